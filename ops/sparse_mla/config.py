"""How the sparse MLA kernels split a row's selected tokens."""

from __future__ import annotations

from dataclasses import dataclass

# What the CuTe kernels are written for: the release's latent, its rotated part, and pages.
CUTE_RANK = 512
CUTE_ROPE_DIM = 64
CUTE_MAX_HEADS = 64
CUTE_PAGE = 64
# Tokens that a block of the decode kernel takes at once, in two halves.
PAIR_TOKENS = 128

# Rows from which blocks take whole rows, one after another: more than a block a multiprocessor.
CUTE_PREFILL_ROWS = 133

# (rows up to which it holds, blocks of the cluster that shares a row). The largest cluster of which
# all rows' are on the device at once: an H200 has 7 groups of at least 16 multiprocessors, and a
# cluster lies in one. Rows beyond what fits wait for the others: 16 rows by 8 blocks took 34 us.
# Measured on one NVIDIA H200, 2026-11-30: 6 rows of 64 heads, 2048 of 128K tokens, cold, 12.3 us.
CUTE_CLUSTERS: tuple[tuple[int | None, int], ...] = (
    (7, 16),
    (14, 8),
    (28, 4),
    (66, 2),
    (None, 1),
)


# Parts of a row that the second kernel can add up.
MAX_SPLITS = 32
# (rows up to which it holds, tokens of a block). A row alone leaves most multiprocessors idle, and
# more than 16 blocks make no cluster: they leave their parts in memory for a second kernel.
CUTE_SPLITS: tuple[tuple[int, int], ...] = ((4, PAIR_TOKENS // 2),)


def split_size(num_rows: int, num_slots: int) -> int:
    """Tokens of a block where blocks leave parts of a row in memory; 0 where they do not."""
    for max_rows, tokens in CUTE_SPLITS:
        # Fewer blocks than the largest cluster has gain nothing.
        if num_rows <= max_rows and 16 < -(-num_slots // tokens) <= MAX_SPLITS:
            return tokens
    return 0


def cluster_size(num_rows: int, num_slots: int) -> int:
    """Blocks of the decode kernel that share a row of `num_slots` selected tokens."""
    for max_rows, size in CUTE_CLUSTERS:
        if max_rows is None or num_rows <= max_rows:
            while size > 1 and (size // 2) * PAIR_TOKENS >= num_slots:
                size //= 2
            return size
    raise AssertionError("the table's last part takes any number of rows")


@dataclass(frozen=True)
class TritonConfig:
    """Shape of one launch of the Triton kernel.

    Attributes:
        block_heads: heads of a program.
        block_tokens: selected tokens that a program looks at together.
        num_splits: programs that share a row's tokens.
        num_warps, num_stages: of a program.
    """

    block_heads: int
    block_tokens: int
    num_splits: int
    num_warps: int
    num_stages: int


# Selected tokens that a split takes at least, and programs a multiprocessor that splitting aims at.
_LEAST_TOKENS = 128
_PROGRAMS_PER_PROCESSOR = 2
_MAX_SPLITS = 32


def default_triton_config(
    num_rows: int,
    num_heads: int,
    num_slots: int,
    rank: int,
    element_bytes: int,
    num_multiprocessors: int,
) -> TritonConfig:
    """Split rows until the device is full; fp32 takes no tensor core here, so small blocks."""
    is_wide = rank > 128
    block_heads = 16
    while block_heads < min(num_heads, 32 if is_wide else 64) and element_bytes == 2:
        block_heads *= 2
    programs = num_rows * -(-num_heads // block_heads)
    num_splits = 1
    while (
        num_splits < _MAX_SPLITS
        and programs * num_splits < _PROGRAMS_PER_PROCESSOR * num_multiprocessors
        and num_slots > num_splits * _LEAST_TOKENS
    ):
        num_splits *= 2
    if element_bytes == 4:
        return TritonConfig(
            block_heads, 16, num_splits, num_warps=8 if is_wide else 4, num_stages=1
        )
    return TritonConfig(block_heads, 32, num_splits, num_warps=8 if is_wide else 4, num_stages=2)
