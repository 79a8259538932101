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


def nearest_code(value: float) -> int:
    """The e4m3 code of a finite value: nearest, ties to the even code, saturated."""
    sign = 0x80 if np.signbit(value) else 0
    distance = np.abs(_POSITIVE - min(abs(float(value)), 448.0))
    candidates = np.flatnonzero(distance == distance.min())
    return sign | int(next((c for c in candidates if c % 2 == 0), candidates[0]))


def pack_row(row: np.ndarray) -> tuple[bytes, bytes]:
    """(D bytes of codes, 4 bytes of scale) of one row of float32 values."""
    assert row.dtype == np.float32
    amax = np.float32(max(np.abs(row).max(), np.float32(1e-4)))
    scale = np.float32(amax / np.float32(448.0))
    codes = bytes(nearest_code(np.float32(value / scale)) for value in row)
    return codes, struct.pack("<f", scale)


def store_row(pages: np.ndarray, page: int, slot: int, row: np.ndarray) -> None:
    """Write one row into uint8 pages [pages, 64 * (D + 4)]: 64 rows of codes, then 64 scales."""
    codes, scale = pack_row(row)
    head_dim = len(codes)
    pages[page, slot * head_dim : (slot + 1) * head_dim] = np.frombuffer(codes, np.uint8)
    at = 64 * head_dim + 4 * slot
    pages[page, at : at + 4] = np.frombuffer(scale, np.uint8)
