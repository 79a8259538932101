"""Tile sizes of the bf16 linear kernel."""

from __future__ import annotations

from dataclasses import dataclass

# Multiprocessors of the cards this is written for (H200: 132, B200: 148); only a scale here.
_NUM_PROCESSORS = 132


@dataclass(frozen=True)
class KernelConfig:
    """Sizes of one program's tile.

    Attributes:
        block_n: out features of a program.
        block_k: in features of a step.
        num_warps: warps of a program.
        num_stages: steps whose weights are in flight.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def default_for(num_features: int, num_columns: int) -> KernelConfig:
    """Analytic default: enough programs to fill the card, then tiles as tall as that leaves.

    It depends on the weight alone, never on the number of rows, so that a row's result does not
    either.
    """
    block_n = 16
    while block_n < 64 and num_features >= block_n * 2 * 4 * _NUM_PROCESSORS:
        block_n *= 2
    # 16 to 32 KiB of weights in flight a stage.
    block_k = 256 if block_n < 64 else 128
    while block_k > 32 and block_k >= 2 * num_columns:
        block_k //= 2
    return KernelConfig(block_n=block_n, block_k=block_k, num_warps=4, num_stages=4)
