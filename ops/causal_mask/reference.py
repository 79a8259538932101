"""Attention mask of a step over a cache. Shape legend: B batch, S query tokens, T cached tokens."""

from __future__ import annotations

import torch

from glm_compile.ops._bounds import expand_key_mask


def causal_mask_reference(
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the mask [B, 1, S, T]; see `causal_mask` for the contract."""
    device = lengths_B.device
    position_T = torch.arange(num_keys, device=device)
    last_BS = lengths_B[:, None] + torch.arange(num_queries, device=device)
    is_seen_BST = position_T <= last_BS[:, :, None]
    if starts_B is not None:
        is_seen_BST = is_seen_BST & (position_T >= starts_B[:, None, None])
    if key_mask is not None:
        is_seen_BST = is_seen_BST & expand_key_mask(key_mask, *is_seen_BST.shape)
    if dtype == torch.bool:
        return is_seen_BST.unsqueeze(1)
    mask_BST = torch.zeros(is_seen_BST.shape, dtype=dtype, device=device)
    return mask_BST.masked_fill_(~is_seen_BST, torch.finfo(dtype).min).unsqueeze(1)
