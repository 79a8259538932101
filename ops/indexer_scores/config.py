"""Tile shapes of the indexer scores."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScoresConfig:
    """Shape of one launch.

    Attributes:
        block_keys: keys of a program.
        rows_per_program: query rows that a program scores against its keys, read once.
        num_warps: warps of a program.
        num_stages: stages of the loop over rows.
    """

    block_keys: int
    rows_per_program: int
    num_warps: int
    num_stages: int


def default_config(element_bytes: int) -> ScoresConfig:
    """Two pages a program; fp32 keys, which take no tensor core here, get a small tile."""
    if element_bytes == 4:
        return ScoresConfig(block_keys=32, rows_per_program=8, num_warps=4, num_stages=1)
    return ScoresConfig(block_keys=128, rows_per_program=8, num_warps=4, num_stages=2)
