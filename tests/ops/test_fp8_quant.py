"""fp8_quant against exact rational arithmetic and its contract, sentence by sentence."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch

from glm_compile.ops.fp8_quant import fp8_quant
from tests.compile_only import ARCHS, compile_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def e4m3_grid() -> list[Fraction]:
    """Non-negative finite e4m3 values, built from the format's definition."""
    subnormal = [Fraction(m, 8) * Fraction(1, 64) for m in range(8)]
    normal = [
        (1 + Fraction(m, 8)) * Fraction(2) ** (e - 7)
        for e in range(1, 16)
        for m in range(8)
        if not (e == 15 and m == 7)
    ]
    return subnormal + normal


GRID = e4m3_grid()


def to_f32(value: Fraction) -> Fraction:
    """`value` rounded to fp32, ties to even (normal range)."""
    exponent = math.floor(math.log2(value)) if value else 0
    while Fraction(2) ** exponent > value > 0:
        exponent -= 1
    unit = Fraction(2) ** (exponent - 23)
    return round(value / unit) * unit


def round_to_grid(value: Fraction) -> Fraction:
    """Nearest e4m3 value, ties to the even code, saturated."""
    magnitude = min(abs(value), Fraction(448))
    best = min(range(len(GRID)), key=lambda i: (abs(GRID[i] - magnitude), i % 2))
    return GRID[best] if value >= 0 else -GRID[best]


def quantise_row(row: list[float], power_of_two_scale: bool) -> tuple[list[Fraction], Fraction]:
    """Oracle: (values, scale) with every fp32 operation rounded once."""
    amax = max(abs(Fraction(v)) for v in row)
    floor = Fraction(torch.tensor(1e-4, dtype=torch.float32).item())
    scale = to_f32(max(amax, floor) / 448)
    if power_of_two_scale:
        power = math.ceil(math.log2(scale)) - 1
        while Fraction(2) ** power < scale:
            power += 1
        scale = Fraction(2) ** power
    values = []
    for v in row:
        ratio = to_f32(abs(Fraction(v)) / scale)
        values.append(round_to_grid(ratio if v >= 0 else -ratio))
    return values, scale


