"""Position of the largest value of each row. Shape legend: V values of a row."""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._cute import why_no_cute
from glm_compile.ops._library import register_op
from glm_compile.ops.row_argmax.reference import row_argmax_reference

__all__ = ["row_argmax"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


# Few rows take a cluster of blocks each; many are as fast in parts side by side.
_MAX_CUTE_ROWS = 64
_LEAST_CUTE_VALUES = 16384


def row_argmax(
    x: torch.Tensor, *, copy: torch.Tensor | None = None, backend: str | None = None
) -> torch.Tensor:
    """Argmax over the last axis: the first of equal values, a NaN before any number.

    As `torch.argmax`, which takes two operations and three times as long for a row of a vocabulary.
    Integers and comparisons only: deterministic, the same by every backend and in any dtype that
    holds the values. Nothing is read on the host.

    Args:
        x: float32, bfloat16 or float16 [..., V], V >= 1.
        copy: int64 [...], any strides: gets the positions as well.
        backend: `reference`, `triton` or `cute` to force one; None takes the first that can.

    Returns:
        int64 [...].

    Raises:
        ValueError: dtype or shape outside the above, or a forced backend that cannot run.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"row_argmax: x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"row_argmax: rows must not be empty, got shape {tuple(x.shape)}")
    if copy is not None and (copy.shape != x.shape[:-1] or copy.dtype != torch.int64):
        raise ValueError(
            f"row_argmax: the copy must be int64 {tuple(x.shape[:-1])}, got {copy.dtype} "
            f"{tuple(copy.shape)}"
        )
    if not backend:
        return _op(x, copy)
    return _dispatch.run("row_argmax", _BACKENDS, backend, x, copy)


def _why_not_cute(x: torch.Tensor, copy: torch.Tensor | None) -> str | None:
    if x.dtype == torch.float16:
        return "written for bfloat16 and float32, got float16"
    num_values = x.shape[-1]
    num_rows = x.numel() // num_values
    if not 0 < num_rows <= _MAX_CUTE_ROWS or num_values < _LEAST_CUTE_VALUES:
        return (
            f"written for 1 to {_MAX_CUTE_ROWS} rows of at least {_LEAST_CUTE_VALUES} values, got "
            f"{num_rows} of {num_values}"
        )
    if num_values >= 2**31:
        return f"positions do not fit 32 bits: {num_values}"
    width = 16 // x.dtype.itemsize
    if num_values % width or not x.is_contiguous() or x.data_ptr() % 16:
        return f"rows must be contiguous, in 16 bytes: multiples of {width} values"
    return why_no_cute(x, copy)


def _run_cute(x: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
    from glm_compile.ops.row_argmax.cute_kernel import row_argmax_cute

    copy_M = None if copy is None else _as_rows(copy)
    out_M = row_argmax_cute(x.view(-1, x.shape[-1]), copy_M)
    out = out_M.view(x.shape[:-1])
    if copy is not None and copy_M is None:
        copy.copy_(out)
    return out


def _as_rows(copy: torch.Tensor) -> torch.Tensor | None:
    """A view of one axis, where there is one."""
    try:
        return copy.view(-1)
    except RuntimeError:
        return None


def _why_not_triton(x: torch.Tensor, copy: torch.Tensor | None) -> str | None:
    if x.shape[-1] >= 2**31:
        return f"positions do not fit 32 bits: {x.shape[-1]}"
    return _dispatch.why_no_triton(x, copy)


def _run_triton(x: torch.Tensor, copy: torch.Tensor | None) -> torch.Tensor:
    from glm_compile.ops.row_argmax.triton_kernel import row_argmax_triton

    out = row_argmax_triton(x)
    if copy is not None:
        copy.copy_(out)
    return out


_BACKENDS = (
    _dispatch.Backend("cute", _why_not_cute, _run_cute),
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, row_argmax_reference),
)


def _row_argmax(x: torch.Tensor, copy: torch.Tensor | None = None) -> torch.Tensor:
    return _dispatch.run("row_argmax", _BACKENDS, None, x, copy)


def _row_argmax_fake(x: torch.Tensor, copy: torch.Tensor | None = None) -> torch.Tensor:
    return x.new_empty(x.shape[:-1], dtype=torch.int64)


_op = register_op(
    "row_argmax(Tensor x, Tensor(a!)? copy=None) -> Tensor", _row_argmax, _row_argmax_fake
)
