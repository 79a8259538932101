"""Indexer scores in Triton: a program holds a block of keys and scores a sequence's rows with it.

Each row is one product [keys, D] x [D, H]; the heads are reduced in registers, so that nothing of
size H x T is stored. Keys come from one strided tensor or from pages (with fp32 scales where FP8).

Shape legend: B batch, S query tokens of the step, T cached tokens, H index heads, D index head dim.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops.indexer_scores.config import ScoresConfig, default_config

_PAGE_SIZE = tl.constexpr(64)


@triton.jit(
    do_not_specialize=[
        "S",
        "T",
        "num_pages",
        "stride_length_b",
        "stride_start_b",
        "stride_table_b",
        "stride_mask_b",
        "stride_mask_s",
    ]
)
def indexer_scores_kernel(
    q,
    stride_q_b,
    stride_q_s,
    stride_q_h,
    weights,
    stride_w_b,
    stride_w_s,
    stride_w_h,
    k,
    stride_k_b,
    stride_k_t,
    scales,
    stride_scale_page,
    table,
    stride_table_b,
    stride_table_p,
    num_pages,
    lengths,
    stride_length_b,
    stride_length_s,
    starts,
    stride_start_b,
    stride_start_s,
    mask,
    stride_mask_b,
    stride_mask_s,
    stride_mask_t,
    scores,
    S,
    T,
    softmax_scale,
    H: tl.constexpr,
    D: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_T: tl.constexpr,
    ROWS: tl.constexpr,
    IS_CAUSAL: tl.constexpr = False,
):
    """Scores of ROWS rows of one sequence against BLOCK_T keys.

    With a block table, `k` points at pages: `stride_k_b` steps over pages, `stride_k_t` over rows
    of a page. Otherwise it is [B, T, D]. The last axis of q and k is contiguous.
    """
    first_key = tl.program_id(0) * BLOCK_T
    first_row = tl.program_id(1) * ROWS
    last_row = tl.minimum(first_row + ROWS, S)
    batch = tl.program_id(2).to(tl.int64)

    # The window of keys that any of these rows may see: nothing else is read, not even the table.
    row = first_row + tl.arange(0, ROWS)
    length = tl.load(
        lengths + batch * stride_length_b + row.to(tl.int64) * stride_length_s,
        mask=row < S,
        other=0,
    )
    if IS_CAUSAL:
        # Clamped first, so that lengths beyond T do not run over.
        length = tl.where(row < S, tl.minimum(length, T) + row + 1, 0)
    stop = tl.minimum(tl.max(length, 0), T).to(tl.int32)
    if first_key >= stop:
        return
    if starts is not None:
        start = tl.load(
            starts + batch * stride_start_b + row.to(tl.int64) * stride_start_s,
            mask=row < S,
            other=2**31 - 1,
        )
        if first_key + BLOCK_T <= tl.min(start, 0):
            return

    key = first_key + tl.arange(0, BLOCK_T)
    is_visible = key < stop
    dim = tl.arange(0, BLOCK_D)
    if table is not None:
        column = key // _PAGE_SIZE
        page = tl.load(
            table + batch * stride_table_b + column.to(tl.int64) * stride_table_p,
            mask=is_visible & (column < num_pages),
            other=-1,
        ).to(tl.int64)
        is_visible = is_visible & (page >= 0)
        key_offset = page * stride_k_b + (key % _PAGE_SIZE) * stride_k_t
    else:
        key_offset = batch * stride_k_b + key.to(tl.int64) * stride_k_t
    k_TD = tl.load(
        k + key_offset[:, None] + dim[None, :],
        mask=is_visible[:, None] & (dim < D)[None, :],
        other=0.0,
    )
    if scales is not None:
        scale_T = tl.load(
            scales + page * stride_scale_page + key % _PAGE_SIZE, mask=is_visible, other=0.0
        )

    head = tl.arange(0, BLOCK_H)
    for index in range(first_row, last_row):
        s = tl.cast(index, tl.int64)
        q_row = q + batch * stride_q_b + s * stride_q_s
        q_DH = tl.load(
            q_row + head[None, :] * stride_q_h + dim[:, None],
            mask=(head < H)[None, :] & (dim < D)[:, None],
            other=0.0,
        )
        w_row = weights + batch * stride_w_b + s * stride_w_s
        w_H = tl.load(w_row + head * stride_w_h, mask=head < H, other=0.0).to(tl.float32)
        # FP8 on Hopper: each instruction's 32 products are then added in fp32, not in the tensor
        # core's shorter accumulator.
        dot_TH = tl.dot(k_TD, q_DH, input_precision="ieee", max_num_imprecise_acc=32)
        dot_TH = dot_TH * softmax_scale
        # A comparison keeps NaN, as torch.relu does; tl.maximum would drop it.
        score_T = tl.sum(tl.where(dot_TH < 0.0, 0.0, dot_TH) * w_H[None, :], 1)
        if scales is not None:
            score_T = score_T * scale_T
        score_T = tl.where(is_visible, score_T, float("-inf"))
        if mask is not None:
            is_allowed = tl.load(
                mask + batch * stride_mask_b + s * stride_mask_s + key.to(tl.int64) * stride_mask_t,
                mask=key < T,
                other=0,
            )
            score_T = tl.where(is_allowed != 0, score_T, float("-inf"))
        tl.store(scores + (batch * S + s) * T + key, score_T, mask=key < T)


def indexer_scores_triton(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    k: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    softmax_scale: float,
    *,
    max_len: int,
    scales: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    is_causal: bool = False,
    config: ScoresConfig | None = None,
) -> torch.Tensor:
    """Launch the kernel; return fp32 [B, S, max_len].

    Args:
        q_BSHD: last axis contiguous.
        weights_BSH: any strides.
        k: [B, T, D], or pages [pages, 64, D] with a block table; last axis contiguous.
        lengths_BS: any strides; [B, 1] if causal.
        starts_BS: any strides.
        key_mask: bool view [B, S, max_len], any strides, or None.
        softmax_scale: factor of the products.
        max_len: T.
        scales: fp32 [pages, 64] of FP8 pages.
        block_table: [B, P].
        is_causal: see `indexer_scores_paged`.
        config: tile shape; None takes the default.
    """
    num_batch, num_queries, num_heads, head_dim = q_BSHD.shape
    scores_BST = torch.empty(
        (num_batch, num_queries, max_len), dtype=torch.float32, device=q_BSHD.device
    )
    if not scores_BST.numel():
        return scores_BST
    config = config or default_config(k.element_size())
    grid = (
        triton.cdiv(max_len, config.block_keys),
        triton.cdiv(num_queries, config.rows_per_program),
        num_batch,
    )
    indexer_scores_kernel[grid](
        q_BSHD,
        *q_BSHD.stride()[:3],
        weights_BSH,
        *weights_BSH.stride(),
        k,
        *k.stride()[:2],
        scales,
        0 if scales is None else scales.stride(0),
        block_table,
        *_strides(block_table, 2),
        0 if block_table is None else block_table.shape[1],
        lengths_BS,
        lengths_BS.stride(0),
        0 if is_causal else lengths_BS.stride(1),
        starts_BS,
        *_strides(starts_BS, 2),
        None if key_mask is None else key_mask.view(torch.uint8),
        *_strides(key_mask, 3),
        scores_BST,
        num_queries,
        max_len,
        softmax_scale,
        H=num_heads,
        D=head_dim,
        BLOCK_H=max(16, triton.next_power_of_2(num_heads)),
        BLOCK_D=max(32, triton.next_power_of_2(head_dim)),
        BLOCK_T=config.block_keys,
        ROWS=config.rows_per_program,
        IS_CAUSAL=is_causal,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    return scores_BST


def _strides(tensor: torch.Tensor | None, num_axes: int) -> tuple[int, ...]:
    return (0,) * num_axes if tensor is None else tensor.stride()
