"""Routed experts against a float64 oracle: the error of plain torch is the yardstick.

Shape legend: M tokens, K experts of a token, E experts, C hidden size, I intermediate size.
"""

from __future__ import annotations

import re

import pytest
import torch
import torch.nn.functional as F

from glm_compile.ops.moe import moe_experts
from glm_compile.ops.moe import reference as moe_reference
from glm_compile.ops.moe.config import CUTE_PAIRS, triton_config_for

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32


def make_inputs(M, E, C, I, K, *, dtype=BF16, device="cpu", ids="topk"):  # noqa: E741
    """x, router weights, ids, gate_up, down; `ids`: topk, same (for all tokens), any (wrong ones,
    repeated ones)."""

    def random(*shape):
        return torch.randn(*shape, device=device)

    x = random(M, C).to(dtype)
    gate_up, down = (random(E, 2 * I, C) / C**0.5).to(dtype), (random(E, C, I) / I**0.5).to(dtype)
    if ids == "any":
        chosen = torch.randint(-2, E + 2, (M, K), device=device)
    else:
        chosen = random(M, E).topk(K).indices
    if ids == "same":
        chosen = chosen[:1].expand(M, K).contiguous()
    return x, torch.rand(M, K, device=device), chosen, gate_up, down


def oracle(x, weights, ids, gate_up, down):
    """In float64, pair by pair."""
    result = torch.zeros(x.shape, dtype=torch.float64, device=x.device)
    for token, row in enumerate(ids.tolist()):
        for slot, expert in enumerate(row):
            if 0 <= expert < gate_up.shape[0]:
                gate, up = (gate_up[expert].double() @ x[token].double()).chunk(2)
                product = down[expert].double() @ (F.silu(gate) * up)
                result[token] += weights[token, slot].double() * product
    return result


def plain_torch(x, weights, ids, gate_up, down):
    """As transformers computes them: an expert's pairs at once, all products rounded; the sum in
    fp32."""
    result = torch.zeros(x.shape, device=x.device)
    for expert in range(gate_up.shape[0]):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up = F.linear(x[token], gate_up[expert]).chunk(2, dim=-1)
        product = F.linear(F.silu(gate) * up, down[expert])
        result.index_add_(0, token, product.float() * weights[token, slot, None])
    return result.to(x.dtype)


def check_error(output, *inputs):
    """Error at most twice plain torch's; both mean and largest, plus half an ulp."""
    expected, library = oracle(*inputs), plain_torch(*inputs)
    assert output.shape == library.shape and output.dtype == library.dtype
    assert output.is_contiguous()
    # What cancels to almost nothing is off by what went into it.
    size = expected.square().mean().sqrt().clamp_min(2.0**-6) if expected.numel() else 1.0
    ulp = expected.abs().clamp_min(size) * torch.finfo(output.dtype).eps
    error = (output.double() - expected).abs() / ulp
    library_error = (library.double() - expected).abs() / ulp
    if error.numel():
        assert error.mean() <= 2 * library_error.mean() + 0.05
        assert error.max() <= 2 * library_error.max() + 0.5


SIZES = [(1, 3, 1, 1, 1), (3, 5, 40, 24, 2), (7, 20, 130, 72, 8), (33, 6, 65, 33, 3)]


@pytest.mark.parametrize("M, E, C, I, K", SIZES)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("ids", ["topk", "any"])
def test_error_is_that_of_plain_torch(M, E, C, I, K, dtype, ids):  # noqa: E741
    inputs = make_inputs(M, E, C, I, K, dtype=dtype, ids=ids)
    check_error(moe_experts(*inputs), *inputs)


@pytest.mark.parametrize("M, E, C, I, K", SIZES)
@pytest.mark.parametrize("ids", ["same", "any"])
@pytest.mark.parametrize("path", ["blocks", "grouped"])
def test_paths_of_other_devices_compute_the_same(M, E, C, I, K, ids, path):  # noqa: E741
    """What runs on CUDA without our kernels, run here: neither looks at the data."""
    if path == "grouped":  # it wants rows of whole 16 bytes
        C, I = 8 * C, 8 * I  # noqa: E741
    inputs = make_inputs(M, E, C, I, K, ids=ids)
    x, weights, chosen, gate_up, down = inputs
    if path == "grouped":
        output = moe_reference.moe_experts_grouped(*inputs)
    else:
        products = moe_reference._by_blocks(x, chosen.flatten(), K, gate_up, down)
        output = moe_reference.sum_experts(products, weights, chosen, gate_up.shape[0], x.dtype)
    check_error(output, *inputs)


