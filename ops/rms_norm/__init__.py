"""RMSNorm of the model, where its reader does not take it in (`rms_norm_linear`).

Shape legend: M rows, K columns.
"""

from __future__ import annotations

from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm"]


def rms_norm(
    x_MK: torch.Tensor, weight_K: torch.Tensor, *, eps: float, backend: str | None = None
) -> torch.Tensor:
    """Return weight * cast(x * rsqrt(mean(x^2) + eps)), as GlmMoeDsaRMSNorm rounds it.

    The sum of squares is taken in fp32, in one order for each K: a row's result depends on nothing
    else. With few rows `triton` lets the next kernel start early; a linear behind reads its weight
    meanwhile.

    Args:
        x_MK: [..., K], any floating dtype and strides; M = 0 is allowed.
        weight_K: [K], of x's dtype. `triton` reads it before the kernel ahead has ended, so that
            one may write it only if it lets no dependent in before it has.
        eps: added to the mean of squares.
        backend: force `triton` or `reference`.

    Returns:
        [..., K] in x's dtype, contiguous.

    Raises:
        ValueError: shapes or dtypes do not fit.
    """
    _check(x_MK, weight_K)
    return _rms_norm_op(x_MK, weight_K, eps, backend or "")


def _check(x_MK: torch.Tensor, weight_K: torch.Tensor) -> None:
    if not x_MK.dim() or weight_K.shape != x_MK.shape[-1:]:
        raise ValueError(
            f"rms_norm: x [..., K] and weight [K] expected, got {tuple(x_MK.shape)} and "
            f"{tuple(weight_K.shape)}"
        )
    if not x_MK.is_floating_point() or weight_K.dtype != x_MK.dtype:
        raise ValueError(
            f"rms_norm: one floating dtype expected, got {x_MK.dtype} and {weight_K.dtype}"
        )


# A program of the kernel holds a whole row.
MAX_TRITON_COLUMNS = 16_384


def why_not_triton(x: torch.Tensor, weight_K: torch.Tensor, *_rest: Any) -> str | None:
    """Why the kernel cannot norm these rows, or None."""
    if not 0 < x.shape[-1] <= MAX_TRITON_COLUMNS:
        return f"the norm's kernel takes 1 to {MAX_TRITON_COLUMNS} columns, got {x.shape[-1]}"
    if x.dtype == torch.float64:
        return "the norm's kernel takes 16 and 32 bits, got float64"
    return _dispatch.why_no_triton(x, weight_K)


def _run_triton(x: torch.Tensor, weight_K: torch.Tensor, eps: float) -> torch.Tensor:
    from glm_compile.ops.rms_norm.triton_kernel import rms_norm_triton

    return rms_norm_triton(x, weight_K, eps)


_BACKENDS = (
    _dispatch.Backend("triton", why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, rms_norm_reference),
)


def _rms_norm(x: torch.Tensor, weight_K: torch.Tensor, eps: float, backend: str) -> torch.Tensor:
    # Graphs call the op itself.
    _check(x, weight_K)
    return _dispatch.run("rms_norm", _BACKENDS, backend, x, weight_K, eps)


def _rms_norm_fake(
    x: torch.Tensor, weight_K: torch.Tensor, eps: float, backend: str
) -> torch.Tensor:
    return x.new_empty(x.shape)


_rms_norm_op = register_op(
    "rms_norm(Tensor x, Tensor weight, float eps, str backend) -> Tensor",
    _rms_norm,
    _rms_norm_fake,
)
