"""Attention over selected latents in plain torch.

Shape legend: B sequences, R rows, H heads, L kv_lora rank, P rope dim, C = L + P, K selected slots,
T tokens of a contiguous cache, X pages (or sequences), Y tokens of a page (or of a sequence).
"""

from __future__ import annotations

import torch

# Gathered values at once: bounds the temporaries of many rows to a few hundred MB.
_CHUNK_VALUES = 1 << 24


def sparse_mla_reference(
    q_RHC: torch.Tensor,
    latents_XYL: torch.Tensor,
    ropes_XYP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    is_paged: bool = False,
) -> torch.Tensor:
    """Return [R, H, L] in q's dtype; see `sparse_mla` for the contract.

    Products and softmax are fp32 (float64 for float64), rounded once at the end.

    Args:
        q_RHC: any strides.
        latents_XYL: pages, or with `is_paged` false the tokens of sequences; any strides.
        ropes_XYP: the keys' rotated parts in the same places.
        indices_RK: positions; physical slots when paged without a table.
        sm_scale: factor of the products.
        block_table: [B, pages of a sequence].
        rows_per_sequence: row r belongs to sequence r // rows_per_sequence.
        is_paged: whether the first axis counts pages.
    """
    num_rows, num_heads, _ = q_RHC.shape
    rank = latents_XYL.shape[2]
    num_slots = indices_RK.shape[1]
    attended_RHL = q_RHC.new_empty((num_rows, num_heads, rank))
    width = max(1, num_slots * (rank + ropes_XYP.shape[2]), num_slots * num_heads)
    rows_at_once = max(1, _CHUNK_VALUES // width)
    for first in range(0, num_rows, rows_at_once):
        stop = min(first + rows_at_once, num_rows)
        sequence_R = torch.arange(first, stop, device=q_RHC.device) // rows_per_sequence
        token_RK, is_valid_RK = locate_tokens(
            indices_RK[first:stop], latents_XYL.shape[:2], sequence_R, block_table, is_paged
        )
        attended_RHL[first:stop] = _attend(
            q_RHC[first:stop], latents_XYL, ropes_XYP, token_RK, is_valid_RK, sm_scale
        )
    return attended_RHL


def locate_tokens(
    indices_RK: torch.Tensor,
    sizes: tuple[int, ...],
    sequence_R: torch.Tensor,
    block_table: torch.Tensor | None,
    is_paged: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(x * Y + y of each slot's token, int64, 0 where it counts for nothing; whether it counts)."""
    num_outer, num_inner = sizes
    index_RK = indices_RK.long()
    is_valid_RK = index_RK >= 0
    is_valid_RK[:, 1:] &= index_RK[:, 1:] != index_RK[:, :-1]
    num_tokens = num_outer * num_inner
    if block_table is not None:
        num_columns = block_table.shape[1]
        column_RK = index_RK // max(1, num_inner)
        is_valid_RK &= column_RK < num_columns
        page_RK = torch.full_like(index_RK, -1)
        if num_columns:
            page_RK = block_table[sequence_R].long().gather(1, column_RK.clamp(0, num_columns - 1))
        is_valid_RK &= (page_RK >= 0) & (page_RK < num_outer)
        token_RK = page_RK * num_inner + index_RK % max(1, num_inner)
    elif is_paged:
        is_valid_RK &= index_RK < num_tokens
        token_RK = index_RK
    else:
        is_valid_RK &= index_RK < num_inner
        token_RK = sequence_R[:, None] * num_inner + index_RK
    return torch.where(is_valid_RK, token_RK, 0), is_valid_RK


def _attend(
    q_RHC: torch.Tensor,
    latents_XYL: torch.Tensor,
    ropes_XYP: torch.Tensor,
    token_RK: torch.Tensor,
    is_valid_RK: torch.Tensor,
    sm_scale: float,
) -> torch.Tensor:
    num_inner, rank = latents_XYL.shape[1:]
    if not latents_XYL.shape[0] or not num_inner or not token_RK.shape[1]:
        return torch.zeros_like(q_RHC[..., :rank])
    place = (token_RK // num_inner, token_RK % num_inner)
    dtype = torch.promote_types(q_RHC.dtype, torch.float32)
    # What does not count may be anything, NaN too.
    is_ignored_RK1 = ~is_valid_RK[..., None]
    latent_RKL = latents_XYL[place].to(dtype).masked_fill_(is_ignored_RK1, 0.0)
    rope_RKP = ropes_XYP[place].to(dtype).masked_fill_(is_ignored_RK1, 0.0)
    q_RHC = q_RHC.to(dtype)
    score_RHK = q_RHC[..., :rank] @ latent_RKL.mT
    score_RHK += q_RHC[..., rank:] @ rope_RKP.mT
    score_RHK = (score_RHK * sm_scale).masked_fill_(~is_valid_RK[:, None], float("-inf"))
    attended_RHL = score_RHK.softmax(-1) @ latent_RKL
    has_any_R11 = is_valid_RK.any(-1)[:, None, None]
    return attended_RHL.masked_fill_(~has_any_R11, 0.0)
