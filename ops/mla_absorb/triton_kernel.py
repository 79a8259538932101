"""The absorbed products for few rows in Triton: a program has a tile of a head's out features.

It multiplies blocks of 16 rows by its tile over the whole reduction, in one order, so results are
the same in every run and a row's do not depend on the others. What goes behind the product is
copied or rotated by the programs of the first tile; beside the library's product by a kernel of its
own.

Shape legend: B batch, S query tokens, R = B * S rows, H heads, K reduction (N or L), F out features
(L or V), P rope dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops._triton import load_rope, rope_columns, rotate
from glm_compile.ops.mla_absorb.reference import absorb_nope

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
    cos,
    stride_cos_b,
    stride_cos_s,
    stride_cos_p,
    sin,
    stride_sin_b,
    stride_sin_s,
    stride_sin_p,
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
    ROTATED: tl.constexpr,
    INTERLEAVED: tl.constexpr,
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
        from_row = copied + (batch * stride_cb + query * stride_cs + head * stride_ch)[:, None]
        if ROTATED:
            value = rotated_part(
                from_row,
                stride_cp,
                cos + (batch * stride_cos_b + query * stride_cos_s)[:, None],
                stride_cos_p,
                sin + (batch * stride_sin_b + query * stride_sin_s)[:, None],
                stride_sin_p,
                part[None, :],
                mask,
                P,
                INTERLEAVED,
            )
        else:
            value = tl.load(from_row + part.to(tl.int64)[None, :] * stride_cp, mask=mask)
        tl.store(output_at[:, None] + (F + part)[None, :], value, mask=mask)


@triton.jit
def rotated_part(
    x,
    stride_x,
    cos,
    stride_cos,
    sin,
    stride_sin,
    column,
    mask,
    P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """The columns of the rotation of rows, rounded as torch rounds in their dtype."""
    dtype = x.dtype.element_ty
    own, partner, angle, is_second, is_rotated = rope_columns(column, P, INTERLEAVED)
    own_x = tl.load(x + own.to(tl.int64) * stride_x, mask=mask, other=0.0).to(tl.float32)
    partner_x = tl.load(x + partner.to(tl.int64) * stride_x, mask=mask, other=0.0).to(tl.float32)
    cos_value, sin_value = load_rope(cos, stride_cos, sin, stride_sin, angle.to(tl.int64), mask)
    turned = rotate(own_x, partner_x, cos_value, sin_value, is_second, is_rotated, dtype)
    return turned.to(dtype)


@triton.jit(do_not_specialize=["num_rows", "num_queries"])
def rotate_kernel(
    x,
    stride_xb,
    stride_xs,
    stride_xh,
    stride_xp,
    cos,
    stride_cos_b,
    stride_cos_s,
    stride_cos_p,
    sin,
    stride_sin_b,
    stride_sin_s,
    stride_sin_p,
    output,
    stride_or,
    stride_oh,
    num_queries,
    H: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):
    """Rotate some heads of a row."""
    row = tl.program_id(0).to(tl.int64)
    batch, query = row // num_queries, row % num_queries
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H).to(tl.int64)
    column = tl.arange(0, BLOCK_P)
    mask = (head < H)[:, None] & (column < P)[None, :]
    value = rotated_part(
        x + batch * stride_xb + query * stride_xs + (head * stride_xh)[:, None],
        stride_xp,
        cos + batch * stride_cos_b + query * stride_cos_s,
        stride_cos_p,
        sin + batch * stride_sin_b + query * stride_sin_s,
        stride_sin_p,
        column[None, :],
        mask,
        P,
        INTERLEAVED,
    )
    target = output + row * stride_or + (head * stride_oh)[:, None] + column[None, :]
    tl.store(target, value, mask=mask)


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
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = True,
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
        *_tables(cos, sin, x_BSHK),
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
        ROTATED=cos is not None,
        INTERLEAVED=interleaved,
        num_warps=4,
        num_stages=4,
    )
    return output


def _tables(
    cos: torch.Tensor | None, sin: torch.Tensor | None, x_BSHK: torch.Tensor
) -> tuple[torch.Tensor | int | None, ...]:
    """cos and sin with their strides; one batch row serves all by stride 0."""
    if cos is None or sin is None:
        return (None, 0, 0, 0) * 2
    batch_size, num_queries = x_BSHK.shape[:2]
    cos, sin = (table.expand(batch_size, num_queries, -1) for table in (cos, sin))
    return cos, *cos.stride(), sin, *sin.stride()


# Rows of heads that a program of `rotate_kernel` turns.
_ROTATED_HEADS = 16


def absorb_query_library(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> torch.Tensor:
    """The library's batched product, and one launch that rotates into its place."""
    rank, num_rotated = kv_b_weight.shape[1], q_rot.shape[-1]
    output = absorb_nope(q_nope, kv_b_weight, num_rotated)
    if not output.numel():
        return output
    x_BSHP = q_rot if q_rot.dim() == 4 else q_rot.unsqueeze(0)
    num_heads = x_BSHP.shape[2]
    turned_RHP = output.view(-1, *output.shape[-2:])[..., rank:]
    rotate_kernel[(turned_RHP.shape[0], triton.cdiv(num_heads, _ROTATED_HEADS))](
        x_BSHP,
        *x_BSHP.stride(),
        *_tables(cos, sin, x_BSHP),
        turned_RHP,
        *turned_RHP.stride()[:2],
        x_BSHP.shape[1],
        H=num_heads,
        P=num_rotated,
        BLOCK_H=_ROTATED_HEADS,
        BLOCK_P=triton.next_power_of_2(num_rotated),
        INTERLEAVED=interleaved,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return output


def absorb_query_triton(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = True,
) -> torch.Tensor:
    """Launch the kernel; nothing is copied first."""
    num_heads, num_nope = q_nope.shape[-2:]
    rank = kv_b_weight.shape[1]
    output = q_nope.new_empty((*q_nope.shape[:-1], rank + q_rot.shape[-1]))
    w_uk_HNL = kv_b_weight.unflatten(0, (num_heads, -1))[:, :num_nope]
    return _run(q_nope, w_uk_HNL.transpose(1, 2), q_rot, output, cos, sin, interleaved)


def project_values_triton(
    o: torch.Tensor, kv_b_weight: torch.Tensor, num_values: int
) -> torch.Tensor:
    """Launch the kernel; nothing is copied first."""
    output = o.new_empty((*o.shape[:-1], num_values))
    w_uv_HVL = kv_b_weight.unflatten(0, (o.shape[-2], -1))[:, -num_values:]
    return _run(o, w_uv_HVL, None, output)
