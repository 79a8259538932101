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
    BUFFERED,
    LOWEST,
    VECTOR,
    ZERO,
    BufferEntries,
    add_to_state,
    is_selected,
    key_of,
)
from glm_compile.ops.topk._cute.threshold import Threshold


class Stream(Threshold):
    """Methods of the kernel that fill the buffer."""

    @cute.jit
    def _sampled_bound(self, shared, source, num_in_window, k, tid, rank):
        """Lower bound of the best k that is probably just below the last of them.

        The sample is spread evenly over every slice. With s of the row's n keys in it, k * s / n of
        the best k are expected there, and the bound leaves room for four standard deviations.
        """
        row_address, first, slice_first, slice_stop, num_keys = source
        number = cutlass.const_expr(self.variant.rising_keys // VECTOR)
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
        for i in cutlass.range_constexpr(number):
            self._count_scores(shared, self._mask(tiles[i], places[i], (first, slice_stop)))
        sampled = Float32(self.num_threads * self.variant.rising_keys * self.cluster)
        expected = Float32(k) * sampled / Float32(cutlass.max(num_in_window, 1))
        wanted = Int32(expected + 4.0 * cute.math.sqrt(expected)) + 1
        bin_index, _above, _count, total = self._find_bin(
            shared, wanted, tid, rank, self.cluster, Int32(0), is_coarse=True
        )
        bound = Uint32(LOWEST)
        if wanted <= total:
            bound, _high = self._coarse_interval(bin_index)
            bound = cutlass.max(bound, Uint32(LOWEST))
        return bound

    @cute.jit
    def _stream(self, shared, source, bound, tid):
        """Append the slice's keys from `bound` up to the buffer; return their number, which may be
        more than fit: then the buffer is useless."""
        row_address, first, slice_first, slice_stop, num_keys = source
        number = cutlass.const_expr(self.variant.keys_per_thread // VECTOR)
        step = cutlass.const_expr(self.num_threads * self.variant.keys_per_thread)
        place = slice_first + tid * VECTOR
        tiles = self._load_tiles(row_address, place, num_keys, number)
        while place - tid * VECTOR < slice_stop:
            # The next keys are under way while these are looked at.
            following = self._load_tiles(row_address, place + step, num_keys, number)
            through = self._append(shared, tiles, place, bound, (first, slice_stop))
            tiles = following
            place += step
            # The lanes of a warp must leave together.
            if cute.arch.vote_any_sync(through > self.variant.buffer_keys):
                place = slice_stop + tid * VECTOR
        cute.arch.sync_threads()
        return shared.state[BUFFERED]

    @cute.jit
    def _append(self, shared, tiles, place, bound, window) -> Int32:
        """Append the scores from `lowest` up with their positions, all of a thread's or none;
        return the place after this thread's, which may be beyond the buffer: then they are lost."""
        first, stop = window
        buffer = shared_address(shared.buffer.iterator)
        # The same test twice, written in two ways: a compiler that sees one keeps its results, for
        # which it has too few predicates.
        lowest = score_of_key(bound)
        under = bound - Uint32(1)
        if under == Uint32(ZERO - 1):
            # No score has this key: it would be -0.0, and +0.0 is not above that.
            under -= Uint32(1)
        below = score_of_key(under)
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
            passing = count_if_at_least(passing, scores[i], lowest)
        through = Int32(0)
        if passing != 0:
            through = add_to_state(shared, BUFFERED, passing) + passing
            if through <= self.variant.buffer_keys:
                address = buffer + (through - passing) * 8
                for i in cutlass.range_constexpr(len(scores)):
                    tile_index, element = divmod(i, VECTOR)
                    position = place + (tile_index * self.num_threads * VECTOR + element)
                    address = push_if_above(address, scores[i], position, below)
        return through

    @cute.jit
    def _mask_all(self, scores, place, window):
        masked = []
        for t in cutlass.range_constexpr(len(scores) // VECTOR):
            tile = scores[t * VECTOR : (t + 1) * VECTOR]
            masked += self._mask(tile, place + t * self.num_threads * VECTOR, window)
        return masked

    @cute.jit
    def _stream_rising(self, shared, source, bound, k, window, tid, turn):
        """Append the slice's keys from a bound up that rises to the k-th best so far; return their
        number, which fits. Later keys that equal the k-th best lose to it: strictly above."""
        row_address, first, slice_first, slice_stop, num_keys = source
        number = cutlass.const_expr(self.variant.rising_keys // VECTOR)
        step = cutlass.const_expr(self.num_threads * self.variant.rising_keys)
        cute.arch.sync_threads()
        if tid == 0:
            shared.state[BUFFERED] = Int32(0)
        cute.arch.sync_threads()
        place = slice_first + tid * VECTOR
        count = Int32(0)
        tiles = self._load_tiles(row_address, place, num_keys, number)
        while place - tid * VECTOR < slice_stop:
            following = self._load_tiles(row_address, place + step, num_keys, number)
            self._append(shared, tiles, place, bound, (first, slice_stop))
            tiles = following
            place += step
            cute.arch.sync_threads()
            count = shared.state[BUFFERED]
            if count > self.variant.buffer_keys - step:
                entries = BufferEntries(shared, tid, self.num_threads, holds_keys=False)
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
        count = shared.state[BUFFERED]
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
