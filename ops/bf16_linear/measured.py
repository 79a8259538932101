"""Measured choices for bf16 linears: `python -m glm_compile.ops.bf16_linear.tune --write`.

So far the shapes of an indexer layer's prologue, from a sweep of the same kind on one H200 on
2026-11-30. The CuTe kernel runs for the shapes that are here; for others only where it is forced.

MEASURED: (N, K) -> the fields of `config.StreamConfig`. LIBRARY: (N, K) -> the M (rounded up to a
power of two) at which torch's own product is the faster one.
"""

from __future__ import annotations

MEASURED: dict[tuple[int, int], tuple[int, ...]] = {
    (2048, 2048): (16, 512, 8, 2, 1, 2),
    (2624, 6144): (24, 1024, 8, 4, 1, 1),
    (2784, 6144): (24, 1024, 8, 4, 1, 1),
    (20480, 2048): (16, 1024, 8, 2, 1, 1),
}

LIBRARY: dict[tuple[int, int], tuple[int, ...]] = {}
