"""The indexer prologue in Triton: one launch for the key side and the query side.

Grid: tokens x (1 + head groups). The first program of a token norms, rotates and stores its key;
the others rotate a group of heads each and scale their gates. Rope reads each output's own input
and its partner by index, so that both layouts are the same code. Products and sums are rounded
where torch rounds them; contraction to fused multiply-adds is off, or fp32 results would differ
from torch's.

Shape legend: B batch, S tokens of the step, H index heads, D index head dim, P rope dim.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from glm_compile.ops._triton import finite_amax, fp8_scale, to_fp8
from glm_compile.ops.paged_cache.triton_kernel import find_slot, store_key

# Heads that one program rotates: 4 x 128 values, four a thread.
_BLOCK_H = 4
_NUM_WARPS = 4

_TRITON_DTYPES = {
    torch.float32: tl.float32,
    torch.bfloat16: tl.bfloat16,
    torch.float16: tl.float16,
}


@triton.jit
def rope_columns(column, P: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Where an output column reads: (own, partner, angle, is in the second half, is rotated)."""
    HALF: tl.constexpr = P // 2
    is_rotated = column < P
    is_second = column >= HALF
    pair = tl.where(is_second, column - HALF, column)
    if INTERLEAVED:
        own = tl.where(is_second, 2 * pair + 1, 2 * pair)
        partner = tl.where(is_second, 2 * pair, 2 * pair + 1)
        angle = pair
    else:
        own = column
        partner = tl.where(is_second, pair, pair + HALF)
        angle = column
    own = tl.where(is_rotated, own, column)
    partner = tl.where(is_rotated, partner, column)
    return own, partner, angle, is_second, is_rotated


@triton.jit
def rotate(own, partner, cos, sin, is_second, is_rotated, ROUND_TO: tl.constexpr):
    """own * cos -+ partner * sin, each step rounded; all blocks fp32, result in fp32."""
    first = (own * cos).to(ROUND_TO).to(tl.float32)
    second = (partner * sin).to(ROUND_TO).to(tl.float32)
    turned = tl.where(is_second, first + second, first - second).to(ROUND_TO).to(tl.float32)
    return tl.where(is_rotated, turned, own)


@triton.jit
def normed_key(
    k,
    stride_kd,
    norm_weight,
    norm_bias,
    norm_eps,
    cos,
    stride_cos,
    sin,
    stride_sin,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    """LayerNorm (two passes, fp32) and RoPE of one key, rounded to k's dtype; returned in fp32."""
    column = tl.arange(0, BLOCK_D)
    inside = column < D
    x = tl.load(k + column * stride_kd, mask=inside, other=0.0).to(tl.float32)
    mean = tl.sum(x, 0) / D
    centred = tl.where(inside, x - mean, 0.0)
    rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / D + norm_eps)

    own, partner, angle, is_second, is_rotated = rope_columns(column, P, INTERLEAVED)
    is_turned = is_rotated & inside
    cos_value = tl.load(cos + angle * stride_cos, mask=is_turned, other=0.0).to(tl.float32)
    sin_value = tl.load(sin + angle * stride_sin, mask=is_turned, other=0.0).to(tl.float32)
    own_value = _normed(k, stride_kd, norm_weight, norm_bias, mean, rstd, own, inside)
    partner_value = _normed(k, stride_kd, norm_weight, norm_bias, mean, rstd, partner, is_turned)
    key = rotate(own_value, partner_value, cos_value, sin_value, is_second, is_rotated, ROUND_TO)
    return key.to(k.dtype.element_ty).to(tl.float32)


@triton.jit
def _normed(k, stride_kd, norm_weight, norm_bias, mean, rstd, column, inside):
    x = tl.load(k + column * stride_kd, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + column, mask=inside, other=0.0).to(tl.float32)
    bias = tl.load(norm_bias + column, mask=inside, other=0.0).to(tl.float32)
    return ((x - mean) * rstd * weight + bias).to(k.dtype.element_ty).to(tl.float32)


