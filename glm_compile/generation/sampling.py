"""Drawing tokens, and rejection sampling of drafts, such that the result follows the target's
distribution.

B batch, k drafts of a block, S = 1 + k rows of a verify step, V vocabulary. p is the target's
distribution and q the draft's; both come from float32 scores that went through the same processors.

Random numbers are arguments. The functions' own come from torch's default generator of the device,
as in transformers, so that plain sampling with a seed gives the text that transformers gives.
"""

from __future__ import annotations

import torch


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the vocabulary in float32."""
    return torch.softmax(scores.float(), dim=-1)


def draw(weights: torch.Tensor, noise: torch.Tensor | None = None) -> torch.Tensor:
    """One index of the last axis for each row, with probability proportional to its weight.

    An exponential race. With its own noise it draws the same as `torch.multinomial(weights, 1)`
    from the same generator state, without that function's check of the values, which waits for the
    device. A weight of zero is never drawn unless all are.

    Args:
        weights: not negative, [..., V].
        noise: exponentially distributed, of the weights' shape; drawn here by default.
    """
    if noise is None:
        noise = torch.empty_like(weights).exponential_(1)
    return weights.div(noise).argmax(dim=-1)


def has_weight(
    p_BSV: torch.Tensor, tokens_BS: torch.Tensor, num_tokens_B: torch.Tensor
) -> torch.Tensor:
    """Whether the last of the first `num_tokens_B` tokens had a probability above zero [B].

    A row without any allowed token, or with a NaN or infinite score, has none that is.
    """
    last_B1 = num_tokens_B[:, None] - 1
    index_B1V = last_B1[..., None].expand(-1, 1, p_BSV.shape[-1])
    p_BV = p_BSV.gather(1, index_B1V).squeeze(1)
    return (p_BV.gather(1, tokens_BS.gather(1, last_B1)) > 0).squeeze(1)


def reject(
    p_BSV: torch.Tensor,
    q_BkV: torch.Tensor,
    drafts_Bk: torch.Tensor,
    coins_Bk: torch.Tensor | None = None,
    noise_BV: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Accept each draft with probability min(1, p/q); then one token from the target.

    The first rejected position is drawn from the residual max(p - q, 0); after k accepted drafts
    one more token is drawn from the target's next row. Every emitted position is distributed as the
    target.

    Args:
        p_BSV: target probabilities; row s follows s drafts.
        q_BkV: draft probabilities that the drafts were drawn from.
        drafts_Bk: the draws.
        coins_Bk: uniform numbers in [0, 1); drawn here by default.
        noise_BV: for `draw` of the one token; drawn there by default.

    Returns:
        tokens [B, S] (accepted drafts, then the drawn token; the rest repeats the drafts) and their
        number [B].
    """
    batch_size, num_drafts = drafts_Bk.shape
    if coins_Bk is None:
        coins_Bk = torch.rand(batch_size, num_drafts, device=p_BSV.device, dtype=p_BSV.dtype)
    index_Bk1 = drafts_Bk.unsqueeze(-1)
    p_draft_Bk = p_BSV[:, :num_drafts].gather(-1, index_Bk1).squeeze(-1)
    q_draft_Bk = q_BkV.gather(-1, index_Bk1).squeeze(-1)
    accepted_Bk = coins_Bk * q_draft_Bk < p_draft_Bk
    num_accepted_B = accepted_Bk.to(torch.int64).cumprod(dim=1).sum(dim=1)

    row_B11 = num_accepted_B[:, None, None].expand(-1, 1, p_BSV.shape[-1])
    p_BV = p_BSV.gather(1, row_B11).squeeze(1)
    # Behind the last draft nothing was proposed: q = 0, and the residual is p itself.
    nothing_B1V = torch.zeros_like(p_BSV[:, :1])
    q_BSV = torch.cat([q_BkV, nothing_B1V], dim=1)
    residual_BV = (p_BV - q_BSV.gather(1, row_B11).squeeze(1)).clamp_min(0)
    # p and q may agree up to rounding; then nothing is left over and p is the right distribution.
    residual_BV = torch.where(residual_BV.sum(dim=-1, keepdim=True) > 0, residual_BV, p_BV)
    extra_B = draw(residual_BV, noise_BV)

    padded_BS = torch.cat([drafts_Bk, extra_B[:, None]], dim=1)
    tokens_BS = padded_BS.scatter(1, num_accepted_B[:, None], extra_B[:, None])
    return tokens_BS, num_accepted_B + 1
