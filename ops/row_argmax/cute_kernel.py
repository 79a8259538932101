"""Argmax of few long rows in CuTe DSL for sm_90a: a cluster of blocks a row, one launch.

A thread keeps the best of its values, as an integer whose order is the values' (-0.0 = 0.0, NaN
above all), and its position; the smallest position with the largest integer wins, in the warp, the
block and then in the first block of the cluster, which the others send theirs. Nothing depends on
timing.

Shape legend: M rows, V values of a row.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import (
    WARP,
    load_shared_v2,
    peer_address,
    send_v2,
    shared_address,
    store_shared_v2,
)

_CLUSTER = 16
_NUM_THREADS = 256
_NUM_WARPS = _NUM_THREADS // WARP
# Loads of 16 bytes that a thread has under way.
_LOADS = 5
_LEAST = -0x80000000
_FARTHEST = 0x7FFFFFFF

_CUTE_TYPES = {torch.bfloat16: BFloat16, torch.float32: Float32}


class RowArgmaxKernel:
    """The kernel for one dtype; `__call__` is its launcher.

    Args:
        has_copy: whether the positions go to a second place as well.
    """

    def __init__(self, dtype: torch.dtype, has_copy: bool) -> None:
        self.dtype = dtype
        self.has_copy = has_copy
        self.width = 16 // dtype.itemsize

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        out: cute.Tensor,
        copy: cute.Tensor | None,
        stream: Any,
    ) -> None:
        self.kernel(x, out, copy).launch(
            grid=(x.shape[0] * _CLUSTER, 1, 1),
            block=(_NUM_THREADS, 1, 1),
            cluster=(_CLUSTER, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, x: cute.Tensor, out: cute.Tensor, copy: Any) -> None:
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block // _CLUSTER
        rank = block % _CLUSTER
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        by_warp = allocator.allocate_tensor(Int32, cute.make_layout(_NUM_WARPS * 2), 16)
        by_block = allocator.allocate_tensor(Int32, cute.make_layout(_CLUSTER * 2), 16)
        barrier = allocator.allocate_tensor(Int64, cute.make_layout(1), 8).iterator
        warps_address = shared_address(by_warp.iterator)
        blocks_address = shared_address(by_block.iterator)
        if tid == 0:
            cute.arch.mbarrier_init(barrier, 1)
            cute.arch.mbarrier_init_fence()
            if rank == 0:
                cute.arch.mbarrier_arrive_and_expect_tx(barrier, _CLUSTER * 8)
        cute.arch.cluster_arrive()

        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        num_vectors = x.shape[1] // self.width
        share = (num_vectors + _CLUSTER - 1) // _CLUSTER
        start = rank * share
        stop = cutlass.min(start + share, num_vectors)
        address = x.iterator.toint() + self.dtype.itemsize * Int64(row) * Int64(x.stride[0])
        best = Int32(_LEAST)
        at = Int32(_FARTHEST)
        for first in cutlass.range(start + tid, stop, _NUM_THREADS * _LOADS, unroll=1):
            # Behind the end the last ones again: a value seen twice changes nothing.
            vectors = [cutlass.min(first + i * _NUM_THREADS, stop - 1) for i in range(_LOADS)]
            loaded = [_load_global_v4(address + Int64(vector) * 16) for vector in vectors]
            for i in cutlass.range_constexpr(_LOADS):
                for word in cutlass.range_constexpr(4):
                    position = vectors[i] * self.width + word * (self.width // 4)
                    if cutlass.const_expr(self.dtype == torch.bfloat16):
                        low, high = loaded[i][word] << 16, loaded[i][word] & -0x10000
                        best, at = _better(best, at, _ordered(low), position)
                        best, at = _better(best, at, _ordered(high), position + 1)
                    else:
                        best, at = _better(best, at, _ordered(loaded[i][word]), position)
        best, at = _best_of_warp(best, at)
        if lane == 0:
            store_shared_v2(warps_address + warp * 8, best, at)
        # The first block's barrier is ready when the cluster has met.
        cute.arch.cluster_wait()
        cute.arch.sync_threads()
        if warp == 0:
            best, at = self._best_of(warps_address, _NUM_WARPS, lane)
            if lane == 0:
                send_v2(
                    peer_address(blocks_address + rank * 8, Int32(0)),
                    best,
                    at,
                    peer_address(Int32(barrier.toint()), Int32(0)),
                )
            if rank == 0:
                cute.arch.mbarrier_wait(barrier, 0)
                best, at = self._best_of(blocks_address, _CLUSTER, lane)
                if lane == 0:
                    out[row] = Int64(at)
                    if cutlass.const_expr(self.has_copy):
                        copy[row] = Int64(at)

    @cute.jit
    def _best_of(self, address, count: cutlass.Constexpr, lane):
        """Best of that many pairs in shared memory; all lanes get it."""
        best, at = load_shared_v2(address + lane % count * 8)
        return _best_of_warp(best, at)


@cute.jit
def _best_of_warp(best, at):
    top = cute.arch.warp_redux_sync(best, "max")
    if best != top:
        at = Int32(_FARTHEST)
    return top, cute.arch.warp_redux_sync(at, "min")


def _load_global_v4(address: Int64) -> tuple[Int32, Int32, Int32, Int32]:
    return inline_ptx(
        "ld.global.L1::no_allocate.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address],
    )


def _ordered(bits: Int32) -> Int32:
    """An integer that is larger for a larger float."""
    return inline_ptx(
        "{ .reg .pred is_nan; .reg .f32 value; .reg .b32 sign;\n"
        "mov.b32 value, {$r0}; add.rn.f32 value, value, 0f00000000;\n"
        "setp.nan.f32 is_nan, value, value; mov.b32 {$w0}, value;\n"
        "shr.s32 sign, {$w0}, 31; and.b32 sign, sign, 0x7fffffff; xor.b32 {$w0}, {$w0}, sign;\n"
        "selp.b32 {$w0}, 0x7fffffff, {$w0}, is_nan; }",
        write_only_types=[Int32],
        read_only_args=[bits],
    )


def _better(best: Int32, at: Int32, value: Int32, position: Int32) -> tuple[Int32, Int32]:
    """The larger of two values with its position: the first one's if they are equal."""
    return inline_ptx(
        "{ .reg .pred is_better; setp.gt.s32 is_better, {$r2}, {$r0};\n"
        "selp.b32 {$w0}, {$r2}, {$r0}, is_better; selp.b32 {$w1}, {$r3}, {$r1}, is_better; }",
        write_only_types=[Int32, Int32],
        read_only_args=[best, at, value, position],
    )


