"""Attention in plain torch, with the two orders of operations that transformers has.

Shape legend: B batch, A attention heads, S query tokens, T keys, K selected keys, D head dim.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from glm_compile.ops._bounds import expand_key_mask


def attention_reference(
    q_BASD: torch.Tensor,
    k_BATD: torch.Tensor,
    v_BATD: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    eager: bool,
) -> torch.Tensor:
    """Return softmax(q k^T * scale, masked) v as [B, A, S, Dv], contiguous.

    `eager` follows transformers' eager code step by step (product, scale, add the mask, softmax in
    fp32, round, product): a bool mask is *added* there too, as 0 and 1. Otherwise
    `scaled_dot_product_attention` is called with the mask as it is.
    """
    if not eager:
        return F.scaled_dot_product_attention(
            q_BASD, k_BATD, v_BATD, attn_mask=mask, scale=scale
        ).contiguous()
    scores = torch.matmul(q_BASD, k_BATD.transpose(2, 3)) * scale
    if mask is not None:
        scores = scores + mask
    weights = F.softmax(scores, dim=-1, dtype=torch.float32).to(q_BASD.dtype)
    return torch.matmul(weights, v_BATD).contiguous()


def selection_mask(
    topk_BSK: torch.Tensor,
    lengths_BS: torch.Tensor | None,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    num_keys: int,
) -> torch.Tensor:
    """Return the bool mask [B, S, T] of keys that are selected, inside the bounds and not masked.

    Selections outside [0, T), such as the -1 of short rows, are ignored.
    """
    topk = topk_BSK.long()
    # One spare column takes the ignored selections, so that nothing depends on the data's form.
    topk = torch.where((topk < 0) | (topk >= num_keys), num_keys, topk)
    selected = torch.zeros(
        (*topk.shape[:-1], num_keys + 1), dtype=torch.bool, device=topk.device
    ).scatter_(-1, topk, True)[..., :num_keys]
    positions = torch.arange(num_keys, device=topk.device)
    valid = selected
    if lengths_BS is not None:
        valid &= positions < lengths_BS[..., None]
    if starts_BS is not None:
        valid &= positions >= starts_BS[..., None]
    if key_mask is not None:
        valid &= expand_key_mask(key_mask, *valid.shape)
    return valid


def indexed_attention_reference(
    q_BASD: torch.Tensor,
    k_BATD: torch.Tensor,
    v_BATD: torch.Tensor,
    topk_BSK: torch.Tensor,
    lengths_BS: torch.Tensor | None,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    scale: float,
    eager: bool,
) -> torch.Tensor:
    """Return attention over the selected keys [B, A, S, Dv]; zeros for rows without one."""
    mask = selection_mask(topk_BSK, lengths_BS, starts_BS, key_mask, k_BATD.shape[2])
    has_key = mask.any(-1)[:, None, :, None]
    mask = mask[:, None]
    if eager:
        # The values of transformers' additive mask: 0, or the dtype's minimum.
        minimum = torch.finfo(q_BASD.dtype).min
        mask = torch.zeros(mask.shape, dtype=q_BASD.dtype, device=mask.device).masked_fill_(
            ~mask, minimum
        )
    attended = attention_reference(q_BASD, k_BATD, v_BATD, mask, scale, eager)
    return attended.masked_fill_(~has_key, 0)
