"""FP8 (e4m3) quantisation of rows with one fp32 scale each. Shape legend: D values of a row."""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.fp8_quant.reference import fp8_quant_reference

__all__ = ["fp8_quant"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
# A program holds one whole row in registers.
_MAX_TRITON_ROW = 8192


def fp8_quant(
    x: torch.Tensor, power_of_two_scale: bool = False, *, backend: str | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantise each row of the last dimension to e4m3 with a scale of its own.

    scale = max(amax, 1e-4) / 448 in fp32, value = x / scale rounded to nearest even. With
    `power_of_two_scale` the scale is rounded up to a power of two before the values are taken, so
    that nothing clips. Deterministic; every leading dimension may be symbolic or 0.

    - amax is that of the row's finite values: an infinity saturates at +-448 and leaves the others
      their precision.
    - NaN gives NaN in its own place.
    - A zero row, or one of denormals, gives zeros and a finite positive scale.

    Args:
        x: float32, bfloat16 or float16 [..., D], any strides, D >= 1.
        power_of_two_scale: round scales up to powers of two (ue8m0).
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        float8_e4m3fn values of x's shape and float32 scales of x.shape[:-1], both contiguous.

    Raises:
        ValueError: dtype or shape outside the above, or a forced backend that cannot run.
    """
    if x.dtype not in _DTYPES:
        raise ValueError(f"fp8_quant: x must be float32, bfloat16 or float16, got {x.dtype}")
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"fp8_quant: rows must not be empty, got shape {tuple(x.shape)}")
    if not backend:
        return _op(x, power_of_two_scale)
    return _dispatch.run("fp8_quant", _BACKENDS, backend, x, power_of_two_scale)


def _why_not_triton(x: torch.Tensor, power_of_two_scale: bool) -> str | None:
    if x.shape[-1] > _MAX_TRITON_ROW:
        return f"rows are longer than {_MAX_TRITON_ROW}: {x.shape[-1]}"
    return _dispatch.why_no_fp8(x) or _dispatch.why_no_triton(x)


def _run_triton(x: torch.Tensor, power_of_two_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    from glm_compile.ops.fp8_quant.triton_kernel import fp8_quant_triton

    return fp8_quant_triton(x, power_of_two_scale)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, fp8_quant_reference),
)


def _fp8_quant(x: torch.Tensor, power_of_two_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return _dispatch.run("fp8_quant", _BACKENDS, None, x, power_of_two_scale)


def _fp8_quant_fake(x: torch.Tensor, power_of_two_scale: bool) -> tuple[torch.Tensor, torch.Tensor]:
    return (
        x.new_empty(x.shape, dtype=torch.float8_e4m3fn),
        x.new_empty(x.shape[:-1], dtype=torch.float32),
    )


_op = register_op(
    "fp8_quant(Tensor x, bool power_of_two_scale) -> (Tensor, Tensor)",
    _fp8_quant,
    _fp8_quant_fake,
)
