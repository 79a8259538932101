"""How the kernels of the absorbed products split the heads' matrices.

Shape legend: R rows, H heads, N nope dim of a query, L rank of the latent, V value dim.
"""

from __future__ import annotations

# More rows than this are a job for the library's batched product: both products of a layer, without
# a rotation, take 9.8 us at 16 rows (library 16.4) and 18.2 at 24 (17.0), on one NVIDIA H200 on
# 2026-11-30, by the method of tests/benchmarks/test_mla_absorb_benchmark.py.
MAX_FEW_ROWS = 16
# Columns of a 128-byte line of bf16: the width of what the copy engine brings in.
LINE = 64
# Rows of W_UK, or lines of W_UV, of one warp.
QUERY_ROWS = 32
MAX_WARPS = 16


# The choices below are from one NVIDIA H200 on 2026-11-30, by the same method: 6 rows, both
# products of a layer in turn, weights cold, microseconds; tiles of (128, 64) / (64, 32), dependents
# let in late and early: 64 heads 9.8, 8.6 / 10.9, 9.2; 32 heads 5.9, 6.1 / 6.3, 6.8; 16 heads 4.3,
# 5.0 / 4.2, 5.0; 8 heads 3.6, 3.9 / 3.4, 3.6; torch's batched products 12.6, 9.1, 7.8, 7.1.

# Tried on the same card: to bring W_UV, or columns of o_proj's weight, into the L2 cache from here
# while attention gathers. A layer takes 0.5 to 3 us more.


def query_tile(num_heads: int, rank: int) -> int:
    """Out features of a block of `absorb_query`: a multiple of 64."""
    return 128 if num_heads >= 32 and rank % 128 == 0 else LINE


def value_tile(num_heads: int, num_values: int) -> int:
    """Out features of a block of `project_values`: a multiple of 16."""
    tile = 64 if num_heads >= 32 else 32
    while num_values % tile:
        tile //= 2
    return tile


def has_early_dependents(num_heads: int) -> bool:
    """Whether dependents are let in before the kernels ahead have ended."""
    return num_heads >= 64
