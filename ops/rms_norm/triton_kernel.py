"""RMSNorm in Triton, one launch: a program norms one row, with the roundings of the model's own.

With few rows the next kernel may start as soon as this one has: a linear then reads its weight
meanwhile.

Shape legend: M rows, K columns.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm_compile.ops._triton import supports_pdl

# Up to here a step is all latency: programs start before the kernel ahead has ended. With many
# programs these would only take its place.
_MAX_EARLY_ROWS = 64


@triton.jit
def rms_norm_kernel(
    x,
    stride_xm,
    weight,
    stride_wk,
    output,
    eps,
    K: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK_K)
    inside = column < K
    scale = tl.load(weight + column * stride_wk, mask=inside, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    values = tl.load(x + row * stride_xm + column, mask=inside, other=0.0).to(tl.float32)
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
        has_pdl = x_MK.shape[0] <= _MAX_EARLY_ROWS and supports_pdl(x.device)
        rms_norm_kernel[(x_MK.shape[0],)](
            x_MK,
            x_MK.stride(0),
            weight_K,
            weight_K.stride(0),
            output,
            eps,
            K=num_columns,
            BLOCK_K=block,
            PDL=has_pdl,
            num_warps=max(1, min(16, block // 512)),
            **({"launch_pdl": True} if has_pdl else {}),
        )
    return output
