"""The model's RMSNorm in plain torch. Shape legend: K columns."""

from __future__ import annotations

import torch


def rms_norm_reference(x: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    """RMSNorm as GlmMoeDsaRMSNorm computes it: rounded to x's dtype before the weight comes in."""
    x_fp32 = x.float()
    variance = x_fp32.pow(2).mean(-1, keepdim=True)
    return (weight_K * (x_fp32 * torch.rsqrt(variance + eps)).to(x.dtype)).contiguous()
