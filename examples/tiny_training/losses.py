"""The training losses: next token, drafts, and the indexers' alignment."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .model import Selection, TinyGlm

DRAFT_STEP_WEIGHTS = (1.0, 0.8, 0.7, 0.6, 0.5)
DRAFT_WEIGHT = 0.3
DRAFT_KL_SHARE = 0.75
TRUNK_SHARE_OF_DRAFT_GRADIENT = 0.3


def scale_gradient(x: Tensor, factor: float) -> Tensor:
    """Return `x` unchanged, with its gradient multiplied by `factor`."""
    return x * factor + x.detach() * (1.0 - factor)


def draft_loss(tokens_BS: Tensor, target_BSV: Tensor, drafts: list[Tensor]) -> Tensor:
    """Weighted mix of cross-entropy and KL to the target's own distribution.

    Args:
        tokens_BS: int64 [B, S + 6].
        target_BSV: the target's logits [B, S, V]; row t predicts token t + 1.
        drafts: five tensors [B, S, V]; row t of step j predicts token t + 2 + j.
    """
    total = target_BSV.new_zeros(())
    num_rows = target_BSV.shape[1]
    target_log_probs = target_BSV.detach().log_softmax(-1)
    for step, (weight, logits) in enumerate(zip(DRAFT_STEP_WEIGHTS, drafts)):
        log_probs = logits.float().log_softmax(-1)
        labels = tokens_BS[:, 2 + step : 2 + step + num_rows]
        cross_entropy = F.nll_loss(log_probs.flatten(0, 1), labels.flatten())
        # The target's row for the same token lies 1 + step later.
        kl = F.kl_div(
            log_probs[:, : num_rows - 1 - step].flatten(0, 1),
            target_log_probs[:, 1 + step :].flatten(0, 1),
            reduction="batchmean",
            log_target=True,
        )
        total = total + weight * ((1 - DRAFT_KL_SHARE) * cross_entropy + DRAFT_KL_SHARE * kl)
    return total


def training_loss(
    model: TinyGlm, tokens_BS: Tensor, selection: Selection, *, with_drafts: bool
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return the loss of one batch, int64 [B, S + 6], and its parts for the log."""
    inputs, labels = tokens_BS[:, :-6], tokens_BS[:, 1:-5]
    hidden = model(inputs, selection)
    logits = model.lm_head(hidden).float()
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    parts = {"lm": loss.detach()}
    if with_drafts:
        shared = scale_gradient(hidden, TRUNK_SHARE_OF_DRAFT_GRADIENT)
        drafts = model.draft(tokens_BS[:, :-1], shared, selection)
        drafts_loss = draft_loss(tokens_BS, logits, drafts)
        loss = loss + DRAFT_WEIGHT * drafts_loss
        parts["drafts"] = drafts_loss.detach()
    if selection.alignment_losses:
        alignment = torch.stack(selection.alignment_losses)
        loss = loss + alignment.sum()
        parts["alignment"] = alignment.detach().mean()
        parts["captured"] = torch.stack(selection.captured_mass)
    return loss, parts
