"""Tile sizes of the expert kernels.

Shape legend: C hidden size, I intermediate size of an expert.
"""

from __future__ import annotations

from dataclasses import dataclass

# Pairs of a token and an expert that one launch takes: 16 tokens of 8 experts, twice.
MAX_PAIRS = 256
# Up to so many pairs the CuTe kernels are the faster ones for experts alone: Triton's programs are
# too few to share the GPU out evenly (one, two, three tokens of 8 experts on an H200: 147 us to
# 170, 287 to 291, 425 to 412). Whole layers use them wherever they can run.
CUTE_PAIRS = 16
# Pairs and tokens that the CuTe kernels take: a shared expert's tokens are one product's rows.
MAX_CUTE_PAIRS = 128
MAX_CUTE_TOKENS = 8
# Experts that their kernels choose from, and columns of the router's.
MAX_CHOSEN_FROM = 512
MAX_LOGITS_COLUMNS = 8192
# Tokens of one program of the Triton kernels.
BLOCK_TOKENS = 16


@dataclass(frozen=True)
class KernelConfig:
    """Sizes of one Triton program.

    Attributes:
        block_n: out features; twice as many rows of weights where gates go with them.
        block_k: in features of a step.
        num_warps: warps of a program.
        num_stages: steps whose weights are in flight.
    """

    block_n: int
    block_k: int
    num_warps: int
    num_stages: int


def triton_config_for(num_columns: int, element_size: int, *, is_gated: bool) -> KernelConfig:
    """Tiles of 16 KiB of weights a step, less where there are fewer columns.

    Measured on an H200 over the release's experts: 98 % of the byte floor for six tokens; tiles of
    256 columns or eight warps lose 2 to 16 %.
    """
    block_n = 32 if is_gated else 64
    block_k = 256 // element_size
    while block_k > 32 and block_k >= 2 * num_columns:
        block_k //= 2
    return KernelConfig(block_n=block_n, block_k=block_k, num_warps=4, num_stages=4)


# Stages of one tile: the loop over them is unrolled.
MAX_STAGES = 63


@dataclass(frozen=True)
class StreamConfig:
    """How the CuTe kernels split an expert's weight.

    Attributes:
        tile: rows of weights of a block at a time: a multiple of 16 where gates go with them, else
            of 8.
        stage_columns: columns of a stage of the ring, a multiple of 32 * warps.
        num_warps: that multiply.
        num_loaders: warps that load, and make the plan: 4 or 8.
    """

    tile: int
    stage_columns: int = 512
    num_warps: int = 8
    num_loaders: int = 4

    def __post_init__(self) -> None:
        if (
            self.tile % 8
            or self.stage_columns % (32 * self.num_warps)
            or self.num_loaders not in (4, 8)
        ):
            raise ValueError(
                "moe_experts: a tile must be a multiple of 8 rows, a stage one of 32 columns a "
                f"warp, loaders 4 or 8, got {self}"
            )


def stream_config_for(num_columns: int, *, is_gated: bool) -> StreamConfig:
    """The split of a weight by its in features.

    Measured on an H200 over whole layers of the release: of gates, tiles of 16 rows in pieces of 2
    KiB are 2 % faster than 32 rows in pieces of 1 KiB; for the others neither changes anything.
    """
    if is_gated and num_columns >= 4096:
        return StreamConfig(tile=16, stage_columns=1024, num_loaders=8)
    stage_columns = 512 if num_columns >= 512 else 256
    return StreamConfig(tile=32 if is_gated else 48, stage_columns=stage_columns)


def draws_tiles(num_pairs: int) -> bool:
    """Whether blocks of a layer's kernels draw their tiles, which costs a launch for the sums.

    Blocks do not get equal shares of the memory's bandwidth; those that draw end together. That
    pays for as many pairs as one token of the release has, whosever they are (160 us a layer to
    163, on an H200). With more of them what is multiplied has to be loaded anew for each tile that
    is drawn: no faster, and slower where tokens share experts (six tokens: 192 to 176).
    """
    return num_pairs <= CUTE_PAIRS // 2