def rows(num_rows: int, row_len: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows of very different sizes; the last three are quiet, constant and zero."""
    x = torch.randn(num_rows, row_len) * torch.logspace(-3, 3, num_rows)[:, None]
    if num_rows > 3:
        x[-3] *= 1e-6
        x[-2] = 7.0
        x[-1] = 0.0
    return x.to(dtype)


@pytest.mark.parametrize("power_of_two_scale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1), (7, 37), (5, 128)])
def test_equals_exact_arithmetic(
    shape: tuple[int, int], dtype: torch.dtype, power_of_two_scale: bool
) -> None:
    x = rows(*shape, dtype)
    values, scale = fp8_quant(x, power_of_two_scale)
    for row, row_values, row_scale in zip(x.tolist(), values.float().tolist(), scale.tolist()):
        want_values, want_scale = quantise_row(row, power_of_two_scale)
        assert Fraction(row_scale) == want_scale
        assert [Fraction(v) for v in row_values] == want_values


@pytest.mark.parametrize("power_of_two_scale", [False, True])
def test_error_is_half_a_step_of_the_row(power_of_two_scale: bool) -> None:
    x = torch.randn(64, 128)
    values, scale = fp8_quant(x, power_of_two_scale)
    error = (values.float() * scale[:, None] - x).abs()
    step = torch.maximum(x.abs() / 16, scale[:, None] * 2**-10)
    assert (error <= step * (1 + 1e-5)).all()


@pytest.mark.parametrize("shape", [(0, 128), (3, 0, 16), (2, 3, 4, 8), (16,)])
def test_keeps_shapes_also_empty_ones(shape: tuple[int, ...]) -> None:
    values, scale = fp8_quant(torch.ones(shape))
    assert values.shape == shape and values.dtype == torch.float8_e4m3fn
    assert scale.shape == shape[:-1] and scale.dtype == torch.float32


def test_any_strides_give_the_same_contiguous_result() -> None:
    x = torch.randn(12, 6, 64)
    want_values, want_scale = fp8_quant(x)
    wide = torch.full((12, 6, 131), 1e9)
    wide[..., 1:129:2] = x
    for view in (x.transpose(0, 1).contiguous().transpose(0, 1), wide[..., 1:129:2]):
        assert not view.is_contiguous()
        values, scale = fp8_quant(view)
        assert torch.equal(values.view(torch.uint8), want_values.view(torch.uint8))
        assert torch.equal(scale, want_scale)
        assert values.is_contiguous() and scale.is_contiguous()


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (torch.ones(4, dtype=torch.int32), "x must be float32, bfloat16 or float16, got"),
        (torch.ones(4, dtype=torch.float64), "got torch.float64"),
        (torch.ones(4, 0), "rows must not be empty"),
        (torch.ones(()), "rows must not be empty"),
    ],
)
def test_refuses_what_it_cannot_quantise(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"fp8_quant: .*{message}"):
        fp8_quant(x)


def test_a_forced_backend_that_cannot_run_says_why() -> None:
    with pytest.raises(ValueError, match=r"'triton' cannot run this call: .*CUDA"):
        fp8_quant(torch.ones(4), backend="triton")
    with pytest.raises(ValueError, match="unknown backend 'cuda'"):
        fp8_quant(torch.ones(4), backend="cuda")


@pytest.mark.parametrize("power_of_two_scale", [False, True])
def test_op_passes_opcheck(power_of_two_scale: bool) -> None:
    op = torch.ops.glm.fp8_quant.default
    torch.library.opcheck(op, (torch.randn(3, 5, 64).transpose(0, 1), power_of_two_scale))


def test_compiles_whole_with_dynamic_rows() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(fp8_quant, backend=counter, fullgraph=True, dynamic=True)
    for num_rows in (3, 4, 9):
        x = torch.randn(num_rows, 64)
        for got, want in zip(compiled(x), fp8_quant(x)):
            assert torch.equal(got.float(), want.float())
    assert counter.frame_count == 1


def adversarial_rows(row_len: int) -> torch.Tensor:
    x = rows(9, row_len, torch.float32)
    x[0, row_len // 2] = math.nan
    x[1, 0] = -math.inf
    x[2] = 1e-40
    x[3] = 3e38
    x[4] = math.inf
    return x


@pytest.mark.interpreter
@pytest.mark.parametrize("power_of_two_scale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("row_len", [1, 37, 128])
def test_kernel_equals_reference_bit_for_bit(
    row_len: int, dtype: torch.dtype, power_of_two_scale: bool
) -> None:
    x = adversarial_rows(row_len).to(dtype)
    _assert_kernel_equals_reference(x, power_of_two_scale)
    _assert_kernel_equals_reference(x.T.contiguous().T, power_of_two_scale)


@pytest.mark.gpu
@pytest.mark.parametrize("power_of_two_scale", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(9, 1), (9, 37), (4096, 128), (9, 8192)])
def test_gpu_kernel_equals_reference_bit_for_bit(
    shape: tuple[int, int], dtype: torch.dtype, power_of_two_scale: bool
) -> None:
    x = torch.randn(shape)
    x[:9] = adversarial_rows(shape[1])
    _assert_kernel_equals_reference(x.to("cuda", dtype), power_of_two_scale)


def _assert_kernel_equals_reference(x: torch.Tensor, power_of_two_scale: bool) -> None:
    values, scale = fp8_quant(x, power_of_two_scale, backend="triton")
    want_values, want_scale = fp8_quant(x, power_of_two_scale, backend="reference")
    is_nan = want_values.float().isnan()
    assert torch.equal(values.float().isnan(), is_nan)
    assert torch.equal(values.view(torch.uint8)[~is_nan], want_values.view(torch.uint8)[~is_nan])
    assert torch.equal(scale, want_scale)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernel_fits_in_registers(arch: str, dtype: torch.dtype) -> None:
    from glm_compile.ops.fp8_quant.triton_kernel import fp8_quant_kernel

    compiled = compile_triton(
        fp8_quant_kernel,
        [
            torch.empty(192, 128, dtype=dtype, device="meta"),
            128,
            1,
            torch.empty(192, 128, dtype=torch.float8_e4m3fn, device="meta"),
            torch.empty(192, device="meta"),
            192,
        ],
        {"D": 128, "BLOCK_ROWS": 8, "BLOCK_D": 128, "POWER_OF_TWO": False},
        arch,
        num_warps=4,
    )
    assert compiled.stack_bytes == 0
    assert compiled.registers <= 48
    assert "cvt.rn.satfinite.e4m3x2.f32" in compiled.ptx
