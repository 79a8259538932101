"""Indexer scores in plain torch, chunked over T so that long contexts fit.

Shape legend: B batch, S query tokens of the step, R = B * S rows, T cached tokens, H index heads,
D index head dim, P pages of a sequence.
"""

from __future__ import annotations

import torch

from glm_compile.ops._bounds import causal_lengths, expand_key_mask
from glm_compile.ops.paged_cache.reference import PAGE_SIZE, split_key_pages

# Per-head scores held at once: 256 MB.
_CHUNK_ELEMENTS = 1 << 26


def indexer_scores_reference(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    k_BTD: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    """Return fp32 [B, S, T] with -inf outside the windows; see `indexer_scores`."""
    num_batch, num_queries, num_heads, _ = q_BSHD.shape
    num_keys = k_BTD.shape[1]
    scores_BST = _empty_scores(q_BSHD, num_batch, num_queries, num_keys)
    for keys in _chunks(num_keys, num_batch * num_queries * num_heads):
        scores_BST[:, :, keys] = _weighted_scores(
            q_BSHD, weights_BSH, k_BTD[:, keys], softmax_scale
        )
    return _mask_outside(scores_BST, lengths_BS, starts_BS, key_mask)


def indexer_scores_paged_reference(
    q_RHD: torch.Tensor,
    weights_RH: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_R: torch.Tensor,
    max_len: int,
    starts_R: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rows_per_sequence: int,
    is_causal: bool = False,
    _early_windows: bool = False,
) -> torch.Tensor:
    """Return fp32 [R, max_len] with -inf outside the windows; see `indexer_scores_paged`."""
    num_rows, num_heads, head_dim = q_RHD.shape
    by_sequence = (num_rows // rows_per_sequence, rows_per_sequence)
    q_BSHD = q_RHD.reshape(*by_sequence, num_heads, head_dim)
    weights_BSH = weights_RH.reshape(*by_sequence, num_heads)
    scores_BST = _empty_scores(q_RHD, *by_sequence, max_len)
    num_cached = min(max_len, block_table.shape[1] * PAGE_SIZE)
    for keys in _chunks(num_cached, num_rows * num_heads):
        table_BP = block_table[:, keys.start // PAGE_SIZE : -(-keys.stop // PAGE_SIZE)]
        num_chunk = keys.stop - keys.start
        page_BP = table_BP.long().clamp(min=0)
        if key_pages.dtype == torch.uint8:
            values, scales = split_key_pages(key_pages, head_dim)
            k_BTD = values.view(torch.uint8)[page_BP].view(values.dtype).flatten(1, 2)
            scale_BT = scales[page_BP].flatten(1, 2)[:, :num_chunk]
        else:
            k_BTD, scale_BT = key_pages[page_BP].flatten(1, 2), None
        chunk_BST = _weighted_scores(q_BSHD, weights_BSH, k_BTD[:, :num_chunk], 1.0)
        if scale_BT is not None:
            chunk_BST = chunk_BST * scale_BT[:, None]
        has_page_BT = (table_BP >= 0).repeat_interleave(PAGE_SIZE, dim=1)[:, None, :num_chunk]
        scores_BST[:, :, keys] = torch.where(has_page_BT, chunk_BST, float("-inf"))
    if is_causal:
        lengths_R = causal_lengths(lengths_R, rows_per_sequence)
    starts_BS = None if starts_R is None else starts_R.reshape(by_sequence)
    scores_BST = _mask_outside(scores_BST, lengths_R.reshape(by_sequence), starts_BS, key_mask)
    return scores_BST.view(num_rows, max_len)


def _weighted_scores(
    q_BSHD: torch.Tensor, weights_BSH: torch.Tensor, k_BTD: torch.Tensor, softmax_scale: float
) -> torch.Tensor:
    """sum over heads of weights * relu(q . k * softmax_scale), in transformers' order."""
    head_scores_BSHT = torch.matmul(q_BSHD.float(), k_BTD.transpose(-1, -2).float().unsqueeze(1))
    head_scores_BSHT = torch.relu(head_scores_BSHT * softmax_scale)
    return torch.matmul(weights_BSH.float().unsqueeze(-2), head_scores_BSHT).squeeze(-2)


def _empty_scores(
    like: torch.Tensor, num_batch: int, num_queries: int, num_keys: int
) -> torch.Tensor:
    return torch.full(
        (num_batch, num_queries, num_keys), float("-inf"), dtype=torch.float32, device=like.device
    )


def _chunks(num_keys: int, elements_per_key: int) -> list[slice]:
    """Slices of [0, num_keys) on page borders."""
    pages = max(1, _CHUNK_ELEMENTS // max(1, elements_per_key * PAGE_SIZE))
    step = pages * PAGE_SIZE
    return [slice(first, min(first + step, num_keys)) for first in range(0, num_keys, step)]


def _mask_outside(
    scores_BST: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
) -> torch.Tensor:
    position_T = torch.arange(scores_BST.shape[-1], device=scores_BST.device)
    is_outside_BST = position_T >= lengths_BS[..., None]
    if starts_BS is not None:
        is_outside_BST |= position_T < starts_BS[..., None]
    if key_mask is not None:
        is_outside_BST |= ~expand_key_mask(key_mask, *scores_BST.shape)
    return scores_BST.masked_fill_(is_outside_BST, float("-inf"))
