"""Tile sizes of the bf16 linear kernels, and where the library is the faster one.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from glm_compile.ops.bf16_linear.measured import LIBRARY, MANY_ROWS, MEASURED

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


# More rows than this may ask for another split: x is then a good part of what is read.
FEW_ROWS = 8
# Stages of one block's part of K: the loop over them is unrolled.
MAX_STAGES = 63


@dataclass(frozen=True)
class StreamConfig:
    """How the CuTe kernel splits a weight; the order in which products are added depends on it.

    Attributes:
        tile: out features of a block at a time, a multiple of 8.
        stage_columns: columns of a stage of the ring, a multiple of 32 * warps.
        num_warps: that multiply.
        num_loaders: warps that load.
        cluster: blocks that share out K; the number of stages is a multiple of it.
        blocks_per_processor: 2 lets the next kernel's blocks fill their rings while this one's
            still multiply.
        late: the next kernel's blocks are let in once all of this one's weights have been asked
            for, so that theirs do not delay these; else at once.
        is_dynamic: blocks draw their tiles, but for the first ones, so that who gets more of the
            memory's bandwidth does more of them; no cluster then.
        is_turned: each tile begins with another stage, so that blocks do not all ask for the same
            part of x at a time; K is a multiple of the stage's columns then. The order of sums
            depends on it.
    """

    tile: int
    stage_columns: int = 1024
    num_warps: int = 8
    num_loaders: int = 2
    cluster: int = 1
    blocks_per_processor: int = 1
    late: bool = False
    is_dynamic: bool = False
    is_turned: bool = False

    def __post_init__(self) -> None:
        if self.is_dynamic and self.cluster > 1:
            raise ValueError(
                f"bf16_linear: blocks of a cluster cannot draw their tiles, got {self}"
            )
        if self.tile % 8 or self.stage_columns % (32 * self.num_warps):
            raise ValueError(
                f"bf16_linear: a tile must be a multiple of 8 rows and a stage one of 32 columns "
                f"a warp, got {self}"
            )


# Registers that a thread may spend on x and on sums: what leaves room for the rest.
MAX_HELD_REGISTERS = 112


def held_registers(num_columns: int, config: StreamConfig, row_blocks: int) -> int:
    """Registers of a thread for x, if all of it is held, and for sums.

    Args:
        row_blocks: of 8 rows of x.
    """
    stages = -(-num_columns // config.stage_columns) // config.cluster
    steps = stages * config.stage_columns // (32 * config.num_warps)
    return 4 * row_blocks * (steps + -(-config.tile // 16))


def norm_config_for(
    num_features: int, num_columns: int, num_rows: int = 1, *, has_swiglu: bool = False
) -> StreamConfig | None:
    """How to split a weight whose x is normed: blocks hold their columns of x in registers.

    None where that is more than these can hold.

    Args:
        num_rows: that a block takes, up to 16.
        has_swiglu: no cluster then.
    """
    config = replace(stream_config_for(num_features, num_columns), is_turned=False)
    if config.cluster > (1 if has_swiglu else 2):
        # As many blocks without a cluster.
        tile = -(-config.tile // (8 * config.cluster)) * 8
        config = replace(config, cluster=1, tile=tile)
    held = held_registers(num_columns, config, 1 if num_rows <= FEW_ROWS else 2)
    return config if held <= MAX_HELD_REGISTERS else None


# Measured with itself as the next kernel, this one does better with `late`. In a model the next is
# q_b's product, which starts to read that much sooner: the indexer of a layer (6 rows, 128K keys,
# one NVIDIA H200, 2026-11-30, tests/benchmarks/test_indexer_benchmark.py) takes 45.4 us for 45.75.
_LETS_IN_AT_ONCE = frozenset({(2784, 6144)})


@functools.cache
def stream_config_for(num_features: int, num_columns: int, num_rows: int = 1) -> StreamConfig:
    """The measured choice for this weight and at most so many rows, or an analytic one.

    Weights whose next kernel in the model is known to gain by it let that in at once.

    Rows that must not depend on their number take that of one row.
    """
    shape = num_features, num_columns
    measured = MEASURED.get(shape)
    if num_rows > FEW_ROWS:
        measured = MANY_ROWS.get(shape, measured)
    if not measured:
        return default_stream(num_features, num_columns)
    config = StreamConfig(*measured)
    return replace(config, late=False) if shape in _LETS_IN_AT_ONCE else config


def is_measured(num_features: int, num_columns: int) -> bool:
    """Whether the CuTe kernel has been measured against the library's on this weight."""
    return (num_features, num_columns) in MEASURED


# Of weights that nobody measured, narrower ones are soon read, whatever reads them, and every K is
# a kernel to be compiled. `tune --keep NxK` compares any other with the library: on an H200
# 32x6144, 128x6144, 576x6144, 1024x2048, 5120x5120 and 8192x6144 took 0.17 to 1.02 of its time.
_LEAST_COLUMNS = 512
_MOST_FEATURES = 24_576


def is_for_stream(num_features: int, num_columns: int) -> bool:
    """Whether few rows on this weight are for the CuTe kernel: measured weights and wide ones."""
    return num_columns >= _LEAST_COLUMNS or is_measured(num_features, num_columns)


def library_wins(num_features: int, num_columns: int, num_rows: int) -> bool:
    """Whether the library was the faster one for this weight and at most so many rows.

    It gets weights that nobody measured, too, if they are taller than those by which others are
    judged: there it comes close to reading at full speed itself.
    """
    if num_features > _MOST_FEATURES and not is_measured(num_features, num_columns):
        return True
    bucket = 1 << max(0, num_rows - 1).bit_length()
    return bucket in LIBRARY.get((num_features, num_columns), ())


def default_stream(num_features: int, num_columns: int) -> StreamConfig:
    """By analogy to what was measured: one wave of blocks, with K shared out where N is small.

    Tiles of a cluster are the taller ones, so that x is read by fewer blocks.
    """
    stage_columns = next((c for c in (512, 256) if num_columns % c == 0), 512)
    num_stages = -(-num_columns // stage_columns)
    # Not all multiprocessors can be in clusters of four and eight.
    for cluster, num_clusters, tallest, least_columns in (
        (8, 14, 16, 2048),
        (4, 30, 24, 2048),
        (2, 66, 48, 4096),
    ):
        tile = _tile_of_one_wave(num_features, num_clusters)
        if tile <= tallest and num_columns >= least_columns and num_stages % cluster == 0:
            return StreamConfig(tile, stage_columns, num_loaders=4, cluster=cluster)
    tile = max(16, _tile_of_one_wave(num_features, _NUM_PROCESSORS))
    if tile > 48:
        tile = 32 if num_columns > 4096 else 16
    return StreamConfig(tile, stage_columns, num_loaders=4)


def _tile_of_one_wave(num_features: int, num_blocks: int) -> int:
    return -(-num_features // (num_blocks * 8)) * 8