def test_an_id_of_no_expert_counts_nothing():
    x, weights, ids, gate_up, down = make_inputs(3, 4, 16, 8, 2)
    ids = torch.tensor([[0, 4], [-1, 1], [7, -5]])
    weights[0, 1] = weights[1, 0] = float("nan")
    output = moe_experts(x, weights, ids, gate_up, down)
    alone = moe_experts(x[:2], weights[[0, 1], [0, 1]][:, None], ids[[0, 1], [0, 1]][:, None],
                        gate_up, down)  # fmt: skip
    assert torch.equal(output[:2], alone)
    assert not output[2].any()


def test_any_strides_dtypes_and_leading_sizes():
    inputs = make_inputs(5, 6, 24, 16, 3)
    x, weights, ids, gate_up, down = inputs
    expected = moe_experts(*inputs)
    turned = [t.transpose(0, 1).contiguous().transpose(0, 1) for t in inputs]
    assert torch.equal(moe_experts(*turned), expected)
    assert torch.equal(moe_experts(x, weights, ids.int(), gate_up, down), expected)
    half = moe_experts(x, weights.bfloat16(), ids, gate_up, down)
    assert torch.equal(half, moe_experts(x, weights.bfloat16().float(), ids, gate_up, down))
    assert moe_experts(x[:0], weights[:0], ids[:0], gate_up, down).shape == (0, 24)


def test_nan_stays_in_its_token_and_its_expert():
    x, weights, ids, gate_up, down = make_inputs(3, 4, 16, 8, 2)
    ids = torch.tensor([[0, 1], [0, 2], [0, 3]])
    x[1, 3] = float("nan")
    gate_up[3] = float("nan")
    output = moe_experts(x, weights, ids, gate_up, down)
    assert output[1].isnan().all() and output[2].isnan().all() and output[0].isfinite().all()


def test_opcheck_and_dynamic_tokens():
    from torch._dynamo.testing import CompileCounter

    inputs = make_inputs(6, 5, 24, 16, 2, dtype=FP32)
    op = torch.ops.glm.moe_experts.default
    torch.library.opcheck(op, (*inputs, ""))
    x, weights, ids, gate_up, down = inputs
    counter = CompileCounter()
    compiled = torch.compile(moe_experts, backend=counter, fullgraph=True)
    for M in (6, 4, 3):
        arguments = x[:M].clone(), weights[:M].clone(), ids[:M].clone()
        for tensor in arguments:
            torch._dynamo.mark_dynamic(tensor, 0)
        output = compiled(*arguments, gate_up, down)
        torch.testing.assert_close(output, moe_experts(*inputs)[:M])
    assert counter.frame_count == 1


