"""RMSNorm and the linear that reads it, as one op: the normed value never leaves the kernel.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.bf16_linear import MAX_FEW_ROWS, why_not_cute
from glm_compile.ops.bf16_linear.config import is_measured, library_wins
from glm_compile.ops.merged_linear import adjacent_block
from glm_compile.ops.rms_norm_linear.reference import (
    linear_of_normed,
    rms_norm_linear_reference,
)

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
        weight_NK: bf16 [N, K], or several of them, whose outputs are put side by side. Like the
            norm's weight they are read early by `cute`, see `bf16_linear`.
        bias_N: bf16 [sum of N].
        eps: of the norm.
        deterministic: see `bf16_linear`.
        backend: force `cute`, the norm inside the product; or `triton` or `reference`, the norm
            before it.

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


def _why_not_cute(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
) -> str | None:
    if (block := adjacent_block(weights)) is None:
        return "the weights do not lie side by side in memory"
    if (reason := why_not_cute(x, block, bias, None, deterministic)) is not None:
        return reason
    if norm_weight_K.dtype != x.dtype or norm_weight_K.data_ptr() % 16:
        return "the norm's weight must be of x's dtype and start at a multiple of 16 bytes"
    if norm_weight_K.stride(0) != 1:
        # A copy made just ahead of a kernel that reads it early would come too late.
        return "the norm's weight must be contiguous"
    from glm_compile.ops.bf16_linear.cute_kernel import norm_config_for

    if norm_config_for(*block.shape) is None:
        return f"rows of {block.shape[1]} do not fit in the registers of one block"
    return None


def _run_cute(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
) -> torch.Tensor:
    from glm_compile.ops.bf16_linear.cute_kernel import bf16_linear_cute

    block = adjacent_block(weights)
    assert block is not None
    return bf16_linear_cute(x, block, bias, None, norm_weight_K, eps)


# A program of the norm's kernel holds a whole row.
_MAX_TRITON_COLUMNS = 16_384


def _why_not_triton(x: torch.Tensor, norm_weight_K: torch.Tensor, *_rest: Any) -> str | None:
    if not 0 < x.shape[-1] <= _MAX_TRITON_COLUMNS:
        return f"the norm's kernel takes 1 to {_MAX_TRITON_COLUMNS} columns, got {x.shape[-1]}"
    return _dispatch.why_no_triton(x, norm_weight_K)


def _run_triton(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
) -> torch.Tensor:
    from glm_compile.ops.rms_norm_linear.triton_kernel import rms_norm_triton

    normed = rms_norm_triton(x, norm_weight_K, eps)
    return linear_of_normed(normed, weights, bias, deterministic)


_CUTE = _dispatch.Backend("cute", _why_not_cute, _run_cute)
_REFERENCE = _dispatch.Backend("reference", _dispatch.always, rms_norm_linear_reference)
_TRITON = _dispatch.Backend("triton", _why_not_triton, _run_triton)
_FEW_ROWS = (_CUTE, _TRITON, _REFERENCE)
_LIBRARY_FIRST = (_TRITON, _REFERENCE, _CUTE)


def _rms_norm_linear(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    backend: str,
) -> torch.Tensor:
    num_rows = x.numel() // max(1, x.shape[-1])
    num_features = sum(weight.shape[0] for weight in weights)
    is_ours = is_measured(num_features, x.shape[-1])
    is_ours = is_ours and (deterministic or num_rows <= MAX_FEW_ROWS)
    is_ours = is_ours and not library_wins(num_features, x.shape[-1], num_rows)
    backends = _FEW_ROWS if is_ours else _LIBRARY_FIRST
    return _dispatch.run(
        "rms_norm_linear", backends, backend, x, norm_weight_K, weights, bias, eps, deterministic
    )


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
