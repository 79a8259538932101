"""How the Triton top-k splits its work. Bins and rounds are fixed: four digits of 8 bits."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class TopkConfig:
    """Shape of one launch.

    Attributes:
        block: keys a program ranks at a time; at most 16384, since two counts share 32 bits.
        num_warps: warps of a program.
        num_slices: programs a row is split over, a power of two; 1 = one launch, else five.
    """

    block: int
    num_warps: int
    num_slices: int

    def __post_init__(self) -> None:
        if self.block > 16384 or self.block & (self.block - 1):
            raise ValueError(f"topk: block must be a power of two up to 16384, got {self.block}")
        if self.num_slices & (self.num_slices - 1):
            raise ValueError(f"topk: num_slices must be a power of two, got {self.num_slices}")


# Five launches cost about 6 us more than one; a row this short is ranked faster by one program.
_ONE_PROGRAM_KEYS = 16384
_MAX_SLICES = 32


def default_config(num_rows: int, num_keys: int, num_multiprocessors: int) -> TopkConfig:
    """Split rows only while that fills the device and a slice still holds several blocks."""
    num_slices = 1
    if num_keys > _ONE_PROGRAM_KEYS:
        while (
            num_slices < _MAX_SLICES
            and num_rows * num_slices < num_multiprocessors
            and num_keys > num_slices * 4096
        ):
            num_slices *= 2
    return TopkConfig(block=2048, num_warps=8, num_slices=num_slices)
