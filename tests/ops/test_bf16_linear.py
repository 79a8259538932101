"""bf16 linears against a float64 oracle: the error of torch's own product is the yardstick.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm_compile.ops.bf16_linear import bf16_linear


def make_inputs(M, N, K, *, bias=False, residual=False, device="cpu"):
    def random(*shape):
        return torch.randn(*shape, device=device).bfloat16()

    x, weight = random(M, K), random(N, K) / K**0.5
    return x, weight, random(N) if bias else None, random(M, N) if residual else None


def oracle(x, weight, bias, residual):
    """round(round(x W^T + bias) + residual) with the sum in float64."""
    product = x.double() @ weight.double().T
    if bias is not None:
        product = product + bias.double()
    if residual is not None:
        product = product.bfloat16().double() + residual.double()
    return product


def check_error(output, x, weight, bias, residual):
    """Error at most twice that of torch's product; both mean and largest, plus half an ulp."""
    expected = oracle(x, weight, bias, residual)
    library = F.linear(x, weight, bias)
    if residual is not None:
        library = library + residual
    ulp = expected.abs().clamp_min(2.0**-6) * 2.0**-8
    error = (output.double() - expected).abs() / ulp
    library_error = (library.double() - expected).abs() / ulp
    assert output.shape == library.shape and output.dtype == torch.bfloat16
    if error.numel():
        assert error.mean() <= 2 * library_error.mean() + 0.05
        assert error.max() <= 2 * library_error.max() + 0.5


@pytest.mark.parametrize("M, N, K", [(1, 1, 1), (3, 37, 64), (6, 130, 200), (17, 5, 1030)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("deterministic", [False, True])
def test_error_is_that_of_the_library(M, N, K, bias, residual, deterministic):
    x, weight, bias, residual = make_inputs(M, N, K, bias=bias, residual=residual)
    output = bf16_linear(x, weight, bias, residual=residual, deterministic=deterministic)
    assert output.is_contiguous()
    check_error(output, x, weight, bias, residual)


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("shape", [(0, 24), (2, 0, 24), (24,), (1, 2, 3, 24)])
def test_leading_dimensions(shape, deterministic):
    x = torch.randn(shape).bfloat16()
    weight = torch.randn(10, 24).bfloat16()
    residual = torch.randn(*shape[:-1], 10).bfloat16()
    output = bf16_linear(x, weight, residual=residual, deterministic=deterministic)
    assert output.shape == residual.shape
    torch.testing.assert_close(output, F.linear(x, weight) + residual, rtol=0.02, atol=0.1)


@pytest.mark.parametrize("deterministic", [False, True])
def test_any_strides(deterministic):
    x, weight, bias, residual = make_inputs(6, 40, 64, bias=True, residual=True)

    def spread(tensor):
        """The same values as an odd-offset, transposed view of something wider."""
        wide = torch.zeros(tensor.shape[-1] + 3, *tensor.shape[:-1], dtype=tensor.dtype)
        wide[1:-2] = tensor.movedim(-1, 0)
        return wide[1:-2].movedim(0, -1)

    expected = bf16_linear(x, weight, bias, residual=residual, deterministic=deterministic)
    output = bf16_linear(
        spread(x),
        spread(weight),
        spread(bias),
        residual=spread(residual),
        deterministic=deterministic,
    )
    assert output.is_contiguous()
    check_error(output, x, weight, bias, residual)
    torch.testing.assert_close(output, expected, rtol=0.02, atol=0.02)


def test_residual_is_added_after_the_rounding():
    x = torch.ones(1, 1).bfloat16()
    weight = torch.tensor([[1.0]]).bfloat16()
    bias = torch.tensor([2.0**-9]).bfloat16()  # lost when 1 + bias is rounded
    residual = torch.tensor([[-1.0]]).bfloat16()
    assert bf16_linear(x, weight, bias, residual=residual).item() == 0


def test_deterministic_rows_do_not_depend_on_their_number():
    x, weight, _, _ = make_inputs(70, 48, 900)
    whole = bf16_linear(x, weight, deterministic=True)
    for M in (1, 2, 15, 16, 17, 33):
        assert torch.equal(bf16_linear(x[:M], weight, deterministic=True), whole[:M])


def test_nan_and_inf_stay_in_their_row():
    x, weight, _, _ = make_inputs(3, 8, 16)
    x[1, 3] = float("nan")
    output = bf16_linear(x, weight)
    assert output[1].isnan().all() and output[[0, 2]].isfinite().all()


def test_opcheck():
    x, weight, bias, residual = make_inputs(6, 40, 64, bias=True, residual=True)
    op = torch.ops.glm.bf16_linear.default
    torch.library.opcheck(op, (x, weight, None, None, False, ""))
    torch.library.opcheck(op, (x.view(2, 3, 64), weight, bias, residual.view(2, 3, 40), True, ""))


def test_compiles_once_for_all_row_counts():
    from torch._dynamo.testing import CompileCounter

    weight = torch.randn(10, 24).bfloat16()

    def step(x):
        return bf16_linear(x, weight) * 2

    counter = CompileCounter()
    counted = torch.compile(step, backend=counter, fullgraph=True)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for M in (6, 5, 17):
        x = torch.randn(M, 24).bfloat16()
        torch._dynamo.mark_dynamic(x, 0)
        assert torch.equal(compiled(x), step(x))
        counted(x)
    assert counter.frame_count == 1


def test_wrong_arguments_are_named():
    x, weight, bias, residual = make_inputs(6, 40, 64, bias=True, residual=True)
    with pytest.raises(ValueError, match=r"x must be bfloat16, got torch.float32"):
        bf16_linear(x.float(), weight)
    with pytest.raises(ValueError, match=r"weight must be bfloat16"):
        bf16_linear(x, weight.half())
    with pytest.raises(ValueError, match=r"x \[..., K\] and weight \[N, K\]"):
        bf16_linear(x[:, :63], weight)
    with pytest.raises(ValueError, match=r"bias must be \[40\]"):
        bf16_linear(x, weight, bias[:1])
    with pytest.raises(ValueError, match="residual must have the output's shape"):
        bf16_linear(x, weight, residual=residual[:1])
    with pytest.raises(ValueError, match="unknown backend 'nvfp'"):
        bf16_linear(x, weight, backend="nvfp")


TRITON_DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("M, N, K", [(1, 1, 1), (3, 37, 64), (6, 130, 300), (17, 16, 1030)])
@pytest.mark.parametrize("bias, residual", [(False, False), (True, False), (True, True)])
def test_triton_error_is_that_of_the_library(device, M, N, K, bias, residual):
    x, weight, bias, residual = make_inputs(M, N, K, bias=bias, residual=residual, device=device)
    output = bf16_linear(x, weight, bias, residual=residual, backend="triton")
    assert output.is_contiguous()
    check_error(output, x, weight, bias, residual)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_takes_any_strides(device):
    x, weight, bias, residual = make_inputs(5, 40, 72, bias=True, residual=True, device=device)
    expected = bf16_linear(x, weight, bias, residual=residual, backend="triton")

    def spread(tensor):
        wide = torch.zeros(tensor.shape[-1] + 3, *tensor.shape[:-1], dtype=tensor.dtype)
        wide = wide.to(device)
        wide[1:-2] = tensor.movedim(-1, 0)
        return wide[1:-2].movedim(0, -1)

    for arguments in (
        (spread(x), weight, bias, residual),
        (x, spread(weight), bias, residual),
        (x, weight, spread(bias), residual),
        (x, weight, bias, spread(residual)),
        (x[None], weight, bias, residual[None]),
    ):
        *tensors, added = arguments
        output = bf16_linear(*tensors, residual=added, backend="triton")
        assert torch.equal(output.view(5, 40), expected)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_rows_do_not_depend_on_their_number(device):
    x, weight, _, _ = make_inputs(35, 20, 300, device=device)
    whole = bf16_linear(x, weight, deterministic=True, backend="triton")
    for M in (0, 1, 2, 16, 17):
        output = bf16_linear(x[:M], weight, deterministic=True, backend="triton")
        assert torch.equal(output, whole[:M])


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 6, 16])
@pytest.mark.parametrize("N, K", [(2784, 6144), (20480, 2048), (6144, 2048), (154880, 6144)])
def test_triton_on_the_release_shapes(M, N, K):
    x, weight, _, _ = make_inputs(M, N, K, device="cuda")
    output = bf16_linear(x, weight, backend="triton")
    check_error(output, x, weight, None, None)
    for _ in range(20):
        assert torch.equal(bf16_linear(x, weight, backend="triton"), output)


