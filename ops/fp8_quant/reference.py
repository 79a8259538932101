"""FP8 quantisation of rows in plain torch. Shape legend: D values of a row."""

from __future__ import annotations

import torch

FP8_MAX = 448.0
# Rows quieter than this share one scale; a floor keeps zero rows finite.
AMAX_FLOOR = 1e-4


def fp8_quant_reference(
    x: torch.Tensor, power_of_two_scale: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (e4m3 values, fp32 scales); see `fp8_quant` for the contract."""
    x = x.float()
    # Infinities saturate, so they must not set the scale; NaN stays where it is.
    magnitude = torch.where(x.isfinite(), x.abs(), 0.0)
    # By a tensor: CUDA divides by a Python number through its reciprocal, one ulp off.
    scale = magnitude.amax(dim=-1).clamp_min(AMAX_FLOOR) / x.new_full((), FP8_MAX)
    if power_of_two_scale:
        scale = _round_up_to_power_of_two(scale)
    # torch 2.11 converts values beyond 448 to NaN, later ones saturate: clamp, which keeps NaN.
    values = (x / scale.unsqueeze(-1)).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
    return values.contiguous(), scale.contiguous()


def _round_up_to_power_of_two(scale: torch.Tensor) -> torch.Tensor:
    """Smallest power of two >= scale, for positive normal fp32: carry the mantissa, drop it."""
    bits = scale.view(torch.int32)
    return ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32)
