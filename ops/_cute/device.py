"""Device functions that several CuTe kernels share: loads, block scans, the cluster's memory.

Imported by kernel files only: needs CuTe DSL. Shared memory is addressed by 32-bit byte addresses,
as PTX does, because CuTe refuses plain loads and stores on another block's shared memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.arch import inline_ptx

WARP = 32


def shared_address(pointer: cute.Pointer) -> Int32:
    """32-bit address of shared memory."""
    return Int32(pointer.toint())


def load_global_v4(address: Int64) -> tuple[Float32, Float32, Float32, Float32]:
    """Four adjacent floats of global memory, 16-byte aligned, read once: not kept in L1."""
    return inline_ptx(
        "ld.global.L1::no_allocate.v4.f32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Float32, Float32, Float32, Float32],
        read_only_args=[address],
    )


def load_global(address: Int64) -> Float32:
    """One float of global memory."""
    return inline_ptx(
        "ld.global.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def peer_address(address: Int32, rank: Int32) -> Int32:
    """Address of the same place in the shared memory of block `rank` of the cluster."""
    return inline_ptx(
        "mapa.shared::cluster.u32 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[address, rank],
    )


def store_global(address: Int64, value: Int32, condition: cutlass.Boolean) -> None:
    """Store one word in global memory where `condition` holds."""
    inline_ptx(
        "st.global.u32 [{$r0}], {$r1};", read_only_args=[address, value], predicate=condition
    )


def load_shared_v4(address: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Four adjacent words of this block's shared memory, 16-byte aligned."""
    return inline_ptx(
        "ld.shared.v4.u32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address],
    )


def send_v2(address: Int32, first: Int32, second: Int32, barrier: Int32) -> None:
    """Store two adjacent words in a peer's shared memory, 8-byte aligned.

    The peer's mbarrier, like `address` one of `peer_address`, counts the 8 bytes: who waits for it
    sees the words, without a fence or a barrier of the cluster.
    """
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.b32 "
        "[{$r0}], {{$r1}, {$r2}}, [{$r3}];",
        read_only_args=[address, first, second, barrier],
    )


def send_v4(address: Int32, words: Sequence[Int32], barrier: Int32) -> None:
    """Store four adjacent words in a peer's shared memory, 16-byte aligned; see `send_v2`."""
    inline_ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.b32 "
        "[{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}}, [{$r5}];",
        read_only_args=[address, *words, barrier],
    )


def load_shared_v2(address: Int32) -> tuple[Int32, Int32]:
    """Two adjacent words of this block's shared memory, 8-byte aligned."""
    return inline_ptx(
        "ld.shared.v2.u32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32, Int32],
        read_only_args=[address],
    )


def store_shared_v2(address: Int32, first: Int32, second: Int32) -> None:
    """Store two adjacent words in this block's shared memory, 8-byte aligned."""
    inline_ptx("st.shared.v2.u32 [{$r0}], {{$r1}, {$r2}};", read_only_args=[address, first, second])


