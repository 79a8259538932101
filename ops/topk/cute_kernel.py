"""Top-k in CuTe DSL for sm_90a: one launch, a row's keys spread over the blocks of one cluster.

Shape legend: R rows, T keys of a row, K selected, C blocks of a cluster.

All variants share one method. A score becomes an unsigned key in its order. A histogram finds the
interval of keys that holds the k-th best, and is refined until at most 32 candidates are left. They
are ranked by (key, lower position first), which gives the threshold: the last selected key and its
position. What is at or before it is written in the order of positions, at places that a prefix sum
gives. Nothing depends on timing, so results are bitwise equal over repeats, and equal to the
reference's. Blocks of a cluster exchange data by writing into each other's shared memory.

Where the keys come from differs:

- `registers`: a block holds its slice of the row in registers; for short rows and for long rows
  over a cluster.
- `filtered`: a slice too long for that is streamed once, and only keys above a bound stay, in
  shared memory. The bound is estimated from a sample, it decides about speed alone: when too much
  or too little passes it, the slice is streamed again with a bound that rises as the best k become
  known.
- `streamed`: one block a row with the rising bound at once.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Boolean, Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import (
    WARP,
    block_exclusive_scan,
    clamp_index,
    float_of_half,
    half_bits,
    increment_shared,
    load_global,
    load_global_v4,
    load_shared_v2,
    load_shared_v4,
    or_shared,
    order_key,
    peer_address,
    score_of_key,
    send_v2,
    send_v4,
    shared_address,
    store_global,
    store_shared_v2,
    warp_inclusive_scan,
)
from glm_compile.ops.topk.config import Variant, default_variant

# Keys a thread loads at once.
_VECTOR = 4
# The key of the lowest finite score.
_LOWEST = 0x00800000


@dataclass(frozen=True)
class _Shared:
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
        bitmap: the selected positions of the slice; None where threads hold their keys.
        buffer: [2 * buffer_keys], what passed the bound; None likewise.
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
_BIN, _ABOVE, _COUNT, _TOTAL, _LISTED, _T_KEY, _T_POSITION, _BUFFERED = range(8)


class _RegisterEntries:
    """Keys of a slice that this thread holds; positions are `first` + a fixed offset."""

    def __init__(self, keys: list, first: Int32, num_threads: int) -> None:
        self.keys, self.first, self.num_threads = keys, first, num_threads

    def position(self, index: int) -> Int32:
        tile, element = divmod(index, _VECTOR)
        return self.first + (tile * self.num_threads * _VECTOR + element)

    def fold(self, body: Any, carry: Any) -> Any:
        """`carry = body(key, position, carry)` over this thread's keys."""
        for index, key in enumerate(self.keys):
            carry = body(key, self.position(index), carry)
        return carry


class _BufferEntries:
    """Keys that passed the bound, in shared memory, dealt out to the threads."""

    def __init__(self, buffer: cute.Tensor, count: Int32, tid: Int32, num_threads: int) -> None:
        self.buffer, self.count, self.tid, self.num_threads = buffer, count, tid, num_threads

    @cute.jit
    def fold(self, body: Any, carry: Any) -> Any:
        """`carry = body(key, position, carry)` over this thread's keys."""
        address = shared_address(self.buffer.iterator)
        slot = self.tid
        while slot < self.count:
            key, position = load_shared_v2(address + slot * 8)
            carry = body(key.bitcast(Uint32), position, carry)
            slot += self.num_threads
        return carry


@cute.jit
def _add(shared: _Shared, word: cutlass.Constexpr, value: Int32) -> Int32:
    """Add to a word of the state; return what it was."""
    return cute.arch.atomic_add(shared.state.iterator + word, value, sem="relaxed", scope="cta")


@cute.jit
def _is_selected(key: Uint32, position: Int32, t_key: Uint32, t_position: Int32) -> Boolean:
    """Whether (key, position) is at or before the threshold."""
    return key > t_key or (key == t_key and position <= t_position)


@cute.jit
def _rank_value(key: Uint32, position: Int32, by_position: cutlass.Constexpr) -> Uint32:
    """What orders the candidates: the key, or among equal keys the position, lower first."""
    value = key
    if cutlass.const_expr(by_position):
        value = (position ^ Int32(-1)).bitcast(Uint32)
    return value


