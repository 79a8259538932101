"""Handovers between two warps in shared memory, in a few lines each: what a race checker follows.

All are right: the consumer's reads come after the producer's writes, by the rules of PTX. Needs
CuTe DSL.
"""

from __future__ import annotations

from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import WARP

# How the consumer learns that all is written: a barrier of the block; an mbarrier that every lane
# arrives at; one that a lane arrives at for its warp; a named barrier that the producer does not
# wait at.
WAYS = ("block", "lanes", "lane", "arrive")


class HandoverKernel:
    """One way; `__call__` is its launcher."""

    def __init__(self, way: str) -> None:
        self.way = way

    @cute.jit
    def __call__(self, output: cute.Tensor, stream: Any) -> None:
        self.kernel(output).launch(grid=(1, 1, 1), block=(2 * WARP, 1, 1), stream=stream)

    @cute.kernel
    def kernel(self, output: cute.Tensor) -> None:
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        values = allocator.allocate_tensor(Int32, cute.make_layout(WARP), 16)
        barrier = allocator.allocate_tensor(Int64, cute.make_layout(1), 16).iterator
        if cutlass.const_expr(self.way in ("lanes", "lane")):
            if tid == 0:
                cute.arch.mbarrier_init(barrier, WARP if self.way == "lanes" else 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.sync_threads()
        if warp == 0:
            values[lane] = lane * lane
            if cutlass.const_expr(self.way == "lanes"):
                cute.arch.mbarrier_arrive(barrier)
            if cutlass.const_expr(self.way == "lane"):
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(barrier)
            if cutlass.const_expr(self.way == "arrive"):
                cute.arch.barrier_arrive(barrier_id=1, number_of_threads=2 * WARP)
        elif cutlass.const_expr(self.way in ("lanes", "lane")):
            cute.arch.mbarrier_wait(barrier, 0)
        elif cutlass.const_expr(self.way == "arrive"):
            cute.arch.barrier(barrier_id=1, number_of_threads=2 * WARP)
        if cutlass.const_expr(self.way == "block"):
            cute.arch.sync_threads()
        if warp == 1:
            output[lane] = values[WARP - 1 - lane]


def compile_way(way: str, arch: str, options: str = "") -> Any:
    """Compile one; see `compile_kernel`."""
    output = make_fake_tensor(Int32, (WARP,), (1,), assumed_align=16)
    return compile_kernel(HandoverKernel(way), output, arch=arch, options=options)


def hand_over(way: str) -> None:
    """Run one on the GPU, and check what arrived."""
    output = torch.zeros(WARP, dtype=torch.int32, device="cuda")
    compile_way(way, arch_of(output.device))(output)
    assert output.tolist() == [(WARP - 1 - lane) ** 2 for lane in range(WARP)]
