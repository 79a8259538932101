"""The indexer prologue in Triton: one launch for the key side and the query side.

Grid: tokens x (1 + head groups, and 1 more with latents). The first program of a token norms,
rotates and stores its key; the next ones rotate a group of heads each and scale their gates; the
last norms, rotates and stores what attention caches of the token. Rope reads each output's own
input and its partner by index, so that both layouts are the same code. Products and sums are
rounded where torch rounds them; contraction to fused multiply-adds is off, or fp32 results would
differ from torch's.

A decode step is all latency: every load is issued before anything waits for one, and the kernel may
be launched before its predecessor ends (PDL, compute capability 9.0 and newer), and lets its
successor in before it waits itself: that one waits for this kernel, so for all ahead, before it
reads what was computed. Only weights are read before the wait: everything else may have been
written by a kernel of the same chain.

Shape legend: B batch, S tokens of the step, T cached tokens, H index heads, D index head dim, P
rope dim, L rank of the latent.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm_compile.ops._triton import (
    TRITON_DTYPES,
    finite_amax,
    fp8_scale,
    is_in_order,
    load_rope,
    rope_arguments,
    rope_columns,
    rotate,
    row_of,
    supports_pdl,
    to_fp8,
    token_of,
)
from glm_compile.ops.indexer_prologue.config import KernelConfig, default_for
from glm_compile.ops.latent_write.triton_kernel import load_norm_weight, write_latent
from glm_compile.ops.paged_cache.triton_kernel import find_slot, store_key, table_arguments

# Where a key goes: a fresh [B, S, D], rows of a cache [B, T, D], pages, or FP8 pages.
FRESH, ROWS, PAGES, FP8_PAGES = (tl.constexpr(i) for i in range(4))


@triton.jit
def find_place(
    table,
    stride_table,
    num_columns,
    positions,
    token,
    sequence,
    step,
    TO: tl.constexpr,
):
    """(major, minor, is_stored) of a key: page and row, or sequence and position."""
    if TO == FRESH:
        return token, token * 0, step >= 0
    elif TO == ROWS:
        position = tl.load(positions).to(tl.int64) + step
        is_stored = (position >= 0) & (position < num_columns)
        return sequence, position, is_stored
    else:
        return find_slot(table, stride_table, num_columns, positions, sequence, step)


@triton.jit(
    do_not_specialize=[
        "num_steps",
        "stride_qb",
        "stride_kb",
        "stride_gb",
        "stride_lb",
        "stride_rb",
        "stride_cb",
        "stride_sb",
        "stride_major",
        "stride_table",
        "num_columns",
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
    weight_constant,
    keys,
    key_scales,
    stride_major,
    stride_minor,
    stride_value,
    table,
    stride_table,
    num_columns,
    positions,
    q_out,
    weights,
    latents,
    stride_lb,
    stride_ls,
    stride_ll,
    ropes,
    stride_rb,
    stride_rs,
    stride_rp,
    latent_weight,
    latent_eps,
    latent_pages,
    stride_latent_page,
    stride_latent_row,
    stride_latent_value,
    num_steps,
    H: tl.constexpr,
    D: tl.constexpr,
    P: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_P: tl.constexpr,
    INTERLEAVED: tl.constexpr,
    ROUND_TO: tl.constexpr,
    TO: tl.constexpr,
    L: tl.constexpr,
    BLOCK_L: tl.constexpr,
    LATENTS_INTERLEAVED: tl.constexpr,
    LATENTS_IN_ORDER: tl.constexpr,
    PDL: tl.constexpr,
):
    if PDL:
        gdc_launch_dependents()
    sequence, step = token_of(tl.program_id(0), num_steps)
    token = tl.program_id(0).to(tl.int64)
    cos += sequence * stride_cb + step * stride_cs
    sin += sequence * stride_sb + step * stride_ss
    column = tl.arange(0, BLOCK_D)
    own, partner, angle, is_second, is_rotated = rope_columns(column, P, INTERLEAVED)
    inside = column < D
    is_turned = is_rotated & inside

    if L > 0 and tl.program_id(1) == tl.num_programs(1) - 1:
        weight = load_norm_weight(latent_weight, L, BLOCK_L)
        if PDL:
            gdc_wait()
        write_latent(
            row_of(latents, stride_lb, stride_ls, sequence, step, num_steps, LATENTS_IN_ORDER),
            stride_ll,
            row_of(ropes, stride_rb, stride_rs, sequence, step, num_steps, LATENTS_IN_ORDER),
            stride_rp,
            weight,
            latent_eps,
            cos,
            stride_cp,
            sin,
            stride_sp,
            latent_pages,
            stride_latent_page,
            stride_latent_row,
            stride_latent_value,
            table,
            stride_table,
            num_columns,
            positions,
            sequence,
            step,
            L,
            P,
            BLOCK_L,
            BLOCK_P,
            LATENTS_INTERLEAVED,
            ROUND_TO,
        )
    elif tl.program_id(1) == 0:
        own_weight = tl.load(norm_weight + own, mask=inside, other=0.0).to(tl.float32)
        own_bias = tl.load(norm_bias + own, mask=inside, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_weight + partner, mask=is_turned, other=0.0).to(tl.float32)
        partner_bias = tl.load(norm_bias + partner, mask=is_turned, other=0.0).to(tl.float32)
        if PDL:
            gdc_wait()
        k += sequence * stride_kb + step * stride_ks
        own_x = tl.load(k + own * stride_kd, mask=inside, other=0.0).to(tl.float32)
        partner_x = tl.load(k + partner * stride_kd, mask=is_turned, other=0.0).to(tl.float32)
        cos_value, sin_value = load_rope(cos, stride_cp, sin, stride_sp, angle, is_turned)
        major, minor, is_stored = find_place(
            table, stride_table, num_columns, positions, token, sequence, step, TO
        )
        # LayerNorm in two passes; the sum does not mind that rope has moved the columns.
        mean = tl.sum(own_x, 0) / D
        centred = tl.where(inside, own_x - mean, 0.0)
        rstd = 1.0 / tl.sqrt_rn(tl.sum(centred * centred, 0) / D + norm_eps)
        dtype = k.dtype.element_ty
        own_key = ((own_x - mean) * rstd * own_weight + own_bias).to(dtype).to(tl.float32)
        partner_key = (partner_x - mean) * rstd * partner_weight + partner_bias
        partner_key = partner_key.to(dtype).to(tl.float32)
        key = rotate(own_key, partner_key, cos_value, sin_value, is_second, is_rotated, ROUND_TO)
        is_written = inside & is_stored
        if TO == FP8_PAGES:
            # Columns behind the head hold whatever the norm makes of nothing.
            key = tl.where(inside, key.to(dtype).to(tl.float32), 0.0)[None, :]
            scale = fp8_scale(finite_amax(key, 1), False)
            values = to_fp8(key, tl.broadcast_to(scale[:, None], key.shape))
            store_key(
                keys,
                key_scales,
                major,
                minor,
                values,
                scale[:, None],
                column[None, :],
                is_written[None, :],
                D,
            )
        else:
            target = keys + major * stride_major + minor * stride_minor + column * stride_value
            tl.store(target, key.to(keys.dtype.element_ty), mask=is_written)
    else:
        head = (tl.program_id(1) - 1) * BLOCK_H + tl.arange(0, BLOCK_H)
        has_head = head < H
        if PDL:
            gdc_wait()
        q += sequence * stride_qb + step * stride_qs
        row = q + head[:, None] * stride_qh
        is_read = has_head[:, None] & inside[None, :]
        own_q = tl.load(row + own[None, :] * stride_qd, mask=is_read, other=0.0)
        is_read = has_head[:, None] & is_turned[None, :]
        partner_q = tl.load(row + partner[None, :] * stride_qd, mask=is_read, other=0.0)
        cos_value, sin_value = load_rope(cos, stride_cp, sin, stride_sp, angle, is_turned)
        gate_at = gates + sequence * stride_gb + step * stride_gs + head * stride_gh
        weight = tl.load(gate_at, mask=has_head, other=0.0).to(tl.float32) * weight_constant
        queries = rotate(
            own_q.to(tl.float32),
            partner_q.to(tl.float32),
            cos_value[None, :],
            sin_value[None, :],
            is_second[None, :],
            is_rotated[None, :],
            tl.float32 if TO == FP8_PAGES else ROUND_TO,
        )
        if TO == FP8_PAGES:
            q_scale = fp8_scale(finite_amax(queries, 1), False)
            q_values = to_fp8(queries, tl.broadcast_to(q_scale[:, None], queries.shape))
            weight *= q_scale
        else:
            q_values = queries.to(q_out.dtype.element_ty)
        q_target = q_out + (token * H + head[:, None]) * D + column[None, :]
        tl.store(q_target, q_values, mask=has_head[:, None] & inside[None, :])
        tl.store(weights + token * H + head, weight, mask=has_head)


def launch(
    q: torch.Tensor,
    k: torch.Tensor,
    gates: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor,
    norm_eps: float,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    weight_constant: float,
    *,
    to: tl.constexpr,
    keys: torch.Tensor,
    table: torch.Tensor | None = None,
    positions: torch.Tensor | None = None,
    num_rows: int = 0,
    latents: tuple[Any, ...] | None = None,
    config: KernelConfig | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Write the keys to `keys`; return queries and head weights.

    Args:
        keys: where the keys go; `to` says what it is.
        table: block table of pages.
        positions: tokens already cached: [B] for pages, one number for rows.
        num_rows: T, for rows.
        latents: what attention caches of the step, for pages: latents [B, S, L], ropes [B, S, P],
            weight and epsilon of the norm, whether pairs are interleaved, pages.
        config: for measurements; None takes the default.
    """
    batch_size, num_steps, num_heads, head_dim = q.shape
    is_fp8 = to is FP8_PAGES
    q_dtype = torch.float8_e4m3fn if is_fp8 else q.dtype
    q_out = torch.empty(q.shape, dtype=q_dtype, device=q.device)
    weights = torch.empty(gates.shape, dtype=torch.float32, device=q.device)
    num_tokens = batch_size * num_steps
    if not num_tokens:
        return q_out, weights
    config = config or default_for(num_tokens)
    rank, rope_dim = 0, cos.shape[-1]
    has_latents = latents is not None
    latent_arguments: tuple[Any, ...] = (*(None, 0, 0, 0) * 2, None, 0.0, *(None, 0, 0, 0))
    latent_weight, is_latent_interleaved = norm_weight, False
    if latents is not None:
        latents_BSL, ropes, latent_weight, eps, is_latent_interleaved, pages = latents
        rank = latents_BSL.shape[2]
        latent_arguments = (
            *(latents_BSL, *latents_BSL.stride(), ropes, *ropes.stride()),
            *(latent_weight.contiguous(), eps, pages, *pages.stride()),
        )
    # The norms' parameters are read early; a copy of them made just ahead would come too late.
    parameters = (norm_weight, norm_bias, latent_weight)
    is_early = config.is_early and all(parameter.is_contiguous() for parameter in parameters)
    has_pdl = is_early and supports_pdl(q.device)
    num_groups = triton.cdiv(num_heads, config.block_h)
    indexer_prologue_kernel[(num_tokens, 1 + num_groups + has_latents)](
        q,
        *q.stride(),
        k,
        *k.stride(),
        gates,
        *gates.stride(),
        norm_weight.contiguous(),
        norm_bias.contiguous(),
        norm_eps,
        *rope_arguments(cos, sin, batch_size),
        weight_constant,
        keys,
        keys.view(torch.float32) if is_fp8 else None,
        *((0, 0, 0) if is_fp8 else keys.stride()),
        *((None, 0, num_rows) if table is None else table_arguments(table)),
        None if positions is None else positions.contiguous(),
        q_out,
        weights,
        *latent_arguments,
        num_steps,
        H=num_heads,
        D=head_dim,
        P=rope_dim,
        BLOCK_H=config.block_h,
        BLOCK_D=triton.next_power_of_2(head_dim),
        BLOCK_P=triton.next_power_of_2(max(1, rope_dim)),
        INTERLEAVED=interleaved,
        ROUND_TO=TRITON_DTYPES[torch.promote_types(k.dtype, cos.dtype)],
        TO=to.value,
        L=rank,
        BLOCK_L=triton.next_power_of_2(max(1, rank)),
        LATENTS_INTERLEAVED=is_latent_interleaved,
        LATENTS_IN_ORDER=latents is not None and is_in_order(*latents[:2]),
        PDL=has_pdl,
        num_warps=config.num_warps,
        enable_fp_fusion=False,
        **({"launch_pdl": True} if has_pdl else {}),
    )
    return q_out, weights


