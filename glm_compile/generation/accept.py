"""Which tokens of a verified block are kept: pure functions on small integer tensors.

B batch, k drafts of a block, S = 1 + k rows of a verify step, E end-of-sequence ids.
Row s of a block saw the bonus token and the drafts before s, and proposes the token that follows.
None of these functions reads a value on the host.
"""

from __future__ import annotations

import torch


def accept_greedy(predicted_BS: torch.Tensor, drafts_Bk: torch.Tensor) -> torch.Tensor:
    """Number of tokens [B] that greedy decoding would have made itself: agreeing drafts, plus one.

    Draft j is compared with the prediction of row j, the one that has not seen it. The tokens are
    `predicted_BS[:, :n]`: an agreeing draft equals its prediction.
    """
    num_drafts = drafts_Bk.shape[1]
    agree_Bk = predicted_BS[:, :num_drafts] == drafts_Bk
    return agree_Bk.to(torch.int64).cumprod(dim=1).sum(dim=1) + 1


def clip_block(
    tokens_BS: torch.Tensor,
    num_tokens_B: torch.Tensor,
    remaining_B: torch.Tensor,
    finished_B: torch.Tensor,
    eos_ids_E: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Apply the end-of-sequence ids and the token budget to a block before anything is appended.

    Args:
        tokens_BS: accepted tokens; only the first `num_tokens_B` of a row count.
        num_tokens_B: accepted tokens, 1..S.
        remaining_B: tokens that may still be appended.
        finished_B: bool, rows that take nothing any more.
        eos_ids_E: any of these ends its sequence; it is kept as the last token. Negative ones stand
            for none. None: no such id.

    Returns:
        kept tokens [B] (0 for a finished row) and the new finished flags [B].
    """
    kept_B = torch.minimum(num_tokens_B, remaining_B).clamp_min(0)
    if eos_ids_E is not None and eos_ids_E.numel() > 0:
        width = tokens_BS.shape[1]
        columns_S = torch.arange(width, device=tokens_BS.device)
        # Not isin, which sorts for many ids and waits for the device then.
        is_eos_BS = (tokens_BS[..., None] == eos_ids_E).any(dim=-1)
        is_eos_BS &= columns_S < kept_B[:, None]
        first_eos_B = torch.where(is_eos_BS, columns_S, width).amin(dim=1)
        stopped_B = first_eos_B < width
        kept_B = torch.where(stopped_B, first_eos_B + 1, kept_B)
    else:
        stopped_B = torch.zeros_like(finished_B)
    kept_B = torch.where(finished_B, 0, kept_B)
    finished_B = finished_B | stopped_B | (kept_B >= remaining_B)
    return kept_B, finished_B


def last_kept(tokens_BS: torch.Tensor, kept_B: torch.Tensor) -> torch.Tensor:
    """Last kept token of each row [B]; the first of the block where a row kept none."""
    return tokens_BS.gather(1, last_row(kept_B)[:, None]).squeeze(1)


def last_row(kept_B: torch.Tensor) -> torch.Tensor:
    """Row of the block that proposed the last kept token [B], 0 where a row kept none."""
    return (kept_B - 1).clamp_min(0)


def append_block(
    text_BW: torch.Tensor, tokens_BS: torch.Tensor, kept_B: torch.Tensor, ends_B: torch.Tensor
) -> None:
    """Write the kept tokens of each row at its end, in place.

    Args:
        text_BW: tokens so far; the last column is a bin for what is not kept.
        ends_B: column of each row where its next token goes.
    """
    columns_S = torch.arange(tokens_BS.shape[1], device=text_BW.device)
    keep_BS = columns_S < kept_B[:, None]
    target_BS = torch.where(keep_BS, ends_B[:, None] + columns_S, text_BW.shape[1] - 1)
    text_BW.scatter_(1, target_BS, tokens_BS)
