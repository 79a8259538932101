"""What the parts of the top-k kernel share: a block's shared memory, and the entries of a slice."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from glm_compile.ops._cute.device import load_shared_v2, shared_address

# Keys a thread loads at once.
VECTOR = 4
# The key of the lowest finite score.
LOWEST = 0x00800000
# The key of zero, of either sign.
ZERO = 0x80000000
# The end of a threshold at which all equal keys are kept, wherever they are.
ANYWHERE = 2**31 - 1


@dataclass(frozen=True)
class Shared:
    """Shared memory of a block. Words are int32; a listed candidate is a (key, position) pair.

    Attributes:
        histogram: [2 * bins], of this turn and the next; one in a block of its own.
        parts: [2 * C * bins / 2], the histograms of the cluster's blocks, of this turn and the
            last, two counts in a word.
        barriers: int64 [2], mbarriers that count what peers send in this turn and the last.
        totals: eight of [32], for scans.
        state: [8], see the names of its words.
        listed: [2 * 32], this block's candidates.
        headers: [2 * C], of each block of the cluster the number of its candidates and of its keys
            above all candidates.
        gathered: [2 * 32 * C], the candidates of each block of the cluster.
        bitmap: the selected positions of the slice; None where threads write from registers.
        buffer: [2 * buffer_keys], entries: (key or score, position) pairs; None likewise.
    """

    histogram: cute.Tensor
    parts: Any
    barriers: Any
    totals: list
    state: cute.Tensor
    listed: cute.Tensor
    headers: Any
    gathered: Any
    bitmap: Any
    buffer: Any


# Words of `state`.
BIN, ABOVE, COUNT, TOTAL, LISTED, T_KEY, T_POSITION, BUFFERED = range(8)


class RegisterEntries:
    """Keys that this thread holds, in tiles of VECTOR adjacent ones; positions start at `first`."""

    def __init__(self, keys: list, first: Int32, tile_stride: int | Int32) -> None:
        self.keys, self.first, self.tile_stride = keys, first, tile_stride

    def position(self, index: int) -> Int32:
        tile, element = divmod(index, VECTOR)
        return self.first + (tile * self.tile_stride + element)

    def fold(self, body: Any, carry: Any) -> Any:
        """`carry = body(key, position, carry)` over this thread's keys."""
        for index, key in enumerate(self.keys):
            carry = body(key, self.position(index), carry)
        return carry


class BufferEntries:
    """The buffer's entries, dealt out to the threads: (key or score, position) pairs."""

    def __init__(self, shared: Shared, tid: Int32, num_threads: int, *, holds_keys: bool) -> None:
        self.buffer, self.count = shared.buffer, shared.state[BUFFERED]
        self.tid, self.num_threads, self.holds_keys = tid, num_threads, holds_keys

    @cute.jit
    def fold(self, body: Any, carry: Any) -> Any:
        """`carry = body(key, position, carry)` over this thread's keys."""
        address = shared_address(self.buffer.iterator)
        slot = self.tid
        while slot < self.count:
            bits, position = load_shared_v2(address + slot * 8)
            if cutlass.const_expr(self.holds_keys):
                carry = body(bits.bitcast(Uint32), position, carry)
            else:
                carry = body(key_of(bits.bitcast(Float32)), position, carry)
            slot += self.num_threads
        return carry


@cute.jit
def key_of(score: Float32) -> Uint32:
    """Unsigned key in the order of the scores, of one that is no NaN; -inf gives LOWEST - 1."""
    bits = (score + Float32(0.0)).bitcast(Int32)
    return (bits ^ ((bits >> 31) | Int32(-(2**31)))).bitcast(Uint32)


@cute.jit
def add_to_state(shared: Shared, word: cutlass.Constexpr, value: Int32) -> Int32:
    """Add to a word of the state; return what it was."""
    return cute.arch.atomic_add(shared.state.iterator + word, value, sem="relaxed", scope="cta")


@cute.jit
def is_selected(key: Uint32, position: Int32, t_key: Uint32, t_position: Int32) -> Boolean:
    """Whether (key, position) is at or before the threshold."""
    return key > t_key or (key == t_key and position <= t_position)


@cute.jit
def rank_value(key: Uint32, position: Int32, by_position: cutlass.Constexpr) -> Uint32:
    """What orders the candidates: the key, or among equal keys the position, lower first."""
    value = key
    if cutlass.const_expr(by_position):
        value = (position ^ Int32(-1)).bitcast(Uint32)
    return value