@triton.jit
def rotated_queries(
    q,
    stride_qh,
    stride_qd,
    head,
    cos,
    stride_cos,
    sin,
    stride_sin,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    """RoPE of a group of heads of one token, fp32 [heads, BLOCK_D]; zeros outside."""
    column = tl.arange(0, BLOCK_D)
    own, partner, angle, is_second, is_rotated = rope_columns(column, P, INTERLEAVED)
    is_turned = is_rotated & (column < D)
    cos_value = tl.load(cos + angle * stride_cos, mask=is_turned, other=0.0).to(tl.float32)
    sin_value = tl.load(sin + angle * stride_sin, mask=is_turned, other=0.0).to(tl.float32)
    row = q + head[:, None] * stride_qh
    has_head = head[:, None] < H
    own_value = tl.load(
        row + own[None, :] * stride_qd, mask=has_head & (column < D)[None, :], other=0.0
    )
    partner_value = tl.load(
        row + partner[None, :] * stride_qd, mask=has_head & is_turned[None, :], other=0.0
    )
    return rotate(
        own_value.to(tl.float32),
        partner_value.to(tl.float32),
        cos_value[None, :],
        sin_value[None, :],
        is_second[None, :],
        is_rotated[None, :],
        ROUND_TO,
    )


@triton.jit(
    do_not_specialize=[
        "num_steps",
        "stride_qb",
        "stride_kb",
        "stride_gb",
        "stride_cb",
        "stride_sb",
    ]
)
def indexer_prologue_kernel(
    q,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_qd,
    k,
    stride_kb,
    stride_ks,
    stride_kd,
    gates,
    stride_gb,
    stride_gs,
    stride_gh,
    norm_weight,
    norm_bias,
    norm_eps,
    cos,
    stride_cb,
    stride_cs,
    stride_cp,
    sin,
    stride_sb,
    stride_ss,
    stride_sp,
    gate_scale,
    q_out,
    k_out,
    weights,
    num_steps,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    sequence, step = token // num_steps, token % num_steps
    cos += sequence * stride_cb + step * stride_cs
    sin += sequence * stride_sb + step * stride_ss
    column = tl.arange(0, BLOCK_D)
    if tl.program_id(1) == 0:
        k += sequence * stride_kb + step * stride_ks
        key = normed_key(
            k,
            stride_kd,
            norm_weight,
            norm_bias,
            norm_eps,
            cos,
            stride_cp,
            sin,
            stride_sp,
            D,
            P,
            BLOCK_D,
            INTERLEAVED,
            ROUND_TO,
        )
        tl.store(k_out + token * D + column, key.to(k_out.dtype.element_ty), mask=column < D)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        queries = rotated_queries(
            q + sequence * stride_qb + step * stride_qs,
            stride_qh,
            stride_qd,
            head,
            cos,
            stride_cp,
            sin,
            stride_sp,
            H,
            D,
            P,
            BLOCK_D,
            INTERLEAVED,
            ROUND_TO,
        )
        target = q_out + (token * H + head[:, None]) * D + column[None, :]
        inside = (head[:, None] < H) & (column[None, :] < D)
        tl.store(target, queries.to(q_out.dtype.element_ty), mask=inside)
        gate_at = gates + sequence * stride_gb + step * stride_gs + head * stride_gh
        gate = tl.load(gate_at, mask=head < H, other=0.0).to(tl.float32)
        tl.store(weights + token * H + head, gate * gate_scale, mask=head < H)


@triton.jit(
    do_not_specialize=[
        "num_steps",
        "stride_qb",
        "stride_kb",
        "stride_gb",
        "stride_cb",
        "stride_sb",
        "stride_table",
        "num_columns",
    ]
)
def indexer_prologue_fp8_kernel(
    q,
    stride_qb,
    stride_qs,
    stride_qh,
    stride_qd,
    k,
    stride_kb,
    stride_ks,
    stride_kd,
    gates,
    stride_gb,
    stride_gs,
    stride_gh,
    norm_weight,
    norm_bias,
    norm_eps,
    cos,
    stride_cb,
    stride_cs,
    stride_cp,
    sin,
    stride_sb,
    stride_ss,
    stride_sp,
    weight_constant,
    key_pages,
    key_scales,
    block_table,
    stride_table,
    num_columns,
    lengths,
    q_out,
    weights,
    num_steps,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_TO: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    sequence, step = token // num_steps, token % num_steps
    cos += sequence * stride_cb + step * stride_cs
    sin += sequence * stride_sb + step * stride_ss
    column = tl.arange(0, BLOCK_D)
    if tl.program_id(1) == 0:
        page, row, is_stored = find_slot(
            block_table, stride_table, num_columns, lengths, sequence, step
        )
        k += sequence * stride_kb + step * stride_ks
        key = normed_key(
            k,
            stride_kd,
            norm_weight,
            norm_bias,
            norm_eps,
            cos,
            stride_cp,
            sin,
            stride_sp,
            D,
            P,
            BLOCK_D,
            INTERLEAVED,
            ROUND_TO,
        )
        # Columns behind the head hold whatever the norm makes of nothing.
        key = tl.where(column < D, key, 0.0)[None, :]
        key_scale = fp8_scale(finite_amax(key, 1), False)
        key_values = to_fp8(key, tl.broadcast_to(key_scale[:, None], key.shape))
        is_written = ((column < D) & is_stored)[None, :]
        store_key(
            key_pages,
            key_scales,
            page,
            row,
            key_values,
            key_scale[:, None],
            column[None, :],
            is_written,
            D,
        )
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        queries = rotated_queries(
            q + sequence * stride_qb + step * stride_qs,
            stride_qh,
            stride_qd,
            head,
            cos,
            stride_cp,
            sin,
            stride_sp,
            H,
            D,
            P,
            BLOCK_D,
            INTERLEAVED,
            tl.float32,
        )
        scale = fp8_scale(finite_amax(queries, 1), False)
        values = to_fp8(queries, tl.broadcast_to(scale[:, None], queries.shape))
        target = q_out + (token * H + head[:, None]) * D + column[None, :]
        inside = (head[:, None] < H) & (column[None, :] < D)
        tl.store(target, values, mask=inside)
        gate_at = gates + sequence * stride_gb + step * stride_gs + head * stride_gh
        gate = tl.load(gate_at, mask=head < H, other=0.0).to(tl.float32)
        tl.store(weights + token * H + head, gate * weight_constant * scale, mask=head < H)


def _rope_arguments(
    cos: torch.Tensor, sin: torch.Tensor, batch_size: int
) -> tuple[torch.Tensor | int, ...]:
    """cos and sin with their strides; one batch row serves all by stride 0."""
    cos, sin = cos.expand(batch_size, -1, -1), sin.expand(batch_size, -1, -1)
    return cos, *cos.stride(), sin, *sin.stride()


def _constexprs(
    q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, interleaved: bool
) -> dict[str, Any]:
    num_heads, head_dim = q.shape[2:]
    return {
        "H": num_heads,
        "D": head_dim,
        "P": cos.shape[-1],
        "BLOCK_H": _BLOCK_H,
        "BLOCK_D": triton.next_power_of_2(head_dim),
        "INTERLEAVED": interleaved,
        "ROUND_TO": _TRITON_DTYPES[torch.promote_types(k.dtype, cos.dtype)],
        "num_warps": _NUM_WARPS,
        "enable_fp_fusion": False,
    }


def indexer_prologue_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    gates: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    gate_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the exact tier's kernel."""
    batch_size, num_steps, num_heads, _ = q.shape
    q_out = torch.empty_like(q, memory_format=torch.contiguous_format)
    k_out = torch.empty_like(k, memory_format=torch.contiguous_format)
    weights = torch.empty(gates.shape, dtype=torch.float32, device=q.device)
    if batch_size * num_steps:
        grid = (batch_size * num_steps, 1 + triton.cdiv(num_heads, _BLOCK_H))
        indexer_prologue_kernel[grid](
            q,
            *q.stride(),
            k,
            *k.stride(),
            gates,
            *gates.stride(),
            norm_weight.contiguous(),
            norm_bias.contiguous(),
            norm_eps,
            *_rope_arguments(cos, sin, batch_size),
            gate_scale,
            q_out,
            k_out,
            weights,
            num_steps,
            **_constexprs(q, k, cos, interleaved),
        )
    return q_out, k_out, weights


def indexer_prologue_fp8_triton(
    q: torch.Tensor,
    k: torch.Tensor,
    gates: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    gate_scale: float,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the FP8 tier's kernel."""
    batch_size, num_steps, num_heads, head_dim = q.shape
    q_out = torch.empty(q.shape, dtype=torch.float8_e4m3fn, device=q.device)
    weights = torch.empty(gates.shape, dtype=torch.float32, device=q.device)
    if batch_size * num_steps:
        table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
        grid = (batch_size * num_steps, 1 + triton.cdiv(num_heads, _BLOCK_H))
        indexer_prologue_fp8_kernel[grid](
            q,
            *q.stride(),
            k,
            *k.stride(),
            gates,
            *gates.stride(),
            norm_weight.contiguous(),
            norm_bias.contiguous(),
            norm_eps,
            *_rope_arguments(cos, sin, batch_size),
            gate_scale * head_dim**-0.5,
            key_pages,
            key_pages.view(torch.float32),
            table,
            table.stride(0),
            table.shape[1],
            lengths.contiguous(),
            q_out,
            weights,
            num_steps,
            **_constexprs(q, k, cos, interleaved),
        )
    return q_out, weights
