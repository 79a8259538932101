"""Published faults of indexer implementations: rope layout, head weights, key norm, scale folding.

Shape legend: B batch, S tokens of the step, H index heads, D index head dim, P rope dim.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm_compile.ops.fp8_quant.reference import fp8_quant_reference
from glm_compile.ops.indexer_prologue import indexer_prologue, indexer_prologue_fp8
from glm_compile.ops.indexer_scores import indexer_scores, indexer_scores_paged
from glm_compile.ops.merged_linear import merged_linear
from glm_compile.ops.paged_cache import key_page_bytes
from glm_compile.ops.topk import topk_select
from tests.ops.test_indexer_prologue import make_inputs


def _rotation_by_pairs(x, angles, interleaved):
    """One pair at a time, in float64; results in transformers' order."""
    half = angles.shape[-1]
    turned = torch.empty_like(x, dtype=torch.float64)
    for i in range(half):
        a, b = (2 * i, 2 * i + 1) if interleaved else (i, i + half)
        cos, sin = angles[..., i].cos(), angles[..., i].sin()
        turned[..., i] = x[..., a] * cos - x[..., b] * sin
        turned[..., i + half] = x[..., b] * cos + x[..., a] * sin
    return turned


@pytest.mark.parametrize("interleaved", [True, False])
def test_idx_1_both_rope_layouts(interleaved):
    q, k, gates, _, _, eps, *_ = make_inputs(B=1, S=8, dtype=torch.float32)
    angles = torch.arange(8)[:, None] / 8e6 ** (torch.arange(0, 64, 2).double() / 64)
    cos, sin = (torch.cat([f, f], -1)[None].float() for f in (angles.cos(), angles.sin()))
    norm = (torch.ones(128), torch.zeros(128))
    result_q, result_k, _ = indexer_prologue(
        q, k, gates, *norm, eps, cos, sin, interleaved=interleaved, gate_scale=1.0
    )
    expected = _rotation_by_pairs(q[..., :64].double(), angles[None, :, None], interleaved)
    torch.testing.assert_close(result_q[..., :64].double(), expected, rtol=1e-4, atol=1e-5)
    assert torch.equal(result_q[..., 64:], q[..., 64:])
    normed = F.layer_norm(k.double(), (128,), eps=eps)
    expected = _rotation_by_pairs(normed[..., :64], angles[None], interleaved)
    torch.testing.assert_close(result_k[..., :64].double(), expected, rtol=1e-4, atol=1e-5)


def test_idx_1_the_layouts_choose_other_keys():
    """The wrong layout is a wrong model, not a permutation of the right one."""
    inputs = make_inputs(B=1, S=64, H=32, dtype=torch.float32)
    scores = []
    for interleaved in (True, False):
        q, k, weights = indexer_prologue(*inputs, interleaved=interleaved, gate_scale=32**-0.5)
        heads = torch.einsum("bshd,btd->bsht", q, k).relu()
        scores.append(torch.einsum("bsht,bsh->bst", heads, weights))
    first, second = (s.topk(8).indices.sort().values for s in scores)
    assert not torch.equal(first, second)


def test_idx_2_head_weights_are_fp32():
    """Two heads whose scaled gates differ by less than a bf16 step stay apart."""
    inputs = list(make_inputs(B=1, S=1, H=2, dtype=torch.float32))
    inputs[2] = torch.tensor([[[1.0, 1.0 + 1e-4]]])
    for gate_scale in (32**-0.5, 64**-0.5):
        weights = indexer_prologue(*inputs, gate_scale=gate_scale)[2]
        assert weights.dtype == torch.float32
        assert torch.equal(weights, inputs[2] * gate_scale)
        assert weights[0, 0, 0] < weights[0, 0, 1]
    low = inputs[2].bfloat16()
    weights = indexer_prologue(*inputs[:2], low, *inputs[3:], gate_scale=32**-0.5)[2]
    assert torch.equal(weights, low.float() * 32**-0.5)


def test_idx_2_fp32_gate_rows_stay_fp32_beside_bf16_rows():
    x = torch.randn(3, 256).bfloat16()
    wk, gate_weight = torch.randn(128, 256).bfloat16(), torch.randn(32, 256)
    merged = merged_linear(x, [wk, gate_weight])
    assert torch.equal(merged[:, 128:], F.linear(x.float(), gate_weight))
    assert not torch.equal(merged[:, 128:], F.linear(x, gate_weight.bfloat16()).float())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