def compile_variant(dtype: torch.dtype, has_copy: bool, arch: str, options: str = "") -> Any:
    """Compile for one dtype; see `compile_kernel`."""
    width = 16 // dtype.itemsize
    x = make_fake_tensor(
        _CUTE_TYPES[dtype],
        (cute.sym_int32(), cute.sym_int32(divisibility=width)),
        (cute.sym_int64(divisibility=width), 1),
        assumed_align=16,
    )
    rows = [
        make_fake_tensor(Int64, (cute.sym_int32(),), (stride,), assumed_align=8)
        for stride in (1, cute.sym_int64())
    ]
    return compile_kernel(
        RowArgmaxKernel(dtype, has_copy),
        x,
        rows[0],
        rows[1] if has_copy else None,
        arch=arch,
        options=options,
    )


@functools.cache
def _compiled(dtype: torch.dtype, has_copy: bool, arch: str) -> Any:
    return compile_variant(dtype, has_copy, arch)


def row_argmax_cute(x_MV: torch.Tensor, copy_M: torch.Tensor | None) -> torch.Tensor:
    """Launch the kernel: int64 [M], which `copy_M` gets too.

    Args:
        x_MV: bf16 or fp32, rows contiguous and by multiples of 16 bytes apart and long.
    """
    out_M = torch.empty(x_MV.shape[0], dtype=torch.int64, device=x_MV.device)
    _compiled(x_MV.dtype, copy_M is not None, arch_of(x_MV.device))(x_MV, out_M, copy_M)
    return out_M