@pytest.mark.gpu
def test_capture_and_replay_with_changed_inputs():
    x, weight, bias, _ = make_inputs(6, 160, 6144, bias=True, device="cuda")
    bf16_linear(x, weight, bias)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = bf16_linear(x, weight, bias)
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        graph.replay()
        check_error(output, x, weight, bias, None)


@pytest.mark.gpu
@pytest.mark.big_memory
def test_offsets_beyond_32_bits():
    weight = torch.zeros(2**31 // 4096 + 40, 4096, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 1
    x = torch.ones(1, 4096, dtype=torch.bfloat16, device="cuda")
    output = bf16_linear(x, weight, backend="triton")
    assert output[0, -1] == 4096 and output.count_nonzero() == 1


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("N, K", [(2784, 6144), (20480, 2048), (154880, 6144), (512, 100)])
def test_kernel_compiles_without_spilling(arch, N, K):
    from glm_compile.ops.bf16_linear.config import default_for
    from glm_compile.ops.bf16_linear.triton_kernel import BLOCK_M, bf16_linear_kernel
    from tests.compile_only import compile_triton

    def meta(*shape):
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")

    config = default_for(N, K)
    residual = meta(6, N)
    compiled = compile_triton(
        bf16_linear_kernel,
        (meta(6, K), K, meta(N, K), K, 1, meta(N), residual, N, 1, meta(6, N), 6, N),
        {"K": K, "BLOCK_M": BLOCK_M, "BLOCK_N": config.block_n, "BLOCK_K": config.block_k},
        arch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    assert compiled.stack_bytes == 0
    assert compiled.registers <= 255
    assert compiled.shared_bytes <= 227 * 1024
    assert "mma" in compiled.ptx
    if K % 8 == 0:  # weights come in as asynchronous 16-byte copies
        assert "cp.async.cg.shared.global" in compiled.ptx