def test_idx_4_key_norm_is_a_layer_norm_with_its_own_eps(dtype, norm_dtype):
    q, k, gates, weight, bias, _, cos, sin = make_inputs(
        B=1, S=4, dtype=dtype, norm_dtype=norm_dtype
    )
    cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
    # A mean that an RMS norm would keep, and a variance so small that eps decides.
    k = (torch.randn(1, 4, 128) * 1e-3 + (3 if dtype == torch.float32 else 0)).to(dtype)
    x = k.double()
    x = x - x.mean(-1, keepdim=True)

    def expected(eps):
        return x / (x.square().mean(-1, keepdim=True) + eps).sqrt() * weight + bias

    result = indexer_prologue(
        q, k, gates, weight, bias, 1e-6, cos, sin, interleaved=False, gate_scale=1.0
    )[1].double()
    tolerance = 0.03 if dtype == torch.bfloat16 else 2e-3
    torch.testing.assert_close(result, expected(1e-6), rtol=tolerance, atol=tolerance)
    assert (result - expected(1e-5)).abs().max() > 0.2


@pytest.mark.parametrize("H, is_power_of_two", [(32, True), (64, False)])
def test_idx_7_folded_scales_are_taken_in_fp32(H, is_power_of_two):
    """128^-0.5 * 32^-0.5 is 1/64, which bf16 would scale exactly; with 64 heads it is not."""
    D = 128
    q, k, gates, *rest = make_inputs(B=1, S=2, H=H)
    pages = torch.zeros(1, key_page_bytes(D), dtype=torch.uint8)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([0])
    _, weights = indexer_prologue_fp8(
        q,
        k,
        gates,
        *rest,
        gate_scale=H**-0.5,
        key_pages=pages,
        block_table=table,
        lengths_B=lengths,
    )
    q32 = indexer_prologue(q.float(), k.float(), gates, *rest, gate_scale=1.0)[0]
    scale = fp8_quant_reference(q32, False)[1]
    exact = gates.double() * D**-0.5 * H**-0.5 * scale.double()
    torch.testing.assert_close(weights.double(), exact, rtol=3e-7, atol=0)
    in_bf16 = (gates * (D**-0.5 * H**-0.5)).double() * scale.double()
    assert bool(((in_bf16 - exact).abs() < 3e-7 * exact.abs()).all()) == is_power_of_two


def test_idx_6_queries_and_keys_share_one_basis():
    """An outlier channel of 50x: FP8 selection keeps overlapping the exact one.

    Nothing is rotated before quantisation, on either side (transformers rotates nothing); turning
    one side only, as in the report, would destroy the overlap.
    """
    num_keys, selected = 512, 64
    q_HD, k_TD = torch.randn(32, 128), torch.randn(num_keys, 128)
    q_HD[:, 100] *= 50
    k_TD[:, 100] *= 50
    weights_H = torch.rand(32)
    exact_T = (q_HD.double() @ k_TD.double().T).relu().T @ weights_H.double()

    values_TD, scales_T = fp8_quant_reference(k_TD, False)
    q_fp8_HD, q_scales_H = fp8_quant_reference(q_HD, False)
    pages = torch.cat(
        [
            values_TD.view(torch.uint8).reshape(-1, 64 * 128),
            scales_T.view(torch.uint8).reshape(-1, 64 * 4),
        ],
        dim=1,
    )
    scores_1T = indexer_scores_paged(
        q_fp8_HD[None],
        (weights_H * q_scales_H)[None],
        pages,
        torch.arange(num_keys // 64, dtype=torch.int32)[None],
        torch.tensor([num_keys]),
        num_keys,
    )
    chosen = set(topk_select(scores_1T, torch.tensor([num_keys]), selected)[0].tolist())
    wanted = set(exact_T.topk(selected).indices.tolist())
    assert len(chosen & wanted) >= 0.9 * selected


def test_idx_9_packed_prefill_rows_stay_inside_their_sequence():
    """Two sequences of 5 and 9 tokens in one buffer of keys: per-row windows, top 4."""
    lengths, selected = [5, 9], 4
    total = sum(lengths)
    q_SHD, k_TD = torch.randn(total, 16, 128), torch.randn(total, 128)
    weights_SH = torch.rand(total, 16)
    starts_S = torch.tensor([0] * 5 + [5] * 9)
    ends_S = torch.arange(total) + 1
    packed_ST = indexer_scores(
        q_SHD[None],
        weights_SH[None],
        k_TD[None],
        ends_S[None],
        starts_BS=starts_S[None],
        softmax_scale=128**-0.5,
    )[0]
    packed_SK = topk_select(packed_ST, ends_S, selected, starts_R=starts_S)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        alone_ST = indexer_scores(
            q_SHD[None, rows],
            weights_SH[None, rows],
            k_TD[None, rows],
            torch.arange(length)[None] + 1,
            softmax_scale=128**-0.5,
        )[0]
        alone_SK = topk_select(alone_ST, torch.arange(length) + 1, selected)
        assert torch.equal(packed_SK[rows], torch.where(alone_SK < 0, -1, alone_SK + begin))
        begin += length
