"""Argmax of rows in Triton: parts of a row side by side, then the parts of each row.

A value becomes an integer whose order is the values' (-0.0 = 0.0, NaN above all); behind it in the
same 64 bits stands the position, counted down, so that one maximum finds the first of equals.

Shape legend: V values of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

_BLOCK = 2048
# Values of one program.
_PART = 4096


@triton.jit
def ordered(value, position):
    """int64 keys: larger for a larger value, and for an earlier position among equals."""
    value = value.to(tl.float32)
    value = tl.where(value == 0.0, 0.0, value)
    bits = value.to(tl.int32, bitcast=True)
    bits = tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)
    bits = tl.where(value != value, 0x7FFFFFFF, bits)
    return (bits.to(tl.int64) << 32) | (0x7FFFFFFF - position).to(tl.int64)


@triton.jit(do_not_specialize=["num_values"])
def row_argmax_kernel(
    x, stride_row, out, num_values, PART: tl.constexpr, BLOCK: tl.constexpr, IS_WHOLE: tl.constexpr
):
    """Key of the best value of one part, or with `IS_WHOLE` its position."""
    row, part = tl.program_id(1).to(tl.int64), tl.program_id(0)
    best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in tl.static_range(0, PART, BLOCK):
        position = part * PART + start + tl.arange(0, BLOCK)
        inside = position < num_values
        value = tl.load(x + row * stride_row + position, mask=inside, other=0.0)
        key = tl.where(inside, ordered(value, position), -0x7FFFFFFFFFFFFFFF)
        best = tl.maximum(best, key)
    winner = tl.max(best, 0)
    if IS_WHOLE:
        tl.store(out + row, 0x7FFFFFFF - (winner & 0x7FFFFFFF))
    else:
        tl.store(out + row * tl.num_programs(0) + part, winner)


@triton.jit(do_not_specialize=["num_parts"])
def best_part_kernel(keys, out, num_parts, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    best = tl.full((BLOCK,), -0x7FFFFFFFFFFFFFFF, tl.int64)
    for start in range(0, num_parts, BLOCK):
        part = start + tl.arange(0, BLOCK)
        key = tl.load(keys + row * num_parts + part, mask=part < num_parts, other=best)
        best = tl.maximum(best, key)
    tl.store(out + row, 0x7FFFFFFF - (tl.max(best, 0) & 0x7FFFFFFF))


def row_argmax_triton(x: torch.Tensor) -> torch.Tensor:
    """Launch the kernels; one where a row has one part."""
    out = torch.empty(x.shape[:-1], dtype=torch.int64, device=x.device)
    num_rows, num_values = out.numel(), x.shape[-1]
    if not num_rows:
        return out
    rows = x.reshape(num_rows, num_values)
    rows = rows if rows.stride(1) == 1 else rows.contiguous()
    num_parts = triton.cdiv(num_values, _PART)
    is_whole = num_parts == 1
    keys = out if is_whole else torch.empty(num_rows, num_parts, dtype=torch.int64, device=x.device)
    row_argmax_kernel[(num_parts, num_rows)](
        rows,
        rows.stride(0),
        keys,
        num_values,
        PART=min(_PART, triton.next_power_of_2(num_values)) if is_whole else _PART,
        BLOCK=min(_BLOCK, triton.next_power_of_2(num_values)),
        IS_WHOLE=is_whole,
        num_warps=4,
    )
    if not is_whole:
        best_part_kernel[(num_rows,)](keys, out, num_parts, BLOCK=64, num_warps=1)
    return out
