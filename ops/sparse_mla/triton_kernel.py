"""Sparse MLA in Triton: a program gathers some of a row's selected tokens for a block of heads.

Each block of tokens is read once and used twice, as keys and as values, with a running maximum.
Rows that are few are split over programs; a second kernel adds their parts in order.

Shape legend: R rows, H heads, L kv_lora rank, P rope dim, C = L + P, K selected slots, X pages or
sequences, Y tokens of one.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops._dispatch import num_multiprocessors
from glm_compile.ops.sparse_mla.config import TritonConfig, default_triton_config


@triton.jit(do_not_specialize=["K", "num_outer", "num_inner", "num_columns", "rows_per_sequence"])
def sparse_mla_kernel(
    q,
    stride_q_r,
    stride_q_h,
    stride_q_c,
    latents,
    stride_latent_x,
    stride_latent_y,
    stride_latent_l,
    ropes,
    stride_rope_x,
    stride_rope_y,
    stride_rope_p,
    indices,
    stride_index_r,
    stride_index_k,
    table,
    stride_table_b,
    stride_table_p,
    num_columns,
    attended,
    stats,
    scale,
    K,
    num_outer,
    num_inner,
    rows_per_sequence,
    H: tl.constexpr,
    L: tl.constexpr,
    P: tl.constexpr,
    IS_PAGED: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_L: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One split of one row and block of heads.

    `attended` is [R, H, L] in q's dtype when there is one split, else float32 [R, H, splits, L],
    and `stats` then receives the maximum and the sum of each: float32 [R, H, splits, 2].
    """
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    split = tl.program_id(2)
    sequence = row // rows_per_sequence
    lat = tl.arange(0, BLOCK_L)
    rot = tl.arange(0, BLOCK_P)
    q_row = q + row * stride_q_r + head[:, None].to(tl.int64) * stride_q_h
    is_head = (head < H)[:, None]
    q_HL = tl.load(q_row + lat[None, :] * stride_q_c, mask=is_head & (lat < L)[None, :], other=0.0)
    q_HP = tl.load(
        q_row + (L + rot)[None, :] * stride_q_c, mask=is_head & (rot < P)[None, :], other=0.0
    )
    highest_H = tl.full([BLOCK_H], float("-inf"), tl.float32)
    total_H = tl.zeros([BLOCK_H], tl.float32)
    sum_HL = tl.zeros([BLOCK_H, BLOCK_L], tl.float32)
    slots_each = tl.cdiv(tl.cdiv(K, NUM_SPLITS), BLOCK_K) * BLOCK_K
    first = split * slots_each
    for start in range(first, tl.minimum(first + slots_each, K), BLOCK_K):
        slot = start + tl.arange(0, BLOCK_K)
        index_row = indices + row * stride_index_r
        index = tl.load(index_row + slot.to(tl.int64) * stride_index_k, mask=slot < K, other=-1).to(
            tl.int64
        )
        before = tl.load(
            index_row + (slot - 1).to(tl.int64) * stride_index_k,
            mask=(slot > 0) & (slot < K),
            other=-1,
        ).to(tl.int64)
        counts = (index >= 0) & (index != before)
        if table is not None:
            column = index // num_inner
            counts = counts & (column < num_columns)
            outer = tl.load(
                table + sequence * stride_table_b + column * stride_table_p, mask=counts, other=-1
            ).to(tl.int64)
            counts = counts & (outer >= 0) & (outer < num_outer)
            inner = index % num_inner
        elif IS_PAGED:
            outer = index // num_inner
            counts = counts & (outer < num_outer)
            inner = index % num_inner
        else:
            counts = counts & (index < num_inner)
            outer = tl.zeros_like(index) + sequence
            inner = index
        latent_KL = tl.load(
            latents
            + (outer * stride_latent_x + inner * stride_latent_y)[:, None]
            + lat[None, :] * stride_latent_l,
            mask=counts[:, None] & (lat < L)[None, :],
            other=0.0,
        )
        rope_KP = tl.load(
            ropes
            + (outer * stride_rope_x + inner * stride_rope_y)[:, None]
            + rot[None, :] * stride_rope_p,
            mask=counts[:, None] & (rot < P)[None, :],
            other=0.0,
        )
        score_HK = tl.dot(q_HL, tl.trans(latent_KL), input_precision="ieee")
        score_HK = tl.dot(q_HP, tl.trans(rope_KP), score_HK, input_precision="ieee")
        # In powers of two.
        score_HK = tl.where(counts[None, :], score_HK * scale, float("-inf"))
        new_highest_H = tl.maximum(highest_H, tl.max(score_HK, 1))
        shift_H = tl.where(new_highest_H == float("-inf"), 0.0, new_highest_H)
        factor_H = tl.exp2(highest_H - shift_H)
        probability_HK = tl.exp2(score_HK - shift_H[:, None])
        total_H = total_H * factor_H + tl.sum(probability_HK, 1)
        sum_HL = sum_HL * factor_H[:, None]
        sum_HL = tl.dot(
            probability_HK.to(latent_KL.dtype), latent_KL, sum_HL, input_precision="ieee"
        )
        highest_H = new_highest_H

    place = (row * H + head) * NUM_SPLITS + split
    if NUM_SPLITS == 1:
        sum_HL = sum_HL / tl.where(total_H == 0.0, 1.0, total_H)[:, None]
    else:
        tl.store(stats + place * 2, highest_H, mask=head < H)
        tl.store(stats + place * 2 + 1, total_H, mask=head < H)
    tl.store(
        attended + place[:, None] * L + lat[None, :],
        sum_HL.to(attended.dtype.element_ty),
        mask=is_head & (lat < L)[None, :],
    )


