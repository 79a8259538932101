"""Exact top-k selection in plain torch. Shape legend: R rows, T keys of a row, K selected."""

from __future__ import annotations

import torch

from glm_compile.ops._bounds import causal_lengths

# Key of what is never selected; below the key of every float.
_NEVER = -(2**31)
# Keys ranked at once: bounds the temporaries of long contexts to about 100 MB.
_CHUNK_KEYS = 1 << 21


def order_key(scores: torch.Tensor) -> torch.Tensor:
    """int32 keys that order as the scores do: -0.0 equals +0.0; NaN and -inf get the lowest key."""
    bits = scores.float().contiguous().view(torch.int32)
    bits = bits.masked_fill(scores == 0, 0)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return key.masked_fill(~(scores > float("-inf")), _NEVER)


def topk_select_reference(
    scores_RT: torch.Tensor,
    lengths_R: torch.Tensor,
    k: int,
    starts_R: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    page_size: int = 64,
    is_causal: bool = False,
    repeat_last: bool = False,
) -> torch.Tensor:
    """Return int32 [R, k]; see `topk_select` for the contract. The plan changes nothing here."""
    num_rows, num_keys = scores_RT.shape
    nothing = 0 if repeat_last else -1
    selected_RK = torch.full((num_rows, k), nothing, dtype=torch.int32, device=scores_RT.device)
    width = min(k, num_keys)
    if not num_rows or not width:
        return selected_RK
    if is_causal:
        lengths_R = causal_lengths(lengths_R, rows_per_sequence)
    rows_at_once = max(1, _CHUNK_KEYS // num_keys)
    for first in range(0, num_rows, rows_at_once):
        rows = slice(first, first + rows_at_once)
        starts = None if starts_R is None else starts_R[rows]
        selected_RK[rows, :width] = _select(scores_RT[rows], lengths_R[rows], starts, width)
    if repeat_last:
        # Positions ascend, so the last one is the highest.
        best_RK = selected_RK[:, :width]
        last_R1 = best_RK.amax(-1, keepdim=True).clamp(min=0)
        selected_RK[:, :width] = torch.where(best_RK < 0, last_R1, best_RK)
        selected_RK[:, width:] = last_R1
    if block_table is None:
        return selected_RK
    return _to_slots(selected_RK, block_table, rows_per_sequence, page_size)


def _select(
    scores_RT: torch.Tensor, lengths_R: torch.Tensor, starts_R: torch.Tensor | None, width: int
) -> torch.Tensor:
    num_keys = scores_RT.shape[1]
    position_T = torch.arange(num_keys, device=scores_RT.device)
    is_outside_RT = position_T >= lengths_R[:, None]
    if starts_R is not None:
        is_outside_RT |= position_T < starts_R[:, None]
    key_RT = order_key(scores_RT).masked_fill(is_outside_RT, _NEVER)
    # Key first, then the lower position: all different, so that topk has no ties to break.
    rank_RT = (key_RT.long() << 32) | (num_keys - 1 - position_T)
    best_RK = rank_RT.topk(width, dim=-1, sorted=False).values
    chosen_RK = num_keys - 1 - (best_RK & 0x7FFFFFFF)
    chosen_RK = torch.where((best_RK >> 32) == _NEVER, num_keys, chosen_RK)
    chosen_RK = chosen_RK.sort(dim=-1).values
    return torch.where(chosen_RK == num_keys, -1, chosen_RK).int()


def _to_slots(
    position_RK: torch.Tensor, block_table: torch.Tensor, rows_per_sequence: int, page_size: int
) -> torch.Tensor:
    """Physical slots of positions; -1 stays, and stands where the table has no page."""
    num_rows, num_pages = position_RK.shape[0], block_table.shape[1]
    if not num_pages:
        return torch.full_like(position_RK, -1)
    sequence_R = torch.arange(num_rows, device=position_RK.device) // rows_per_sequence
    column_RK = position_RK.long() // page_size
    page_RK = block_table[sequence_R].long().gather(1, column_RK.clamp(0, num_pages - 1))
    has_page_RK = (position_RK >= 0) & (column_RK < num_pages) & (page_RK >= 0)
    slot_RK = page_RK * page_size + position_RK % page_size
    return torch.where(has_page_RK, slot_RK, -1).int()


def topk_plan_reference(
    lengths_R: torch.Tensor, k: int, starts_R: torch.Tensor | None = None
) -> torch.Tensor:
    """Return int32 [R, 2]: the window [first, stop) of each row, 0 <= first <= stop."""
    limit = torch.iinfo(torch.int32).max
    stop_R = lengths_R.clamp(0, limit)
    first_R = torch.zeros_like(stop_R) if starts_R is None else starts_R.clamp(0, limit)
    return torch.stack([torch.minimum(first_R, stop_R), stop_R], dim=1).int()
