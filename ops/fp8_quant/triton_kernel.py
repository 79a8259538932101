"""FP8 quantisation of rows in Triton: one program a group of rows, one read, one write."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops._triton import finite_amax, fp8_scale, to_fp8

# Values held by one program; 8 values a thread at 4 warps.
_BLOCK_VALUES = 1024


@triton.jit(do_not_specialize=["num_rows"])
def fp8_quant_kernel(
    x,
    stride_row,
    stride_value,
    values,
    scales,
    num_rows,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
    POWER_OF_TWO: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    column = tl.arange(0, BLOCK_D)
    inside = (row < num_rows)[:, None] & (column < D)[None, :]
    offset = row[:, None] * stride_row + column.to(tl.int64)[None, :] * stride_value
    block = tl.load(x + offset, mask=inside, other=0.0).to(tl.float32)
    scale = fp8_scale(finite_amax(block, 1), POWER_OF_TWO)
    quantised = to_fp8(block, tl.broadcast_to(scale[:, None], block.shape))
    tl.store(values + row[:, None] * D + column[None, :], quantised, mask=inside)
    tl.store(scales + row, scale, mask=row < num_rows)


def fp8_quant_triton(
    x: torch.Tensor, power_of_two_scale: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel; rows that do not flatten into one stride are copied first."""
    values = torch.empty(x.shape, dtype=torch.float8_e4m3fn, device=x.device)
    scales = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    num_rows, row_len = scales.numel(), x.shape[-1]
    if not num_rows:
        return values, scales
    rows = x.reshape(num_rows, row_len)
    block_d = triton.next_power_of_2(row_len)
    block_rows = max(1, _BLOCK_VALUES // block_d)
    fp8_quant_kernel[(triton.cdiv(num_rows, block_rows),)](
        rows,
        rows.stride(0),
        rows.stride(1),
        values,
        scales,
        num_rows,
        D=row_len,
        BLOCK_ROWS=block_rows,
        BLOCK_D=block_d,
        POWER_OF_TWO=power_of_two_scale,
        num_warps=4,
    )
    return values, scales
