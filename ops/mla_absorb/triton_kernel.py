"""The absorbed products for few rows in Triton: a program has a tile of a head's out features.

It multiplies blocks of 16 rows by its tile over the whole reduction, in one order, so results are
the same in every run and a row's do not depend on the others.

Shape legend: B batch, S query tokens, R = B * S rows, H heads, K reduction (N or L), F out features
(L or V), P rope dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

# Rows of one program: the narrowest side that the tensor cores take through Triton.
BLOCK_R = 16


@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def mla_absorb_kernel(
    x,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_xk,
    weight,
    stride_wh,
    stride_wf,
    stride_wk,
    copied,
    stride_cb,
    stride_cs,
    stride_ch,
    stride_cp,
    output,
    stride_or,
    stride_oh,
    num_rows,
    num_queries,
    K: tl.constexpr,
    F: tl.constexpr,
    P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_F: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    head = tl.program_id(1).to(tl.int64)
    row = tl.program_id(2).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    batch, query = row // num_queries, row % num_queries
    feature = tl.program_id(0) * BLOCK_F + tl.arange(0, BLOCK_F)
    column = tl.arange(0, BLOCK_K)
    has_row = row < num_rows
    has_feature = feature < F
    weight_at = (
        weight
        + head * stride_wh
        + feature.to(tl.int64)[:, None] * stride_wf
        + column.to(tl.int64)[None, :] * stride_wk
    )
    x_at = (
        x
        + (batch * stride_xb + query * stride_xs + head * stride_xh)[None, :]
        + column.to(tl.int64)[:, None] * stride_xk
    )

    product = tl.zeros((BLOCK_F, BLOCK_R), dtype=tl.float32)
    for start in range(0, K, BLOCK_K):
        inside = column < K - start
        weight_block = tl.load(weight_at, mask=has_feature[:, None] & inside[None, :], other=0.0)
        x_block = tl.load(x_at, mask=has_row[None, :] & inside[:, None], other=0.0)
        if weight_block.dtype == tl.float32:
            # Products of fp32 are summed up one after the other: those of a step by themselves, or
            # rounding errors would grow with K. The compiler fuses a sum with the product into one
            # chain, but not a difference: this is the negative total.
            product -= tl.dot(weight_block, x_block, input_precision="ieee")
        else:
            product = tl.dot(weight_block, x_block, product)
        weight_at += BLOCK_K * stride_wk
        x_at += BLOCK_K * stride_xk

    if weight.dtype.element_ty == tl.float32:
        product = 0.0 - product
    output_at = output + row * stride_or + head * stride_oh
    tl.store(
        output_at[None, :] + feature[:, None],
        product.to(output.dtype.element_ty),
        mask=has_feature[:, None] & has_row[None, :],
    )
    if P > 0 and tl.program_id(0) == 0:
        part = tl.arange(0, BLOCK_P)
        mask = has_row[:, None] & (part < P)[None, :]
        from_row = batch * stride_cb + query * stride_cs + head * stride_ch
        value = tl.load(
            copied + from_row[:, None] + part.to(tl.int64)[None, :] * stride_cp, mask=mask
        )
        tl.store(output_at[:, None] + (F + part)[None, :], value, mask=mask)


def block_sizes(num_features: int, num_reduced: int, element_bytes: int) -> tuple[int, int]:
    """(out features, reduction of a step): tiles as a head's matrix has them, 16 KiB a step."""
    block_f = min(64, max(16, triton.next_power_of_2(num_features)))
    block_k = min(256 // element_bytes, max(16, triton.next_power_of_2(num_reduced)))
    return block_f, block_k


def _run(
    x: torch.Tensor,
    weight_HFK: torch.Tensor,
    copied: torch.Tensor | None,
    output: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernel; `output` is [..., H, F + P]."""
    if not output.numel():
        return output
    x_BSHK = x if x.dim() == 4 else x.unsqueeze(0)
    num_heads, num_features, num_reduced = weight_HFK.shape
    if copied is not None and copied.dim() == 3:
        copied = copied.unsqueeze(0)
    output_RHF = output.view(-1, *output.shape[-2:])
    num_copied = output.shape[-1] - num_features
    block_f, block_k = block_sizes(num_features, num_reduced, x.element_size())
    grid = (
        triton.cdiv(num_features, block_f),
        num_heads,
        triton.cdiv(output_RHF.shape[0], BLOCK_R),
    )
    mla_absorb_kernel[grid](
        x_BSHK,
        *x_BSHK.stride(),
        weight_HFK,
        *weight_HFK.stride(),
        copied,
        *((0, 0, 0, 0) if copied is None else copied.stride()),
        output_RHF,
        *output_RHF.stride()[:2],
        output_RHF.shape[0],
        x_BSHK.shape[1],
        K=num_reduced,
        F=num_features,
        P=num_copied,
        BLOCK_R=BLOCK_R,
        BLOCK_F=block_f,
        BLOCK_K=block_k,
        BLOCK_P=triton.next_power_of_2(max(1, num_copied)),
        num_warps=4,
        num_stages=4,
    )
    return output


def absorb_query_triton(
    q_nope: torch.Tensor, q_rot: torch.Tensor, kv_b_weight: torch.Tensor
) -> torch.Tensor:
    """Launch the kernel; nothing is copied first."""
    num_heads, num_nope = q_nope.shape[-2:]
    rank = kv_b_weight.shape[1]
    output = q_nope.new_empty((*q_nope.shape[:-1], rank + q_rot.shape[-1]))
    w_uk_HNL = kv_b_weight.unflatten(0, (num_heads, -1))[:, :num_nope]
    return _run(q_nope, w_uk_HNL.transpose(1, 2), q_rot, output)


def project_values_triton(
    o: torch.Tensor, kv_b_weight: torch.Tensor, num_values: int
) -> torch.Tensor:
    """Launch the kernel; nothing is copied first."""
    output = o.new_empty((*o.shape[:-1], num_values))
    w_uv_HVL = kv_b_weight.unflatten(0, (o.shape[-2], -1))[:, -num_values:]
    return _run(o, w_uv_HVL, None, output)