class TopkKernel:
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.num_threads = variant.num_threads
        self.num_warps = variant.num_threads // WARP
        self.cluster = variant.cluster
        self.num_bins = 1 << variant.bin_bits
        self.in_registers = variant.source == "registers"
        self.bitmap_words = 0 if self.in_registers else -(-variant.slice_keys // WARP)
        self.words_per_thread = -(-self.bitmap_words // self.num_threads)

    @cute.jit
    def __call__(
        self,
        scores: cute.Tensor,
        lengths: cute.Tensor,
        starts: cute.Tensor | None,
        plan: cute.Tensor | None,
        table: cute.Tensor | None,
        selected: cute.Tensor,
        num_keys: Int32,
        k: Int32,
        rows_per_sequence: Int32,
        page_size: Int32,
        stream: Any,
    ) -> None:
        num_rows = selected.shape[0]
        self.kernel(
            scores,
            lengths,
            starts,
            plan,
            table,
            selected,
            num_keys,
            k,
            rows_per_sequence,
            page_size,
        ).launch(
            grid=(num_rows * self.cluster, 1, 1),
            block=(self.num_threads, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        scores: cute.Tensor,
        lengths: cute.Tensor,
        starts: cute.Tensor | None,
        plan: cute.Tensor | None,
        table: cute.Tensor | None,
        selected: cute.Tensor,
        num_keys: Int32,
        k: Int32,
        rows_per_sequence: Int32,
        page_size: Int32,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        row = block // self.cluster
        rank = block % self.cluster
        shared = self._allocate()
        if cutlass.const_expr(self.cluster > 1):
            if tid == 0:
                for i in cutlass.range_constexpr(2):
                    cute.arch.mbarrier_init(shared.barriers.iterator + i, 1)
                cute.arch.mbarrier_init_fence()
            cute.arch.cluster_arrive()
        for i in cutlass.range_constexpr(2 if self.cluster > 1 else 1):
            self._clear_histogram(shared, tid, i)
        for i in cutlass.range_constexpr(self.words_per_thread):
            word = tid + i * self.num_threads
            if word < self.bitmap_words:
                shared.bitmap[word] = Int32(0)
        if tid < 8:
            shared.state[tid] = Int32(0)
        # Everything above touches only this block; what follows reads what earlier kernels wrote.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        row_address = scores.iterator.toint() + Int64(row) * Int64(scores.stride[0]) * 4
        out_address = selected.iterator.toint() + Int64(row) * Int64(selected.stride[0]) * 4
        # What writing the result takes.
        target = (selected, out_address, table, row, k, rows_per_sequence, page_size)

        if cutlass.const_expr(self.in_registers):
            # Slices of the whole row, whatever its length, so that the loads need not wait for it.
            slice_first = rank * self._slice_keys(num_keys)
            place = slice_first + tid * _VECTOR
            tiles = self._load_tiles(
                row_address, place, num_keys, self.variant.keys_per_thread // _VECTOR
            )
            first, stop = self._window(row, lengths, starts, plan, num_keys)
            window = (first, cutlass.min(stop, slice_first + self._slice_keys(num_keys)))
            self._begin()
            keys: list = []
            for tile in tiles:
                position = place + len(keys) * self.num_threads
                keys += self._count_scores(shared, self._mask(tile, position, window))
            entries = _RegisterEntries(keys, place, self.num_threads)
            t_key, t_position, base, _turn = self._select(
                shared, entries, k, (first, stop), tid, rank, self.cluster, Int32(0)
            )
            self._write_own(shared, entries, t_key, t_position, base, target, tid, rank)
        else:
            first, stop = self._window(row, lengths, starts, plan, num_keys)
            aligned = first
            if cutlass.const_expr(self.variant.is_vector):
                aligned = first - first % _VECTOR
            slice_first = aligned + rank * self._slice_keys(stop - aligned)
            slice_stop = cutlass.min(slice_first + self._slice_keys(stop - aligned), stop)
            source = (row_address, first, slice_first, slice_stop, num_keys)
            self._begin()
            count = Int32(0)
            turn = Int32(0)
            if cutlass.const_expr(self.variant.source == "filtered"):
                bound = self._sampled_bound(shared, source, stop - first, k, tid, rank)
                turn = Int32(1)
                count = self._stream(shared, source, bound, tid)
                if count > self.variant.buffer_keys:
                    count = self._stream_rising(shared, source, bound, k, (first, stop), tid, turn)
                if bound > Uint32(_LOWEST):
                    total = count
                    if cutlass.const_expr(self.cluster > 1):
                        total = self._cluster_total(shared, count, tid, rank, turn)
                        turn += 1
                    if total < k:
                        lowest = Uint32(_LOWEST)
                        count = self._stream_rising(
                            shared, source, lowest, k, (first, stop), tid, turn
                        )
            else:
                lowest = Uint32(_LOWEST)
                count = self._stream_rising(shared, source, lowest, k, (first, stop), tid, turn)
            buffered = _BufferEntries(shared.buffer, count, tid, self.num_threads)
            t_key, t_position, base, _turn = self._select(
                shared, buffered, k, (first, stop), tid, rank, self.cluster, turn
            )
            bitmap = shared_address(shared.bitmap.iterator)
            mark = functools.partial(self._mark, bitmap, t_key, t_position, slice_first)
            buffered.fold(mark, Int32(0))
            cute.arch.sync_threads()
            self._write_marked(shared, base, slice_first, target, tid, rank)

    def _allocate(self) -> _Shared:
        allocator = SmemAllocator()

        def words(number: int) -> Any:
            if not number:
                return None
            return allocator.allocate_tensor(Int32, cute.make_layout(number), 16)

        in_cluster = self.cluster if self.cluster > 1 else 0
        barriers = None
        if in_cluster:
            barriers = allocator.allocate_tensor(Int64, cute.make_layout(2), 8)
        return _Shared(
            histogram=words(2 * self.num_bins if in_cluster else self.num_bins),
            parts=words(in_cluster * self.num_bins),
            barriers=barriers,
            totals=[words(WARP) for _ in range(8)],
            state=words(8),
            listed=words(2 * WARP),
            headers=words(2 * in_cluster),
            gathered=words(2 * WARP * in_cluster),
            bitmap=words(self.bitmap_words),
            buffer=words(2 * self.variant.buffer_keys),
        )

    def _begin(self) -> None:
        """The block's shared memory is initialised, and its peers are there to be written to."""
        if self.cluster > 1:
            cute.arch.cluster_wait()
        cute.arch.sync_threads()

    def _slice_keys(self, num_keys: Int32) -> Int32:
        """Keys of a block's slice: whole words of the bitmap and whole vectors."""
        step = WARP * self.cluster
        return (num_keys + (step - 1)) // step * WARP

    @cute.jit
    def _clear_histogram(self, shared: _Shared, tid: Int32, turn) -> None:
        for i in cutlass.range_constexpr(-(-self.num_bins // self.num_threads)):
            bin_index = tid + i * self.num_threads
            if bin_index < self.num_bins:
                shared.histogram[(turn & 1) * self.num_bins + bin_index] = Int32(0)

    @cute.jit
    def _window(self, row, lengths, starts, plan, num_keys):
        first = Int32(0)
        if cutlass.const_expr(plan is not None):
            first = Int32(plan[row, 0])
            stop = cutlass.min(Int32(plan[row, 1]), num_keys)
        else:
            stop = clamp_index(lengths[row], num_keys)
            if cutlass.const_expr(starts is not None):
                first = clamp_index(starts[row], num_keys)
        first = cutlass.min(first, stop)
        return first, stop

    @cute.jit
    def _load_scores(self, row_address, position, num_keys):
        """Scores of the _VECTOR positions from `position`, -inf beyond the row."""
        score = Float32(float("-inf"))
        scores = [score] * _VECTOR
        if cutlass.const_expr(self.variant.is_vector):
            s0, s1, s2, s3 = scores
            if position < num_keys:
                s0, s1, s2, s3 = load_global_v4(row_address + Int64(position) * 4)
            scores = [s0, s1, s2, s3]
        else:
            scores = []
            for e in cutlass.range_constexpr(_VECTOR):
                score = Float32(float("-inf"))
                if position + e < num_keys:
                    score = load_global(row_address + Int64(position + e) * 4)
                scores.append(score)
        return scores

    def _load_tiles(self, row_address, position, num_keys, number: int) -> list:
        """Scores of `number` tiles of all threads; this thread's first one is at `position`."""
        tile = self.num_threads * _VECTOR
        return [
            self._load_scores(row_address, position + i * tile, num_keys) for i in range(number)
        ]

    @cute.jit
    def _mask(self, scores, position, window):
        """-inf instead of the scores outside the window."""
        first, stop = window
        s0, s1, s2, s3 = scores
        if position < first or position + _VECTOR > stop:
            outside = Float32(float("-inf"))
            if position < first or position >= stop:
                s0 = outside
            if position + 1 < first or position + 1 >= stop:
                s1 = outside
            if position + 2 < first or position + 2 >= stop:
                s2 = outside
            if position + 3 < first or position + 3 >= stop:
                s3 = outside
        return [s0, s1, s2, s3]

    @cute.jit
    def _select(self, shared, entries, k, window, tid, rank, cluster: cutlass.Constexpr, turn):
        """Find the threshold, what is at or before it are the best k of the window.

        Returns (key of the last of them, its position, how many of them lower ranks hold, turn of
        the cluster's next exchange). This turn's histogram is clear before and after.
        """
        first, stop = window
        if tid == 0:
            # Seen by the block after the barriers of `_find_bin`.
            shared.state[_LISTED] = Int32(0)
        histogram = self._histogram(shared, turn)
        if cutlass.const_expr(isinstance(entries, _BufferEntries)):
            entries.fold(functools.partial(self._count_key, histogram), Int32(0))
        bin_index, above, count, total = self._find_bin(
            shared, k, tid, rank, cluster, turn, is_coarse=True
        )
        if cutlass.const_expr(cluster > 1):
            turn += 1
        low, high = self._coarse_interval(bin_index)
        wanted = k - above
        # The candidates' keys are in [low, high]; `by_position` set, they all equal `tied` and are
        # told apart by position, for rows of many equal keys.
        tied = Uint32(0)
        by_position = Int32(0)
        if total <= k:
            # Everything selectable is selected: nothing is a candidate, every key is above 0.
            low = Uint32(1)
            high = Uint32(0)
            count = Int32(0)
            wanted = Int32(0)
        while count > WARP:
            if low == high and by_position == 0:
                tied = low
                by_position = Int32(1)
                low = (Int32(0) - stop).bitcast(Uint32)
                high = (first ^ Int32(-1)).bitcast(Uint32)
            width = WARP - Int32(cute.arch.clz(high - low))
            shift = Uint32(cutlass.max(width - self.variant.bin_bits, 0))
            histogram = self._histogram(shared, turn)
            if by_position == 0:
                self._refine(histogram, entries, low, high, tied, shift, False)
            else:
                self._refine(histogram, entries, low, high, tied, shift, True)
            bin_index, above, count, _total = self._find_bin(
                shared, wanted, tid, rank, cluster, turn, is_coarse=False
            )
            if cutlass.const_expr(cluster > 1):
                turn += 1
            wanted -= above
            high -= bin_index.bitcast(Uint32) << shift
            mask = (Uint32(1) << shift) - Uint32(1)
            if high - low > mask:
                low = high - mask
        num_above = Int32(0)
        if by_position == 0:
            num_above = self._list(shared, entries, low, high, tied, False, cluster)
        else:
            num_above = self._list(shared, entries, low, high, tied, True, cluster)
        lane = cute.arch.lane_idx()
        source = Int32(0)
        base = Int32(0)
        pair = shared_address(shared.listed.iterator) + lane * 8
        if cutlass.const_expr(cluster > 1):
            pair, source, base = self._exchange(shared, num_above, count, tid, rank, turn)
            turn += 1
        else:
            cute.arch.sync_threads()
        # Every warp holds all candidates now, one a lane.
        key_bits, position = load_shared_v2(pair)
        key = key_bits.bitcast(Uint32)
        t_key, t_position = self._rank(shared, key, position, count, wanted)
        if cutlass.const_expr(cluster > 1):
            is_before = lane < count and source < rank
            is_before = is_before and _is_selected(key, position, t_key, t_position)
            base += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(is_before)))
        return t_key, t_position, base, turn

    def _histogram(self, shared, turn) -> Int32:
        """Address of the histogram of this turn."""
        first = shared_address(shared.histogram.iterator)
        return first + (turn & 1) * (4 * self.num_bins) if self.cluster > 1 else first

    @cute.jit
    def _count_scores(self, shared, scores):
        """Count scores in the coarse bins, the top bits of their float16; return their keys."""
        keys = []
        for i in cutlass.range_constexpr(0, len(scores), 2):
            # Adding +0.0 turns -0.0, which has a bin of its own, into +0.0.
            halves = half_bits(scores[i] + Float32(0.0), scores[i + 1] + Float32(0.0))
            for e in cutlass.range_constexpr(2):
                key = order_key(scores[i + e])
                self._count_half(shared_address(shared.histogram.iterator), halves, e, key)
                keys.append(key)
        return keys

    @cute.jit
    def _count_half(self, histogram, halves, element: cutlass.Constexpr, key) -> None:
        cut = cutlass.const_expr(16 * (element + 1) - self.variant.bin_bits)
        place = (halves.bitcast(Uint32) >> Uint32(cut - 2)) & Uint32((self.num_bins - 1) << 2)
        increment_shared(histogram + place.bitcast(Int32), key != Uint32(0))

    @cute.jit
    def _count_key(self, histogram, key, position, carry):
        score = score_of_key(key)
        self._count_half(histogram, half_bits(score, score), 0, key)
        return carry

    @cute.jit
    def _bin_of_rank(self, bin_index: Int32, is_coarse: cutlass.Constexpr) -> Int32:
        """Where the bin is that comes `bin_index`-th from the highest: float16 has a sign bit."""
        place = bin_index
        if cutlass.const_expr(is_coarse):  # noqa: SIM102 - decided while tracing
            if bin_index < self.num_bins // 2:
                place = (self.num_bins // 2 - 1) - bin_index
        return place

    @cute.jit
    def _coarse_interval(self, bin_index: Int32):
        """(lowest, highest) key of the coarse bin that comes `bin_index`-th from the highest."""
        half = cutlass.const_expr(self.num_bins // 2)
        cut = cutlass.const_expr(16 - self.variant.bin_bits)
        infinity = Int32(0x7F800000)
        magnitude = (half - 1) - bin_index
        if bin_index >= half:
            magnitude = bin_index - half
        # float16 infinity is float32 infinity alone: what is finite was rounded to zero.
        least = infinity
        most = infinity
        if magnitude < (0x7C00 >> cut):
            least = float_of_half(magnitude << cut).bitcast(Int32)
            most = float_of_half((magnitude + 1) << cut).bitcast(Int32) - 1
        low = least | Int32(-(2**31))
        high = most | Int32(-(2**31))
        if bin_index >= half:
            low = most ^ Int32(-1)
            high = least ^ Int32(-1)
            low = low & Int32(0x7FFFFFFF)
            high = high & Int32(0x7FFFFFFF)
        return low.bitcast(Uint32), high.bitcast(Uint32)

    @cute.jit
    def _refine(
        self, histogram, entries, low, high, tied, shift, by_position: cutlass.Constexpr
    ) -> None:
        """Count the candidates in the bins of [low, high], 0 for the highest."""
        body = functools.partial(self._count_fine, histogram, low, high, tied, shift, by_position)
        entries.fold(body, Int32(0))

    @cute.jit
    def _count_fine(
        self,
        histogram,
        low,
        high,
        tied,
        shift,
        by_position: cutlass.Constexpr,
        key,
        position,
        carry,
    ):
        value = _rank_value(key, position, by_position)
        is_candidate = high - value <= high - low
        if cutlass.const_expr(by_position):
            is_candidate = is_candidate and key == tied
        increment_shared(histogram + Int32((high - value) >> shift) * 4, is_candidate)
        return carry

    @cute.jit
    def _send_histogram(self, shared, tid, rank, turn):
        """Give the block's histogram to every block of the cluster, two counts in a word: a slice
        has less than 2^16 keys."""
        histogram = self._histogram(shared, turn)
        barrier = self._expect(shared, self.cluster * self.num_bins * 2, tid, turn)
        parts = shared_address(shared.parts.iterator) + (turn & 1) * (
            self.cluster * self.num_bins * 2
        )
        vectors = cutlass.const_expr(self.num_bins // 8)
        for i in cutlass.range_constexpr(-(-self.cluster * vectors // self.num_threads)):
            peer = (tid + i * self.num_threads) // vectors
            vector = (tid + i * self.num_threads) % vectors
            if peer < self.cluster:
                counts = [
                    *load_shared_v4(histogram + vector * 32),
                    *load_shared_v4(histogram + vector * 32 + 16),
                ]
                words = [counts[2 * e] | (counts[2 * e + 1] << 16) for e in range(4)]
                place = peer_address(parts + (rank * vectors + vector) * 16, peer)
                send_v4(place, words, peer_address(barrier, peer))
        self._clear_histogram(shared, tid, turn + 1)

    @cute.jit
    def _expect(self, shared, num_bytes, tid, turn) -> Int32:
        """Say how many bytes this block gets in this turn; return the mbarrier that counts them.

        A peer is ahead by a turn at most, since it needs this block's part of the last: two sets of
        mbarriers and receiving memory are enough, and a set is free when its next turn starts.
        """
        if tid == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(
                shared.barriers.iterator + (turn & 1), num_bytes
            )
        return shared_address(shared.barriers.iterator) + (turn & 1) * 8

    @cute.jit
    def _await(self, shared, turn) -> None:
        """Wait for what `_expect` announced."""
        cute.arch.mbarrier_wait(shared.barriers.iterator + (turn & 1), (turn >> 1) & 1)

    @cute.jit
    def _find_bin(
        self,
        shared,
        wanted,
        tid,
        rank,
        cluster: cutlass.Constexpr,
        turn,
        is_coarse: cutlass.Constexpr,
    ):
        """Bin that holds the `wanted`-th best of what was counted, then clear the histogram.

        Returns (bin from the highest, counted above it, counted in it, counted in all); with fewer
        than `wanted` counted the first three mean nothing.
        """
        cute.arch.sync_threads()
        # One thread a bin or more: with a cluster a word, of two.
        least = cutlass.const_expr(2 if cluster > 1 else 1)
        active = cutlass.const_expr(min(self.num_bins // least, self.num_threads))
        per_thread = cutlass.const_expr(self.num_bins // active)
        if cutlass.const_expr(cluster > 1):
            self._send_histogram(shared, tid, rank, turn)
        if tid < active:
            counts = []
            if cutlass.const_expr(cluster > 1):
                self._await(shared, turn)
                # A word's bins follow each other from the highest down, or up.
                first_bin = self._bin_of_rank(tid * 2, is_coarse)
                word = first_bin >> 1
                low = Int32(0)
                high = Int32(0)
                for peer in cutlass.range_constexpr(cluster):
                    part = shared.parts[((turn & 1) * cluster + peer) * (self.num_bins // 2) + word]
                    low += part & 0xFFFF
                    high += (part >> 16) & 0xFFFF
                if first_bin & 1 != 0:
                    swapped = low
                    low = high
                    high = swapped
                counts = [low, high]
            else:
                for e in cutlass.range_constexpr(per_thread):
                    place = self._bin_of_rank(tid * per_thread + e, is_coarse)
                    if cutlass.const_expr(self.cluster > 1):
                        place += (turn & 1) * self.num_bins
                    counts.append(shared.histogram[place])
                    shared.histogram[place] = Int32(0)
            own = counts[0]
            for e in cutlass.range_constexpr(1, per_thread):
                own += counts[e]
            lane = cute.arch.lane_idx()
            warp = cute.arch.warp_idx()
            inclusive = warp_inclusive_scan(own)
            if lane == WARP - 1:
                shared.totals[0][warp] = inclusive
            cute.arch.barrier(barrier_id=1, number_of_threads=active)
            warp_total = Int32(0)
            if lane < active // WARP:
                warp_total = shared.totals[0][lane]
            earlier = warp_total
            if lane >= warp:
                earlier = Int32(0)
            before = cute.arch.warp_redux_sync(earlier, "add") + inclusive - own
            total = cute.arch.warp_redux_sync(warp_total, "add")
            if tid == 0:
                shared.state[_TOTAL] = total
            if before < wanted and wanted <= before + own:
                above = before
                found = Int32(0)
                in_bin = counts[0]
                running = before
                for e in cutlass.range_constexpr(per_thread):
                    if running < wanted:
                        above = running
                        found = Int32(e)
                        in_bin = counts[e]
                    running += counts[e]
                shared.state[_BIN] = tid * per_thread + found
                shared.state[_ABOVE] = above
                shared.state[_COUNT] = in_bin
        cute.arch.sync_threads()
        state = shared.state
        return state[_BIN], state[_ABOVE], state[_COUNT], state[_TOTAL]

    @cute.jit
    def _list(
        self,
        shared,
        entries,
        low,
        high,
        tied,
        by_position: cutlass.Constexpr,
        cluster: cutlass.Constexpr,
    ):
        """List the block's candidates; with a cluster, return this thread's keys above them all."""
        interval = (low, high, tied, by_position)
        num_listed = entries.fold(functools.partial(self._count_candidate, interval), Int32(0))
        if num_listed != 0:
            self._append_candidates(shared, entries, interval)
        num_above = Int32(0)
        if cutlass.const_expr(cluster > 1):
            num_above = entries.fold(functools.partial(self._count_above, interval), Int32(0))
        return num_above

    def _append_candidates(self, shared, entries, interval) -> None:
        entries.fold(functools.partial(self._list_candidate, shared, interval), Int32(0))

    @cute.jit
    def _is_candidate(self, interval, key, position) -> Boolean:
        low, high, tied, by_position = interval
        value = _rank_value(key, position, by_position)
        is_candidate = low <= value and value <= high
        if cutlass.const_expr(by_position):
            is_candidate = is_candidate and key == tied
        return is_candidate

    @cute.jit
    def _count_candidate(self, interval, key, position, carry):
        if self._is_candidate(interval, key, position):
            carry += 1
        return carry

    @cute.jit
    def _list_candidate(self, shared, interval, key, position, carry):
        if self._is_candidate(interval, key, position):
            slot = _add(shared, _LISTED, Int32(1))
            pair = shared_address(shared.listed.iterator) + slot * 8
            store_shared_v2(pair, key.bitcast(Int32), position)
        return carry

    @cute.jit
    def _count_above(self, interval, key, position, carry):
        _low, high, tied, by_position = interval
        is_above = key > high
        if cutlass.const_expr(by_position):
            is_above = key > tied or (key == tied and _rank_value(key, position, True) > high)
        if is_above:
            carry += 1
        return carry

    @cute.jit
    def _exchange(self, shared, num_above, count, tid, rank, turn):
        """Give the block's candidates to every block of the cluster and take theirs.

        Returns where candidate `lane` of the cluster is, whose blocks' lists follow each other, its
        block, and the number of keys above all candidates in lower blocks.
        """
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        num_above = cute.arch.warp_redux_sync(num_above, "add")
        if lane == 0:
            shared.totals[1][warp] = num_above
        cute.arch.sync_threads()
        headers = shared_address(shared.headers.iterator)
        gathered = shared_address(shared.gathered.iterator)
        listed = shared_address(shared.listed.iterator)
        block_above = Int32(0)
        if lane < self.num_warps:
            block_above = shared.totals[1][lane]
        block_above = cute.arch.warp_redux_sync(block_above, "add")
        num_listed = shared.state[_LISTED]
        barrier = self._expect(shared, self.cluster * 8 + count * 8, tid, turn)
        for i in cutlass.range_constexpr(-(-self.cluster // self.num_warps)):
            peer = warp + i * self.num_warps
            if peer < self.cluster:
                its_barrier = peer_address(barrier, peer)
                if lane == 0:
                    place = peer_address(headers + rank * 8, peer)
                    send_v2(place, num_listed, block_above, its_barrier)
                if lane < num_listed:
                    key, position = load_shared_v2(listed + lane * 8)
                    place = peer_address(gathered + (rank * WARP + lane) * 8, peer)
                    send_v2(place, key, position, its_barrier)
        self._await(shared, turn)
        its_listed = Int32(0)
        its_above = Int32(0)
        if lane < self.cluster:
            its_listed, its_above = load_shared_v2(headers + lane * 8)
        listed_to = warp_inclusive_scan(its_listed)
        if lane >= rank:
            its_above = Int32(0)
        base = cute.arch.warp_redux_sync(its_above, "add")
        source = Int32(0)
        for peer in cutlass.range_constexpr(self.cluster):
            if lane >= cute.arch.shuffle_sync(listed_to, peer):
                source += 1
        before = cute.arch.shuffle_sync(listed_to - its_listed, source)
        # A lane without a candidate looks at some place that exists.
        source = cutlass.min(source, self.cluster - 1)
        slot = source * WARP + ((lane - before) & (WARP - 1))
        return gathered + slot * 8, source, base

    @cute.jit
    def _rank(self, shared, key, position, count, wanted):
        """(key, position) of the `wanted`-th best of the candidates in the first `count` lanes of
        every warp: each warp ranks one of them against all."""
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        for i in cutlass.range_constexpr(-(-WARP // self.num_warps)):
            candidate = warp + i * self.num_warps
            its_key = cute.arch.shuffle_sync(key, candidate)
            its_position = cute.arch.shuffle_sync(position, candidate)
            is_better = key > its_key or (key == its_key and position < its_position)
            is_better = is_better and lane < count
            num_better = Int32(cute.arch.popc(cute.arch.vote_ballot_sync(is_better)))
            if candidate < count and num_better == wanted - 1:
                shared.state[_T_KEY] = its_key.bitcast(Int32)
                shared.state[_T_POSITION] = its_position
        cute.arch.sync_threads()
        t_key = Uint32(0)
        t_position = Int32(-1)
        if count > 0:
            t_key = shared.state[_T_KEY].bitcast(Uint32)
            t_position = shared.state[_T_POSITION]
        return t_key, t_position

    @cute.jit
    def _sampled_bound(self, shared, source, num_in_window, k, tid, rank):
        """Lower bound of the best k that is probably just below the last of them.

        The first keys of every slice are the sample. With s of the row's n keys in it, k * s / n of
        the best k are expected there, and the bound leaves room for four standard deviations.
        """
        row_address, first, slice_first, slice_stop, num_keys = source
        place = slice_first + tid * _VECTOR
        number = cutlass.const_expr(self.variant.rising_keys // _VECTOR)
        for tile in self._load_tiles(row_address, place, num_keys, number):
            self._count_scores(shared, self._mask(tile, place, (first, slice_stop)))
            place += self.num_threads * _VECTOR
        sampled = Float32(self.num_threads * self.variant.rising_keys * self.cluster)
        expected = Float32(k) * sampled / Float32(cutlass.max(num_in_window, 1))
        wanted = Int32(expected + 4.0 * cute.math.sqrt(expected)) + 1
        bin_index, _above, _count, total = self._find_bin(
            shared, wanted, tid, rank, self.cluster, Int32(0), is_coarse=True
        )
        bound = Uint32(_LOWEST)
        if wanted <= total:
            bound, _high = self._coarse_interval(bin_index)
            bound = cutlass.max(bound, Uint32(_LOWEST))
        return bound

    @cute.jit
    def _stream(self, shared, source, bound, tid):
        """Append the slice's keys from `bound` up to the buffer; return their number, which may be
        more than fit: then the buffer is useless."""
        row_address, first, slice_first, slice_stop, num_keys = source
        number = cutlass.const_expr(self.variant.keys_per_thread // _VECTOR)
        step = cutlass.const_expr(self.num_threads * self.variant.keys_per_thread)
        place = slice_first + tid * _VECTOR
        lowest = score_of_key(bound)
        tiles = self._load_tiles(row_address, place, num_keys, number)
        while place - tid * _VECTOR < slice_stop:
            # The next keys are under way while these are looked at.
            following = self._load_tiles(row_address, place + step, num_keys, number)
            self._append(shared, tiles, place, lowest, (first, slice_stop))
            tiles = following
            place += step
            # Other warps may be adding to the count; the lanes of this one must leave together.
            is_full = shared.state[_BUFFERED] > self.variant.buffer_keys
            if cute.arch.vote_any_sync(is_full):
                place = slice_stop + tid * _VECTOR
        cute.arch.sync_threads()
        return shared.state[_BUFFERED]

    @cute.jit
    def _append(self, shared, tiles, place, lowest, window) -> None:
        """Append the keys of scores from `lowest` up, as long as they fit; the count goes on."""
        buffer = shared_address(shared.buffer.iterator)
        passing = Int32(0)
        scores: list = []
        for tile in tiles:
            position = place + len(scores) * self.num_threads
            scores += self._mask(tile, position, window)
        for i in cutlass.range_constexpr(len(scores)):
            if scores[i] >= lowest:
                passing += 1
        if cute.arch.vote_any_sync(passing != 0):
            inclusive = warp_inclusive_scan(passing)
            slot = Int32(0)
            if cute.arch.lane_idx() == WARP - 1:
                slot = _add(shared, _BUFFERED, inclusive)
            slot = cute.arch.shuffle_sync(slot, WARP - 1) + inclusive - passing
            for i in cutlass.range_constexpr(len(scores)):
                if scores[i] >= lowest:
                    if slot < self.variant.buffer_keys:
                        tile_index, element = divmod(i, _VECTOR)
                        position = place + (tile_index * self.num_threads * _VECTOR + element)
                        key = order_key(scores[i])
                        store_shared_v2(buffer + slot * 8, key.bitcast(Int32), position)
                    slot += 1

    @cute.jit
    def _stream_rising(self, shared, source, bound, k, window, tid, turn):
        """Append the slice's keys from a bound up that rises to the k-th best so far; return their
        number, which fits. Later keys that equal the k-th best lose to it: strictly above."""
        row_address, first, slice_first, slice_stop, num_keys = source
        number = cutlass.const_expr(self.variant.rising_keys // _VECTOR)
        step = cutlass.const_expr(self.num_threads * self.variant.rising_keys)
        cute.arch.sync_threads()
        if tid == 0:
            shared.state[_BUFFERED] = Int32(0)
        cute.arch.sync_threads()
        place = slice_first + tid * _VECTOR
        count = Int32(0)
        tiles = self._load_tiles(row_address, place, num_keys, number)
        while place - tid * _VECTOR < slice_stop:
            following = self._load_tiles(row_address, place + step, num_keys, number)
            self._append(shared, tiles, place, score_of_key(bound), (first, slice_stop))
            tiles = following
            place += step
            cute.arch.sync_threads()
            count = shared.state[_BUFFERED]
            if count > self.variant.buffer_keys - step:
                entries = _BufferEntries(shared.buffer, count, tid, self.num_threads)
                t_key, t_position, _base, _turn = self._select(
                    shared, entries, k, window, tid, Int32(0), 1, turn
                )
                count = self._keep_best(shared, count, t_key, t_position, tid)
                if t_key >= bound:
                    bound = t_key + Uint32(1)
            else:
                cute.arch.sync_threads()
        return count

    @cute.jit
    def _keep_best(self, shared, count, t_key, t_position, tid):
        """Drop the buffer's keys beyond the threshold; return the number left."""
        if tid == 0:
            shared.state[_BUFFERED] = Int32(0)
        buffer = shared_address(shared.buffer.iterator)
        first_slot = Int32(0)
        lane = cute.arch.lane_idx()
        while first_slot < count:
            key = Uint32(0)
            position = Int32(0)
            if first_slot + tid < count:
                key_bits, position = load_shared_v2(buffer + (first_slot + tid) * 8)
                key = key_bits.bitcast(Uint32)
            # All have read this round before one writes, and no write reaches the next round.
            cute.arch.sync_threads()
            is_kept = key != Uint32(0) and _is_selected(key, position, t_key, t_position)
            votes = cute.arch.vote_ballot_sync(is_kept)
            slot = Int32(0)
            if lane == 0:
                slot = _add(shared, _BUFFERED, Int32(cute.arch.popc(votes)))
            slot = cute.arch.shuffle_sync(slot, 0)
            if is_kept:
                slot += Int32(cute.arch.popc(votes & ((1 << lane) - 1)))
                store_shared_v2(buffer + slot * 8, key.bitcast(Int32), position)
            first_slot += self.num_threads
        cute.arch.sync_threads()
        count = shared.state[_BUFFERED]
        cute.arch.sync_threads()
        return count

    @cute.jit
    def _cluster_total(self, shared, count, tid, rank, turn):
        """Sum of `count` over the cluster. The headers are free until the last exchange."""
        headers = shared_address(shared.headers.iterator)
        barrier = self._expect(shared, self.cluster * 8, tid, turn)
        if tid < self.cluster:
            place = peer_address(headers + rank * 8, tid)
            send_v2(place, count, Int32(0), peer_address(barrier, tid))
        self._clear_histogram(shared, tid, turn + 1)
        self._await(shared, turn)
        cute.arch.sync_threads()
        lane = cute.arch.lane_idx()
        its_count = Int32(0)
        if lane < self.cluster:
            its_count, _zero = load_shared_v2(headers + lane * 8)
        return cute.arch.warp_redux_sync(its_count, "add")

    @cute.jit
    def _write_own(self, shared, entries, t_key, t_position, base, target, tid, rank) -> None:
        """Write the selected positions from keys in registers. A tile of _VECTOR keys a thread is
        in order over the threads, so each tile's counts are scanned, two in a word."""
        _selected, out_address, table, *_rest = target
        has_table = cutlass.const_expr(table is not None)
        num_tiles = cutlass.const_expr(len(entries.keys) // _VECTOR)
        flags = []
        counts = []
        for tile in cutlass.range_constexpr(num_tiles):
            count = Int32(0)
            for e in cutlass.range_constexpr(_VECTOR):
                key = entries.keys[tile * _VECTOR + e]
                position = entries.position(tile * _VECTOR + e)
                # Key 0 is never selected: the threshold is above it, or before position 0.
                flag = _is_selected(key, position, t_key, t_position)
                flags.append(flag)
                if flag:
                    count += 1
            counts.append(count)
        words = []
        for tile in cutlass.range_constexpr(0, num_tiles, 2):
            word = counts[tile]
            if cutlass.const_expr(tile + 1 < num_tiles):
                word = word | (counts[tile + 1] << 16)
            words.append(word)
        before, total = block_exclusive_scan(
            words, shared.totals[1 : 1 + len(words)], self.num_warps
        )
        slot_base = base
        for tile in cutlass.range_constexpr(num_tiles):
            half = cutlass.const_expr(16 * (tile % 2))
            slot = slot_base + ((before[tile // 2] >> half) & 0xFFFF)
            slot_base += (total[tile // 2] >> half) & 0xFFFF
            for e in cutlass.range_constexpr(_VECTOR):
                flag = flags[tile * _VECTOR + e]
                position = entries.position(tile * _VECTOR + e)
                if cutlass.const_expr(has_table):
                    if flag:
                        self._write(target, slot, position)
                else:
                    # Without a branch: this is most of the kernel's last phase.
                    store_global(out_address + Int64(slot) * 4, position, flag)
                if flag:
                    slot += 1
        self._write_rest(target, slot_base, tid, rank)

    @cute.jit
    def _mark(self, bitmap, t_key, t_position, slice_first, key, position, carry):
        """Set the bit of a selected position."""
        if _is_selected(key, position, t_key, t_position):
            offset = position - slice_first
            or_shared(bitmap + (offset >> 5) * 4, Int32(1) << (offset & 31))
        return carry

    @cute.jit
    def _write_marked(self, shared, base, slice_first, target, tid, rank) -> None:
        """Write the positions of the set bits."""
        own = Int32(0)
        for i in cutlass.range_constexpr(self.words_per_thread):
            word = tid * self.words_per_thread + i
            if word < self.bitmap_words:
                own += Int32(cute.arch.popc(shared.bitmap[word]))
        (before,), (total,) = block_exclusive_scan([own], shared.totals[2:3], self.num_warps)
        slot = base + before
        for i in cutlass.range_constexpr(self.words_per_thread):
            word = tid * self.words_per_thread + i
            bits = Int32(0)
            if word < self.bitmap_words:
                bits = shared.bitmap[word]
            while bits != 0:
                bit = 31 - Int32(cute.arch.clz(bits & (0 - bits)))
                self._write(target, slot, slice_first + word * WARP + bit)
                slot += 1
                bits = bits & (bits - 1)
        self._write_rest(target, base + total, tid, rank)

    @cute.jit
    def _write(self, target, slot, position) -> None:
        """Write a selected position, or the physical slot that the table has for it, or -1 where it
        has none."""
        selected, _out_address, table, row, _k, rows_per_sequence, page_size = target
        value = position
        if cutlass.const_expr(table is not None):
            column = position // page_size
            value = Int32(-1)
            if column < table.shape[1]:
                page = table[row // rows_per_sequence, column]
                if page >= 0:
                    value = Int32(page) * page_size + position % page_size
        selected[row, slot] = value

    @cute.jit
    def _write_rest(self, target, num_selected, tid, rank) -> None:
        """The last block, which knows the row's count, fills up with -1."""
        selected, _out_address, _table, row, k, _rows_per_sequence, _page_size = target
        if rank == self.cluster - 1:
            slot = num_selected + tid
            while slot < k:
                selected[row, slot] = Int32(-1)
                slot += self.num_threads


@functools.cache
def _compiled(variant: Variant, arch: str) -> Any:
    return compile_variant(variant, arch)


def compile_variant(variant: Variant, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`."""

    def fake(dtype: Any, num_axes: int, **kwargs: Any) -> Any:
        shape = tuple(cute.sym_int32() for _ in range(num_axes))
        return make_fake_tensor(
            dtype, shape, tuple(cute.sym_int64() for _ in range(num_axes)), **kwargs
        )

    row_stride = cute.sym_int64(divisibility=_VECTOR if variant.is_vector else 1)
    scores = make_fake_tensor(
        Float32,
        (cute.sym_int32(), cute.sym_int32()),
        (row_stride, 1),
        assumed_align=16 if variant.is_vector else 4,
    )
    length, start, page = (
        Int64 if is_64 else Int32
        for is_64 in (variant.lengths_64, variant.starts_64, variant.table_64)
    )
    selected = make_fake_tensor(
        Int32, (cute.sym_int32(), cute.sym_int32()), (cute.sym_int64(), 1), assumed_align=4
    )
    return compile_kernel(
        TopkKernel(variant),
        scores,
        fake(length, 1, assumed_align=length.width // 8),
        fake(start, 1, assumed_align=start.width // 8) if variant.has_starts else None,
        fake(Int32, 2, assumed_align=4) if variant.has_plan else None,
        fake(page, 2, assumed_align=page.width // 8) if variant.has_table else None,
        selected,
        Int32(1),
        Int32(1),
        Int32(1),
        Int32(1),
        arch=arch,
        options=options,
    )


def topk_select_cute(
    scores_RT: torch.Tensor,
    lengths_R: torch.Tensor,
    k: int,
    starts_R: torch.Tensor | None = None,
    plan: torch.Tensor | None = None,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    page_size: int = 64,
    *,
    variant: Variant | None = None,
) -> torch.Tensor:
    """Return int32 [R, k]; see `topk_select` for the contract."""
    num_rows, num_keys = scores_RT.shape
    selected_RK = torch.empty((num_rows, k), dtype=torch.int32, device=scores_RT.device)
    if not num_rows:
        return selected_RK
    if not num_keys:
        return selected_RK.fill_(-1)
    if num_rows == 1 or num_keys == 1:
        # The stride of an axis of one means nothing, and may be anything.
        row_stride = scores_RT.stride(0) if num_rows > 1 else -(-num_keys // _VECTOR) * _VECTOR
        scores_RT = scores_RT.as_strided((num_rows, num_keys), (row_stride, 1))
    if plan is not None:
        starts_R = None
    shape = replace(
        variant or default_variant(num_rows, num_keys),
        is_vector=scores_RT.data_ptr() % 16 == 0
        and scores_RT.stride(0) % _VECTOR == 0
        and num_keys % _VECTOR == 0,
        has_starts=starts_R is not None,
        has_plan=plan is not None,
        has_table=block_table is not None,
        lengths_64=lengths_R.dtype == torch.int64,
        starts_64=starts_R is not None and starts_R.dtype == torch.int64,
        table_64=block_table is not None and block_table.dtype == torch.int64,
    )
    run = _compiled(shape, arch_of(scores_RT.device))
    run(
        scores_RT,
        lengths_R,
        starts_R,
        plan,
        block_table,
        selected_RK,
        num_keys,
        k,
        rows_per_sequence,
        page_size,
    )
    return selected_RK
