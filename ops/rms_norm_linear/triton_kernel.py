"""RMSNorm and SwiGLU of many rows in Triton: what runs around a product that is not ours.

A program norms one row, with the roundings of the model's own norm, or takes a part of a row's
gates and ups, with the roundings of separate calls.

Shape legend: M rows, K in features, N products of a SwiGLU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def rms_norm_kernel(
    x, stride_xm, weight, stride_wk, output, eps, K: tl.constexpr, BLOCK_K: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    values = tl.load(x + row * stride_xm + column, mask=inside, other=0.0).to(tl.float32)
    scale = tl.load(weight + column * stride_wk, mask=inside, other=0.0).to(tl.float32)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(values * values, 0) / K + eps)
    dtype = output.dtype.element_ty
    normed = (values * inverse).to(dtype).to(tl.float32) * scale
    tl.store(output + row * K + column, normed.to(dtype), mask=inside)


def rms_norm_triton(x: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """Launch one program a row; returns [..., K], contiguous, in x's dtype, which is the weight's.

    Rows of `x` that are not dense are made so first.
    """
    num_columns = x.shape[-1]
    output = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    x_MK = x.reshape(-1, num_columns)
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    if output.numel():
        block = triton.next_power_of_2(num_columns)
        rms_norm_kernel[(x_MK.shape[0],)](
            x_MK,
            x_MK.stride(0),
            weight_K,
            weight_K.stride(0),
            output,
            eps,
            K=num_columns,
            BLOCK_K=block,
            num_warps=max(1, min(16, block // 512)),
        )
    return output


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
