"""RMSNorm and the linear that reads it, as one op: the normed value never leaves the kernel.

Nor do gates and ups where the linear is the first half of a SwiGLU MLP.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.bf16_linear import MAX_FEW_ROWS, why_not_cute
from glm_compile.ops.bf16_linear.config import is_measured, library_wins, norm_config_for
from glm_compile.ops.merged_linear import adjacent_block
from glm_compile.ops.rms_norm import why_not_triton
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
    has_swiglu: bool = False,
    deterministic: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Return norm(x) W^T (+ bias), or silu(gates) * ups of it.

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
        has_swiglu: the product is gates [..., N / 2], then ups; silu(gate) * up is returned, with
            the roundings of separate calls: product, silu and result. No bias then.
        deterministic: see `bf16_linear`.
        backend: force `cute`, the norm inside the product; or `triton` or `reference`, the norm
            before it.

    Returns:
        bf16 [..., sum of N], contiguous; half as wide with `has_swiglu`.
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
    if has_swiglu and (bias_N is not None or num_features % 2):
        raise ValueError(
            f"rms_norm_linear: with has_swiglu an even number of features without a bias is "
            f"expected, got {num_features}" + " and a bias" * (bias_N is not None)
        )
    for tensor in (x_MK, norm_weight_K, bias_N, *weights):
        if tensor is not None and tensor.dtype != torch.bfloat16:
            raise ValueError(f"rms_norm_linear: bfloat16 expected, got {tensor.dtype}")
    return _rms_norm_linear_op(
        x_MK, norm_weight_K, weights, bias_N, eps, deterministic, backend or "", has_swiglu
    )


def _why_not_cute(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    has_swiglu: bool,
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
    if norm_config_for(*block.shape, has_swiglu=has_swiglu) is None:
        return f"rows of {block.shape[1]} do not fit in the registers of one block"
    return None


def _run_cute(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    has_swiglu: bool,
) -> torch.Tensor:
    from glm_compile.ops.bf16_linear.cute_kernel import bf16_linear_cute

    block = adjacent_block(weights)
    assert block is not None
    return bf16_linear_cute(x, block, bias, None, norm_weight_K, eps, has_swiglu=has_swiglu)


def _run_triton(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    has_swiglu: bool,
) -> torch.Tensor:
    from glm_compile.ops._swiglu_triton import swiglu_triton
    from glm_compile.ops.rms_norm.triton_kernel import rms_norm_triton

    normed = rms_norm_triton(x, norm_weight_K, eps)
    product = linear_of_normed(normed, weights, bias, deterministic)
    return swiglu_triton(product) if has_swiglu else product


_CUTE = _dispatch.Backend("cute", _why_not_cute, _run_cute)
_REFERENCE = _dispatch.Backend("reference", _dispatch.always, rms_norm_linear_reference)
_TRITON = _dispatch.Backend("triton", why_not_triton, _run_triton)
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
    has_swiglu: bool = False,
) -> torch.Tensor:
    num_rows = x.numel() // max(1, x.shape[-1])
    num_features = sum(weight.shape[0] for weight in weights)
    is_ours = is_measured(num_features, x.shape[-1])
    is_ours = is_ours and (deterministic or num_rows <= MAX_FEW_ROWS)
    is_ours = is_ours and not library_wins(num_features, x.shape[-1], num_rows)
    # Rows that do not fit in one block would take others to read the weight again.
    block_rows = 1 if deterministic else num_rows
    is_ours = is_ours and (
        norm_config_for(num_features, x.shape[-1], block_rows, has_swiglu=has_swiglu) is not None
    )
    backends = _FEW_ROWS if is_ours else _LIBRARY_FIRST
    return _dispatch.run(
        "rms_norm_linear",
        backends,
        backend,
        x,
        norm_weight_K,
        weights,
        bias,
        eps,
        deterministic,
        has_swiglu,
    )


def _rms_norm_linear_fake(
    x: torch.Tensor,
    norm_weight_K: torch.Tensor,
    weights: Sequence[torch.Tensor],
    bias: torch.Tensor | None,
    eps: float,
    deterministic: bool,
    backend: str,
    has_swiglu: bool = False,
) -> torch.Tensor:
    num_features = weights[0].shape[0]
    for weight in weights[1:]:
        num_features = num_features + weight.shape[0]
    if has_swiglu:
        num_features = num_features // 2
    return x.new_empty((*x.shape[:-1], num_features))


_rms_norm_linear_op = register_op(
    "rms_norm_linear(Tensor x, Tensor norm_weight, Tensor[] weights, Tensor? bias, float eps, "
    "bool deterministic, str backend, bool has_swiglu=False) -> Tensor",
    _rms_norm_linear,
    _rms_norm_linear_fake,
)
