"""Which tokens of a verified block are kept, in plain torch on small integer tensors.

Shape legend: B batch, k drafts of a block, S = 1 + k rows of it, W width of the text buffer, E ids
that end a sequence, R = 3 + S columns of a result, N results that are kept. Row s of a block saw
the bonus token and the drafts before s, and proposes the token that follows. Nothing here reads a
value on the host.
"""

from __future__ import annotations

import torch

# Results that are not tokens come first in a row of them.
KEPT, FINISHED, IS_DRAWN, FIRST_TOKEN = range(4)


def accept_block_reference(
    predicted_BS: torch.Tensor,
    drafts_Bk: torch.Tensor,
    num_tokens_B: torch.Tensor | None,
    has_weight_B: torch.Tensor | None,
    eos_ids_E: torch.Tensor,
    budget: torch.Tensor,
    prompt_width: torch.Tensor,
    text_BW: torch.Tensor,
    counts_B: torch.Tensor,
    finished_B: torch.Tensor,
    kept_B: torch.Tensor,
    tokens_BS: torch.Tensor,
    bonus_B: torch.Tensor,
    row_B: torch.Tensor,
    results_NBR: torch.Tensor,
    turns_B: torch.Tensor,
    lengths_B: torch.Tensor | None,
) -> None:
    """See `accept_block` for the contract."""
    width = predicted_BS.shape[1]
    if num_tokens_B is None:
        num_tokens_B = accept_greedy(predicted_BS, drafts_Bk)
    new_kept_B, new_finished_B = clip_block(
        predicted_BS, num_tokens_B, budget - counts_B, finished_B, eos_ids_E
    )
    append_block(text_BW, predicted_BS, new_kept_B, prompt_width + counts_B)
    # Only the last token of a block can lack a weight: a draft without is never accepted.
    is_drawn_B = torch.ones_like(new_finished_B)
    if has_weight_B is not None:
        is_drawn_B = has_weight_B | (new_kept_B < num_tokens_B)
    tokens_BS[:, :width].copy_(predicted_BS)
    kept_B.copy_(new_kept_B)
    counts_B.add_(new_kept_B)
    finished_B.copy_(new_finished_B)
    row_B.copy_(last_row(new_kept_B))
    bonus_B.copy_(last_kept(predicted_BS, new_kept_B))
    facts_B3 = torch.stack([new_kept_B, new_finished_B.long(), is_drawn_B.long()], dim=1)
    slots_B = turns_B % results_NBR.shape[0]
    rows_B = torch.arange(len(slots_B), device=slots_B.device)
    columns_BX = torch.cat([facts_B3, predicted_BS], dim=1)
    results_NBR[..., : FIRST_TOKEN + width].index_put_((slots_B, rows_B), columns_BX)
    turns_B.add_(1)
    if lengths_B is not None:
        lengths_B.add_(new_kept_B)


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
