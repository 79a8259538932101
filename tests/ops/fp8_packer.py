"""An independent packer of FP8 index-key pages: nearest e4m3 code by search, bytes by struct.

Shares no code with the package, so that a fault of layout or rounding cannot hide in both.
"""

from __future__ import annotations

import struct

import numpy as np


def _decode(code: int) -> float:
    sign, exponent, mantissa = code >> 7, (code >> 3) & 15, code & 7
    value = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -value if sign else value


# Codes 0..0x7e in rising order of value; 0x7f is NaN.
_POSITIVE = np.array([_decode(code) for code in range(0x7F)])
assert _POSITIVE[-1] == 448.0


def nearest_codes(values: np.ndarray) -> np.ndarray:
    """The e4m3 codes of finite values: nearest, ties to the even code, saturated; any shape."""
    magnitude = np.minimum(np.abs(values.astype(np.float64)), 448.0)
    distance = np.abs(_POSITIVE - magnitude[..., None])
    code = distance.argmin(-1)
    following = np.minimum(code + 1, len(_POSITIVE) - 1)
    is_tie = np.take_along_axis(distance, following[..., None], -1)[..., 0] == distance.min(-1)
    code = np.where(is_tie & (code % 2 == 1), following, code)
    return (code | np.where(np.signbit(values), 0x80, 0)).astype(np.uint8)


def pack_row(row: np.ndarray) -> tuple[bytes, bytes]:
    """(D bytes of codes, 4 bytes of scale) of one row of float32 values."""
    assert row.dtype == np.float32
    amax = np.float32(max(np.abs(row).max(), np.float32(1e-4)))
    scale = np.float32(amax / np.float32(448.0))
    return nearest_codes(row / scale).tobytes(), struct.pack("<f", scale)


def store_row(pages: np.ndarray, page: int, slot: int, row: np.ndarray) -> None:
    """Write one row into uint8 pages [pages, 64 * (D + 4)]: 64 rows of codes, then 64 scales."""
    codes, scale = pack_row(row)
    head_dim = len(codes)
    pages[page, slot * head_dim : (slot + 1) * head_dim] = np.frombuffer(codes, np.uint8)
    at = 64 * head_dim + 4 * slot
    pages[page, at : at + 4] = np.frombuffer(scale, np.uint8)
