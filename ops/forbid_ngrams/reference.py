"""Forbidden n-grams in plain torch.

Shape legend: B batch, S rows of a block, V vocabulary, W width of the text buffer, N n-grams of a
sequence, G tokens of an n-gram.
"""

from __future__ import annotations

import torch

from glm_compile.ops.repetition_penalty.reference import in_bin


def forbid_ngrams_reference(
    scores_BSV: torch.Tensor,
    ngrams_BNG: torch.Tensor,
    text_BW: torch.Tensor,
    starts_B: torch.Tensor,
    num_drafts: int,
    is_text: bool,
) -> torch.Tensor:
    """See `forbid_ngrams` for the contract."""
    batch_size, num_rows, vocab_size = scores_BSV.shape
    num_ngrams, size = ngrams_BNG.shape[1:]
    rows_S = torch.arange(num_rows, device=text_BW.device)
    ends_BS = starts_B[:, None] + num_drafts + rows_S
    holds_BSN = (ends_BS >= size - 1)[..., None].expand(-1, -1, num_ngrams)
    if is_text:
        last_N = torch.arange(size - 1, size - 1 + num_ngrams, device=text_BW.device)
        holds_BSN = holds_BSN & (last_N < ends_BS[..., None])
    for i in range(size - 1):
        column_BS = (ends_BS - (size - 1) + i).clamp_min(0)
        token_BS1 = text_BW.gather(1, column_BS)[..., None]
        holds_BSN = holds_BSN & (ngrams_BNG[:, None, :, i] == token_BS1)
    last_BSN = ngrams_BNG[:, None, :, -1].expand(-1, num_rows, -1)
    banned_BSV = torch.zeros(
        batch_size, num_rows, vocab_size + 1, dtype=torch.bool, device=scores_BSV.device
    )
    banned_BSV.scatter_(-1, in_bin(last_BSN, holds_BSN, vocab_size), True)
    return scores_BSV.masked_fill(banned_BSV[..., :vocab_size], -torch.inf)
