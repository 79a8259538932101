"""Make Triton's interpreter exact for bf16 and fp8: conversions, dots and element-wise arithmetic.

Triton interprets kernels in numpy, which has neither format: a bf16 block is carried as uint16 and
an fp8 block as uint8. Unpatched, `tl.dot` of bf16 multiplies those integers, f32 -> bf16 truncates,
fp8 rounding loses carries and fp8 NaN codes read as 480 (Triton 3.6 to 3.8). Everything here goes
through torch instead, as the GPU does it: conversions round to nearest even and saturate in fp8.

Not covered: `tl.sum` of a bf16 block, bf16 times a Python literal, `atomic_add` of bf16, inline
assembly. Kernels of this project upcast to f32 right after the load and round once at the store.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

_TORCH_DTYPES = {
    tl.float64: torch.float64,
    tl.float32: torch.float32,
    tl.float16: torch.float16,
    tl.bfloat16: torch.bfloat16,
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
}
_NUMPY_WIDTHS = {8: np.uint8, 16: np.uint16, 32: np.uint32, 64: np.uint64}

_original_convert = interpreter._convert_float
_original_binary = interpreter.InterpreterBuilder.binary_op
_original_patch_tensor = interpreter._patch_lang_tensor


def _convert_float(data: np.ndarray, source: tl.dtype, target: tl.dtype, rounding: Any) -> Any:
    """Replacement of the interpreter's bit-by-bit float conversion."""
    if source not in _TORCH_DTYPES or target not in _TORCH_DTYPES:
        return _original_convert(data, source, target, rounding)
    raw = np.ascontiguousarray(data).reshape(-1).view(np.uint8).copy()
    values = torch.from_numpy(raw).view(_TORCH_DTYPES[source])
    if target.primitive_bitwidth == 8:
        limit = torch.finfo(_TORCH_DTYPES[target]).max
        values = values.float()
        values = torch.where(values.isnan(), values, values.clamp(-limit, limit))
    converted = values.to(_TORCH_DTYPES[target]).contiguous().view(torch.uint8).numpy()
    return converted.view(_NUMPY_WIDTHS[target.primitive_bitwidth]).reshape(np.shape(data))


def _as_f32(handle: Any) -> np.ndarray:
    """Data of a floating handle as numpy floats; f32 and f64 unchanged."""
    dtype = handle.dtype.scalar
    if dtype in _TORCH_DTYPES and dtype not in (tl.float32, tl.float64):
        return _convert_float(handle.data, dtype, tl.float32, None).view(np.float32)
    return handle.data


def _round_to_bf16(data: np.ndarray) -> Any:
    return _convert_float(data.astype(np.float32), tl.float32, tl.bfloat16, None)


def _create_dot(self: Any, a: Any, b: Any, d: Any, _precision: Any, _imprecise: Any) -> Any:
    if a.dtype.scalar.is_floating():
        product = np.matmul(_as_f32(a), _as_f32(b)).astype(d.data.dtype)
    else:
        product = np.matmul(a.data, b.data, dtype=d.data.dtype)
    return interpreter.TensorHandle(product + d.data, d.dtype.scalar)


def _cast(self: Any, source: Any, target: Any) -> Any:
    source_type, target_type = source.dtype.scalar, target.scalar
    if source_type in _TORCH_DTYPES and target_type in _TORCH_DTYPES:
        data = _convert_float(source.data, source_type, target_type, None)
        return interpreter.TensorHandle(data.view(interpreter._get_np_dtype(target)), target_type)
    if source_type == tl.bfloat16:
        source = interpreter.TensorHandle(_as_f32(source), tl.float32)
    if target_type == tl.bfloat16:
        return interpreter.TensorHandle(_round_to_bf16(source.data), target_type)
    return interpreter.TensorHandle(
        source.data.astype(interpreter._get_np_dtype(target)), target_type
    )


def _binary(self: Any, lhs: Any, rhs: Any, op: Any) -> Any:
    if lhs.dtype.scalar == tl.bfloat16 and rhs.dtype.scalar == tl.bfloat16:
        result = op(_as_f32(lhs), _as_f32(rhs))
        if result.dtype == np.float32:
            return interpreter.TensorHandle(_round_to_bf16(result), tl.bfloat16)
        return interpreter.TensorHandle(
            result, tl.int1 if result.dtype == np.bool_ else tl.bfloat16
        )
    return _original_binary(self, lhs, rhs, op)


def _patch_tensor(tensor: Any, *scope: Any) -> None:
    """Let a block of one element bound a loop: Triton 3.6 fails there with numpy 2.4."""
    _original_patch_tensor(tensor, *scope)
    tensor.__index__ = lambda self: self.handle.data.item()


def install() -> None:
    """Patch the interpreter of this process; calling it again changes nothing."""
    builder = interpreter.InterpreterBuilder
    interpreter._convert_float = _convert_float
    interpreter._patch_lang_tensor = _patch_tensor
    builder.create_dot = _create_dot
    builder.cast_impl = _cast
    builder.binary_op = _binary