def indexer_prologue_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Launch the exact tier's kernel with keys of their own."""
    k = args[1]
    k_out = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    # As [tokens, 1, D], like rows of a cache.
    q_out, weights = launch(*args, to=FRESH, keys=k_out.view(-1, 1, k.shape[2]))
    return q_out, k_out, weights


def indexer_prologue_rows_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the exact tier's kernel with the keys stored in rows of a cache."""
    *prologue, keys, first = args
    return launch(*prologue, to=ROWS, keys=keys, positions=first, num_rows=keys.shape[1])


def indexer_prologue_paged_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the exact tier's kernel with the keys stored in pages."""
    *prologue, pages, table, lengths = args
    return launch(*prologue, to=PAGES, keys=pages, table=table, positions=lengths)


def indexer_prologue_fp8_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the FP8 tier's kernel."""
    *prologue, gate_scale, pages, table, lengths = args
    prologue.append(gate_scale * args[0].shape[3] ** -0.5)
    return launch(*prologue, to=FP8_PAGES, keys=pages, table=table, positions=lengths)


def attention_prologue_paged_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the exact tier's kernel with keys and latents stored in pages."""
    prologue, (pages, table, lengths), latents = args[:10], args[10:13], args[13:]
    where: dict[str, Any] = {"keys": pages, "table": table, "positions": lengths}
    return launch(*prologue, to=PAGES, latents=latents, **where)


