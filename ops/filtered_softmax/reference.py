"""Temperature, top-k and top-p in plain torch, as transformers' warpers take them.

R rows, V vocabulary.
"""

from __future__ import annotations

import torch


def filtered_softmax_reference(
    scores_RV: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    """One filter after the other: sort, add up, compare."""
    scores_RV = scores_RV.float()
    if temperature != 1.0:
        scores_RV = scores_RV / temperature
    if top_k > 0:
        kth_R1 = torch.topk(scores_RV, min(top_k, scores_RV.shape[-1]))[0][..., -1:]
        scores_RV = scores_RV.masked_fill(scores_RV < kth_R1, -torch.inf)
    if top_p < 1.0:
        sorted_RV, order_RV = torch.sort(scores_RV, stable=True)
        removed_RV = sorted_RV.softmax(dim=-1).cumsum(dim=-1) <= 1 - top_p
        removed_RV[..., -1:].fill_(False)
        scores_RV = scores_RV.masked_fill(removed_RV.scatter(1, order_RV, removed_RV), -torch.inf)
    return torch.softmax(scores_RV, dim=-1)
