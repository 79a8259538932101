"""Sizes of the indexer prologue's programs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class KernelConfig:
    """Sizes of one program.

    Attributes:
        block_h: heads that a program rotates.
        num_warps: warps of a program.
    """

    block_h: int
    num_warps: int


def default_for(num_tokens: int) -> KernelConfig:
    """Config for a step of so many tokens."""
    return KernelConfig(block_h=4, num_warps=4)
