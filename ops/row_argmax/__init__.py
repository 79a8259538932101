"""Position of the largest value of each row. Shape legend: V values of a row."""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.row_argmax.reference import row_argmax_reference

__all__ = ["row_argmax"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def row_argmax(x: torch.Tensor, *, backend: str | None = None) -> torch.Tensor:
    """Argmax over the last axis: the first of equal values, a NaN before any number.

    As `torch.argmax`, which takes two operations and three times as long for a row of a vocabulary.
    Integers and comparisons only: deterministic, the same by every backend and in any dtype that
    holds the values. Nothing is read on the host.

    Args:
        x: float32, bfloat16 or float16 [..., V], V >= 1.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        int64 [...].

    Raises:
        ValueError: dtype or shape outside the above, or a forced backend that cannot run.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"row_argmax: x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"row_argmax: rows must not be empty, got shape {tuple(x.shape)}")
    if not backend:
        return _op(x)
    return _dispatch.run("row_argmax", _BACKENDS, backend, x)


def _why_not_triton(x: torch.Tensor) -> str | None:
    if x.shape[-1] >= 2**31:
        return f"positions do not fit 32 bits: {x.shape[-1]}"
    return _dispatch.why_no_triton(x)


def _run_triton(x: torch.Tensor) -> torch.Tensor:
    from glm_compile.ops.row_argmax.triton_kernel import row_argmax_triton

    return row_argmax_triton(x)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, row_argmax_reference),
)


def _row_argmax(x: torch.Tensor) -> torch.Tensor:
    return _dispatch.run("row_argmax", _BACKENDS, None, x)


def _row_argmax_fake(x: torch.Tensor) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


_op = register_op("row_argmax(Tensor x) -> Tensor", _row_argmax, _row_argmax_fake)
