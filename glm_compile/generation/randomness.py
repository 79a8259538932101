"""Random numbers that depend on a key and on nothing else: a counter-based generator.

SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014) in
its counter form: output n of the stream with seed s is `mix(s + n * GAMMA)`. Streams are nested:
the call's seed gives one key for each sequence, that one a key for each position and purpose, and
that one the numbers of the vocabulary. So a token's numbers are the same however many iterations
the host has launched, eagerly or in a CUDA graph, and on every device.

Elementwise integer operations of torch; they wrap around, and nothing reads the host.

B batch, X positions, V vocabulary.
"""

from __future__ import annotations

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
_NUM_PURPOSES = len(Purpose)


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
    row_keys_B: torch.Tensor, positions_BX: torch.Tensor, purpose: Purpose
) -> torch.Tensor:
    """Keys [B,X] of positions in each sequence."""
    counters_BX = positions_BX * _NUM_PURPOSES + int(purpose) + 1
    return mix(row_keys_B[:, None] + counters_BX * GAMMA)


def uniform(keys: torch.Tensor) -> torch.Tensor:
    """One number in [0, 1) for each key, float32 in steps of 2^-24."""
    return _shift(keys, 40).to(torch.float32) * 2.0**-24


def exponential(keys_BX: torch.Tensor, size: int) -> torch.Tensor:
    """Exponentially distributed numbers [B,X,size], mean 1, float32, within 2^-54 and 17.

    Small ones, which win a race, have 53 bits behind them.
    """
    counters_V = torch.arange(1, size + 1, device=keys_BX.device)
    bits_BXV = mix(keys_BX[..., None] + counters_V * GAMMA)
    uniform_BXV = (_shift(bits_BXV, 11).to(torch.float32) + 0.5) * 2.0**-53
    return uniform_BXV.clamp_max_(1 - 2.0**-24).neg_().log1p_().neg_()


def _shift(value: torch.Tensor, count: int) -> torch.Tensor:
    """Logical shift to the right of int64."""
    return (value >> count) & ((1 << (64 - count)) - 1)
