"""Distributions over the vocabulary, and plain draws from them.

B batch, V vocabulary. Rejection sampling of drafts is an op, `glm_compile.ops.rejection_sampling`.

The numbers of a plain draw come from torch's default generator of the device, as in transformers,
so that sampling without drafts gives, with a seed, the text that transformers gives.
"""

from __future__ import annotations

import torch


def probabilities(scores: torch.Tensor) -> torch.Tensor:
    """Softmax over the vocabulary in float32."""
    return torch.softmax(scores.float(), dim=-1)


def draw(weights: torch.Tensor) -> torch.Tensor:
    """One index of the last axis for each row, with probability proportional to its weight.

    An exponential race, which draws the same as `torch.multinomial(weights, 1)` from the same
    generator state, without that function's check of the values, which waits for the device. A
    weight of zero is never drawn unless all are.

    Args:
        weights: not negative, [..., V].
    """
    return weights.div(torch.empty_like(weights).exponential_(1)).argmax(dim=-1)


def has_weight(p_BV: torch.Tensor, tokens_B: torch.Tensor) -> torch.Tensor:
    """Whether the tokens had a probability above zero [B].

    A row without any allowed token, or with a NaN or infinite score, has none that is.
    """
    return (p_BV.gather(1, tokens_B[:, None]) > 0).squeeze(1)
