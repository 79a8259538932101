"""Measured choices for bf16 linears: `python -m glm_compile.ops.bf16_linear.tune --write`.

The linears of the release over 1, 2, 4 and 8 devices, on one NVIDIA H200, 2026-11-30. Other
weights are split by analogy (`config.default_stream`).

MEASURED: (N, K) -> the fields of `config.StreamConfig`. MANY_ROWS: the same for more than 8 rows,
where another split is faster then. LIBRARY: (N, K) -> the M (rounded up to a power of two) at which
torch's own product is the faster one.
"""

from __future__ import annotations

MEASURED: dict[tuple[int, int], tuple[int, ...]] = {
    (160, 6144): (16, 256, 8, 4, 8, 1),
    (512, 6144): (24, 512, 8, 4, 4, 1, False),
    (1024, 6144): (40, 256, 8, 4, 4, 1, False),
    (2048, 2048): (16, 512, 8, 2, 1, 2, True),
    (2048, 6144): (32, 512, 8, 4, 2, 1, True),
    (2624, 6144): (40, 512, 8, 4, 2, 1, False, False, False),
    (2784, 6144): (48, 512, 8, 4, 2, 1, True, False, True),
    (3072, 6144): (48, 512, 8, 4, 2, 1, False),
    (4096, 2048): (24, 512, 8, 4, 1, 1),
    (4096, 6144): (32, 512, 8, 4, 1, 1, False),
    (6144, 256): (16, 256, 8, 2, 1, 2),
    (6144, 512): (32, 256, 8, 4, 1, 1),
    (6144, 1024): (16, 512, 8, 2, 1, 2),
    (6144, 1536): (48, 512, 8, 4, 1, 1),
    (6144, 2048): (48, 512, 8, 4, 1, 1),
    (6144, 3072): (16, 1024, 8, 2, 1, 1, False),
    (6144, 4096): (48, 512, 8, 4, 1, 1, False),
    (6144, 6144): (24, 512, 8, 4, 1, 1, False),
    (6144, 8192): (48, 512, 8, 4, 1, 1, False),
    (6144, 12288): (48, 512, 8, 4, 1, 1),
    (6144, 16384): (48, 512, 8, 4, 1, 1),
    (8192, 2048): (32, 512, 8, 4, 1, 1),
    (12288, 6144): (32, 512, 8, 4, 1, 1, False),
    (16384, 2048): (16, 1024, 8, 2, 1, 1),
    (19360, 6144): (24, 512, 8, 4, 1, 1, False, True, False),
    (20480, 2048): (16, 1024, 8, 2, 1, 1),
    (24576, 6144): (24, 512, 8, 4, 1, 1, False),
    (38720, 6144): (24, 512, 8, 4, 1, 1, False, True, False),
    (77440, 6144): (24, 512, 8, 4, 1, 1, False, True, False),
    (154880, 6144): (24, 512, 8, 4, 1, 1, False, True, False),
}

MANY_ROWS: dict[tuple[int, int], tuple[int, ...]] = {
    (2624, 6144): (48, 512, 8, 4, 2, 1, True, False, True),
    (4096, 6144): (64, 256, 8, 4, 2, 1, False),
    (6144, 6144): (96, 256, 8, 4, 2, 1, False),
    (12288, 6144): (48, 512, 8, 4, 1, 1, False),
    (19360, 6144): (48, 256, 8, 4, 1, 1, False, True, False),
    (24576, 6144): (48, 512, 8, 4, 1, 1, False),
    (38720, 6144): (48, 256, 8, 4, 1, 1, False, True, False),
    (77440, 6144): (48, 256, 8, 4, 1, 1, False, True, False),
    (154880, 6144): (48, 256, 8, 4, 1, 1, False, True, False),
}

LIBRARY: dict[tuple[int, int], tuple[int, ...]] = {}