def attention_prologue_fp8_triton(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the FP8 tier's kernel with latents stored in pages."""
    prologue, (pages, table, lengths), latents = list(args[:10]), args[10:13], args[13:]
    prologue[9] *= args[0].shape[3] ** -0.5
    where: dict[str, Any] = {"keys": pages, "table": table, "positions": lengths}
    return launch(*prologue, to=FP8_PAGES, latents=latents, **where)


@triton.jit(do_not_specialize=["num_rows"])
def indexer_gates_kernel(
    x,
    stride_xm,
    stride_xc,
    weight,
    stride_wh,
    stride_wc,
    output,
    num_rows,
    H: tl.constexpr,
    C: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    PDL: tl.constexpr,
):
    """One head of a few rows."""
    head = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    x += row[:, None] * stride_xm
    weight += head * stride_wh
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    total = tl.zeros((BLOCK_M, BLOCK_C), tl.float32)
    for first in tl.static_range(0, C, BLOCK_C):
        column = first + tl.arange(0, BLOCK_C)
        is_read = (row[:, None] < num_rows) & (column[None, :] < C)
        factors = tl.load(weight + column * stride_wc, mask=column < C, other=0.0)
        values = tl.load(x + column[None, :] * stride_xc, mask=is_read, other=0.0)
        total += values.to(tl.float32) * factors[None, :]
    tl.store(output + row * H + head, tl.sum(total, 1), mask=row < num_rows)


# Rows and columns of a program at a time: 64 values a thread.
_GATE_ROWS, _GATE_COLUMNS, _GATE_WARPS = 8, 2048, 8


def indexer_gates_triton(x: torch.Tensor, weight_HC: torch.Tensor) -> torch.Tensor:
    """Launch a program for each head and 8 rows."""
    num_heads, num_columns = weight_HC.shape
    output = torch.empty((*x.shape[:-1], num_heads), dtype=torch.float32, device=x.device)
    if not output.numel():
        return output
    x_MC = x.reshape(-1, num_columns)
    num_rows = x_MC.shape[0]
    has_pdl = supports_pdl(x.device)
    indexer_gates_kernel[(num_heads, triton.cdiv(num_rows, _GATE_ROWS))](
        x_MC,
        *x_MC.stride(),
        weight_HC,
        *weight_HC.stride(),
        output,
        num_rows,
        H=num_heads,
        C=num_columns,
        BLOCK_M=_GATE_ROWS,
        BLOCK_C=min(_GATE_COLUMNS, triton.next_power_of_2(num_columns)),
        PDL=has_pdl,
        num_warps=_GATE_WARPS,
        **({"launch_pdl": True} if has_pdl else {}),
    )
    return output
