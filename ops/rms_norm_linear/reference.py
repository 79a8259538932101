"""The model's RMSNorm, and the linear after it as the other ops do it.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm_compile.ops._swiglu import swiglu_reference
from glm_compile.ops.bf16_linear import run_bf16_linear
from glm_compile.ops.merged_linear import adjacent_block, merged_linear
from glm_compile.ops.rms_norm.reference import rms_norm_reference


def rms_norm_linear_reference(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias_N: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    has_swiglu: bool = False,
) -> torch.Tensor:
    """The norm, then `bf16_linear`, or `merged_linear` where weights are apart; SwiGLU last."""
    normed = rms_norm_reference(x, norm_weight_K, eps)
    product = linear_of_normed(normed, weights, bias_N, deterministic)
    return swiglu_reference(product) if has_swiglu else product


def linear_of_normed(
    normed: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias_N: torch.Tensor | None,
    deterministic: bool,
) -> torch.Tensor:
    """The product alone."""
    if (block := adjacent_block(weights)) is not None:
        return run_bf16_linear(normed, block, bias_N, None, deterministic, "")
    product = merged_linear(normed, weights, deterministic=deterministic)
    return product if bias_N is None else product + bias_N
