"""Fake tensors that tell CuTe DSL what a kernel takes: what is known of sizes, strides, alignment.

Each call makes sizes and strides of its own: one tensor for two arguments would say that both have
the same, and calls where they differ would be refused.

Imported by kernel files only: needs CuTe DSL.
"""

from __future__ import annotations

from typing import Any

import cutlass.cute as cute
from cutlass.cute.runtime import make_fake_tensor


def vector(dtype: Any, align: int) -> Any:
    """Adjacent numbers; `align` of the first one's address in bytes."""
    return make_fake_tensor(dtype, (cute.sym_int32(),), (1,), assumed_align=align)


def matrix(dtype: Any, last_stride: Any, align: int, row_divisibility: int = 1) -> Any:
    """Rows at multiples of `row_divisibility` numbers."""
    strides = (cute.sym_int64(divisibility=row_divisibility), last_stride)
    return make_fake_tensor(
        dtype, (cute.sym_int32(), cute.sym_int32()), strides, assumed_align=align
    )


def strided_matrix(dtype: Any) -> Any:
    """A matrix of any strides."""
    return matrix(dtype, cute.sym_int64(), dtype.width // 8)
