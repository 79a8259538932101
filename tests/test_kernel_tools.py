"""What the kernel tests rest on: the interpreter's patches and the compile-only reader."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl

from tests.compile_only import ARCHS, CompiledKernel, compile_triton

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.float8_e5m2)


@triton.jit
def convert_kernel(x, y, n, BLOCK: tl.constexpr):
    offset = tl.arange(0, BLOCK)
    value = tl.load(x + offset, mask=offset < n)
    tl.store(y + offset, value.to(y.dtype.element_ty), mask=offset < n)


@triton.jit
def dot_kernel(a, b, c, N: tl.constexpr):
    row, column = tl.arange(0, N)[:, None], tl.arange(0, N)[None, :]
    product = tl.dot(tl.load(a + row * N + column), tl.load(b + row * N + column))
    tl.store(c + row * N + column, product)


@triton.jit
def sort_kernel(x, y, N: tl.constexpr):
    offset = tl.arange(0, N)
    tl.store(y + offset, tl.sort(tl.load(x + offset) + tl.load(x + offset)))


@triton.jit
def copy_kernel(x, y, n, stride, scale, BLOCK: tl.constexpr):
    offset = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + offset * stride, mask=offset < n)
    tl.store(y + offset, value * scale, mask=offset < n)


def every_interesting_value() -> torch.Tensor:
    """All bf16 values, and floats near every fp8 and bf16 rounding border."""
    codes = torch.arange(2**16, dtype=torch.int32)
    exact = codes.to(torch.uint16).view(torch.bfloat16).float()
    borders = exact.view(torch.int32)[:, None] + torch.tensor([0x7FFF, 0x8000, 0x8001])
    return torch.cat([exact, borders.flatten().int().view(torch.float32)])


@pytest.mark.interpreter
@pytest.mark.parametrize("target", FLOATS)
@pytest.mark.parametrize("source", FLOATS)
def test_interpreter_converts_as_torch_does(source: torch.dtype, target: torch.dtype) -> None:
    def convert(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        x = x.float()
        if dtype.itemsize == 1:
            limit = torch.finfo(dtype).max
            x = torch.where(x.isnan(), x, x.clamp(-limit, limit))
        return x.to(dtype)

    x = convert(every_interesting_value(), source)
    got = torch.empty(x.shape, dtype=target)
    convert_kernel[(1,)](x, got, x.numel(), BLOCK=triton.next_power_of_2(x.numel()))
    torch.testing.assert_close(
        got.float(), convert(x, target).float(), rtol=0, atol=0, equal_nan=True
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", FLOATS[1:])
def test_interpreter_multiplies_values_not_codes(dtype: torch.dtype) -> None:
    a, b = torch.randn(2, 16, 16).to(dtype)
    got = torch.empty(16, 16)
    dot_kernel[(1,)](a, b, got, N=16)
    torch.testing.assert_close(got, a.float() @ b.float())


@pytest.mark.interpreter
def test_interpreter_adds_and_sorts_bf16() -> None:
    x = torch.randn(64).bfloat16()
    got = torch.empty_like(x)
    sort_kernel[(1,)](x, got, N=64)
    assert torch.equal(got, (x + x).sort().values)


def meta(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def compile_copy(x: torch.Tensor, n: int, stride: int, arch: str = "sm_90a") -> CompiledKernel:
    arguments = [x, meta(4096), n, stride, 2.0]
    return compile_triton(copy_kernel, arguments, {"BLOCK": 1024}, arch, num_warps=4)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
def test_compile_only_reads_resources(arch: str) -> None:
    kernel = compile_copy(meta(4096), 4096, 1, arch)
    assert 0 < kernel.registers <= 64
    assert kernel.stack_bytes == 0 and kernel.shared_bytes == 0
    assert "ld.global" in kernel.ptx


@pytest.mark.compile_only
def test_compile_only_specializes_as_the_launcher_does() -> None:
    aligned = compile_copy(meta(4096), 4096, 1)
    assert "v4.b32" in aligned.ptx
    assert "v4.b32" not in compile_copy(meta(4097)[1:], 4096, 1).ptx.split("st.global")[0]
    assert "v4.b32" not in compile_copy(meta(8192), 4096, 2).ptx.split("st.global")[0]
    assert aligned.cubin != compile_copy(meta(4096), 4095, 1).cubin


@pytest.mark.compile_only
def test_compile_only_sees_spills() -> None:
    arguments = [meta(32, 32)] * 3
    free, tight = (
        compile_triton(dot_kernel, arguments, {"N": 32}, "sm_90a", num_warps=1, maxnreg=limit)
        for limit in (255, 32)
    )
    assert free.stack_bytes == 0 < tight.stack_bytes
    assert tight.registers <= 32 < free.registers
