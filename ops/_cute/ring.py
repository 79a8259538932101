"""Products of kernels whose weights stream through a ring of stages in shared memory.

A stage holds a piece of each row of a tile of weights. Warps share out its columns between them,
multiply by the tensor cores (16 rows of weights by 8 rows of x) and put their sums where all can
read them. The tensor cores do not care which columns they multiply as long as both sides agree:
a lane takes eight adjacent columns of a row, so weights come out of shared memory 16 bytes at a
time.

Imported by kernel files only: needs CuTe DSL.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32

from glm_compile.ops._cute.device import WARP, load_shared_v4
from glm_compile.ops._cute.stream import mma_bf16

# Columns of one step of a warp: 8 of each of the 4 lanes that share a row.
STEP = 32
# Rows of x of one product.
ROWS = 8
# Shared memory of a multiprocessor, less what the system keeps for each block.
SHARED_BYTES = 226 * 1024
# Named barrier of the warps that multiply.
MULTIPLYING = 1


class RingProduct:
    """Layout of the ring and of the sums, and the products of a tile.

    Args:
        variant: has `num_columns`, `tile` (rows of weights), `stage_columns`, `num_warps`,
            `num_loaders` and `num_steps` (stages of a tile).
        row_blocks: of 8 rows of x.
    """

    v: Any

    def __init__(self, variant: Any, row_blocks: int) -> None:
        v = variant
        self.v = variant
        self.row_blocks = row_blocks
        self.num_rows = row_blocks * ROWS
        self.num_threads = (v.num_warps + v.num_loaders) * WARP
        self.num_consumers = v.num_warps * WARP
        # Half a 128-byte line is left free so that adjacent rows use the other half of the banks.
        self.pitch = v.stage_columns * 2 + 64
        self.stage_bytes = v.tile * self.pitch
        self.warp_columns = v.stage_columns // v.num_warps
        self.steps_per_stage = self.warp_columns // STEP
        self.tile_blocks = -(-v.tile // 16)
        # 4 more than a multiple of 16: stores of a warp's sums meet no bank twice.
        self.sum_pitch = self.tile_blocks * 16 + 4
        self.num_sums = v.num_warps * self.num_rows * self.sum_pitch

    def _is_cut(self, step: int) -> bool:
        """Whether columns of a step may lie beyond the last."""
        v = self.v
        is_last = step // self.steps_per_stage == v.num_steps - 1
        return is_last and v.num_columns % v.stage_columns != 0

    def _column(self, step: int) -> int:
        stage, i = divmod(step, self.steps_per_stage)
        return stage * self.v.stage_columns + i * STEP

    def _zero_sums(self) -> list:
        """Of a tile: [blocks of 16 rows of weights][blocks of 8 rows of x][4]."""
        return [
            [[Float32(0.0) for _ in range(4)] for _ in range(self.row_blocks)]
            for _ in range(self.tile_blocks)
        ]

    def _multiply_step(self, total, x_part, address, first_column, step, index) -> None:
        """Add the products of one step: words of x, 4 for each block of 8 rows, and the ring's.

        `address` is that of this lane's columns in the stage; `index` counts the steps of a stage,
        `step` those of a tile, of which `first_column` is the lane's first.
        """
        v = self.v
        zero = Int32(0)
        for block in range(self.tile_blocks):
            at = address + (block * 16 * self.pitch + index * STEP * 2)
            upper = load_shared_v4(at)
            lower = (zero,) * 4
            if block * 16 + 8 < v.tile:
                lower = load_shared_v4(at + 8 * self.pitch)
            if self._is_cut(step):
                # What lies in the ring beyond the columns is left over, and may be NaN.
                keep = zero - Int32(first_column + self._column(step) < v.num_columns)
                upper = tuple(word & keep for word in upper)
                lower = tuple(word & keep for word in lower)
            for n in range(self.row_blocks):
                for half in (0, 2):
                    a = (upper[half], lower[half], upper[half + 1], lower[half + 1])
                    total[block][n] = mma_bf16(a, x_part[n][half : half + 2], total[block][n])

    @cute.jit
    def _sum_up(self, total, sums, warp, lane) -> None:
        """Put this warp's sums where all can read them."""
        # The sums of the tile before have been read.
        cute.arch.barrier(barrier_id=MULTIPLYING, number_of_threads=self.num_consumers)
        group = lane // 4
        for block in cutlass.range_constexpr(self.tile_blocks):
            for n in cutlass.range_constexpr(self.row_blocks):
                for i in cutlass.range_constexpr(4):
                    row = n * ROWS + (lane % 4) * 2 + i % 2
                    feature = block * 16 + group + (i // 2) * 8
                    at = (warp * self.num_rows + row) * self.sum_pitch + feature
                    sums[at] = total[block][n][i]
        cute.arch.barrier(barrier_id=MULTIPLYING, number_of_threads=self.num_consumers)
