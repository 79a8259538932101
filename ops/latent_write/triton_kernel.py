"""Latents into their pages in Triton: one program a token.

A decode step is all latency: every load is issued before anything waits for one, and the kernel may
be launched before its predecessor ends (PDL, compute capability 9.0 and newer) and let its
successor in before it waits itself. Only the norm's weight is read before the wait. Contraction to
fused multiply-adds is off, so that products and sums are rounded where torch rounds them.

Shape legend: B batch, S tokens of the step, L rank of the latent, P rope dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm_compile.ops._triton import (
    TRITON_DTYPES,
    is_in_order,
    load_rope,
    rope_arguments,
    rope_columns,
    rotate,
    row_of,
    supports_pdl,
    token_of,
)
from glm_compile.ops.paged_cache.triton_kernel import find_slot, table_arguments

# Up to here a step is all latency: programs start before the kernel ahead has ended. With many
# programs these would only take its place.
_MAX_EARLY_TOKENS = 64


@triton.jit
def load_norm_weight(norm_weight, L: tl.constexpr, BLOCK_L: tl.constexpr):
    """The weight of the latents' norm in fp32, zeros behind it."""
    column = tl.arange(0, BLOCK_L)
    return tl.load(norm_weight + column, mask=column < L, other=0.0).to(tl.float32)


@triton.jit
def write_latent(
    latents,
    stride_latent,
    ropes,
    stride_rope,
    weight,
    eps,
    cos,
    stride_cos,
    sin,
    stride_sin,
    pages,
    stride_page,
    stride_row,
    stride_value,
    table,
    stride_table,
    num_columns,
    lengths,
    sequence,
    step,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    """Norm, rotate and store one token; pointers are the token's own, `weight` is loaded."""
    dtype = pages.dtype.element_ty
    column = tl.arange(0, BLOCK_L)
    inside = column < L
    x = tl.load(latents + column * stride_latent, mask=inside, other=0.0).to(tl.float32)
    turned = tl.arange(0, BLOCK_P)
    own, partner, angle, is_second, is_rotated = rope_columns(turned, P, INTERLEAVED)
    own_x = tl.load(ropes + own * stride_rope, mask=is_rotated, other=0.0).to(tl.float32)
    partner_x = tl.load(ropes + partner * stride_rope, mask=is_rotated, other=0.0).to(tl.float32)
    cos_value, sin_value = load_rope(cos, stride_cos, sin, stride_sin, angle, is_rotated)
    page, row, is_stored = find_slot(table, stride_table, num_columns, lengths, sequence, step)
    target = pages + page * stride_page + row * stride_row

    key = rotate(own_x, partner_x, cos_value, sin_value, is_second, is_rotated, ROUND_TO)
    tl.store(target + (L + turned) * stride_value, key.to(dtype), mask=is_rotated & is_stored)
    inverse = 1.0 / tl.sqrt_rn(tl.sum(x * x, 0) / L + eps)
    normed = (x * inverse).to(dtype).to(tl.float32)
    tl.store(target + column * stride_value, (weight * normed).to(dtype), mask=inside & is_stored)


@triton.jit(
    do_not_specialize=[
        "num_steps",
        "stride_lb",
        "stride_rb",
        "stride_cb",
        "stride_sb",
        "stride_table",
        "num_columns",
    ]
)
def latent_write_kernel(
    latents,
    stride_lb,
    stride_ls,
    stride_ll,
    ropes,
    stride_rb,
    stride_rs,
    stride_rp,
    norm_weight,
    norm_eps,
    cos,
    stride_cb,
    stride_cs,
    stride_cp,
    sin,
    stride_sb,
    stride_ss,
    stride_sp,
    pages,
    stride_page,
    stride_row,
    stride_value,
    table,
    stride_table,
    num_columns,
    lengths,
    num_steps,
    L: tl.constexpr,
    P: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_TO: tl.constexpr,
    IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    sequence, step = token_of(tl.program_id(0), num_steps)
    weight = load_norm_weight(norm_weight, L, BLOCK_L)
    if PDL:
        gdc_wait()
    write_latent(
        row_of(latents, stride_lb, stride_ls, sequence, step, num_steps, IN_ORDER),
        stride_ll,
        row_of(ropes, stride_rb, stride_rs, sequence, step, num_steps, IN_ORDER),
        stride_rp,
        weight,
        norm_eps,
        cos + sequence * stride_cb + step * stride_cs,
        stride_cp,
        sin + sequence * stride_sb + step * stride_ss,
        stride_sp,
        pages,
        stride_page,
        stride_row,
        stride_value,
        table,
        stride_table,
        num_columns,
        lengths,
        sequence,
        step,
        L,
        P,
        BLOCK_L,
        BLOCK_P,
        INTERLEAVED,
        ROUND_TO,
    )


def latent_write_triton(
    latents: torch.Tensor,
    ropes: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> None:
    """Launch one program a token."""
    batch_size, num_steps, rank = latents.shape
    num_tokens = batch_size * num_steps
    if not num_tokens:
        return
    # The weight is read early; a copy of it made just ahead would come too late.
    is_early = num_tokens <= _MAX_EARLY_TOKENS and norm_weight.is_contiguous()
    has_pdl = is_early and supports_pdl(latents.device)
    latent_write_kernel[(num_tokens,)](
        latents,
        *latents.stride(),
        ropes,
        *ropes.stride(),
        norm_weight.contiguous(),
        norm_eps,
        *rope_arguments(cos, sin, batch_size),
        pages,
        *pages.stride(),
        *table_arguments(block_table),
        lengths.contiguous(),
        num_steps,
        L=rank,
        P=ropes.shape[2],
        BLOCK_L=triton.next_power_of_2(rank),
        BLOCK_P=triton.next_power_of_2(max(1, ropes.shape[2])),
        INTERLEAVED=interleaved,
        ROUND_TO=TRITON_DTYPES[torch.promote_types(latents.dtype, cos.dtype)],
        IN_ORDER=is_in_order(latents, ropes),
        PDL=has_pdl,
        num_warps=2,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if has_pdl else {}),
    )
