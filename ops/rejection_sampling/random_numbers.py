"""Random numbers that depend on a key and on nothing else: a counter-based generator.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) in
its counter form: output n of the stream with seed s is `mix(s + n * GAMMA)`. Streams are nested:
the call's seed gives one key for each sequence, that one a key for each position and purpose, and
that one the numbers of the vocabulary. So a token's numbers are the same however many iterations
the host has launched, eagerly or in a CUDA graph, and on every device.

Integers wrap around; floats are made by single additions, products and quotients, each rounded
once. So a kernel that does the same gives the same bits. Nothing reads the host.

B batch, X positions, V vocabulary.
"""

from __future__ import annotations

import math
from enum import IntEnum

import torch


class Purpose(IntEnum):
    """What a number is for: one position needs several that are independent."""

    TOKEN = 0
    DRAFT = 1
    COIN = 2


def _signed(value: int) -> int:
    return value - (1 << 64) if value >= 1 << 63 else value


GAMMA = _signed(0x9E3779B97F4A7C15)
_FACTORS = _signed(0xBF58476D1CE4E5B9), _signed(0x94D049BB133111EB)
NUM_PURPOSES = len(Purpose)
# atanh(s) / s = 1 + s^2 / 3 + s^4 / 5 + ..., up to s = 1/3.
_NUM_TERMS = 8


def mix(state: torch.Tensor) -> torch.Tensor:
    """SplitMix64's output function on int64 (the bits of uint64)."""
    state = (state ^ _shift(state, 30)) * _FACTORS[0]
    state = (state ^ _shift(state, 27)) * _FACTORS[1]
    return state ^ _shift(state, 31)


def row_keys(seed: torch.Tensor, batch_size: int) -> torch.Tensor:
    """A key for each sequence of a call [B]; the seed is int64, 0-d."""
    rows_B = torch.arange(1, batch_size + 1, device=seed.device)
    return mix(mix(seed) + rows_B * GAMMA)


def position_keys(
    row_keys_B: torch.Tensor, positions_BX: torch.Tensor, purpose: int
) -> torch.Tensor:
    """Keys [B,X] of positions in each sequence."""
    counters_BX = positions_BX * NUM_PURPOSES + int(purpose) + 1
    return mix(row_keys_B[:, None] + counters_BX * GAMMA)


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) for each key, float32 in steps of 2^-24."""
    return _shift(keys, 40).to(torch.float32) * 2.0**-24


def exponential(keys_BX: torch.Tensor, size: int) -> torch.Tensor:
    """Exponentially distributed numbers [B,X,size], mean 1, float32, between 2^-54 and 38."""
    counters_V = torch.arange(1, size + 1, device=keys_BX.device)
    return exponential_of(mix(keys_BX[..., None] + counters_V * GAMMA))


def exponential_of(bits: torch.Tensor) -> torch.Tensor:
    """-log(1 - u) for u = (n + 1/2) / 2^53, n the upper 53 of 64 bits; float32.

    Small numbers, which win a race, and large ones keep their relative precision:

        u < 1/2   2 atanh(u / (2 - u))
        else      with 1 - u = f 2^-e, 1 <= f < 2:  e log(2) - 2 atanh((f - 1) / (f + 1))
    """
    n = _shift(bits, 11)
    is_small = n < 1 << 52
    u = (n.to(torch.float32) + 0.5) * 2.0**-53
    rest = ((1 << 53) - n).to(torch.float32) - 0.5
    rest_bits = rest.view(torch.int32)
    f = ((rest_bits & 0x7FFFFF) | 0x3F800000).view(torch.float32)
    exponent = (53 + 127 - (rest_bits >> 23)).to(torch.float32)
    s = torch.where(is_small, u, f - 1.0) / torch.where(is_small, 2.0 - u, f + 1.0)
    z = s * s
    series = torch.full_like(z, 1 / (2 * _NUM_TERMS - 1))
    for term in reversed(range(_NUM_TERMS - 1)):
        series = series * z + 1 / (2 * term + 1)
    double_atanh = (s + s) * series
    return torch.where(is_small, double_atanh, exponent * math.log(2) - double_atanh)


def _shift(value: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (value >> count) & ((1 << (64 - count)) - 1)
