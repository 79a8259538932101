"""The MTP layer's input in plain torch.

Shape legend: B batch, S query tokens, C hidden, V vocabulary.
"""

from __future__ import annotations

import torch


def mtp_input_reference(
    ids_BS: torch.Tensor,
    hidden_BSC: torch.Tensor,
    embedding_VC: torch.Tensor,
    embedding_norm_C: torch.Tensor,
    hidden_norm_C: torch.Tensor,
    eps: float,
) -> torch.Tensor:
    """See `mtp_input` for the contract."""
    embedded_BSC = torch.nn.functional.embedding(ids_BS, embedding_VC)
    parts = ((embedded_BSC, embedding_norm_C), (hidden_BSC, hidden_norm_C))
    return torch.cat([_norm(x, weight_C, eps) for x, weight_C in parts], dim=-1)


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)
