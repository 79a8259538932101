"""RMSNorm and the linear that reads it, as one op: the normed value never leaves the kernel.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm_compile.ops._library import register_op
from glm_compile.ops.merged_linear import merged_linear
from glm_compile.ops.rms_norm_linear.reference import rms_norm_reference

__all__ = ["rms_norm_linear"]


def rms_norm_linear(
    x_MK: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weight_NK: torch.Tensor | Sequence[torch.Tensor],
    bias_N: torch.Tensor | None = None,
    *,
    eps: float,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Return norm(x) W^T (+ bias).

    The norm is the model's own, with its roundings: x in fp32 times rsqrt(mean(x^2) + eps), rounded
    to x's dtype, times the norm's weight. The product is `bf16_linear`'s; several weights are
    `merged_linear`'s, one product where they lie side by side in memory.

    Args:
        x_MK: bf16 [..., K], any strides; M = 0 is allowed.
        norm_weight_K: bf16 [K].
        weight_NK: bf16 [N, K], or several of them, whose outputs are put side by side.
        bias_N: bf16 [sum of N].
        eps: of the norm.
        deterministic: see `bf16_linear`.
        backend: force `reference`.

    Returns:
        bf16 [..., sum of N], contiguous.
    """
    weights = [weight_NK] if isinstance(weight_NK, torch.Tensor) else list(weight_NK)
    if not weights:
        raise ValueError("rms_norm_linear: at least one weight is needed")
    if not x_MK.dim() or norm_weight_K.shape != x_MK.shape[-1:]:
        raise ValueError(
            f"rms_norm_linear: x [..., K] and norm weight [K] expected, got {tuple(x_MK.shape)} "
            f"and {tuple(norm_weight_K.shape)}"
        )
    for weight in weights:
        if weight.dim() != 2 or weight.shape[1] != x_MK.shape[-1]:
            raise ValueError(
                f"rms_norm_linear: weights must be [N, {x_MK.shape[-1]}], got {tuple(weight.shape)}"
            )
    num_features = sum(weight.shape[0] for weight in weights)
    if bias_N is not None and bias_N.shape != (num_features,):
        raise ValueError(
            f"rms_norm_linear: bias must be [{num_features}], got {tuple(bias_N.shape)}"
        )
    for tensor in (x_MK, norm_weight_K, bias_N, *weights):
        if tensor is not None and tensor.dtype != torch.bfloat16:
            raise ValueError(f"rms_norm_linear: bfloat16 expected, got {tensor.dtype}")
    return _rms_norm_linear_op(
        x_MK, norm_weight_K, weights, bias_N, eps, deterministic, backend or ""
    )


def _rms_norm_linear(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    backend: str,
) -> torch.Tensor:
    if backend not in ("", "reference"):
        raise ValueError(f"rms_norm_linear: unknown backend {backend!r}; this op has 'reference'")
    normed = rms_norm_reference(x, norm_weight_K, eps)
    product = merged_linear(normed, weights, deterministic=deterministic)
    return product if bias is None else product + bias


def _rms_norm_linear_fake(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    backend: str,
) -> torch.Tensor:
    num_features = weights[0].shape[0]
    for weight in weights[1:]:
        num_features = num_features + weight.shape[0]
    return x.new_empty((*x.shape[:-1], num_features))


_rms_norm_linear_op = register_op(
    "rms_norm_linear(Tensor x, Tensor norm_weight, Tensor[] weights, Tensor? bias, float eps, "
    "bool deterministic, str backend) -> Tensor",
    _rms_norm_linear,
    _rms_norm_linear_fake,
)
