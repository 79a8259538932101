"""row_argmax against a loop over the values, ties and NaN included."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from glm_compile.ops.row_argmax import row_argmax
from tests.compile_only import ARCHS, compile_cute, compile_triton

INTERPRETER = pytest.mark.interpreter
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WIDTHS = [1, 2, 37, 1024, 4096, 4097, 9001]


def make_rows(width: int, dtype: torch.dtype) -> torch.Tensor:
    """Ties at both ends, NaN, infinities, zeros of both signs, all equal, all negative."""
    x = torch.randn(9, width, generator=torch.Generator().manual_seed(width)).round(decimals=1)
    x[0, -1] = x[0, width // 2] = 50.0
    x[1, width // 3] = math.nan
    x[1, -1] = math.inf
    x[2] = -math.inf
    x[3] = -0.0
    x[3, width // 2] = 0.0
    x[4] = -x[4].abs() - 1
    x[5] = 3.5
    x[6, -1] = 1e30 if dtype != torch.float16 else 6e4
    x[7] = math.nan
    return x.to(dtype)


def by_hand(row: list[float]) -> int:
    best = 0
    for i, value in enumerate(row):
        if math.isnan(row[best]):
            break
        if math.isnan(value) or value > row[best]:
            best = i
    return best


def check(x: torch.Tensor, backend: str | None) -> None:
    got = row_argmax(x, backend=backend)
    assert got.dtype == torch.int64 and got.shape == x.shape[:-1]
    want = [by_hand(row) for row in x.float().reshape(-1, x.shape[-1]).tolist()]
    assert got.flatten().tolist() == want


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_reference(width: int, dtype: torch.dtype) -> None:
    check(make_rows(width, dtype), None)


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=INTERPRETER)])
def test_a_copy_lies_where_it_was_asked_for(backend: str) -> None:
    x = make_rows(4097, torch.bfloat16).view(9, 1, -1)
    buffer = torch.full((9, 4), -7)
    got = row_argmax(x, copy=buffer[:, 2:3], backend=backend)
    assert torch.equal(got, row_argmax(x, backend="reference"))
    assert torch.equal(buffer[:, 2:3], got) and (buffer[:, [0, 1, 3]] == -7).all()


def test_any_shape_and_strides() -> None:
    x = make_rows(37, torch.float32)
    check(x.view(3, 3, 37), None)
    check(x.T.contiguous().T, None)
    assert row_argmax(torch.zeros(0, 5)).shape == (0,)


@pytest.mark.parametrize(
    ("x", "message"),
    [(torch.zeros(3, dtype=torch.long), "got torch.int64"), (torch.zeros(2, 0), "not be empty")],
)
def test_what_it_refuses(x: torch.Tensor, message: str) -> None:
    with pytest.raises(ValueError, match=f"row_argmax: .*{message}"):
        row_argmax(x)


def test_a_copy_has_the_rows_shape() -> None:
    with pytest.raises(ValueError, match=r"the copy must be int64 \(2,\), got torch.int32 \(2,\)"):
        row_argmax(torch.zeros(2, 5), copy=torch.zeros(2, dtype=torch.int32))
    with pytest.raises(ValueError, match=r"the copy must be int64 \(2,\)"):
        row_argmax(torch.zeros(2, 5), copy=torch.zeros(2, 1, dtype=torch.int64))


def test_op_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.glm.row_argmax.default, (torch.randn(3, 5),))
    copy = torch.zeros(3, dtype=torch.long)
    torch.library.opcheck(torch.ops.glm.row_argmax.default, (torch.randn(3, 5), copy))


@INTERPRETER
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", WIDTHS)
def test_kernel(width: int, dtype: torch.dtype) -> None:
    check(make_rows(width, dtype), "triton")
    check(make_rows(width, dtype).T.contiguous().T, "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [*WIDTHS, 154_880])
def test_gpu_kernel(width: int, dtype: torch.dtype) -> None:
    check(make_rows(width, dtype).cuda(), "triton")


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES[:2])
@pytest.mark.parametrize("width", [16_384, 20_008, 40_960, 154_880, 1_000_000])
def test_gpu_cluster(width: int, dtype: torch.dtype) -> None:
    x = make_rows(width, dtype).cuda()
    check(x, "cute")
    check(x[3:4], "cute")
    buffer = torch.full((9, 4), -7, device="cuda")
    got = row_argmax(x, copy=buffer[:, 1], backend="cute")
    assert torch.equal(buffer[:, 1], got) and (buffer[:, [0, 2, 3]] == -7).all()
    noise = torch.randn(3, 11, width, device="cuda", dtype=dtype)
    assert torch.equal(row_argmax(noise, backend="cute"), row_argmax(noise, backend="triton"))
    odd = torch.zeros(2, 20_001, device="cuda", dtype=dtype)
    with pytest.raises(ValueError, match="in 16 bytes"):
        row_argmax(odd, backend="cute")


@pytest.mark.compile_only
@pytest.mark.parametrize("has_copy", [True, False])
@pytest.mark.parametrize("dtype", DTYPES[:2])
def test_cluster_compiles(tmp_path: Path, dtype: torch.dtype, has_copy: bool) -> None:
    from glm_compile.ops.row_argmax.cute_kernel import compile_variant

    compiled = compile_cute(
        lambda options: compile_variant(dtype, has_copy, "sm_90a", options), "sm_90a", tmp_path
    )
    assert compiled.stack_bytes == 0 and compiled.registers <= 64
    assert compiled.ptx.count("redux.sync.max") == 3


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("is_whole", [True, False])
def test_kernel_fits_in_registers(arch: str, is_whole: bool) -> None:
    from glm_compile.ops.row_argmax.triton_kernel import row_argmax_kernel

    compiled = compile_triton(
        row_argmax_kernel,
        [
            torch.empty(6, 154_880, dtype=torch.bfloat16, device="meta"),
            154_880,
            torch.empty(6, 38, dtype=torch.int64, device="meta"),
            154_880,
        ],
        {"PART": 4096, "BLOCK": 2048, "IS_WHOLE": is_whole},
        arch,
        num_warps=4,
    )
    assert compiled.stack_bytes == 0
