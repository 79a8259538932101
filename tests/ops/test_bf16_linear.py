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
    with pytest.raises(ValueError, match="unknown backend 'cute'"):
        bf16_linear(x, weight, backend="cute")
