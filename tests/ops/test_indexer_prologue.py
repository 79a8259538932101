"""The indexer prologue against transformers' functions, and its FP8 pages byte for byte.

Shape legend: B batch, S tokens of the step, H index heads, D index head dim, P rope dim.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from glm_compile.ops.indexer_prologue import (
    indexer_gates,
    indexer_prologue,
    indexer_prologue_fp8,
    indexer_prologue_paged,
    indexer_prologue_rows,
)
from glm_compile.ops.paged_cache import key_page_bytes, paged_write_fp8
from tests.ops.fp8_packer import nearest_codes, store_row
from tests.tiny_models import CACHE_ARGUMENT, tiny_model

EPS = 1e-6
GATE_SCALE = 0.25


def make_inputs(B=2, S=3, H=4, D=128, P=64, dtype=torch.bfloat16, norm_dtype=None, cos_batch=None):
    """Arguments of both ops up to cos and sin, as strided as the merged projections give them."""
    merged = torch.randn(B, S, D + H + 8).to(dtype)
    k, gates = merged[..., :D], merged[..., D : D + H]
    q = torch.randn(B, S, 24 + H * D).to(dtype)[..., 24:].unflatten(-1, (H, D))
    norm_dtype = norm_dtype or dtype
    weight, bias = torch.rand(D).to(norm_dtype) + 0.5, torch.randn(D).to(norm_dtype)
    positions = torch.randint(0, 4000, (cos_batch or B, S))
    angles = positions[..., None].float() / 8e6 ** (torch.arange(0, P, 2) / P)
    angles = torch.cat([angles, angles], -1)
    return q, k, gates, weight, bias, EPS, angles.cos().to(dtype), angles.sin().to(dtype)


def upstream_prologue(q, k, gates, weight, bias, eps, cos, sin, interleaved):
    """The lines of the model's indexer, with transformers' rope functions."""
    P = cos.shape[-1]
    rope = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    if weight.dtype != k.dtype:
        k = torch.nn.functional.layer_norm(k.float(), weight.shape, weight, bias, eps).to(k.dtype)
    else:
        k = torch.nn.functional.layer_norm(k, weight.shape, weight, bias, eps)
    k = k.unsqueeze(2)
    q_rot, k_rot = rope(q[..., :P], k[..., :P], cos, sin, unsqueeze_dim=2)
    q = torch.cat([q_rot, q[..., P:]], -1)
    k = torch.cat([k_rot, k[..., P:]], -1).squeeze(2)
    return q, k, gates.float() * GATE_SCALE


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("B, S, H", [(1, 1, 32), (2, 6, 4), (3, 37, 1), (1, 0, 4), (0, 2, 4)])
def test_exact_tier_gives_the_bits_of_transformers(interleaved, dtype, B, S, H):
    inputs = make_inputs(B, S, H, dtype=dtype)
    results = indexer_prologue(*inputs, interleaved=interleaved, gate_scale=GATE_SCALE)
    for result, expected in zip(results, upstream_prologue(*inputs, interleaved)):
        assert result.is_contiguous() and result.dtype == expected.dtype
        assert torch.equal(result, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_key_and_weights_are_those_of_the_models_own_indexer(dtype):
    class Recorder:
        """A cache that keeps what the indexer stores."""

        def update_indexer(self, key, layer_idx, *args, **kwargs):
            self.key = key
            return key

    model = tiny_model(dtype=dtype)
    indexer = model.model.layers[0].self_attn.indexer
    hidden = torch.randn(2, 12, 128).to(dtype)
    q_resid = torch.randn(2, 12, model.config.q_lora_rank).to(dtype)
    positions = torch.arange(5, 17).expand(2, 12)
    cos, sin = model.model.rotary_emb(hidden, positions)
    mask = torch.ones(12, 12, dtype=torch.bool).tril().expand(2, 12, 12)
    recorder = Recorder()
    chosen = indexer(hidden, q_resid, (cos, sin), mask, positions, **{CACHE_ARGUMENT: recorder})
    q, k, weights = indexer_prologue(
        indexer.wq_b(q_resid).unflatten(-1, (16, 128)),
        indexer.wk(hidden),
        indexer.weights_proj(hidden),
        indexer.k_norm.weight,
        indexer.k_norm.bias,
        indexer.k_norm.eps,
        cos,
        sin,
        gate_scale=16**-0.5,
    )
    assert torch.equal(k, recorder.key)
    scores = torch.matmul(q.float(), k.mT.float().unsqueeze(1)) * 128**-0.5
    scores = torch.matmul(weights.unsqueeze(-2), scores.relu()).squeeze(-2)
    scores = scores.masked_fill(~mask, float("-inf"))
    assert torch.equal(scores.topk(8).indices.int(), chosen)


@pytest.mark.parametrize("D, P", [(128, 128), (32, 8), (20, 2), (64, 0)])
@pytest.mark.parametrize("interleaved", [True, False])
def test_other_head_and_rope_dims(D, P, interleaved):
    inputs = make_inputs(D=D, P=P)
    results = indexer_prologue(*inputs, interleaved=interleaved, gate_scale=GATE_SCALE)
    for result, expected in zip(results, upstream_prologue(*inputs, interleaved)):
        assert torch.equal(result, expected)


def test_rope_of_one_batch_row_serves_all():
    inputs = make_inputs(B=3, cos_batch=1)
    results = indexer_prologue(*inputs, gate_scale=GATE_SCALE)
    for result, expected in zip(results, upstream_prologue(*inputs, True)):
        assert torch.equal(result, expected)


def test_fp32_norm_weights_with_bf16_keys():
    inputs = make_inputs(norm_dtype=torch.float32)
    _, k, _ = indexer_prologue(*inputs, gate_scale=GATE_SCALE)
    assert k.dtype == torch.bfloat16
    assert torch.equal(k, upstream_prologue(*inputs, True)[1])


def test_exact_tier_is_close_to_float64():
    q, k, gates, weight, bias, eps, cos, sin = make_inputs(dtype=torch.float32)
    result_q, result_k, _ = indexer_prologue(
        q, k, gates, weight, bias, eps, cos, sin, gate_scale=GATE_SCALE
    )

    def rotate(x):
        """Complex rotation of the pairs (2i, 2i + 1), then evens before odds."""
        turn = torch.complex(cos[..., :32].double(), sin[..., :32].double())
        turn = turn.view(2, 3, *[1] * (x.dim() - 3), 32)
        pairs = torch.view_as_complex(x[..., :64].reshape(*x.shape[:-1], 32, 2).contiguous())
        turned = pairs * turn
        return torch.cat([turned.real, turned.imag, x[..., 64:]], -1)

    x = k.double()
    x = (x - x.mean(-1, keepdim=True)) / (x.var(-1, keepdim=True, correction=0) + eps).sqrt()
    torch.testing.assert_close(
        result_k.double(), rotate(x * weight.double() + bias.double()), rtol=1e-5, atol=1e-5
    )
    torch.testing.assert_close(result_q.double(), rotate(q.double()), rtol=1e-5, atol=1e-5)


TABLE = torch.tensor([[4, 1], [2, -1]], dtype=torch.int32)


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [128, 64])
def test_fp8_tier_bytes(interleaved, dtype, D):
    """Pages, queries and weights against the packer; a page border and a missing page."""
    inputs = make_inputs(S=5, D=D, P=D // 2, dtype=dtype)
    q, _, gates, *_, cos, sin = inputs
    lengths = torch.tensor([62, 61])
    pages = torch.randint(0, 256, (6, key_page_bytes(D)), dtype=torch.uint8)
    expected = pages.numpy().copy()
    q8, weights = indexer_prologue_fp8(
        *inputs,
        interleaved=interleaved,
        gate_scale=GATE_SCALE,
        key_pages=pages,
        block_table=TABLE,
        lengths_B=lengths,
    )
    _, k, _ = upstream_prologue(*inputs, interleaved)
    for b in range(2):
        for s in range(5):
            position = int(lengths[b]) + s
            page = int(TABLE[b, position // 64])
            if page >= 0:
                store_row(expected, page, position % 64, k[b, s].float().numpy())
    assert np.array_equal(pages.numpy(), expected)

    rope = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    half = q[..., : D // 2].float()
    rotated, _ = rope(half, half, cos.float(), sin.float(), unsqueeze_dim=2)
    rotated = torch.cat([rotated, q[..., D // 2 :].float()], -1)
    scale = rotated.abs().amax(-1).clamp_min(1e-4) / 448
    codes = nearest_codes((rotated / scale[..., None]).numpy())
    assert q8.dtype == torch.float8_e4m3fn and q8.is_contiguous()
    assert np.array_equal(q8.view(torch.uint8).numpy(), codes)
    assert torch.equal(weights, gates.float() * (GATE_SCALE * D**-0.5) * scale)


# Of the first of five tokens in eleven rows: before the beginning, inside, over the end.
FIRSTS = (-2, 3, 8)


def call_with_rows(device, inputs, first, **options):
    """(q, weights, keys, keys before): the exact tier over a cache of random rows."""
    keys = torch.randn(2, 11, inputs[1].shape[2]).to(device, inputs[1].dtype)
    before = keys.clone()
    results = indexer_prologue_rows(
        *_to(device, inputs), keys_BTD=keys, first=torch.tensor(first, device=device), **options
    )
    return *results, keys, before


def call_with_pages(device, inputs, first, **options):
    """The same with pages: a page border, a missing page, positions before the beginning."""
    pages = torch.randn(6, 64, inputs[1].shape[2]).to(device, inputs[1].dtype)
    before = pages.clone()
    results = indexer_prologue_paged(
        *_to(device, inputs),
        key_pages=pages,
        block_table=TABLE.to(device),
        lengths_B=torch.tensor([62, first], device=device),
        **options,
    )
    return *results, pages, before


def expected_rows(before, k, first):
    expected = before.clone()
    for s in range(5):
        if 0 <= first + s < 11:
            expected[:, first + s] = k[:, s]
    return expected


def expected_pages(before, k, first):
    expected = before.clone()
    for b, s in np.ndindex(2, 5):
        position = (62, first)[b] + s
        page = int(TABLE[b, position // 64]) if position >= 0 else -1
        if page >= 0:
            expected[page, position % 64] = k[b, s]
    return expected


STORES = [(call_with_rows, expected_rows), (call_with_pages, expected_pages)]


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [128, 20])
@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize(("call", "expected"), STORES)
def test_exact_keys_are_stored_where_they_belong_and_nowhere_else(
    call, expected, first, interleaved, dtype, D
):
    inputs = make_inputs(S=5, D=D, P=D // 2, dtype=dtype)
    q, weights, keys, before = call(
        "cpu", inputs, first, interleaved=interleaved, gate_scale=GATE_SCALE
    )
    expected_q, k, expected_weights = upstream_prologue(*inputs, interleaved)
    assert torch.equal(q, expected_q) and q.is_contiguous()
    assert torch.equal(weights, expected_weights) and weights.is_contiguous()
    assert torch.equal(keys, expected(before, k, first))


def test_fp8_tier_stores_what_the_unfused_ops_store():
    inputs = make_inputs(S=6)
    lengths = torch.tensor([60, 0], dtype=torch.int32)
    fused, unfused = (torch.zeros(6, key_page_bytes(128), dtype=torch.uint8) for _ in range(2))
    indexer_prologue_fp8(
        *inputs, gate_scale=GATE_SCALE, key_pages=fused, block_table=TABLE, lengths_B=lengths
    )
    _, k, _ = indexer_prologue(*inputs, gate_scale=GATE_SCALE)
    paged_write_fp8(unfused, k, TABLE, lengths)
    assert torch.equal(fused, unfused)


def test_fp8_scores_are_close_to_the_exact_tier():
    """Head weights carry every scale: sum_h w relu(q8 . k8) * k scale equals the exact scores."""
    inputs = make_inputs(B=1, S=50, H=32, dtype=torch.float32)
    pages = torch.zeros(1, key_page_bytes(128), dtype=torch.uint8)
    q8, weights8 = indexer_prologue_fp8(
        *inputs,
        gate_scale=32**-0.5,
        key_pages=pages,
        block_table=torch.zeros(1, 1, dtype=torch.int32),
        lengths_B=torch.tensor([0]),
    )
    q, k, weights = indexer_prologue(*inputs, gate_scale=32**-0.5)
    exact = torch.einsum("bshd,btd->bsht", q, k).mul(128**-0.5).relu()
    exact = torch.einsum("bsht,bsh->bst", exact, weights)
    keys = pages[0, :8192].view(torch.float8_e4m3fn).float().view(64, 128)[:50]
    scales = pages[0, 8192:].view(torch.float32)[:50]
    scores = torch.einsum("bshd,td->bsht", q8.float(), keys).relu()
    scores = torch.einsum("bsht,bsh->bst", scores, weights8) * scales
    error = (scores - exact).abs().mean() / exact.abs().mean()
    assert error < 0.05


@pytest.mark.parametrize("interleaved", [True, False])
def test_opcheck(interleaved):
    inputs = make_inputs()
    torch.library.opcheck(
        torch.ops.glm.indexer_prologue.default, (*inputs, interleaved, GATE_SCALE, "")
    )
    pages = torch.zeros(6, key_page_bytes(128), dtype=torch.uint8)
    lengths = torch.tensor([62, 0])
    shared = (*inputs, interleaved, GATE_SCALE)
    torch.library.opcheck(
        torch.ops.glm.indexer_prologue_fp8.default, (*shared, pages, TABLE, lengths, "")
    )
    torch.library.opcheck(
        torch.ops.glm.indexer_prologue_paged.default,
        (*shared, torch.zeros(6, 64, 128).bfloat16(), TABLE, lengths, ""),
    )
    torch.library.opcheck(
        torch.ops.glm.indexer_prologue_rows.default,
        (*shared, torch.zeros(2, 9, 128).bfloat16(), torch.tensor(5), ""),
    )


def test_compiles_once_for_all_step_lengths_and_writes_in_place():
    lengths = torch.tensor([3, 60])

    def step(pages, *inputs):
        q, k, weights = indexer_prologue(*inputs, gate_scale=GATE_SCALE)
        q8, weights8 = indexer_prologue_fp8(
            *inputs, gate_scale=GATE_SCALE, key_pages=pages, block_table=TABLE, lengths_B=lengths
        )
        return q * 1, k * 1, weights * 1, q8.float(), weights8 * 1

    counter = CompileCounter()
    counted = torch.compile(step, backend=counter, fullgraph=True)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    pages, eager_pages = (torch.zeros(6, key_page_bytes(128), dtype=torch.uint8) for _ in range(2))
    address = pages.data_ptr()
    for S in (2, 5, 3):
        inputs = make_inputs(S=S)
        for tensor in (*inputs[:3], *inputs[6:]):
            torch._dynamo.mark_dynamic(tensor, 1)
        for one, other in zip(compiled(pages, *inputs), step(eager_pages, *inputs)):
            assert torch.equal(one, other)
        assert torch.equal(pages, eager_pages)
        counted(pages.clone(), *inputs)
    assert pages.data_ptr() == address
    assert counter.frame_count == 1


def test_wrong_arguments_are_named():
    q, k, gates, weight, bias, eps, cos, sin = make_inputs()

    def call(**changes):
        values = {"q": q, "k": k, "gates": gates, "weight": weight, "cos": cos, "sin": sin}
        values.update(changes)
        return indexer_prologue(
            values["q"],
            values["k"],
            values["gates"],
            values["weight"],
            bias,
            eps,
            values["cos"],
            values["sin"],
            gate_scale=1.0,
            backend=changes.get("backend"),
        )

    with pytest.raises(ValueError, match=r"q \[B, S, H, D\]"):
        call(k=k[:, :, :64])
    with pytest.raises(ValueError, match="one floating dtype"):
        call(q=q.float())
    with pytest.raises(ValueError, match="norm weight and bias"):
        call(weight=weight[:5])
    with pytest.raises(ValueError, match="even and at most 128"):
        call(cos=cos[..., :63], sin=sin[..., :63])
    with pytest.raises(ValueError, match="cos and sin"):
        call(cos=cos[:, :2], sin=sin[:, :2])
    with pytest.raises(ValueError, match="unknown backend 'cute'"):
        call(backend="cute")
    with pytest.raises(ValueError, match="has 8448 bytes"):
        indexer_prologue_fp8(
            *make_inputs(),
            gate_scale=1.0,
            key_pages=torch.zeros(2, 64, dtype=torch.uint8),
            block_table=TABLE,
            lengths_B=torch.tensor([0, 0]),
        )

    exact = {"gate_scale": 1.0, "lengths_B": torch.tensor([0, 0])}
    with pytest.raises(ValueError, match=r"pages \[pages, 64, 128\] expected"):
        indexer_prologue_paged(
            *make_inputs(), key_pages=torch.zeros(2, 64, 64), block_table=TABLE, **exact
        )
    with pytest.raises(ValueError, match="got a cache of torch\\.float32"):
        indexer_prologue_paged(
            *make_inputs(), key_pages=torch.zeros(2, 64, 128), block_table=TABLE, **exact
        )
    with pytest.raises(ValueError, match="first must be one number"):
        indexer_prologue_rows(
            *make_inputs(),
            gate_scale=1.0,
            keys_BTD=torch.zeros(2, 9, 128).bfloat16(),
            first=torch.tensor([0, 1]),
        )


TRITON_DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


def _to(device, inputs):
    """Copies on a device with the same strides."""
    moved = []
    for value in inputs:
        if isinstance(value, torch.Tensor) and device != "cpu":
            empty = torch.empty_strided(
                value.shape, value.stride(), dtype=value.dtype, device=device
            )
            value = empty.copy_(value)
        moved.append(value)
    return moved


def _check_key(result, expected):
    """LayerNorm sums in another order: at most an ulp of the key's own dtype beside fp32 noise."""
    eps = torch.finfo(expected.dtype).eps
    tolerance = max(2 * eps, 1e-5)
    torch.testing.assert_close(result.float(), expected.float(), rtol=tolerance, atol=tolerance)
    if expected.dtype == torch.bfloat16:
        assert (result != expected).float().mean() < 0.02


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    "shape",
    [
        {"B": 1, "S": 1, "H": 32},
        {"B": 2, "S": 3, "H": 5, "cos_batch": 1},
        {"D": 20, "P": 6},
        {"D": 96, "P": 96, "norm_dtype": torch.float32},
        {"D": 64, "P": 0},
        {"S": 0},
    ],
)
def test_triton_equals_the_reference(device, interleaved, dtype, shape):
    inputs = make_inputs(dtype=dtype, **shape)
    options = {"interleaved": interleaved, "gate_scale": GATE_SCALE}
    expected = indexer_prologue(*inputs, **options, backend="reference")
    results = indexer_prologue(*_to(device, inputs), **options, backend="triton")
    for result, reference in zip(results, expected):
        assert result.shape == reference.shape and result.dtype == reference.dtype
        assert result.is_contiguous()
    assert torch.equal(results[0].cpu(), expected[0])
    assert torch.equal(results[2].cpu(), expected[2])
    if inputs[1].numel():
        _check_key(results[1].cpu(), expected[1])


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [128, 20])
def test_triton_fp8_bytes(device, interleaved, dtype, D):
    inputs = _to(device, make_inputs(S=5, H=6, D=D, P=D // 2, dtype=dtype))
    options = {"interleaved": interleaved, "gate_scale": GATE_SCALE}
    lengths, table = torch.tensor([62, 61], device=device), TABLE.to(device)
    pages = torch.randint(0, 256, (6, key_page_bytes(D)), dtype=torch.uint8, device=device)
    reference_pages = pages.cpu().clone()
    expected = reference_pages.numpy().copy()
    q8, weights = indexer_prologue_fp8(
        *inputs,
        **options,
        key_pages=pages,
        block_table=table,
        lengths_B=lengths,
        backend="triton",
    )
    # The keys are this backend's exact ones, so that the bytes can be compared without a tolerance.
    k = indexer_prologue(*inputs, **options, backend="triton")[1].cpu()
    for b in range(2):
        for s in range(5):
            position = int(lengths[b]) + s
            page = int(TABLE[b, position // 64])
            if page >= 0:
                store_row(expected, page, position % 64, k[b, s].float().numpy())
    assert np.array_equal(pages.cpu().numpy(), expected)
    reference_q8, reference_weights = indexer_prologue_fp8(
        *_to("cpu", [x.cpu() if isinstance(x, torch.Tensor) else x for x in inputs]),
        **options,
        key_pages=reference_pages,
        block_table=TABLE,
        lengths_B=lengths.cpu(),
        backend="reference",
    )
    assert torch.equal(q8.cpu().view(torch.uint8), reference_q8.view(torch.uint8))
    assert torch.equal(weights.cpu(), reference_weights)


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("D", [128, 20])
@pytest.mark.parametrize("first", FIRSTS)
@pytest.mark.parametrize(("call", "expected"), STORES)
def test_triton_stores_exact_keys(device, call, expected, first, dtype, D):
    inputs = make_inputs(S=5, H=6, D=D, P=D // 2, dtype=dtype)
    options = {"gate_scale": GATE_SCALE, "backend": "triton"}
    q, weights, keys, before = call(device, inputs, first, **options)
    fresh = indexer_prologue(*_to(device, inputs), **options)
    assert torch.equal(q, fresh[0]) and torch.equal(weights, fresh[2])
    assert torch.equal(keys.cpu(), expected(before.cpu(), fresh[1].cpu(), first))


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_key_norm_removes_the_mean(device):
    """IDX-4's input: a mean far above a tiny deviation."""
    inputs = make_inputs(B=1, S=4, dtype=torch.float32)
    q, _, *rest = inputs
    k = torch.randn(1, 4, 128) * 1e-3 + 3
    expected = indexer_prologue(q, k, *rest, gate_scale=1.0, backend="reference")[1]
    result = indexer_prologue(*_to(device, (q, k, *rest)), gate_scale=1.0, backend="triton")[1]
    torch.testing.assert_close(result.cpu(), expected, rtol=2e-3, atol=2e-3)


@pytest.mark.gpu
def test_capture_and_replay_with_changed_inputs():
    inputs = _to("cuda", make_inputs(S=6, H=32))
    pages = torch.zeros(6, key_page_bytes(128), dtype=torch.uint8, device="cuda")
    lengths, table = torch.tensor([60, 0], device="cuda"), TABLE.cuda()
    rest = {"gate_scale": GATE_SCALE, "block_table": table, "lengths_B": lengths}
    indexer_prologue_fp8(*inputs, key_pages=pages, **rest)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q8, weights = indexer_prologue_fp8(*inputs, key_pages=pages, **rest)
    inputs[0].copy_(torch.randn_like(inputs[0]))
    inputs[1].copy_(torch.randn_like(inputs[1]))
    lengths += 3
    pages.zero_()
    graph.replay()
    other = torch.zeros_like(pages)
    expected_q8, expected_weights = indexer_prologue_fp8(*inputs, key_pages=other, **rest)
    assert torch.equal(q8.view(torch.uint8), expected_q8.view(torch.uint8))
    assert torch.equal(weights, expected_weights)
    assert torch.equal(pages, other)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("to", ["FRESH", "ROWS", "PAGES", "FP8_PAGES"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("num_tokens", [6, 2048])
@pytest.mark.parametrize("rank", [0, 512])
def test_kernels_compile_without_spilling(arch, to, interleaved, num_tokens, rank):
    import triton.language as tl

    from glm_compile.ops.indexer_prologue import triton_kernel as kernels
    from glm_compile.ops.indexer_prologue.config import default_for
    from tests.compile_only import compile_triton

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    if rank and "PAGES" not in to:
        pytest.skip("latents are stored in pages")
    config = default_for(num_tokens)
    merged = meta(1, num_tokens, 2784)
    k, gates = merged[..., 2624:2752], merged[..., 2752:]
    q = meta(1, num_tokens, 20480)[..., 16384:].unflatten(-1, (32, 128))
    cos = meta(1, num_tokens, 64)
    positions, is_fp8 = meta(1, dtype=torch.int32), to == "FP8_PAGES"
    keys = {
        "FRESH": (meta(num_tokens, 1, 128), None),
        "ROWS": (meta(1, 4096, 128), None),
        "PAGES": (meta(9, 64, 128), None),
        "FP8_PAGES": (meta(9, 8448, dtype=torch.uint8), meta(9, 2112, dtype=torch.float32)),
    }[to]
    table = meta(1, 9, dtype=torch.int32) if "PAGES" in to else None
    latent, rope, latent_pages = merged[..., 2048:2560], merged[..., 2560:2624], meta(9, 64, 576)
    latents = (
        *(latent, *latent.stride(), rope, *rope.stride(), meta(512), EPS),
        *(latent_pages, *latent_pages.stride()),
    )
    compiled = compile_triton(
        kernels.indexer_prologue_kernel,
        [
            *(q, *q.stride(), k, *k.stride(), gates, *gates.stride(), meta(128), meta(128), EPS),
            *(cos, *cos.stride(), cos, *cos.stride(), GATE_SCALE, *keys),
            *((0, 0, 0) if is_fp8 else keys[0].stride()),
            *(table, 0 if table is None else 9, 4096 if table is None else 9),
            None if to == "FRESH" else positions,
            *(q, meta(1, dtype=torch.float32)),
            *(latents if rank else (*(None, 0, 0, 0) * 2, None, 0.0, *(None, 0, 0, 0))),
            num_tokens,
        ],
        {
            "H": 32,
            "D": 128,
            "P": 64,
            "BLOCK_H": config.block_h,
            "BLOCK_D": 128,
            "BLOCK_P": 64,
            "INTERLEAVED": interleaved,
            "ROUND_TO": tl.bfloat16,
            "TO": getattr(kernels, to).value,
            "L": rank,
            "BLOCK_L": max(1, rank),
            "LATENTS_INTERLEAVED": True,
            "LATENTS_IN_ORDER": True,
            "PDL": config.is_early,
        },
        arch,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        launch_pdl=config.is_early,
    )
    assert compiled.stack_bytes == 0
    assert compiled.registers <= 72
    # Every role lets the next kernel in, and then waits for the one before.
    num_roles = 3 if rank else 2
    assert compiled.ptx.count("griddepcontrol.wait") == num_roles * config.is_early
    assert compiled.ptx.count("griddepcontrol.launch_dependents") == config.is_early
    if config.is_early:
        let_in = compiled.ptx.index("griddepcontrol.launch_dependents")
        assert let_in < compiled.ptx.index("griddepcontrol.wait")


def _check_gates(gates, x, weight):
    """Sums of C products in fp32, in whatever order."""
    assert gates.dtype == torch.float32 and gates.is_contiguous()
    expected = x.double().cpu() @ weight.double().cpu().T
    sizes = x.double().abs().cpu() @ weight.double().abs().cpu().T
    assert ((gates.double().cpu() - expected).abs() <= 2**-19 * sizes).all()


@pytest.mark.parametrize("shape", [(6, 40), (2, 3, 40), (0, 40), (40,)])
def test_gates_in_fp32(shape):
    x, weight = torch.randn(shape).bfloat16(), torch.randn(5, 40)
    gates = indexer_gates(x, weight)
    assert gates.shape == (*shape[:-1], 5)
    _check_gates(gates, x, weight)
    torch.library.opcheck(torch.ops.glm.indexer_gates.default, (x, weight, ""))


def test_gates_refuse_what_is_no_fp32_projection():
    with pytest.raises(ValueError, match=r"weight must be float32 \[H, C\], got torch.bfloat16"):
        indexer_gates(torch.randn(2, 8), torch.randn(3, 8).bfloat16())
    with pytest.raises(ValueError, match=r"x must be floating \[..., 8\], got torch.float32"):
        indexer_gates(torch.randn(2, 9), torch.randn(3, 8))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape, num_heads", [((6, 6144), 32), ((1, 1, 33), 1), ((3, 7, 2500), 4)])
def test_triton_gates(device, dtype, shape, num_heads):
    x = torch.randn(shape).to(dtype)
    weight = torch.randn(shape[-1], num_heads).T
    x, weight = _to(device, (x.transpose(0, -2).contiguous().transpose(0, -2), weight))
    gates = indexer_gates(x, weight, backend="triton")
    assert gates.shape == (*shape[:-1], num_heads)
    _check_gates(gates, x, weight)
    assert torch.equal(indexer_gates(x, weight, backend="triton"), gates)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernel_of_the_gates_compiles_without_spilling(arch):
    from glm_compile.ops.indexer_prologue import triton_kernel as kernels
    from tests.compile_only import compile_triton

    x = torch.empty(6, 6144, dtype=torch.bfloat16, device="meta")
    weight = torch.empty(32, 6144, device="meta")
    compiled = compile_triton(
        kernels.indexer_gates_kernel,
        [x, *x.stride(), weight, *weight.stride(), weight, 6],
        {"H": 32, "C": 6144, "BLOCK_M": 8, "BLOCK_C": 2048, "PDL": True},
        arch,
        num_warps=8,
        launch_pdl=True,
    )
    assert compiled.stack_bytes == 0 and compiled.registers <= 255
    assert compiled.ptx.count("griddepcontrol.wait") == 1
