"""Sizes of the indexer prologue's programs, from sweeps on an H200 at 1, 6 and 2048 tokens."""

from __future__ import annotations

from dataclasses import dataclass

# Up to here a step is all latency: small programs, started before the kernel before has ended.
_MAX_FEW_TOKENS = 64


@dataclass(frozen=True)
class KernelConfig:
    """Sizes of one program.

    Attributes:
        block_h: heads that a program rotates.
        num_warps: warps of a program.
        is_early: whether to start before the predecessor's end, where the device can. With many
            programs these only take its place.
    """

    block_h: int
    num_warps: int
    is_early: bool


def default_for(num_tokens: int) -> KernelConfig:
    """Config for a step of so many tokens."""
    if num_tokens <= _MAX_FEW_TOKENS:
        return KernelConfig(block_h=1, num_warps=1, is_early=True)
    return KernelConfig(block_h=4, num_warps=1, is_early=False)
