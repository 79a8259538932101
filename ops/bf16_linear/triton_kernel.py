"""A bf16 linear for few rows in Triton: the weight is the tall side, programs split its rows.

Every program computes blocks of 16 rows of x against `BLOCK_N` out features over the whole of K, in
one order, so results are the same in every run and a row's do not depend on the others.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops.bf16_linear.config import default_for

# Rows of x of one program: the narrowest side that the tensor cores take through Triton.
BLOCK_M = 16


@triton.jit(do_not_specialize=["num_rows"])
def bf16_linear_kernel(
    x,
    stride_xm,
    weight,
    stride_wn,
    stride_wk,
    bias,
    residual,
    stride_rm,
    stride_rn,
    output,
    num_rows,
    num_features,
    K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    feature = tl.program_id(0).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.arange(0, BLOCK_K)
    has_feature = feature < num_features
    has_row = row < num_rows
    weight_at = weight + feature[:, None] * stride_wn + column.to(tl.int64)[None, :] * stride_wk
    x_at = x + row[None, :] * stride_xm + column[:, None]

    product = tl.zeros((BLOCK_N, BLOCK_M), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        if K % BLOCK_K == 0:
            weight_mask, x_mask = has_feature[:, None], has_row[None, :]
        else:
            inside = column < K - start
            weight_mask = has_feature[:, None] & inside[None, :]
            x_mask = has_row[None, :] & inside[:, None]
        weight_block = tl.load(weight_at, mask=weight_mask, other=0.0)
        x_block = tl.load(x_at, mask=x_mask, other=0.0)
        product = tl.dot(weight_block, x_block, product)
        weight_at += BLOCK_K * stride_wk
        x_at += BLOCK_K

    if bias is not None:
        product += tl.load(bias + feature, mask=has_feature, other=0.0).to(tl.float32)[:, None]
    result = product.to(tl.bfloat16)
    inside = has_feature[:, None] & has_row[None, :]
    if residual is not None:
        residual_at = residual + row[None, :] * stride_rm + feature[:, None] * stride_rn
        added = tl.load(residual_at, mask=inside, other=0.0).to(tl.float32)
        result = (result.to(tl.float32) + added).to(tl.bfloat16)
    tl.store(output + row[None, :] * num_features + feature[:, None], result, mask=inside)


def bf16_linear_triton(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    deterministic: bool,
) -> torch.Tensor:
    """Launch the kernel; an x or bias with gaps is made dense first, a weight never."""
    num_features, num_columns = weight.shape
    output = x.new_empty((*x.shape[:-1], num_features))
    x_MK = x.reshape(-1, num_columns)
    if x_MK.stride(1) != 1:
        x_MK = x_MK.contiguous()
    num_rows = x_MK.shape[0]
    if not output.numel():
        return output
    residual_MN = None if residual is None else residual.reshape(num_rows, num_features)
    config = default_for(num_features, num_columns)
    grid = (triton.cdiv(num_features, config.block_n), triton.cdiv(num_rows, BLOCK_M))
    bf16_linear_kernel[grid](
        x_MK,
        x_MK.stride(0),
        weight,
        *weight.stride(),
        None if bias is None else bias.contiguous(),
        residual_MN,
        *((0, 0) if residual_MN is None else residual_MN.stride()),
        output,
        num_rows,
        num_features,
        K=num_columns,
        BLOCK_M=BLOCK_M,
        BLOCK_N=config.block_n,
        BLOCK_K=config.block_k,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return output
