"""Rows too long for registers: a slice is streamed, what is above a bound stays in a buffer."""

from __future__ import annotations

import cutlass
import cutlass.cute as cute
from cutlass import Float32, Int32, Uint32

from glm_compile.ops._cute.device import (
    WARP,
    count_if_at_least,
    load_shared_v2,
    peer_address,
    push_if_above,
    score_of_key,
    send_v2,
    shared_address,
    store_shared_v2,
)
from glm_compile.ops.topk._cute.entries import (
    ANYWHERE,
    BUFFERED,
    LOWEST,
    VECTOR,
    ZERO,
    BufferEntries,
    RegisterEntries,
    add_to_state,
    is_selected,
    key_of,
)
from glm_compile.ops.topk._cute.threshold import Threshold


class Stream(Threshold):
    """Methods of the kernel that fill the buffer."""

    @cute.jit
    def _sampled_threshold(self, shared, source, window, k, tid, rank):
        """A threshold that is probably just beyond the last of the best k: (key, position, turn).

        The sample is spread evenly over every slice. With s of the row's n keys in it, k * s / n of
        the best k are expected there, and the threshold leaves room for four standard deviations.
        It is the lowest key of a bin, or better where more keys would pass than there is room for;
        see `_stream` for what the position means.
        """
        row_address, first, slice_first, slice_stop, num_keys = source
        row_first, row_stop = window
        num_in_window = Float32(cutlass.max(row_stop - row_first, 1))
        number = cutlass.const_expr(self.variant.sampled_keys // VECTOR)
        lane = cute.arch.lane_idx()
        warp = cute.arch.warp_idx()
        # A warp's keys lie next to each other, those of the warps are spread over the slice.
        chunk = cutlass.const_expr(WARP * VECTOR)
        gap = (slice_stop - slice_first) // (number * self.num_warps) // chunk * chunk
        gap = cutlass.max(gap, chunk)
        tiles = []
        places = []
        for i in cutlass.range_constexpr(number):
            place = slice_first + (warp + i * self.num_warps) * gap + lane * VECTOR
            places.append(place)
            tiles.append(self._load_scores(row_address, place, num_keys))
        keys: list = []
        for i in cutlass.range_constexpr(number):
            keys += self._count_scores(shared, self._mask(tiles[i], places[i], (first, slice_stop)))
        sampled = Float32(self.num_threads * self.variant.sampled_keys * self.cluster)
        expected = Float32(k) * sampled / num_in_window
        wanted = Int32(expected + 4.0 * cute.math.sqrt(expected)) + 1
        bin_index, above, count, total = self._find_bin(
            shared, wanted, tid, rank, self.cluster, Int32(0), is_coarse=True
        )
        bound = Uint32(LOWEST)
        last_equal = Int32(ANYWHERE)
        turn = Int32(1)
        if wanted <= total:
            bound, high = self._coarse_interval(bin_index)
            bound = cutlass.max(bound, Uint32(LOWEST))
            # Half of what the buffers hold, or what a sample's scatter explains.
            room = sampled * Float32(self.cluster * self.variant.buffer_keys // 2) / num_in_window
            if Float32(above + count) > cutlass.max(room, Float32(2 * wanted)):
                entries = RegisterEntries(keys, places[0], self.num_warps * gap)
                bound, last_equal, turn = self._refined_threshold(
                    shared, entries, window, tid, rank, (bound, high, wanted, above, count)
                )
                if last_equal != ANYWHERE:
                    # The sample says nothing about what follows a warp's keys up to the next ones.
                    # What is loaded at once is on one side, and the same in all blocks.
                    last_equal += (row_stop - row_first) // (
                        number * self.num_warps * self.cluster
                    ) + chunk
                    last_equal = slice_first + ((last_equal - slice_first) | (VECTOR - 1))
        return bound, last_equal, turn

    @cute.jit
    def _refined_threshold(self, shared, entries, window, tid, rank, candidates):
        """The threshold of scores that are close to each other, or equal: (key, position, turn)."""
        low, high, wanted, above, count = candidates
        enough = cutlass.max(wanted // 2, WARP)
        wanted -= above
        turn = Int32(1)
        low, high = self._tighten(shared, entries, low, high, tid, rank, self.cluster, turn)
        if cutlass.const_expr(self.cluster > 1):
            turn += 1
        tied = Uint32(0)
        by_position = Int32(0)
        while count > enough:
            low, high, tied, by_position, wanted, count, turn = self._narrow(
                shared,
                entries,
                window,
                tid,
                rank,
                self.cluster,
                (low, high, tied, by_position, wanted, count, turn),
            )
        last_equal = Int32(ANYWHERE)
        if by_position != 0:
            last_equal = low.bitcast(Int32) ^ Int32(-1)
            low = tied
        return low, last_equal, turn

    @cute.jit
    def _stream(self, shared, source, threshold, place, owes, tid, is_rising: cutlass.Constexpr):
        """Append the slice's keys to the buffer, until they end or it is full.

        Args:
            threshold: (key, position): kept are the keys above, and those equal to the key in what
                is loaded at once (VECTOR keys) from a place up to the position.
            place: of this thread's next keys.
            owes: whether these are still to be appended; those beyond always are.
            is_rising: whether positions and `owes` matter.

        Returns:
            (place, owes) of where this thread stopped. The warps of a block stop by themselves.
        """
        row_address, first, _slice_first, slice_stop, num_keys = source
        bound, last_equal = threshold
        number = cutlass.const_expr(self.variant.keys_per_thread // VECTOR)
        step = cutlass.const_expr(self.num_threads * self.variant.keys_per_thread)
        tiles = self._load_tiles(row_address, place, num_keys, number)
        lost = Int32(-1)
        stop = slice_stop
        while place - tid * VECTOR < stop:
            # The next keys are under way while these are looked at.
            following = self._load_tiles(row_address, place + step, num_keys, number)
            bounds = [bound] * number
            its_stop = slice_stop
            if cutlass.const_expr(is_rising):
                for t in cutlass.range_constexpr(number):
                    strict = bound
                    if place + t * self.num_threads * VECTOR > last_equal:
                        strict += Uint32(1)
                    bounds[t] = strict
                if owes == 0:
                    its_stop = first
                owes = Int32(1)
            lost = self._append(shared, tiles, place, bounds, (first, its_stop))
            tiles = following
            place += step
            # The lanes of a warp must leave together.
            if cute.arch.vote_any_sync(lost >= 0):
                stop = Int32(-(2**31))
        if stop != slice_stop:
            place -= step
            owes = Int32(0)
            if lost >= 0:
                owes = Int32(1)
                # The first thread that found no room leaves a gap: nothing selectable.
                while lost < self.variant.buffer_keys:
                    address = shared_address(shared.buffer.iterator) + lost * 8
                    store_shared_v2(address, Float32(float("-inf")).bitcast(Int32), Int32(0))
                    lost += 1
        cute.arch.sync_threads()
        return place, owes

    @cute.jit
    def _append(self, shared, tiles, place, bounds, window):
        """Append the scores from each tile's bound up with their positions: all of a thread's, or
        none where they do not fit. Returns -1, or the slot that the first of them would have had.
        """
        first, stop = window
        buffer = shared_address(shared.buffer.iterator)
        # The same test twice, written in two ways: a compiler that sees one keeps its results, for
        # which it has too few predicates.
        lowest: list = []
        below: list = []
        for t in cutlass.range_constexpr(len(tiles)):
            if cutlass.const_expr(t > 0 and bounds[t] is bounds[0]):
                lowest.append(lowest[0])
                below.append(below[0])
            else:
                lowest.append(score_of_key(bounds[t]))
                below.append(self._score_below(bounds[t]))
        scores: list = []
        for tile in tiles:
            scores += tile
        lane = cute.arch.lane_idx()
        warp_first = place - lane * VECTOR
        span = (len(tiles) - 1) * self.num_threads * VECTOR + WARP * VECTOR
        if warp_first < first or warp_first + span > stop:
            scores = self._mask_all(scores, place, window)
        passing = Int32(0)
        for i in cutlass.range_constexpr(len(scores)):
            passing = count_if_at_least(passing, scores[i], lowest[i // VECTOR])
        lost = Int32(-1)
        if passing != 0:
            slot = add_to_state(shared, BUFFERED, passing)
            if slot + passing <= self.variant.buffer_keys:
                address = buffer + slot * 8
                for i in cutlass.range_constexpr(len(scores)):
                    tile_index, element = divmod(i, VECTOR)
                    position = place + (tile_index * self.num_threads * VECTOR + element)
                    address = push_if_above(address, scores[i], position, below[tile_index])
            else:
                lost = slot
        return lost

    @cute.jit
    def _score_below(self, key) -> Float32:
        """The highest score below the one that has this key."""
        under = key - Uint32(1)
        if under == Uint32(ZERO - 1):
            # No score has this key: it would be -0.0, and +0.0 is not above that.
            under -= Uint32(1)
        return score_of_key(under)

    @cute.jit
    def _mask_all(self, scores, place, window):
        masked = []
        for t in cutlass.range_constexpr(len(scores) // VECTOR):
            tile = scores[t * VECTOR : (t + 1) * VECTOR]
            masked += self._mask(tile, place + t * self.num_threads * VECTOR, window)
        return masked

    @cute.jit
    def _stream_rising(self, shared, source, threshold, k, window, tid, turn, place, owes):
        """Append the slice's keys from `place` on; return the buffer's number.

        Whenever the buffer is full it is cut to its best k, and the worst of these is the threshold
        from then on: a key beyond it has k better ones. Warps go on from where they stopped.
        """
        full = cutlass.const_expr(self.variant.buffer_keys)
        count = shared.state[BUFFERED]
        is_left = Int32(1)
        while is_left != 0:
            cute.arch.sync_threads()
            if count > full:
                if tid == 0:
                    shared.state[BUFFERED] = Int32(full)
                cute.arch.sync_threads()
                entries = BufferEntries(shared, tid, self.num_threads, holds_keys=False)
                t_key, t_position, _base, _num_selected, _turn = self._select(
                    shared, entries, k, window, tid, Int32(0), 1, turn
                )
                self._keep_best(shared, Int32(full), t_key, t_position, tid)
                threshold = (t_key, t_position)
            place, owes = self._stream(shared, source, threshold, place, owes, tid, is_rising=True)
            count = shared.state[BUFFERED]
            if count <= full:
                is_left = Int32(0)
        return count

    @cute.jit
    def _keep_best(self, shared, count, t_key, t_position, tid):
        """Drop the buffer's keys beyond the threshold."""
        if tid == 0:
            shared.state[BUFFERED] = Int32(0)
        buffer = shared_address(shared.buffer.iterator)
        first_slot = Int32(0)
        lane = cute.arch.lane_idx()
        while first_slot < count:
            bits = Int32(0)
            position = Int32(0)
            if first_slot + tid < count:
                bits, position = load_shared_v2(buffer + (first_slot + tid) * 8)
            # All have read this round before one writes, and no write reaches the next round.
            cute.arch.sync_threads()
            is_kept = is_selected(key_of(bits.bitcast(Float32)), position, t_key, t_position)
            is_kept = is_kept and first_slot + tid < count
            votes = cute.arch.vote_ballot_sync(is_kept)
            slot = Int32(0)
            if lane == 0:
                slot = add_to_state(shared, BUFFERED, Int32(cute.arch.popc(votes)))
            slot = cute.arch.shuffle_sync(slot, 0)
            if is_kept:
                slot += Int32(cute.arch.popc(votes & ((1 << lane) - 1)))
                store_shared_v2(buffer + slot * 8, bits, position)
            first_slot += self.num_threads
        cute.arch.sync_threads()

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
