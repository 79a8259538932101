"""Writing what is selected, in the order of positions."""

from __future__ import annotations

import functools

import cutlass
import cutlass.cute as cute
from cutlass import Int32, Int64

from glm_compile.ops._cute.device import (
    WARP,
    block_exclusive_scan,
    or_shared,
    shared_address,
    store_global,
)
from glm_compile.ops.topk._cute.entries import VECTOR, is_selected
from glm_compile.ops.topk.config import Variant


class Output:
    """Methods of the kernel that write the result.

    `places` is (how many selected positions lower ranks hold, how many the row has).
    """

    variant: Variant
    num_threads: int
    num_warps: int
    cluster: int
    bitmap_words: int
    words_per_thread: int

    @cute.jit
    def _write_own(self, shared, entries, threshold, places, target, tid, rank) -> None:
        """Write the selected positions from keys in registers. A tile of VECTOR keys a thread is
        in order over the threads, so each tile's counts are scanned, two in a word."""
        _selected, out_address, table, *_rest = target
        t_key, t_position = threshold
        base, num_selected = places
        has_table = cutlass.const_expr(table is not None)
        num_tiles = cutlass.const_expr(len(entries.keys) // VECTOR)
        flags = []
        counts = []
        for tile in cutlass.range_constexpr(num_tiles):
            count = Int32(0)
            for e in cutlass.range_constexpr(VECTOR):
                key = entries.keys[tile * VECTOR + e]
                position = entries.position(tile * VECTOR + e)
                # Key 0 is never selected: the threshold is above it, or before position 0.
                flag = is_selected(key, position, t_key, t_position)
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
            for e in cutlass.range_constexpr(VECTOR):
                flag = flags[tile * VECTOR + e]
                position = entries.position(tile * VECTOR + e)
                if cutlass.const_expr(has_table):
                    if flag:
                        self._write(target, slot, position)
                else:
                    # Without a branch: this is most of the kernel's last phase.
                    store_global(out_address + Int64(slot) * 4, position, flag)
                if flag:
                    slot += 1
        self._write_rest(target, base, slot_base, num_selected, tid, rank)

    @cute.jit
    def _write_listed(
        self, shared, entries, threshold, places, slice_first, target, tid, rank
    ) -> None:
        """Write the selected positions from entries in any order, which a bitmap puts in order."""
        t_key, t_position = threshold
        bitmap = shared_address(shared.bitmap.iterator)
        mark = functools.partial(self._mark, bitmap, t_key, t_position, slice_first)
        entries.fold(mark, Int32(0))
        cute.arch.sync_threads()
        self._write_marked(shared, places, slice_first, target, tid, rank)

    @cute.jit
    def _mark(self, bitmap, t_key, t_position, slice_first, key, position, carry):
        """Set the bit of a selected position."""
        if is_selected(key, position, t_key, t_position):
            offset = position - slice_first
            or_shared(bitmap + (offset >> 5) * 4, Int32(1) << (offset & 31))
        return carry

    @cute.jit
    def _write_marked(self, shared, places, slice_first, target, tid, rank) -> None:
        """Write the positions of the set bits."""
        base, num_selected = places
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
        self._write_rest(target, base, base + total, num_selected, tid, rank)

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
    def _write_rest(self, target, base, end, num_selected, tid, rank) -> None:
        """Fill up the row behind its last selected position.

        With -1 the cluster's last block does so, whose last place is the row's. With the last
        position the block that has written it, in places `base` to `end`; in a row that has none
        the last one.
        """
        selected, _out_address, _table, row, k, _rows_per_sequence, _page_size = target
        value = Int32(-1)
        is_mine = rank == self.cluster - 1
        if cutlass.const_expr(self.variant.repeat_last):
            value = Int32(0)
            is_mine = is_mine and num_selected == 0
            if num_selected < k:
                # This block wrote it: a barrier is all that the load needs.
                cute.arch.sync_threads()
                if base < num_selected and num_selected <= end:
                    value = selected[row, num_selected - 1]
                    is_mine = True
        if is_mine:
            slot = end + tid
            while slot < k:
                selected[row, slot] = value
                slot += self.num_threads
