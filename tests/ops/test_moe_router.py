"""The router against a float64 oracle and against transformers' own.

Shape legend: M tokens, C hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

import pytest
import torch

from glm_compile.ops.moe import moe_router

DEVICES = [
    "cpu",
    pytest.param("triton on cpu", marks=pytest.mark.interpreter),
    pytest.param("triton on cuda", marks=pytest.mark.gpu),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
SIZES = [(1, 40, 5, 2), (6, 1300, 20, 8), (9, 130, 65, 8), (3, 7, 3, 3)]


def run(place, *arguments, **keywords):
    """By the backend that `place` names."""
    backend = "triton" if place.startswith("triton") else "reference"
    return moe_router(*arguments, backend=backend, **keywords)


def make_inputs(place, M, C, E, dtype=torch.bfloat16):
    device = place.rpartition(" ")[2]
    x = torch.randn(M, C, device=device).to(dtype)
    return x, torch.randn(E, C, device=device) / C**0.5, torch.randn(E, device=device) * 0.1


def oracle(x, weight, bias, top_k, normalize, scale):
    scores = (x.double() @ weight.double().T).sigmoid()
    ids = (scores + bias.double()).sort(dim=-1, descending=True, stable=True).indices[:, :top_k]
    weights = scores.gather(1, ids)
    if normalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * scale, ids


@pytest.mark.parametrize("place", DEVICES)
@pytest.mark.parametrize("M, C, E, K", SIZES)
@pytest.mark.parametrize("normalize, scale", [(True, 2.5), (False, 1.0)])
def test_choice_and_weights(place, M, C, E, K, normalize, scale):
    inputs = make_inputs(place, M, C, E)
    weights, ids = run(place, *inputs, K, normalize=normalize, scale=scale)
    expected_weights, expected_ids = oracle(*inputs, K, normalize, scale)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int64
    assert torch.equal(ids, expected_ids)
    torch.testing.assert_close(weights.double(), expected_weights, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("place", DEVICES)
def test_lowest_id_wins_ties_and_nan_is_largest(place):
    x, weight, bias = make_inputs(place, 3, 16, 7)
    weight, bias = torch.zeros_like(weight), torch.zeros_like(bias)
    weights, ids = run(place, x, weight, bias, 3)
    assert ids.tolist() == [[0, 1, 2]] * 3
    torch.testing.assert_close(weights, torch.full_like(weights, 1 / 3))
    weight[4] = weight[6] = float("nan")
    bias[5] = 1
    weights, ids = run(place, x, weight, bias, 3)
    assert ids.tolist() == [[4, 6, 5]] * 3 and weights.isnan().all()
    _, ids = run(place, x, torch.zeros_like(weight), torch.full_like(bias, -float("inf")), 3)
    assert ids.tolist() == [[0, 1, 2]] * 3


@pytest.mark.parametrize("place", DEVICES)
def test_rows_are_alone_and_strides_are_any(place):
    x, weight, bias = make_inputs(place, 11, 600, 24)
    whole = run(place, x, weight, bias, 4)
    if place.startswith("triton"):
        for rows in (slice(0, 1), slice(2, 10), slice(10, 11)):
            for part, all_rows in zip(run(place, x[rows], weight, bias, 4), whole):
                assert torch.equal(part, all_rows[rows])
    turned = x.T.contiguous().T
    for ours, expected in zip(run(place, turned, weight, bias.repeat_interleave(2)[::2], 4), whole):
        torch.testing.assert_close(ours, expected)
    assert [t.shape for t in run(place, x[:0], weight, bias, 4)] == [(0, 4), (0, 4)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_equals_transformers(dtype):
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaTopkRouter

    from tests.tiny_models import tiny_config

    router = GlmMoeDsaTopkRouter(tiny_config(n_routed_experts=16, num_experts_per_tok=4))
    router.weight.normal_()
    router.e_score_correction_bias.normal_(0, 0.1)
    x = torch.randn(9, 128).to(dtype)
    _, weights, ids = router(x)
    ours, our_ids = moe_router(x, router.weight, router.e_score_correction_bias, 4,
                               scale=router.routed_scaling_factor)  # fmt: skip
    order, our_order = ids.argsort(-1), our_ids.argsort(-1)
    assert torch.equal(ids.gather(1, order), our_ids.gather(1, our_order))
    torch.testing.assert_close(ours.gather(1, our_order), weights.gather(1, order))


def test_opcheck():
    op = torch.ops.glm.moe_router.default
    torch.library.opcheck(op, (*make_inputs("cpu", 6, 24, 10), 3, True, 2.5, ""))


def test_wrong_arguments_are_named():
    x, weight, bias = make_inputs("cpu", 4, 16, 5)
    for arguments, message in (
        ((x.double(), weight, bias, 2), "x must be float32, float16 or bfloat16"),
        ((x, weight[:, :8], bias, 2), r"weight \[E, C\] and bias \[E\] expected"),
        ((x, weight, bias[:4], 2), r"bias \[E\] expected"),
        ((x, weight, bias, 6), "top_k must be from 1 to 5, got 6"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_router(*arguments)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("block_m", [1, 8])
def test_kernels_compile_without_spilling(arch, block_m):
    from glm_compile.ops.moe import router_kernel
    from tests.compile_only import compile_triton

    def meta(*shape, dtype=torch.float32):
        return torch.empty(shape, dtype=dtype, device="meta")

    compiled = compile_triton(
        router_kernel.router_parts_kernel,
        (
            *(meta(6, 6144, dtype=torch.bfloat16), 6144, 1, meta(256, 6144), 6144),
            *(meta(12, 6, 256), 6, 256, 6144),
        ),
        {
            "BLOCK_M": block_m,
            "BLOCK_E": router_kernel._BLOCK_E,
            "BLOCK_C": router_kernel._BLOCK_C,
            "NUM_STEPS": router_kernel._NUM_STEPS,
        },
        arch,
        num_warps=1,
    )
    assert compiled.stack_bytes == 0
    compiled = compile_triton(
        router_kernel.router_choice_kernel,
        (meta(12, 6, 256), meta(256), 1, meta(6, 8), meta(6, 8, dtype=torch.int64), 6, 256, 2.5),
        {"NUM_PARTS": 12, "TOP": 8, "NORMALIZE": True, "BLOCK_E": 256, "BLOCK_TOP": 8},
        arch,
        num_warps=1,
    )
    assert compiled.stack_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 6, 64])
def test_gpu_capture_and_replay(M):
    x, weight, bias = make_inputs("cuda", M, 6144, 256)
    moe_router(x, weight, bias, 8, scale=2.5)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        weights, ids = moe_router(x, weight, bias, 8, scale=2.5)
    for _ in range(3):
        x.normal_()
        graph.replay()
        expected_weights, expected_ids = oracle(x, weight, bias, 8, True, 2.5)
        # Two scores that fp32 cannot tell apart may change places.
        same = ids == expected_ids
        assert same.float().mean() > 0.99
        torch.testing.assert_close(
            weights.double()[same], expected_weights[same], rtol=1e-4, atol=1e-6
        )
