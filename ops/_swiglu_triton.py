"""SwiGLU of many rows in Triton: what runs behind a product that is not ours.

A program takes a part of a row's gates and ups, with the roundings of separate calls.

Shape legend: M rows, N products of a SwiGLU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def swiglu_kernel(product, output, N: tl.constexpr, BLOCK_N: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    inside = column < N
    gate = tl.load(product + row * 2 * N + column, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(product + row * 2 * N + N + column, mask=inside, other=0.0).to(tl.float32)
    dtype = output.dtype.element_ty
    silu = (gate / (1.0 + tl.exp(-gate))).to(dtype).to(tl.float32)
    tl.store(output + row * N + column, (silu * up).to(dtype), mask=inside)


def swiglu_triton(product: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of contiguous rows [..., 2N] that hold gates, then ups; [..., N]."""
    num_columns = product.shape[-1] // 2
    output = product.new_empty((*product.shape[:-1], num_columns))
    if output.numel():
        block = min(1024, triton.next_power_of_2(num_columns))
        grid = (output.numel() // num_columns, triton.cdiv(num_columns, block))
        swiglu_kernel[grid](product, output, N=num_columns, BLOCK_N=block, num_warps=4)
    return output
