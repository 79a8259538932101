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

from glm_compile.ops.indexer_prologue import indexer_prologue, indexer_prologue_fp8
from glm_compile.ops.paged_cache import key_page_bytes, paged_write_fp8
from tests.ops.fp8_packer import nearest_code, store_row

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
    codes = [nearest_code(x) for x in (rotated / scale[..., None]).flatten().tolist()]
    assert q8.dtype == torch.float8_e4m3fn and q8.is_contiguous()
    assert q8.view(torch.uint8).flatten().tolist() == codes
    assert torch.equal(weights, gates.float() * (GATE_SCALE * D**-0.5) * scale)


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
    torch.library.opcheck(
        torch.ops.glm.indexer_prologue_fp8.default,
        (*inputs, interleaved, GATE_SCALE, pages, TABLE, lengths, ""),
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
