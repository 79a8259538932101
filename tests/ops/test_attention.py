"""Attention markers against transformers' own functions and a float64 oracle.

Shape legend: B batch, A attention heads, S query tokens, T keys, K selected keys, D head dim.
"""

from __future__ import annotations

import itertools

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import eager_attention_forward

from glm_compile.ops.attention import attention, indexed_attention

SCALE = 0.17


class _Module(torch.nn.Module):
    """What transformers' attention functions ask of their module."""

    num_key_value_groups = 1
    is_causal = True


def _qkv(B=2, A=3, S=5, T=11, D=40, Dv=24, dtype=torch.float32):
    q = torch.randn(B, S, A, D).to(dtype).transpose(1, 2)
    k = torch.randn(B, T, A, D).to(dtype).transpose(1, 2)
    v = torch.randn(B, T, A, Dv).to(dtype).transpose(1, 2)
    return q, k, v


def _upstream(q, k, v, mask, eager):
    function = eager_attention_forward if eager else sdpa_attention_forward
    output, _ = function(_Module().eval(), q, k, v, mask, scaling=SCALE, dropout=0.0)
    return output.transpose(1, 2)


def _additive(mask, dtype):
    return torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, torch.finfo(dtype).min)


def _valid_keys(topk, lengths, starts, key_mask, T):
    """The contract, key by key."""
    B, S, _ = topk.shape
    valid = torch.zeros(B, S, T, dtype=torch.bool)
    for b, s in itertools.product(range(B), range(S)):
        for p in topk[b, s].tolist():
            inside = 0 <= p < min(int(lengths[b, s]), T)
            if starts is not None:
                inside = inside and p >= int(starts[b, s])
            if inside and key_mask is not None:
                inside = bool(key_mask.expand(B, S, key_mask.shape[-1])[b, s, p])
            if inside:
                valid[b, s, p] = True
    return valid


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["none", "bool", "additive"])
def test_attention_gives_the_numbers_of_transformers(eager, dtype, kind):
    q, k, v = _qkv(dtype=dtype)
    keep = torch.ones(5, 11, dtype=torch.bool).tril(6).expand(2, 1, 5, 11)
    mask = {"none": None, "bool": keep, "additive": _additive(keep, dtype)}[kind]
    module_mask = torch.ones(2, 1, 5, 11, dtype=torch.bool) if kind == "none" else mask
    if kind == "none" and eager:
        module_mask = None
    output = attention(q, k, v, mask, scale=SCALE, eager=eager)
    assert output.is_contiguous()
    torch.testing.assert_close(output, _upstream(q, k, v, module_mask, eager), rtol=0, atol=0)


@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("with_starts", [False, True])
@pytest.mark.parametrize("key_mask_shape", [None, (2, 1, 11), (1, 5, 17), (2, 5, 11)])
def test_indexed_attention_equals_the_masked_model(eager, dtype, with_starts, key_mask_shape):
    q, k, v = _qkv(dtype=dtype)
    topk = torch.stack([torch.randperm(11)[:6] for _ in range(10)]).view(2, 5, 6).int()
    topk[0, 1, 4:] = -1
    lengths = torch.arange(7, 12).expand(2, 5)
    starts = torch.tensor([[1], [3]]).expand(2, 5) if with_starts else None
    key_mask = None if key_mask_shape is None else torch.rand(key_mask_shape) > 0.2
    valid = _valid_keys(topk, lengths, starts, key_mask, 11)
    mask = valid[:, None]
    expected = _upstream(q, k, v, _additive(mask, dtype) if eager else mask, eager)
    expected = torch.where(mask.any(-1, keepdim=True), expected, 0)
    output = indexed_attention(q, k, v, topk, lengths, starts, key_mask, scale=SCALE, eager=eager)
    assert output.is_contiguous()
    torch.testing.assert_close(output, expected, rtol=0, atol=0)