def load_shared(address: Int32) -> Int32:
    """One word of this block's shared memory."""
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def store_shared(address: Int32, value: Int32) -> None:
    """Store one word in this block's shared memory."""
    inline_ptx("st.shared.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def store_shared_float(address: Int32, value: Float32) -> None:
    """Store one float in this block's shared memory."""
    inline_ptx("st.shared.f32 [{$r0}], {$r1};", read_only_args=[address, value])


@cute.jit
def clamp_index(value, limit) -> Int32:
    """A 32- or 64-bit index within 0 and `limit`, compared before it is cut to 32 bits."""
    return Int32(cutlass.max(cutlass.min(value, limit), 0))


@cute.jit
def warp_inclusive_scan(value: Int32) -> Int32:
    """Sum of the lanes up to and including this one."""
    lane = cute.arch.lane_idx()
    for step in cutlass.range_constexpr(5):
        below = cute.arch.shuffle_sync_up(value, 1 << step, mask_and_clamp=0)
        if lane >= (1 << step):
            value += below
    return value


@cute.jit
def block_exclusive_scan(
    values: list, totals: list, num_warps: cutlass.Constexpr
) -> tuple[list, list]:
    """(sums over the threads before this one, sums over the block) of each value; one barrier.

    Args:
        values: this thread's int32 summands; several scans cost little more than one.
        totals: for each value int32 [num_warps] of shared memory; to be used again only after
            another barrier.
        num_warps: warps of the block, at most 32.
    """
    lane = cute.arch.lane_idx()
    warp = cute.arch.warp_idx()
    inclusive = [warp_inclusive_scan(value) for value in values]
    for i in cutlass.range_constexpr(len(values)):
        if lane == WARP - 1:
            totals[i][warp] = inclusive[i]
    cute.arch.sync_threads()
    before = []
    total = []
    for i in cutlass.range_constexpr(len(values)):
        warp_total = Int32(0)
        if lane < num_warps:
            warp_total = totals[i][lane]
        earlier = warp_total
        if lane >= warp:
            earlier = Int32(0)
        before.append(cute.arch.warp_redux_sync(earlier, "add") + inclusive[i] - values[i])
        total.append(cute.arch.warp_redux_sync(warp_total, "add"))
    return before, total


def increment_shared(address: Int32, condition: cutlass.Boolean) -> None:
    """Add one to a word of shared memory where `condition` holds.

    The literal 1 matters: with it the hardware adds up the lanes that hit one address by itself,
    so a row of equal scores costs what any other costs.
    """
    inline_ptx(
        "red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;",
        read_only_args=[address],
        predicate=condition,
    )


def count_shared(address: Int32) -> None:
    """`increment_shared` without a condition, which would cost a branch."""
    inline_ptx("red.relaxed.cta.shared::cta.add.u32 [{$r0}], 1;", read_only_args=[address])


def count_if_at_least(count: Int32, score: Float32, lowest: Float32) -> Int32:
    """`count`, plus one if score >= lowest."""
    return inline_ptx(
        "{\n.reg .pred passes;\nsetp.ge.f32 passes, {$r1}, {$r2};\nmov.b32 {$w0}, {$r0};\n"
        "@passes add.s32 {$w0}, {$w0}, 1;\n}",
        write_only_types=[Int32],
        read_only_args=[count, score, lowest],
    )


def push_if_above(address: Int32, score: Float32, position: Int32, below: Float32) -> Int32:
    """Store (score, position) in shared memory if score > below; return where the next one goes."""
    return inline_ptx(
        "{\n.reg .pred passes;\nsetp.gt.f32 passes, {$r1}, {$r3};\nmov.b32 {$w0}, {$r0};\n"
        "@passes st.shared.b32 [{$r0}], {$r1};\n@passes st.shared.b32 [{$r0} + 4], {$r2};\n"
        "@passes add.s32 {$w0}, {$w0}, 8;\n}",
        write_only_types=[Int32],
        read_only_args=[address, score, position, below],
    )


def or_shared(address: Int32, bits: Int32) -> None:
    """Set bits of a word of shared memory."""
    inline_ptx("red.relaxed.cta.shared::cta.or.b32 [{$r0}], {$r1};", read_only_args=[address, bits])


def half_bits(low: Float32, high: Float32) -> Int32:
    """Two scores as float16, rounded to zero, in the halves of a word: the order is kept."""
    return inline_ptx(
        "cvt.rz.f16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def float_of_half(bits: Int32) -> Float32:
    """The float16 in the low half of a word."""
    return inline_ptx(
        "{ .reg .b16 low, high; mov.b32 {low, high}, {$r0}; cvt.f32.f16 {$w0}, low; }",
        write_only_types=[Float32],
        read_only_args=[bits],
    )


@cute.jit
def score_of_key(key: Uint32) -> Float32:
    """The score that has this order key, which is not 0."""
    bits = key.bitcast(Int32)
    return (bits ^ (((bits ^ Int32(-1)) >> 31) | Int32(-(2**31)))).bitcast(Float32)


@cute.jit
def inverse(total: Float32) -> Float32:
    """1 / total, and 0 of 0: of a sum to which nothing was added."""
    quotient = Float32(0.0)
    if total != 0.0:
        quotient = Float32(1.0) / total
    return quotient


def exp2(value: Float32) -> Float32:
    """2 to the power of `value`, to about 2 units in the last place."""
    return inline_ptx(
        "ex2.approx.ftz.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )


def quad_sum(value: Float32) -> Float32:
    """Sum over four adjacent lanes, which share a row of a tensor core's result."""
    value = value + cute.arch.shuffle_sync_bfly(value, 1)
    return value + cute.arch.shuffle_sync_bfly(value, 2)