@triton.jit
def combine_kernel(
    parts,
    stats,
    attended,
    L: tl.constexpr,
    NUM_SPLITS: tl.constexpr,
    BLOCK_L: tl.constexpr,
):
    """Add up the splits of one row and head, in order."""
    place = tl.program_id(0).to(tl.int64)
    split = tl.arange(0, NUM_SPLITS)
    lat = tl.arange(0, BLOCK_L)
    stats_of = stats + (place * NUM_SPLITS + split) * 2
    highest_S = tl.load(stats_of)
    highest = tl.max(highest_S, 0)
    factor_S = tl.exp2(highest_S - tl.where(highest == float("-inf"), 0.0, highest))
    total = tl.sum(tl.load(stats_of + 1) * factor_S, 0)
    part_SL = tl.load(
        parts + (place * NUM_SPLITS + split)[:, None] * L + lat[None, :],
        mask=(lat < L)[None, :],
        other=0.0,
    )
    sum_L = tl.sum(part_SL * factor_S[:, None], 0) / tl.where(total == 0.0, 1.0, total)
    tl.store(attended + place * L + lat, sum_L.to(attended.dtype.element_ty), mask=lat < L)


def sparse_mla_triton(
    q_RHC: torch.Tensor,
    latents_XYL: torch.Tensor,
    ropes_XYP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    is_paged: bool = False,
    *,
    config: TritonConfig | None = None,
) -> torch.Tensor:
    """Launch the kernels; return [R, H, L]. See `sparse_mla_reference` for the arguments."""
    num_rows, num_heads, _ = q_RHC.shape
    rank, rope_dim = latents_XYL.shape[2], ropes_XYP.shape[2]
    num_slots = indices_RK.shape[1]
    attended_RHL = q_RHC.new_empty((num_rows, num_heads, rank))
    if not attended_RHL.numel():
        return attended_RHL
    if config is None:
        config = default_triton_config(
            num_rows,
            num_heads,
            num_slots,
            rank,
            q_RHC.element_size(),
            num_multiprocessors(q_RHC.device),
        )
    splits = config.num_splits
    parts, stats = attended_RHL, None
    if splits > 1:
        parts = q_RHC.new_empty((num_rows, num_heads, splits, rank), dtype=torch.float32)
        stats = q_RHC.new_empty((num_rows, num_heads, splits, 2), dtype=torch.float32)
    block_rank = max(16, triton.next_power_of_2(rank))
    grid = (num_rows, triton.cdiv(num_heads, config.block_heads), splits)
    sparse_mla_kernel[grid](
        q_RHC,
        *q_RHC.stride(),
        latents_XYL,
        *latents_XYL.stride(),
        ropes_XYP,
        *ropes_XYP.stride(),
        indices_RK,
        *indices_RK.stride(),
        block_table,
        *((0, 0) if block_table is None else block_table.stride()),
        0 if block_table is None else block_table.shape[1],
        parts,
        stats,
        sm_scale * 1.4426950408889634,
        num_slots,
        *latents_XYL.shape[:2],
        rows_per_sequence,
        H=num_heads,
        L=rank,
        P=rope_dim,
        IS_PAGED=is_paged,
        NUM_SPLITS=splits,
        BLOCK_H=config.block_heads,
        BLOCK_L=block_rank,
        BLOCK_P=max(16, triton.next_power_of_2(max(1, rope_dim))),
        BLOCK_K=config.block_tokens,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    if stats is not None:
        combine_kernel[(num_rows * num_heads,)](
            parts,
            stats,
            attended_RHL,
            L=rank,
            NUM_SPLITS=splits,
            BLOCK_L=block_rank,
            num_warps=4,
        )
    return attended_RHL