def test_wrong_arguments_are_named():
    x, weights, ids, gate_up, down = make_inputs(4, 5, 16, 8, 2)
    for arguments, message in (
        ((x.double(), weights, ids, gate_up, down), "x is torch.float64"),
        ((x, weights, ids, gate_up.half(), down), "gate_up is torch.float16, x torch.bfloat16"),
        ((x, weights.long(), ids, gate_up, down), "router weights must be floats"),
        ((x, weights, ids.float(), gate_up, down), "ids must be int32 or int64"),
        ((x, weights, ids[:3], gate_up, down), r"ids \[M, K\] expected"),
        ((x, weights, ids, gate_up[:, :8], down), r"gate_up \[E, 2 I, 16\]"),
        ((x, weights, ids, gate_up, down[:4]), r"down \[E, 16, I\]"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_experts(*arguments)
    with pytest.raises(ValueError, match="unknown backend 'nvfp4'"):
        moe_experts(x, weights, ids, gate_up, down, backend="nvfp4")
    with pytest.raises(ValueError, match=r"'grouped_mm' cannot run this call: .* used on CUDA"):
        moe_experts(x, weights, ids, gate_up, down, backend="grouped_mm")


TRITON_DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("M, E, C, I, K", [(1, 3, 1, 1, 1), (5, 9, 130, 40, 4), (16, 3, 70, 33, 2)])
@pytest.mark.parametrize("ids", ["topk", "any"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_triton_error_is_that_of_plain_torch(device, M, E, C, I, K, ids, dtype):  # noqa: E741
    inputs = make_inputs(M, E, C, I, K, dtype=dtype, device=device, ids=ids)
    check_error(moe_experts(*inputs, backend="triton"), *inputs)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_sums_what_the_grouped_product_leaves(device):
    from glm_compile.ops.moe.triton_kernel import sum_pairs

    inputs = make_inputs(9, 5, 64, 32, 3, device=device, ids="any")
    x, weights, ids, gate_up, down = inputs
    products, places = moe_reference.grouped_products(x, ids, gate_up, down)
    is_expert = (ids.flatten() >= 0) & (ids.flatten() < 5)
    products[places[~is_expert]] = float("nan")
    check_error(sum_pairs(products, weights, ids, 5, BF16, places), *inputs)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_rows_do_not_depend_on_the_others(device):
    x, weights, ids, gate_up, down = make_inputs(9, 5, 72, 40, 3, device=device)
    whole = moe_experts(x, weights, ids, gate_up, down, backend="triton")
    for rows in (slice(0, 1), slice(3, 8), slice(8, 9)):
        part = moe_experts(x[rows], weights[rows], ids[rows], gate_up, down, backend="triton")
        assert torch.equal(part, whole[rows])


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_refuses_many_tokens(device):
    inputs = make_inputs(17, 5, 16, 8, 2, device=device)
    with pytest.raises(ValueError, match="at most 16 tokens and 256 pairs, got 17 and 34"):
        moe_experts(*inputs, backend="triton")
    assert moe_experts(*inputs).shape == (17, 16)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("columns, features, is_gated", [
    (6144, 2048, True), (2048, 6144, False), (100, 40, True),
])  # fmt: skip
def test_kernel_compiles_without_spilling(arch, dtype, columns, features, is_gated):
    from glm_compile.ops.moe.triton_kernel import expert_kernel
    from tests.compile_only import compile_triton

    def meta(*shape, dtype=dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    config = triton_config_for(columns, dtype.itemsize, is_gated=is_gated)
    rows = features * 2 if is_gated else features
    compiled = compile_triton(
        expert_kernel,
        (
            *(meta(6, columns), columns, meta(6, 8, dtype=torch.int64), 8, 1),
            *(meta(256, rows, columns), rows * columns, columns),
            *(meta(48, features, dtype=dtype if is_gated else FP32), 6, 256, features),
        ),
        {
            "NUM_COLUMNS": columns,
            "TOP": 8,
            "IS_GATED": is_gated,
            "BLOCK_M": 16,
            "BLOCK_TOP": 8,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
        },
        arch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    assert compiled.stack_bytes == 0 and compiled.registers <= 168
    assert compiled.shared_bytes <= 100 * 1024  # two blocks a multiprocessor
    if dtype == FP32:  # each step's sums are a chain of their own, which starts from zero
        dots = re.findall(r"tt\.dot .*", compiled.ttgir)
        assert len(dots) == 1 + is_gated and all(re.search(r", %cst\w* :", dot) for dot in dots)
    if columns % 8 == 0:  # weights come in as asynchronous 16-byte copies
        assert "cp.async.cg.shared.global" in compiled.ptx


@pytest.mark.gpu
@pytest.mark.parametrize(
    "M, ids", [(1, "topk"), (2, "same"), (6, "any"), (16, "topk"), (64, "any")]
)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
def test_gpu_error_is_that_of_plain_torch(M, ids, dtype):
    inputs = make_inputs(M, 24, 1000, 104, 8, dtype=dtype, device="cuda", ids=ids)
    output = moe_experts(*inputs)
    check_error(output, *inputs)
    for backend in ("reference", *(["grouped_mm"] if dtype == BF16 else [])):
        check_error(moe_experts(*inputs, backend=backend), *inputs)
    assert all(torch.equal(moe_experts(*inputs), output) for _ in range(10))


@pytest.mark.gpu
@pytest.mark.parametrize("M", [2, CUTE_PAIRS // 8 + 4, 40])
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_gpu_capture_waits_for_nobody_and_replays_other_experts(M, dtype):
    x, weights, ids, gate_up, down = make_inputs(M, 24, 256, 104, 8, dtype=dtype, device="cuda")
    moe_experts(x, weights, ids, gate_up, down)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = moe_experts(x, weights, ids, gate_up, down)
    for _ in range(3):
        x.normal_()
        weights.uniform_()
        ids.copy_(torch.randn(M, 24, device="cuda").topk(8).indices)
        graph.replay()
        check_error(output, x, weights, ids, gate_up, down)


@pytest.mark.gpu
@pytest.mark.big_memory
@pytest.mark.parametrize("backend", ["cute", "triton"])
def test_offsets_beyond_32_bits(backend):
    gate_up = torch.zeros(90, 4096, 6144, dtype=BF16, device="cuda")
    down = torch.zeros(90, 6144, 2048, dtype=BF16, device="cuda")
    x = torch.ones(1, 6144, dtype=BF16, device="cuda")
    gate_up[89, -1] = gate_up[89, 2047] = 1
    down[89, -1, -1] = 1
    ids = torch.tensor([[89]], device="cuda")
    output = moe_experts(x, torch.ones(1, 1, device="cuda"), ids, gate_up, down, backend=backend)
    assert output[0, -1] == 6144**2 and output.count_nonzero() == 1
