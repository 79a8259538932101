"""Rejection sampling in plain torch.

B batch, k drafts of a block, S = 1 + k rows of a verify step, V vocabulary. p is the target's
distribution and q the draft's.
"""

from __future__ import annotations

import torch

from glm_compile.ops.rejection_sampling.random_numbers import (
    Purpose,
    exponential,
    position_keys,
    uniform,
)


def race(weights: torch.Tensor, noise: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The index of the largest quotient of the last axis, the lowest of several, and the quotient.

    With exponential noise an index wins with probability proportional to its weight. NaN never
    does.
    """
    quotients = weights / noise
    quotients = torch.where(quotients >= 0, quotients, -1.0)
    # max() may give any of several equal ones.
    return quotients.argmax(dim=-1), quotients.amax(dim=-1)


def reject(
    p_BSV: torch.Tensor,
    q_BkV: torch.Tensor | None,
    drafts_Bk: torch.Tensor,
    coins_Bk: torch.Tensor,
    noise_BV: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """`rejection_sample` with given random numbers: uniform coins, exponential noise."""
    num_drafts = drafts_Bk.shape[1]
    rows_B = p_BSV.new_zeros(len(p_BSV), dtype=torch.int64)
    if num_drafts:
        assert q_BkV is not None
        index_Bk1 = drafts_Bk[..., None]
        p_draft_Bk = p_BSV[:, :num_drafts].gather(-1, index_Bk1).squeeze(-1)
        q_draft_Bk = q_BkV.gather(-1, index_Bk1).squeeze(-1)
        accepted_Bk = coins_Bk * q_draft_Bk < p_draft_Bk
        rows_B = accepted_Bk.to(torch.int64).cumprod(dim=1).sum(dim=1)
    batch = torch.arange(len(p_BSV), device=p_BSV.device)
    p_BV = p_BSV[batch, rows_B]
    token_B, _ = race(p_BV, noise_BV)
    if num_drafts:
        assert q_BkV is not None
        # Behind the last draft nothing was proposed: q = 0, and the residual is p itself.
        q_BV = q_BkV[batch, rows_B.clamp_max(num_drafts - 1)]
        q_BV = torch.where((rows_B < num_drafts)[:, None], q_BV, 0.0)
        corrected_B, best_B = race((p_BV - q_BV).clamp_min(0), noise_BV)
        # p and q may agree up to rounding; then nothing is left and p is the right distribution.
        token_B = torch.where(best_B > 0, corrected_B, token_B)
    tokens_BS = torch.cat([drafts_Bk, token_B[:, None]], dim=1)
    tokens_BS.scatter_(1, rows_B[:, None], token_B[:, None])
    has_weight_B = p_BV.gather(1, token_B[:, None]).squeeze(1) > 0
    return tokens_BS, rows_B + 1, has_weight_B


def rejection_sample_reference(
    p_BSV: torch.Tensor,
    q_BkV: torch.Tensor | None,
    drafts_Bk: torch.Tensor | None,
    row_keys_B: torch.Tensor,
    positions_B: torch.Tensor,
    offset: int,
    purpose: int,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Draw the numbers, then decide."""
    if drafts_Bk is None:
        drafts_Bk = positions_B.new_zeros(len(p_BSV), 0)
    positions_B = positions_B + offset
    offsets_k = torch.arange(drafts_Bk.shape[1], device=p_BSV.device)
    coins_Bk = uniform(position_keys(row_keys_B, positions_B[:, None] + offsets_k, Purpose.COIN))
    keys_B1 = position_keys(row_keys_B, positions_B[:, None], purpose)
    noise_BV = exponential(keys_B1, p_BSV.shape[-1]).squeeze(1)
    return reject(p_BSV, q_BkV, drafts_Bk, coins_Bk, noise_BV)
