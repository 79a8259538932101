"""Exact, deterministic top-k selection of scored positions.

Shape legend: B batch, S query tokens of the step, R = B * S rows, T keys of a row, K selected.
"""

from __future__ import annotations

from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._bounds import (
    INDEX_DTYPES,
    check_key_mask,
    check_lengths,
    check_rows,
    expand_key_mask,
)
from glm_compile.ops._cute import why_no_cute
from glm_compile.ops._library import register_op
from glm_compile.ops.topk.config import MAX_CUTE_K, MAX_CUTE_KEYS
from glm_compile.ops.topk.reference import topk_plan_reference, topk_select_reference

__all__ = ["masked_topk", "topk_plan", "topk_select"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def topk_plan(
    lengths_R: torch.Tensor, k: int, *, starts_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Prepare the selections of one forward: the same lengths serve every layer.

    Made on the device without a host sync. The result is opaque, an int32 tensor, and belongs to
    `topk_select` calls with the same lengths, starts and k.
    """
    _check_k(k)
    if lengths_R.dim() != 1:
        raise ValueError(f"topk: lengths must be [R], got shape {tuple(lengths_R.shape)}")
    check_rows("topk", "lengths", lengths_R, (lengths_R.shape[0],))
    check_rows("topk", "starts", starts_R, (lengths_R.shape[0],))
    return _plan_op(lengths_R, k, starts_R)


def topk_select(
    scores_RT: torch.Tensor,
    lengths_R: torch.Tensor,
    k: int,
    *,
    starts_R: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    page_size: int = 64,
    is_causal: bool = False,
    repeat_last: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Select the k highest-scored positions of each row.

    - A row's keys are the positions start <= p < length; a length beyond T counts as T, a negative
      start as 0. Scores outside do not matter, whatever they are.
    - NaN and -inf are never selected; +inf is the highest score; -0.0 equals +0.0.
    - Among equal scores the lowest position wins.
    - The result is ascending by position and -1 from min(k, number of selectable keys) on. A row
      with an empty window is all -1. With `repeat_last`, for a consumer that takes positions only,
      the last selected position stands there instead, and 0 in a row that has none.
    - Deterministic: bitwise equal over repeats, batch sizes, backends and ranks.
    - R = 0, T = 0 and k > T are fine; R, T and the windows may be symbolic or change in a CUDA
      graph's replay. Nothing waits for the host.
    - With a block table the result holds physical slots, table[r // rows_per_sequence, p //
      page_size] * page_size + p % page_size, still in the order of positions; a position without a
      page (beyond the table, or a negative entry) gives -1 in its place.

    Args:
        scores_RT: float32, bfloat16 or float16 [R, T], any strides.
        lengths_R: int32 or int64 [R]; [B] if `is_causal`.
        k: at least 1; the width of the result.
        starts_R: int32 or int64 [R]; None = 0.
        plan: what `topk_plan` made of the rows' lengths, starts and k.
        block_table: int32 or int64 [B, pages], B * rows_per_sequence = R.
        rows_per_sequence: rows that share a line of the block table, or a length.
        page_size: tokens of a page.
        is_causal: lengths count the tokens cached before a step of `rows_per_sequence` tokens, one
            number a sequence: row s of it has the length `lengths[b] + s + 1`.
        repeat_last: see above; not together with a block table.
        backend: `cute`, `triton` or `reference` to force one; None takes the first that can.

    Returns:
        int32 [R, k], contiguous.

    Raises:
        ValueError: a dtype, shape or size outside the above, or a forced backend that cannot run.
    """
    _check_k(k)
    if scores_RT.dim() != 2:
        raise ValueError(f"topk: scores must be [R, T], got shape {tuple(scores_RT.shape)}")
    _check_dtype(scores_RT)
    num_rows = scores_RT.shape[0]
    check_rows("topk", "starts", starts_R, (num_rows,))
    if plan is not None and (plan.dtype, *plan.shape) != (torch.int32, num_rows, 2):
        raise ValueError(
            f"topk: plan must be topk_plan's for {num_rows} rows, got {plan.dtype} "
            f"{tuple(plan.shape)}"
        )
    if rows_per_sequence < 1 or page_size < 1:
        raise ValueError(
            f"topk: rows_per_sequence and page_size must be at least 1, got {rows_per_sequence} "
            f"and {page_size}"
        )
    check_lengths("topk", lengths_R, num_rows, rows_per_sequence, is_causal)
    if block_table is not None:
        _check_table(block_table, num_rows, rows_per_sequence)
        if repeat_last:
            raise ValueError(
                "topk: repeat_last repeats a position, and a block table turns positions into "
                "slots, of which there may be none: leave one of them out"
            )
    return _select_op(
        scores_RT,
        lengths_R,
        k,
        starts_R,
        plan,
        block_table,
        rows_per_sequence,
        page_size,
        is_causal,
        repeat_last,
        backend or "",
    )


def masked_topk(
    scores_BST: torch.Tensor,
    lengths_BS: torch.Tensor,
    k: int,
    *,
    starts_BS: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    repeat_last: bool = False,
) -> torch.Tensor:
    """Mask, select and cast: `topk_select` of a batch, as wide as transformers' own, min(k, T).

    A key is selectable iff start <= p < length and key_mask allows it; otherwise the contract of
    `topk_select` holds: positions ascend, and rows with fewer keys end in -1, or repeat the last.

    Args:
        scores_BST: float32, bfloat16 or float16, any strides.
        lengths_BS: int32 or int64.
        k: at least 1.
        starts_BS: int32 or int64; None = 0.
        key_mask: bool, broadcastable to [B, S, T]; its last axis may be longer than T.
        repeat_last: as in `topk_select`.

    Returns:
        int32 [B, S, min(k, T)], contiguous.
    """
    _check_k(k)
    if scores_BST.dim() != 3:
        raise ValueError(f"topk: scores must be [B, S, T], got shape {tuple(scores_BST.shape)}")
    _check_dtype(scores_BST)
    check_rows("topk", "lengths", lengths_BS, scores_BST.shape[:2])
    check_rows("topk", "starts", starts_BS, scores_BST.shape[:2])
    check_key_mask("topk", key_mask, *scores_BST.shape)
    return _masked_op(scores_BST, lengths_BS, starts_BS, key_mask, k, repeat_last)


def _check_k(k: int) -> None:
    if k < 1:
        raise ValueError(f"topk: k must be at least 1, got {k}")


def _check_dtype(scores: torch.Tensor) -> None:
    if scores.dtype not in _DTYPES:
        raise ValueError(f"topk: scores must be float32, bfloat16 or float16, got {scores.dtype}")


def _check_table(block_table: torch.Tensor, num_rows: int, rows_per_sequence: int) -> None:
    if block_table.dtype not in INDEX_DTYPES:
        raise ValueError(f"topk: block_table must be int32 or int64, got {block_table.dtype}")
    if block_table.dim() != 2:
        raise ValueError(
            f"topk: block_table must be [B, pages], got shape {tuple(block_table.shape)}"
        )
    if block_table.shape[0] * rows_per_sequence != num_rows:
        raise ValueError(
            f"topk: {block_table.shape[0]} sequences of {rows_per_sequence} rows expected, got "
            f"{num_rows} rows"
        )


def _why_not_cute(
    scores_RT: torch.Tensor,
    lengths_R: torch.Tensor,
    k: int,
    starts_R: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    *_args: Any,
) -> str | None:
    if scores_RT.dtype != torch.float32:
        return f"scores must be float32, got {scores_RT.dtype}"
    if k > MAX_CUTE_K:
        return f"k is at most {MAX_CUTE_K}, got {k}"
    num_keys = scores_RT.shape[1]
    if num_keys > MAX_CUTE_KEYS:
        return f"a row's keys must fit in a cluster, {MAX_CUTE_KEYS} of them, got {num_keys}"
    if num_keys > 1 and scores_RT.stride(1) != 1:
        return f"the scores of a row must be adjacent, got stride {scores_RT.stride(1)}"
    return why_no_cute(scores_RT, lengths_R, starts_R, plan, block_table)


def _run_cute(*args: Any) -> torch.Tensor:
    from glm_compile.ops.topk.cute_kernel import topk_select_cute

    return topk_select_cute(*args)


def _why_not_triton(scores_RT: torch.Tensor, *_args: Any) -> str | None:
    if scores_RT.shape[1] >= 2**31 - 2**14:
        return f"positions do not fit 32 bits: {scores_RT.shape[1]} keys a row"
    return _dispatch.why_no_triton(scores_RT)


def _run_triton(*args: Any) -> torch.Tensor:
    from glm_compile.ops.topk.triton_kernel import topk_select_triton

    return topk_select_triton(*args)


_BACKENDS = (
    _dispatch.Backend("cute", _why_not_cute, _run_cute),
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, topk_select_reference),
)


def _topk_select(
    scores_RT: torch.Tensor,
    lengths_R: torch.Tensor,
    k: int,
    starts_R: torch.Tensor | None,
    plan: torch.Tensor | None,
    block_table: torch.Tensor | None,
    rows_per_sequence: int,
    page_size: int,
    is_causal: bool,
    repeat_last: bool,
    backend: str,
) -> torch.Tensor:
    return _dispatch.run(
        "topk",
        _BACKENDS,
        backend or None,
        scores_RT,
        lengths_R,
        k,
        starts_R,
        plan,
        block_table,
        rows_per_sequence,
        page_size,
        is_causal,
        repeat_last,
    )


def _topk_select_fake(
    scores_RT: torch.Tensor,
    lengths_R: torch.Tensor,
    k: int,
    starts_R: torch.Tensor | None,
    plan: torch.Tensor | None,
    block_table: torch.Tensor | None,
    rows_per_sequence: int,
    page_size: int,
    is_causal: bool,
    repeat_last: bool,
    backend: str,
) -> torch.Tensor:
    return scores_RT.new_empty((scores_RT.shape[0], k), dtype=torch.int32)


def _topk_plan_fake(lengths_R: torch.Tensor, k: int, starts_R: torch.Tensor | None) -> torch.Tensor:
    return lengths_R.new_empty((lengths_R.shape[0], 2), dtype=torch.int32)


def _masked_topk(
    scores_BST: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    k: int,
    repeat_last: bool = False,
) -> torch.Tensor:
    num_batch, num_queries, num_keys = scores_BST.shape
    if key_mask is not None:
        is_allowed = expand_key_mask(key_mask, num_batch, num_queries, num_keys)
        scores_BST = scores_BST.masked_fill(~is_allowed, float("-inf"))
    num_rows = num_batch * num_queries
    return _topk_select(
        scores_BST.reshape(num_rows, num_keys),
        lengths_BS.reshape(num_rows),
        min(k, num_keys),
        None if starts_BS is None else starts_BS.reshape(num_rows),
        None,
        None,
        1,
        64,
        False,
        repeat_last,
        "",
    ).view(num_batch, num_queries, min(k, num_keys))


def _masked_topk_fake(
    scores_BST: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    k: int,
    repeat_last: bool = False,
) -> torch.Tensor:
    num_batch, num_queries, num_keys = scores_BST.shape
    width = torch.sym_min(k, num_keys)
    return scores_BST.new_empty((num_batch, num_queries, width), dtype=torch.int32)


_select_op = register_op(
    "topk_select(Tensor scores_RT, Tensor lengths_R, SymInt k, Tensor? starts_R, Tensor? plan, "
    "Tensor? block_table, SymInt rows_per_sequence, int page_size, bool is_causal, "
    "bool repeat_last, str backend) -> Tensor",
    _topk_select,
    _topk_select_fake,
)
_plan_op = register_op(
    "topk_plan(Tensor lengths_R, SymInt k, Tensor? starts_R) -> Tensor",
    topk_plan_reference,
    _topk_plan_fake,
)
_masked_op = register_op(
    "masked_topk(Tensor scores_BST, Tensor lengths_BS, Tensor? starts_BS, Tensor? key_mask, "
    "SymInt k, bool repeat_last=False) -> Tensor",
    _masked_topk,
    _masked_topk_fake,
)