@pytest.mark.parametrize("eager", [False, True])
def test_indexed_attention_is_close_to_float64(eager):
    q, k, v = _qkv()
    topk = torch.stack([torch.randperm(11)[:4] for _ in range(10)]).view(2, 5, 4)
    lengths = torch.full((2, 5), 11)
    output = indexed_attention(q, k, v, topk, lengths, scale=SCALE, eager=eager)
    for b, s in itertools.product(range(2), range(5)):
        keys = k[b, :, topk[b, s]].double()
        weights = torch.softmax((q[b, :, s, None].double() @ keys.mT) * SCALE, dim=-1)
        expected = (weights @ v[b, :, topk[b, s]].double())[:, 0]
        torch.testing.assert_close(output[b, :, s].double(), expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_without_a_valid_key_are_zero(eager, dtype, device):
    q, k, v = _qkv(dtype=dtype)
    topk = torch.zeros(2, 5, 3, dtype=torch.int32)
    topk[0, 0] = -1  # nothing selected
    topk[0, 2] = 9  # selected, but not below the length
    lengths = torch.tensor([[4, 0, 9, -1, 4], [4, 4, 4, 4, 4]])
    starts = torch.zeros(2, 5, dtype=torch.int64)
    starts[1, 1] = 4  # an empty range
    key_mask = torch.ones(2, 5, 11, dtype=torch.bool)
    key_mask[1, 4] = False
    arguments = [x.to(device) for x in (q, k, v, topk, lengths, starts, key_mask)]
    output = indexed_attention(*arguments, scale=SCALE, eager=eager).cpu()
    empty = torch.zeros(2, 5, dtype=torch.bool)
    for row in ((0, 0), (0, 1), (0, 2), (0, 3), (1, 1), (1, 4)):
        empty[row] = True
    assert output.isfinite().all()
    per_row = output.transpose(1, 2).abs().sum((-1, -2))
    assert torch.equal(per_row == 0, empty)


@pytest.mark.parametrize("is_allowed", [True, False])
def test_one_bool_may_mask_every_key(is_allowed):
    q, k, v = _qkv()
    lengths = torch.full((2, 5), 11, dtype=torch.int32)
    topk = torch.tensor([2, 7]).expand(2, 5, 2)
    plain = indexed_attention(q, k, v, topk, lengths, scale=SCALE)
    masked = indexed_attention(q, k, v, topk, lengths, None, torch.tensor(is_allowed), scale=SCALE)
    assert torch.equal(masked, plain if is_allowed else torch.zeros_like(plain))


def test_selection_ignores_repeats_and_positions_out_of_range():
    q, k, v = _qkv()
    lengths = torch.full((2, 5), 11, dtype=torch.int32)
    topk = torch.tensor([2, 7, -1, -1]).expand(2, 5, 4)
    odd = torch.tensor([7, 2, 7, 2, 11, 500, -7]).expand(2, 5, 7)
    expected = indexed_attention(q, k, v, topk, lengths, scale=SCALE)
    assert torch.equal(indexed_attention(q, k, v, odd, lengths, scale=SCALE), expected)


@pytest.mark.parametrize("shape", [{"S": 0}, {"B": 0}, {"S": 1, "T": 1}, {"S": 48, "T": 70}])
@pytest.mark.parametrize("eager", [False, True])
def test_awkward_sizes(shape, eager):
    q, k, v = _qkv(**shape)
    B, _, S, _ = q.shape
    T = k.shape[2]
    lengths = torch.full((B, S), T)
    topk = torch.arange(T).expand(B, S, T)
    output = indexed_attention(q, k, v, topk, lengths, scale=SCALE, eager=eager)
    expected = attention(q, k, v, None, scale=SCALE, eager=eager)
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("eager", [False, True])
def test_masked_values_never_leak(eager):
    """Values of keys that take no part may be anything finite."""
    q, k, v = _qkv()
    topk = torch.tensor([0, 3, 5, -1]).expand(2, 5, 4).int()
    lengths = torch.full((2, 5), 6)
    expected = indexed_attention(q, k, v, topk, lengths, scale=SCALE, eager=eager)
    others = [p for p in range(11) if p not in (0, 3, 5)]
    k[:, :, others] = 1e4
    v[:, :, others] = -1e30
    output = indexed_attention(q, k, v, topk, lengths, scale=SCALE, eager=eager)
    torch.testing.assert_close(output, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("eager", [False, True])
def test_opcheck(eager):
    q, k, v = _qkv()
    mask = torch.ones(2, 1, 5, 11, dtype=torch.bool)
    torch.library.opcheck(torch.ops.glm.attention.default, (q, k, v, None, SCALE, eager))
    if not eager:
        torch.library.opcheck(torch.ops.glm.attention.default, (q, k, v, mask, SCALE, eager))
    topk = torch.zeros(2, 5, 4, dtype=torch.int32)
    lengths = torch.full((2, 5), 11)
    args = (q, k, v, topk, lengths, lengths - 11, mask[:, 0], SCALE, eager)
    torch.library.opcheck(torch.ops.glm.indexed_attention.default, args)


def test_compiles_once_for_all_query_lengths():
    def step(q, k, v, topk, lengths):
        return indexed_attention(q, k, v, topk, lengths, scale=SCALE) + 1

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    counter = CompileCounter()
    counted = torch.compile(step, backend=counter, fullgraph=True)
    for S in (5, 3, 7, 12):
        q, k, v = _qkv(S=S)
        topk = torch.randint(-1, 11, (2, S, 4), dtype=torch.int32)
        lengths = torch.randint(0, 12, (2, S))
        for tensor, axis in ((q, 2), (topk, 1), (lengths, 1)):
            torch._dynamo.mark_dynamic(tensor, axis)
        expected = step(q, k, v, topk, lengths)
        assert torch.equal(compiled(q, k, v, topk, lengths), expected)
        counted(q, k, v, topk, lengths)
    assert counter.frame_count == 1


def test_wrong_arguments_are_named():
    q, k, v = _qkv()
    with pytest.raises(ValueError, match="same batch and heads"):
        attention(q, k[:, :1], v, scale=1.0)
    with pytest.raises(ValueError, match="same batch and heads"):
        attention(q[:1], k, v, scale=1.0)
    with pytest.raises(ValueError, match=r"attention: .*\[batch, heads, tokens, dim\]"):
        attention(q[0], k, v, scale=1.0)
    topk, lengths = torch.zeros(2, 5, 1, dtype=torch.int32), torch.ones(2, 5)
    with pytest.raises(ValueError, match="lengths must be int32 or int64"):
        indexed_attention(q, k, v, topk, lengths, scale=1.0)
    with pytest.raises(ValueError, match="lengths must hold one value a row"):
        indexed_attention(q, k, v, topk, lengths[:, :4].long(), scale=1.0)
    with pytest.raises(ValueError, match="topk must be int32 or int64"):
        indexed_attention(q, k, v, topk[:, :3], lengths.long(), scale=1.0)
    with pytest.raises(ValueError, match="key_mask must broadcast"):
        mask = torch.ones(3, 1, 11, dtype=torch.bool)
        indexed_attention(q, k, v, topk, lengths, None, mask, scale=1.0)
    with pytest.raises(ValueError, match="key_mask must be bool"):
        indexed_attention(q, k, v, topk, lengths, None, torch.ones(11), scale=1.0)
