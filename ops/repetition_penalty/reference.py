"""The repetition penalty and its record of tokens in plain torch.

B batch, S rows of a block, V vocabulary, W width of the text buffer, D drafts before the last row.
"""

from __future__ import annotations

import torch


def in_bin(ids: torch.Tensor, counts: torch.Tensor | bool, vocab_size: int) -> torch.Tensor:
    """The ids that count, and the vocabulary's size for the rest."""
    is_known = (ids >= 0) & (ids < vocab_size) & counts
    return torch.where(is_known, ids, vocab_size)


def repetition_penalty_reference(
    scores_BSV: torch.Tensor,
    seen_BV: torch.Tensor,
    text_BW: torch.Tensor,
    starts_B: torch.Tensor,
    first_B: torch.Tensor,
    num_drafts: int,
    penalty: float,
) -> torch.Tensor:
    """Mark the drafts before each row, then penalize what is marked."""
    num_rows, vocab_size = scores_BSV.shape[1:]
    seen_BSV = seen_BV[:, None]
    if count := num_drafts + num_rows - 1:
        numbers_D = torch.arange(count, device=scores_BSV.device)
        before_S1 = torch.arange(num_drafts, count + 1, device=scores_BSV.device)[:, None]
        columns_BD = starts_B[:, None] + numbers_D
        drafts_B1D = text_BW.gather(1, columns_BD)[:, None]
        counts_BSD = (numbers_D < before_S1) & (columns_BD >= first_B[:, None])[:, None]
        seen_BSV = seen_BSV.repeat(1, num_rows, 1)
        seen_BSV.scatter_(-1, in_bin(drafts_B1D, counts_BSD, vocab_size), True)
    lower_BSV = torch.where(scores_BSV < 0, scores_BSV * penalty, scores_BSV / penalty)
    return torch.where(seen_BSV[..., :vocab_size], lower_BSV, scores_BSV)


def note_tokens_reference(
    seen_BV: torch.Tensor,
    tokens_BS: torch.Tensor,
    kept_B: torch.Tensor,
    starts_B: torch.Tensor,
    first_B: torch.Tensor,
) -> None:
    """Mark the first tokens of each block; the others go to the bin."""
    offsets_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
    counts_BS = offsets_S < kept_B[:, None]
    counts_BS = counts_BS & (starts_B[:, None] + offsets_S >= first_B[:, None])
    seen_BV.scatter_(1, in_bin(tokens_BS, counts_BS, seen_BV.shape[1] - 1), True)
