"""The threshold of a row's best k: histograms, narrowed down to 32 candidates, which are ranked."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Boolean, Float32, Int32, Uint32

from glm_compile.ops._cute.device import (
    WARP,
    count_shared,
    float_of_half,
    half_bits,
    increment_shared,
    load_shared_v2,
    load_shared_v4,
    peer_address,
    score_of_key,
    send_v2,
    send_v4,
    shared_address,
    store_shared_v2,
    warp_inclusive_scan,
)
from glm_compile.ops.topk._cute.entries import (
    ABOVE,
    BIN,
    BUFFERED,
    COUNT,
    LISTED,
    LOWEST,
    T_KEY,
    T_POSITION,
    TOTAL,
    BufferEntries,
    RegisterEntries,
    add_to_state,
    is_selected,
    key_of,
    rank_value,
)
from glm_compile.ops.topk.config import MAX_CUTE_K, Variant


class Threshold:
    """Methods of the kernel that find the threshold."""

    variant: Variant
    num_threads: int
    num_warps: int
    num_bins: int
    cluster: int
    is_compacted: bool

    @cute.jit
    def _select(
        self, shared, entries, k, window, tid, rank, cluster: cutlass.Constexpr, turn, is_tied=None
    ):
        """Find the threshold, what is at or before it are the best k of the window.

        `is_tied` says, where it is known, that the last of them probably equals many others.
        Returns (key of the last of them, its position, how many of them lower ranks hold, how many
        there are, turn of the cluster's next exchange). This turn's histogram is clear before and
        after.
        """
        if tid == 0:
            # Seen by the block after the barriers of `_find_bin`.
            shared.state[LISTED] = Int32(0)
        histogram = self._histogram(shared, turn)
        if cutlass.const_expr(isinstance(entries, BufferEntries)):
            entries.fold(functools.partial(self._count_key, histogram), Int32(0))
        bin_index, above, count, total = self._find_bin(
            shared, k, tid, rank, cluster, turn, is_coarse=True
        )
        if cutlass.const_expr(cluster > 1):
            turn += 1
        num_selected = cutlass.min(total, k)
        low, high = self._coarse_interval(bin_index)
        wanted = k - above
        # The candidates' keys are in [low, high]; `by_position` set, they all equal `tied` and are
        # told apart by position, for rows of many equal keys.
        tied = Uint32(0)
        by_position = Int32(0)
        if total <= k:
            # Everything selectable is selected: nothing is a candidate, all keys are above.
            low = Uint32(LOWEST)
            high = Uint32(LOWEST - 1)
            count = Int32(0)
            wanted = Int32(0)
        if cutlass.const_expr(is_tied is not None):  # noqa: SIM102 - decided while tracing
            if is_tied and count > WARP:
                low, high = self._tighten(shared, entries, low, high, tid, rank, cluster, turn)
                if cutlass.const_expr(cluster > 1):
                    turn += 1
        if cutlass.const_expr(self.is_compacted and isinstance(entries, RegisterEntries)):
            # Fewer than k keys are above the candidates: with so many of these, all fit.
            most = cutlass.const_expr(self.variant.buffer_keys - MAX_CUTE_K)
            while count > most:
                low, high, tied, by_position, wanted, count, turn = self._narrow(
                    shared,
                    entries,
                    window,
                    tid,
                    rank,
                    cluster,
                    (low, high, tied, by_position, wanted, count, turn),
                )
            if by_position == 0:
                self._compact(shared, entries, low, tied, False)
            else:
                self._compact(shared, entries, low, tied, True)
            cute.arch.sync_threads()
            entries = BufferEntries(shared, tid, self.num_threads, holds_keys=True)
        while count > WARP:
            low, high, tied, by_position, wanted, count, turn = self._narrow(
                shared,
                entries,
                window,
                tid,
                rank,
                cluster,
                (low, high, tied, by_position, wanted, count, turn),
            )
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
            is_before = is_before and is_selected(key, position, t_key, t_position)
            base += Int32(cute.arch.popc(cute.arch.vote_ballot_sync(is_before)))
        return t_key, t_position, base, num_selected, turn

    @cute.jit
    def _tighten(self, shared, entries, low, high, tid, rank, cluster: cutlass.Constexpr, turn):
        """(lowest, highest) key of the candidates, those in [low, high]; there is one."""
        body = functools.partial(self._extend, low, high)
        least, most = entries.fold(body, (high, low))
        least, most = self._span(shared.totals, least, most, self.num_warps)
        if cutlass.const_expr(cluster > 1):
            headers = shared_address(shared.headers.iterator)
            barrier = self._expect(shared, self.cluster * 8, tid, turn)
            if tid < self.cluster:
                send_v2(
                    peer_address(headers + rank * 8, tid),
                    least.bitcast(Int32),
                    most.bitcast(Int32),
                    peer_address(barrier, tid),
                )
            self._clear_histogram(shared, tid, turn + 1)
            self._await(shared, turn)
            cute.arch.sync_threads()
            if cute.arch.lane_idx() < self.cluster:
                its_least, its_most = load_shared_v2(headers + cute.arch.lane_idx() * 8)
                least = its_least.bitcast(Uint32)
                most = its_most.bitcast(Uint32)
            least = cute.arch.warp_redux_sync(least, "min")
            most = cute.arch.warp_redux_sync(most, "max")
        return least, most

    @cute.jit
    def _extend(self, low, high, key, position, carry):
        least, most = carry
        if low <= key and key <= high:
            least = cutlass.min(least, key)
            most = cutlass.max(most, key)
        return least, most

    @cute.jit
    def _span(self, totals, least, most, num_warps: cutlass.Constexpr):
        """(least, most) of the block."""
        lane = cute.arch.lane_idx()
        least = cute.arch.warp_redux_sync(least, "min")
        most = cute.arch.warp_redux_sync(most, "max")
        if lane == 0:
            totals[1][cute.arch.warp_idx()] = least.bitcast(Int32)
            totals[2][cute.arch.warp_idx()] = most.bitcast(Int32)
        cute.arch.sync_threads()
        if lane < num_warps:
            least = totals[1][lane].bitcast(Uint32)
            most = totals[2][lane].bitcast(Uint32)
        return cute.arch.warp_redux_sync(least, "min"), cute.arch.warp_redux_sync(most, "max")

    @cute.jit
    def _narrow(self, shared, entries, window, tid, rank, cluster: cutlass.Constexpr, candidates):
        """Keep the candidates of one bin of [low, high], the one that holds the wanted one."""
        low, high, tied, by_position, wanted, count, turn = candidates
        first, stop = window
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
        return low, high, tied, by_position, wanted, count, turn

    @cute.jit
    def _compact(self, shared, entries, low, tied, by_position: cutlass.Constexpr) -> None:
        """Put this thread's candidates and what is above them into the buffer, where they fit."""
        passing = Int32(0)
        for i in cutlass.range_constexpr(len(entries.keys)):
            if self._is_from(low, tied, by_position, entries.keys[i], entries.position(i)):
                passing += 1
        inclusive = warp_inclusive_scan(passing)
        slot = Int32(0)
        if cute.arch.lane_idx() == WARP - 1:
            slot = add_to_state(shared, BUFFERED, inclusive)
        slot = cute.arch.shuffle_sync(slot, WARP - 1) + inclusive - passing
        address = shared_address(shared.buffer.iterator) + slot * 8
        if passing != 0:
            self._push_all(entries, address, low, tied, by_position)

    def _push_all(self, entries, address, low, tied, by_position: bool) -> None:
        for i, key in enumerate(entries.keys):
            address = self._push(address, low, tied, by_position, key, entries.position(i))

    @cute.jit
    def _push(self, address, low, tied, by_position: cutlass.Constexpr, key, position) -> Int32:
        if self._is_from(low, tied, by_position, key, position):
            store_shared_v2(address, key.bitcast(Int32), position)
            address += 8
        return address

    @cute.jit
    def _is_from(self, low, tied, by_position: cutlass.Constexpr, key, position) -> Boolean:
        is_from = key >= low
        if cutlass.const_expr(by_position):
            is_from = key > tied or (key == tied and rank_value(key, position, True) >= low)
        return is_from

    @cute.jit
    def _clear_histogram(self, shared, tid: Int32, turn) -> None:
        for i in cutlass.range_constexpr(-(-self.num_bins // self.num_threads)):
            bin_index = tid + i * self.num_threads
            if bin_index < self.num_bins:
                shared.histogram[(turn & 1) * self.num_bins + bin_index] = Int32(0)

    def _histogram(self, shared, turn) -> Int32:
        """Address of the histogram of this turn."""
        first = shared_address(shared.histogram.iterator)
        return first + (turn & 1) * (4 * self.num_bins) if self.cluster > 1 else first

    @cute.jit
    def _count_scores(self, shared, scores):
        """Count scores in the coarse bins, the top bits of their float16; return their keys."""
        keys = []
        for i in cutlass.range_constexpr(0, len(scores), 2):
            # NaN becomes -inf, whose bin is left out later. Adding +0.0 turns -0.0, which has a bin
            # of its own, into +0.0.
            pair = [
                cute.arch.fmax(scores[i + e], Float32(float("-inf"))) + Float32(0.0)
                for e in range(2)
            ]
            halves = half_bits(*pair)
            for e in cutlass.range_constexpr(2):
                self._count_half(shared_address(shared.histogram.iterator), halves, e)
                keys.append(key_of(pair[e]))
        return keys

    @cute.jit
    def _count_half(self, histogram, halves, element: cutlass.Constexpr) -> None:
        cut = cutlass.const_expr(16 * (element + 1) - self.variant.bin_bits)
        place = (halves.bitcast(Uint32) >> Uint32(cut - 2)) & Uint32((self.num_bins - 1) << 2)
        count_shared(histogram + place.bitcast(Int32))

    @cute.jit
    def _count_key(self, histogram, key, position, carry):
        score = score_of_key(key)
        self._count_half(histogram, half_bits(score, score), 0)
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
        value = rank_value(key, position, by_position)
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
        # Lanes may leave the wait apart.
        cute.arch.sync_warp()

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
            if cutlass.const_expr(is_coarse):
                # From this bin on there is -inf alone.
                unwanted = self.num_bins // 2 + (0x7C00 >> (16 - self.variant.bin_bits))
                for e in cutlass.range_constexpr(per_thread):
                    if tid * per_thread + e >= unwanted:
                        counts[e] = Int32(0)
            own = counts[0]
            for e in cutlass.range_constexpr(1, per_thread):
                own += counts[e]
            lane = cute.arch.lane_idx()
            warp = cute.arch.warp_idx()
            inclusive = warp_inclusive_scan(own)
            if lane == WARP - 1:
                shared.totals[0][warp] = inclusive
            # Each number of threads has a barrier of its own.
            cute.arch.barrier(barrier_id=1 if cluster > 1 else 2, number_of_threads=active)
            warp_total = Int32(0)
            if lane < active // WARP:
                warp_total = shared.totals[0][lane]
            earlier = warp_total
            if lane >= warp:
                earlier = Int32(0)
            before = cute.arch.warp_redux_sync(earlier, "add") + inclusive - own
            total = cute.arch.warp_redux_sync(warp_total, "add")
            if tid == 0:
                shared.state[TOTAL] = total
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
                shared.state[BIN] = tid * per_thread + found
                shared.state[ABOVE] = above
                shared.state[COUNT] = in_bin
        cute.arch.sync_threads()
        state = shared.state
        return state[BIN], state[ABOVE], state[COUNT], state[TOTAL]

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
        value = rank_value(key, position, by_position)
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
            slot = add_to_state(shared, LISTED, Int32(1))
            pair = shared_address(shared.listed.iterator) + slot * 8
            store_shared_v2(pair, key.bitcast(Int32), position)
        return carry

    @cute.jit
    def _count_above(self, interval, key, position, carry):
        _low, high, tied, by_position = interval
        is_above = key > high
        if cutlass.const_expr(by_position):
            is_above = key > tied or (key == tied and rank_value(key, position, True) > high)
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
        num_listed = shared.state[LISTED]
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
                shared.state[T_KEY] = its_key.bitcast(Int32)
                shared.state[T_POSITION] = its_position
        cute.arch.sync_threads()
        t_key = Uint32(LOWEST - 1)
        t_position = Int32(-1)
        if count > 0:
            t_key = shared.state[T_KEY].bitcast(Uint32)
            t_position = shared.state[T_POSITION]
        return t_key, t_position
