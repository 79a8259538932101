"""Indexer scores in CuTe DSL for sm_90a: a page of keys times all rows' heads is one wgmma tile.

The 64 keys of a page are the M side of a wgmma, the query rows' heads (up to 256 columns) its N
side, so a key is read once for all rows. Blocks are persistent: one warp of a block reads the block
table and keeps a ring of pages full by bulk tensor copies, two warpgroups take turns at the pages,
one multiplying while the other reduces its products over the heads in registers. With a wide tile
of FP8 queries a page is multiplied in two parts, so that a warpgroup also reduces one part while
the tensor core is at its other one (6 rows of 128K keys: 8.8 us, in one part 9.2). Narrow tiles and
bf16 lose by it: keys are read from shared memory for each part.

Half of a decode step is latency. So what needs no other kernel's data is done before it is waited
for, lengths and block table are read before where they are known to be there, and what the lengths
do not decide is asked for before they are known. That one warp asks for page after page is on
purpose: four warps that ask for all at once make some blocks wait for their first page until others
have all of theirs (12.5 us). Nor are pages brought into L2 before the kernels ahead have ended
(10.1 us where it was 9.2 without), or into the ring: they hold up the queries on their way (a
layer's whole indexer 46.0 us without, 46.4 with two pages a block, 49.4 with all). Figures: 6 rows
of 128K keys on one NVIDIA H200, 2026-11-30, by the methods of
tests/benchmarks/test_indexer_scores_benchmark and test_indexer_benchmark.

The pages of each block are found from the lengths on the device. One tile of rows: page p goes to
block p modulo their number. More: the pages of all tiles form one list, cut into one piece a block.

FP8 products are summed by the tensor core over all 128 dimensions, in its accumulator of fewer bits
than fp32: on an H200 scores were off by at most 2^-15 of the sum of the absolute products behind
them, 2^-19 on average (bf16: 2^-25 and 2^-28). All else is fp32.

Shape legend: B batch, S query tokens of the step, R = B * S rows, T cached tokens, H index heads,
D index head dim, P pages of a sequence.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Boolean, Float8E4M3FN, Float16, Float32, Int32, Int64, Uint8
from cutlass._mlir.dialects import llvm
from cutlass.cute.arch import inline_ptx
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import (
    WARP,
    clamp_index,
    shared_address,
    store_global,
    store_shared,
    warp_inclusive_scan,
)
from glm_compile.ops._cute.stream import bulk_load, evict_first_policy, evict_normal_policy
from glm_compile.ops._dispatch import num_multiprocessors

_GROUP = 128
_PAGE = 64
_DIM = 128
# Columns of the widest wgmma.
MAX_COLUMNS = 256
# Columns of the widest tile of FP8 that a page is multiplied with at once.
_COLUMNS_OF_A_PART = 128
# Rows of queries that share a tile at most: what the epilogue was written for.
MAX_ROWS = 8
_SHARED_BYTES = 220 * 1024
# Warpgroups that score; the first warp of another one loads.
_GROUPS = 2
_LOADER = _GROUPS * _GROUP // WARP
_WARPS = (_GROUPS + 1) * _GROUP // WARP
# Registers of a thread that loads and of one that scores, together those of a multiprocessor.
_REGISTERS_TO_LOAD, _REGISTERS_TO_SCORE = 40, 232

_CUTE_TYPES = {
    torch.float8_e4m3fn: Float8E4M3FN,
    torch.bfloat16: BFloat16,
    torch.float16: Float16,
    torch.float32: Float32,
    torch.int32: Int32,
    torch.int64: Int64,
    torch.uint8: Uint8,
}


@dataclass(frozen=True)
class Variant:
    """What a kernel is specialised for.

    Attributes:
        key_dtype: of q and keys.
        num_heads: H.
        num_rows: query rows of a tile.
        weight_dtype, length_dtype, table_dtype: of these arguments; no table: contiguous keys.
        start_dtype: None without starts.
        has_mask: whether there is a key mask.
        is_causal: lengths are tokens cached before the step, one number a sequence.
        has_early_windows: lengths, starts and table are read before the kernels ahead have ended.
        has_weight_pairs: weights are fp32, and those of two adjacent heads one aligned load.
        num_stages: pages in flight, at most; at least 4.
        use_pdl: start before the kernels ahead have ended.
    """

    key_dtype: torch.dtype
    num_heads: int
    num_rows: int
    weight_dtype: torch.dtype = torch.float32
    length_dtype: torch.dtype = torch.int32
    table_dtype: torch.dtype | None = torch.int32
    start_dtype: torch.dtype | None = None
    has_mask: bool = False
    has_weight_pairs: bool = False
    is_causal: bool = False
    has_early_windows: bool = False
    num_stages: int = 16
    use_pdl: bool = True

    @property
    def is_fp8(self) -> bool:
        return self.key_dtype == torch.float8_e4m3fn

    @property
    def num_columns(self) -> int:
        return self.num_rows * self.num_heads


class IndexerScoresKernel:
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        v = variant
        self.v = variant
        self.dtype = _CUTE_TYPES[v.key_dtype]
        self.has_table = v.table_dtype is not None
        element_bytes = 1 if v.is_fp8 else 2
        self.key_bytes = _PAGE * _DIM * element_bytes
        self.stage_bytes = self.key_bytes + (_PAGE * 4 if v.is_fp8 else 0)
        self.query_bytes = v.num_columns * _DIM * element_bytes
        # Two tiles of queries, so that the next ones are there when a block moves on.
        self.num_query_stages = 2 if self.query_bytes <= 32 * 1024 else 1
        room = _SHARED_BYTES - self.num_query_stages * self.query_bytes
        # As many for each warpgroup.
        self.num_stages = min(v.num_stages, room // self.stage_bytes) // _GROUPS * _GROUPS
        # A warpgroup waits for its next page before it gives one back.
        if self.num_stages < 2 * _GROUPS:
            raise ValueError(
                f"indexer_scores: {2 * _GROUPS} pages in flight are the least, got "
                f"{v.num_stages} of {self.stage_bytes} bytes, of which {self.num_stages} fit"
            )
        self.num_steps = _DIM * element_bytes // 32
        # Pairs of adjacent columns of one row that a thread holds.
        self.num_pairs = v.num_heads // 8
        # Rows of the tile's first half, and of what a page is multiplied with at a time.
        self.half_rows = -(-v.num_rows // 2)
        self.rows_of_parts = [v.num_rows]
        if v.is_fp8 and v.num_columns > _COLUMNS_OF_A_PART:
            self.rows_of_parts = [self.half_rows, v.num_rows - self.half_rows]

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        weights: cute.Tensor,
        keys: cute.Tensor,
        table: cute.Tensor | None,
        lengths: cute.Tensor,
        starts: cute.Tensor | None,
        mask: cute.Tensor | None,
        scores: cute.Tensor,
        num_queries: Int32,
        num_tiles: Int32,
        softmax_scale: Float32,
        num_blocks: Int32,
        stream: Any,
    ) -> None:
        v = self.v
        tile = (_PAGE, v.num_columns, _DIM)
        row_major = LayoutEnum.ROW_MAJOR
        key_layout = hopper.make_smem_layout_a(row_major, tile, self.dtype, self.num_stages)
        query_layout = hopper.make_smem_layout_b(row_major, tile, self.dtype, self.num_query_stages)
        # [rows of a page or sequence, D, pages or sequences]
        if cutlass.const_expr(v.is_fp8):
            key_tensor = cute.make_tensor(
                cute.recast_ptr(keys.iterator, dtype=self.dtype),
                cute.make_layout((_PAGE, _DIM, keys.shape[0]), stride=(_DIM, 1, keys.stride[0])),
            )
        else:
            key_tensor = cute.make_tensor(keys.iterator, cute.select(keys.layout, mode=[1, 2, 0]))
        query_tensor = cute.make_tensor(
            cute.recast_ptr(q.iterator, dtype=self.dtype),
            cute.make_layout((q.shape[0], _DIM), stride=(q.stride[0], 1)),
        )
        load = cpasync.CopyBulkTensorTileG2SOp()
        key_atom, key_coords = cpasync.make_tiled_tma_atom(
            load, key_tensor, cute.slice_(key_layout, (None, None, 0)), (_PAGE, _DIM)
        )
        query_atom, query_coords = cpasync.make_tiled_tma_atom(
            load,
            query_tensor,
            cute.slice_(query_layout, (None, None, 0)),
            (v.num_columns, _DIM),
        )
        self.kernel(
            key_layout,
            query_layout,
            key_atom,
            key_coords,
            query_atom,
            query_coords,
            keys,
            weights,
            table,
            lengths,
            starts,
            mask,
            scores,
            num_queries,
            num_tiles,
            softmax_scale,
        ).launch(
            grid=(num_blocks, 1, 1),
            block=(_WARPS * WARP, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=v.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        key_layout: cute.ComposedLayout,
        query_layout: cute.ComposedLayout,
        key_atom: cute.CopyAtom,
        key_coords: cute.Tensor,
        query_atom: cute.CopyAtom,
        query_coords: cute.Tensor,
        keys: cute.Tensor,
        weights: cute.Tensor,
        table: cute.Tensor | None,
        lengths: cute.Tensor,
        starts: cute.Tensor | None,
        mask: cute.Tensor | None,
        scores: cute.Tensor,
        num_queries: Int32,
        num_tiles: Int32,
        softmax_scale: Float32,
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        key_ring = allocator.allocate_tensor(
            self.dtype, key_layout.outer, 1024, swizzle=key_layout.inner
        )
        query_ring = allocator.allocate_tensor(
            self.dtype, query_layout.outer, 1024, swizzle=query_layout.inner
        )
        scale_ring = None
        if cutlass.const_expr(v.is_fp8):
            scale_ring = allocator.allocate_tensor(
                Float32, cute.make_layout(self.num_stages * _PAGE), 128
            )
        entry_ring = allocator.allocate_tensor(Int32, cute.make_layout(self.num_stages), 16)
        plan = allocator.allocate_tensor(Int32, cute.make_layout(4), 16)
        num_barriers = 2 * (self.num_stages + self.num_query_stages) + 1
        barriers = allocator.allocate_tensor(Int64, cute.make_layout(num_barriers), 16).iterator
        is_full = barriers
        is_empty = is_full + self.num_stages
        has_query = is_empty + self.num_stages
        is_query_free = has_query + self.num_query_stages
        has_plan = is_query_free + self.num_query_stages
        # By three warps: one thread alone takes longer than all that follows.
        if tid == 0:
            for stage in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(is_full + stage, 1)
        if tid == _GROUP:
            for stage in cutlass.range_constexpr(self.num_stages):
                cute.arch.mbarrier_init(is_empty + stage, _GROUP // WARP)
        if tid == 2 * _GROUP:
            cute.arch.mbarrier_init(has_plan, WARP)
            for stage in cutlass.range_constexpr(self.num_query_stages):
                cute.arch.mbarrier_init(has_query + stage, 1)
                cute.arch.mbarrier_init(is_query_free + stage, _LOADER)
        cute.arch.mbarrier_init_fence()
        if warp == _LOADER:
            cpasync.prefetch_descriptor(key_atom)
            cpasync.prefetch_descriptor(query_atom)
        cute.arch.sync_threads()
        windows = (lengths, starts, num_queries, scores.shape[1])
        rings = (key_ring, query_ring, scale_ring, entry_ring)
        signals = (is_full, is_empty, has_query, is_query_free)
        if warp >= _LOADER:
            cute.arch.setmaxregister_decrease(_REGISTERS_TO_LOAD)
            if warp == _LOADER:
                if cutlass.const_expr(not v.has_early_windows):
                    # Everything below may come from the kernel ahead.
                    self._wait_for_kernels_ahead()
                if num_tiles > 1:
                    self._make_plan(plan, windows, num_tiles)
                    cute.arch.sync_warp()
                    # All lanes do, since any may have found the block's first tile.
                    cute.arch.mbarrier_arrive(has_plan)
                self._load(
                    (key_atom, key_coords, query_atom, query_coords),
                    keys,
                    table,
                    windows,
                    rings,
                    signals,
                    plan,
                    num_tiles,
                )
        else:
            cute.arch.setmaxregister_increase(_REGISTERS_TO_SCORE)
            if cutlass.const_expr(not v.has_early_windows):
                self._wait_for_kernels_ahead()
            if num_tiles > 1:
                cute.arch.mbarrier_wait(has_plan, 0)
                cute.arch.sync_warp()
            self._score(
                weights, mask, scores, softmax_scale, windows, rings, signals, plan, num_tiles
            )

    def _wait_for_kernels_ahead(self) -> None:
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()

    @cute.jit
    def _window_of_row(self, windows, sequence, query, i) -> tuple[Int32, Int32]:
        """(start, length) of row i of the tile that begins with a query, in 0..T.

        Nothing for a row that the tile does not have.
        """
        lengths, starts, num_queries, num_keys = windows
        length = Int32(0)
        start = num_keys
        if i < self.v.num_rows and query + i < num_queries:
            row = sequence * num_queries + query + i
            if cutlass.const_expr(self.v.is_causal):
                cached = cutlass.min(lengths[sequence], num_keys)
                length = clamp_index(cached + (query + i + 1), num_keys)
            else:
                length = clamp_index(lengths[row], num_keys)
            start = Int32(0)
            if cutlass.const_expr(starts is not None):
                start = clamp_index(starts[row], num_keys)
        return start, length

    @cute.jit
    def _pages_of_tile(self, windows, sequence, query) -> tuple[Int32, Int32]:
        """(first, one past the last) page that any row of a tile sees; all lanes call it."""
        start, length = self._window_of_row(windows, sequence, query, cute.arch.lane_idx())
        last = (cute.arch.warp_redux_sync(length, "max") + _PAGE - 1) // _PAGE
        first = Int32(0)
        if cutlass.const_expr(windows[1] is not None):
            first = cutlass.min(cute.arch.warp_redux_sync(start, "min") // _PAGE, last)
        return first, last

    @cute.jit
    def _pages_of_lane(self, windows, tile, num_tiles) -> tuple[Int32, Int32]:
        """(first page, number of pages) of a tile of this lane's own."""
        v = self.v
        tiles_per_sequence = (windows[2] + v.num_rows - 1) // v.num_rows
        sequence = tile // tiles_per_sequence
        query = (tile - sequence * tiles_per_sequence) * v.num_rows
        longest = Int32(0)
        earliest = windows[3]
        if tile < num_tiles:
            for i in cutlass.range_constexpr(v.num_rows):
                start, length = self._window_of_row(windows, sequence, query, i)
                longest = cutlass.max(longest, length)
                earliest = cutlass.min(earliest, start)
        last = (longest + _PAGE - 1) // _PAGE
        first = cutlass.min(earliest // _PAGE, last)
        return first, last - first

    @cute.jit
    def _make_plan(self, plan, windows, num_tiles) -> None:
        """Put the tile, page and number of pages of this block into shared memory; one warp."""
        lane = cute.arch.lane_idx()
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        total = Int32(0)
        for tile in cutlass.range(0, num_tiles, WARP, unroll=1):
            _, count = self._pages_of_lane(windows, tile + lane, num_tiles)
            total += cute.arch.warp_redux_sync(count, "add")
        share = total // num_blocks
        rest = total % num_blocks
        begin = block * share + cutlass.min(block, rest)
        if lane == 0:
            plan[0] = Int32(0)
            plan[1] = Int32(0)
            plan[2] = share + Int32(block < rest)
        cute.arch.sync_warp()
        before = Int32(0)
        for tile in cutlass.range(0, num_tiles, WARP, unroll=1):
            first, count = self._pages_of_lane(windows, tile + lane, num_tiles)
            through = before + warp_inclusive_scan(count)
            if through - count <= begin and begin < through:
                plan[0] = tile + lane
                plan[1] = first + begin - (through - count)
            before = cute.arch.shuffle_sync(through, WARP - 1)

    @cute.jit
    def _first_piece(self, plan, windows, num_tiles) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """(sequence, first query, page, end, pages after the end) of a block's first piece.

        One tile of rows: its pages are `page`, `page` + number of blocks, ... up to the end. More:
        all pages from `page` to the end, then as many of the following tiles.
        """
        v = self.v
        block, _, _ = cute.arch.block_idx()
        sequence = Int32(0)
        query = Int32(0)
        if num_tiles > 1:
            tiles_per_sequence = (windows[2] + v.num_rows - 1) // v.num_rows
            tile = plan[0]
            sequence = tile // tiles_per_sequence
            query = (tile - sequence * tiles_per_sequence) * v.num_rows
        first, last = self._pages_of_tile(windows, sequence, query)
        page = first + block
        rest = Int32(0)
        if num_tiles > 1:
            page = plan[1]
            end = cutlass.min(last, page + plan[2])
            rest = plan[2] - (end - page)
            last = end
        return sequence, query, page, last, rest

    @cute.jit
    def _next_piece(
        self, windows, sequence, query, rest
    ) -> tuple[Int32, Int32, Int32, Int32, Int32]:
        """`_first_piece`, of the tile behind this one."""
        query += self.v.num_rows
        if query >= windows[2]:
            query = Int32(0)
            sequence += 1
        page, last = self._pages_of_tile(windows, sequence, query)
        end = cutlass.min(last, page + rest)
        return sequence, query, page, end, rest - (end - page)

    @cute.jit
    def _entries(self, table, sequence, page, step) -> Int32:
        """Block table entries of 32 pages, one a lane; -1 beyond the table."""
        column = page + cute.arch.lane_idx() * step
        entry = Int32(-1)
        if column < table.shape[1]:
            entry = Int32(table[sequence, column])
        return entry

    @cute.jit
    def _load(self, atoms, keys, table, windows, rings, signals, plan, num_tiles) -> None:
        """Keep the ring full; one warp."""
        v = self.v
        key_atom, key_coords, query_atom, query_coords = atoms
        key_ring, query_ring, scale_ring, entry_ring = rings
        is_full, is_empty, has_query, is_query_free = signals
        queries = (query_atom, query_coords, query_ring, has_query)
        num_queries = windows[2]
        # (copy, stage), (copy, row tile, dim tile, page or sequence)
        key_tiles = cute.local_tile(key_coords, (_PAGE, _DIM), (None, None, None))
        key_to, key_from = cpasync.tma_partition(
            key_atom,
            0,
            cute.make_layout(1),
            cute.group_modes(key_ring, 0, 2),
            cute.group_modes(key_tiles, 0, 2),
        )
        # Pages of the block that follow each other are so far apart.
        step = Int32(1)
        block, _, _ = cute.arch.block_idx()
        if num_tiles == 1:
            step, _, _ = cute.arch.grid_dim()
        # What does not take the lengths is asked for before they are.
        following = Int32(0)
        is_asked_for = Boolean(False)
        if cutlass.const_expr(table is not None and windows[1] is None):  # noqa: SIM102
            if num_tiles == 1:
                following = self._entries(table, Int32(0), Int32(block), step)
                is_asked_for = Boolean(True)
        if cutlass.const_expr(not v.has_early_windows):  # noqa: SIM102 - decided while tracing
            if num_tiles == 1:
                self._load_query(queries, Int32(0), Int32(0))
        sequence, query, page, end, rest = self._first_piece(plan, windows, num_tiles)
        if cutlass.const_expr(v.has_early_windows):
            self._wait_for_kernels_ahead()
            if num_tiles == 1:
                self._load_query(queries, Int32(0), Int32(0))
        has_pages = page < end
        # Keys are read once, or again by the next tile of a long step.
        policy = evict_first_policy()
        if num_queries > v.num_rows:
            policy = evict_normal_policy()
        slot = Int32(0)
        phase = Int32(1)
        query_slot = Int32(0)
        query_phase = Int32(1)
        entry_address = shared_address(entry_ring.iterator)
        is_going = page < end or rest > 0
        while is_going:
            if page < end:
                if num_tiles > 1:
                    cute.arch.mbarrier_wait(is_query_free + query_slot, query_phase)
                    cute.arch.sync_warp()
                    self._load_query(queries, sequence * num_queries + query, query_slot)
                query_slot += 1
                if query_slot == self.num_query_stages:
                    query_slot = Int32(0)
                    query_phase ^= 1
                entries = Int32(0)
                if cutlass.const_expr(table is not None):  # noqa: SIM102 - decided while tracing
                    if not is_asked_for:
                        following = self._entries(table, sequence, page, step)
                i = Int32(0)
                for at in cutlass.range(page, end, step, unroll=1):
                    entry = sequence
                    if cutlass.const_expr(table is not None):
                        if i % WARP == 0:
                            entries = following
                            following = self._entries(table, sequence, at + WARP * step, step)
                        entry = cute.arch.shuffle_sync(entries, i % WARP)
                    i += 1
                    cute.arch.mbarrier_wait(is_empty + slot, phase)
                    cute.arch.sync_warp()
                    self._load_page(
                        (key_atom, key_from, key_to),
                        keys,
                        entry,
                        at,
                        slot,
                        scale_ring,
                        entry_address,
                        is_full,
                        policy,
                    )
                    slot += 1
                    if slot == self.num_stages:
                        slot = Int32(0)
                        phase ^= 1
            is_going = rest > 0
            if is_going:
                sequence, query, page, end, rest = self._next_piece(windows, sequence, query, rest)
        if num_tiles == 1 and not has_pages:
            # Nobody waits for the queries, and a block must not end before its copies.
            cute.arch.mbarrier_wait(has_query, 0)

    @cute.jit
    def _load_page(
        self, copy, keys, entry, page, slot, scale_ring, entry_address, is_full, policy
    ) -> None:
        """Start the copy of a page, or say that there is none."""
        v = self.v
        key_atom, key_from, key_to = copy
        if entry >= 0:
            with cute.arch.elect_one():
                if cutlass.const_expr(self.has_table):
                    store_shared(entry_address + slot * 4, entry)
                cute.arch.mbarrier_arrive_and_expect_tx(is_full + slot, self.stage_bytes)
                if cutlass.const_expr(v.is_fp8):
                    bulk_load(
                        shared_address(scale_ring.iterator) + slot * (_PAGE * 4),
                        keys.iterator.toint()
                        + (Int64(entry) * Int64(keys.stride[0]) + self.key_bytes),
                        _PAGE * 4,
                        Int32((is_full + slot).toint()),
                        policy,
                    )
            row_tile = Int32(0)
            if cutlass.const_expr(not self.has_table):
                row_tile = page
            cute.copy(
                key_atom,
                key_from[None, row_tile, 0, entry],
                key_to[None, slot],
                tma_bar_ptr=is_full + slot,
                cache_policy=policy,
            )
        else:
            with cute.arch.elect_one():
                store_shared(entry_address + slot * 4, Int32(-1))
                cute.arch.mbarrier_arrive(is_full + slot)

    @cute.jit
    def _load_query(self, queries, row, slot) -> None:
        """Start the copy of a tile's queries, from row `row` on."""
        atom, coords, ring, has_query = queries
        v = self.v
        tile = cute.local_tile(
            cute.domain_offset((row * v.num_heads, 0), coords), (v.num_columns, _DIM), (0, 0)
        )
        to, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(ring, 0, 2),
            cute.group_modes(tile, 0, 2),
        )
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive_and_expect_tx(has_query + slot, self.query_bytes)
        cute.copy(atom, source, to[None, slot], tma_bar_ptr=has_query + slot)

    @cute.jit
    def _score(
        self, weights, mask, scores, softmax_scale, windows, rings, signals, plan, num_tiles
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        group = cute.arch.make_warp_uniform(tid // _GROUP)
        in_group = tid % _GROUP
        key_ring, query_ring, scale_ring, entry_ring = rings
        is_full, is_empty, has_query, is_query_free = signals
        num_queries = windows[2]
        num_keys = windows[3]
        fragments = []
        products = []
        for i in cutlass.range_constexpr(len(self.rows_of_parts)):
            num_columns = self.rows_of_parts[i] * v.num_heads
            first_column = i * self.half_rows * v.num_heads
            queries = cute.local_tile(
                cute.domain_offset((first_column, 0, 0), query_ring),
                (num_columns, _DIM),
                (0, 0, None),
            )
            mma = self._make_mma(i)
            part = mma.get_slice(in_group)
            fragments.append(
                (
                    mma.make_fragment_A(part.partition_A(key_ring)),
                    mma.make_fragment_B(part.partition_B(queries)),
                )
            )
            shape = mma.partition_shape_C((_PAGE, num_columns))
            products.append(cute.make_rmem_tensor(shape, Float32))
        # After the reduction a lane holds one key of the page and the rows of one half.
        key = in_group // WARP * 16 + lane // 4 + lane % 2 * 8
        odd = lane // 2 % 2

        row_weights = cute.make_rmem_tensor(v.num_rows * self.num_pairs * 2, Float32)
        if cutlass.const_expr(not v.has_early_windows):  # noqa: SIM102 - decided while tracing
            if num_tiles == 1:
                # Asked for before the lengths are there.
                self._load_weights(weights, Int32(0), num_queries, lane, row_weights)
        sequence, query, page, end, rest = self._first_piece(plan, windows, num_tiles)
        if cutlass.const_expr(v.has_early_windows):
            self._wait_for_kernels_ahead()
            if num_tiles == 1:
                self._load_weights(weights, Int32(0), num_queries, lane, row_weights)
        step = Int32(1)
        if num_tiles == 1:
            step, _, _ = cute.arch.grid_dim()
        stride = step * _GROUPS
        # Pages of the block before this piece; a block's page j is warpgroup j % _GROUPS's.
        done = Int32(0)
        query_slot = Int32(0)
        query_phase = Int32(0)
        slot = Int32(group)
        phase = Int32(0)
        row_bytes = Int64(scores.stride[0]) * 4
        address_step = Int64(stride) * (_PAGE * 4)
        is_going = page < end or rest > 0
        while is_going:
            if page < end:
                row = sequence * num_queries + query
                num_rows = cutlass.min(num_queries - query, v.num_rows)
                if num_tiles > 1:
                    self._load_weights(weights, row, num_rows, lane, row_weights)
                first = page + (group + _GROUPS - done % _GROUPS) % _GROUPS * step
                position = first * _PAGE + key
                address = (
                    scores.iterator.toint()
                    + Int64(row + odd * self.half_rows) * row_bytes
                    + Int64(position) * 4
                )
                has_row = [i + odd * self.half_rows < num_rows for i in range(self.half_rows)]
                cute.arch.mbarrier_wait(has_query + query_slot, query_phase)
                cute.arch.sync_warp()
                if first < end:
                    cute.arch.mbarrier_wait(is_full + slot, phase)
                    cute.arch.sync_warp()
                    self._multiply(0, products, fragments, slot, query_slot, is_full)
                    warpgroup.wait_group(0)
                    constants = (
                        (products, fragments, query_slot, row_weights),
                        (mask, sequence, query, num_rows),
                        (softmax_scale, num_keys, key, odd, lane),
                        (row_bytes, has_row, stride, address_step),
                        (scale_ring, entry_ring, is_full, is_empty),
                    )
                    for _ in cutlass.range(first + stride, end, stride, unroll=1):
                        slot, phase, position, address = self._page(
                            constants, slot, phase, position, address, True
                        )
                    slot, phase, position, address = self._page(
                        constants, slot, phase, position, address, False
                    )
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(is_query_free + query_slot)
                query_slot += 1
                if query_slot == self.num_query_stages:
                    query_slot = Int32(0)
                    query_phase ^= 1
                done += end - page
            is_going = rest > 0
            if is_going:
                sequence, query, page, end, rest = self._next_piece(windows, sequence, query, rest)

    @cute.jit
    def _load_weights(self, weights, row, num_rows, lane, row_weights) -> None:
        """The weights of this thread's columns, by row of the tile."""
        v = self.v
        for i in cutlass.range_constexpr(v.num_rows):
            # Rows beyond the tile's own are not stored, so any weight does.
            from_row = row + cutlass.min(i, num_rows - 1)
            for pair in cutlass.range_constexpr(self.num_pairs):
                head = pair * 8 + lane % 4 * 2
                at = (i * self.num_pairs + pair) * 2
                if cutlass.const_expr(v.has_weight_pairs):
                    place = Int64(from_row) * Int64(weights.stride[0]) + head
                    first, second = _load_global_v2(weights.iterator.toint() + place * 4)
                else:
                    first = Float32(weights[from_row, head])
                    second = Float32(weights[from_row, head + 1])
                row_weights[at] = first
                row_weights[at + 1] = second

    def _make_mma(self, part: int) -> Any:
        k_major = OperandMajorMode.K
        tile = (_PAGE, self.rows_of_parts[part] * self.v.num_heads)
        return hopper.make_trivial_tiled_mma(
            self.dtype, self.dtype, k_major, k_major, Float32, (1, 1, 1), tile
        )

    @cute.jit
    def _multiply(
        self, part: cutlass.Constexpr, products, fragments, slot, query_slot, is_full
    ) -> None:
        """Start the products of a page with the queries of a part of the tile."""
        key_part, query_part = fragments[part]
        # One of its own, since what is set holds within the loop that sets it.
        mma = self._make_mma(part)
        warpgroup.fence()
        mma.set(warpgroup.Field.ACCUMULATE, False)
        for k in cutlass.range_constexpr(self.num_steps):
            cute.gemm(
                mma,
                products[part],
                key_part[None, None, k, slot],
                query_part[None, None, k, query_slot],
                products[part],
            )
            mma.set(warpgroup.Field.ACCUMULATE, True)
        warpgroup.commit_group()
        # The word before the barriers is nobody's.
        _move_nothing_across(Int32(is_full.toint()) - 4)

    @cute.jit
    def _page(self, constants, slot, phase, position, address, has_next: cutlass.Constexpr):
        """Reduce a page's products, start the next one's, give the page back, store its scores.

        The products of the first part of the rows are there when this begins, and those of the next
        page when it ends: with some under way at a loop's end, the assembler waits after each
        step of a product. Returns the next page's slot, the phase of its barriers, its first
        position and the address of this lane's first score.
        """
        v = self.v
        (
            (products, fragments, query_slot, row_weights),
            (mask, sequence, query, num_rows),
            (softmax_scale, num_keys, key, odd, lane),
            (row_bytes, has_row, stride, address_step),
            (scale_ring, entry_ring, is_full, is_empty),
        ) = constants
        allowed = []
        if cutlass.const_expr(v.has_mask):
            rows = (query + odd * self.half_rows, num_rows - odd * self.half_rows)
            allowed = self._load_mask(mask, sequence, *rows, position, num_keys)
        num_parts = cutlass.const_expr(len(self.rows_of_parts))
        if cutlass.const_expr(num_parts == 2):
            self._multiply(1, products, fragments, slot, query_slot, is_full)
        sums = self._reduce(0, products[0], row_weights, softmax_scale, lane)
        scale = Float32(1.0)
        if cutlass.const_expr(v.is_fp8):
            scale = scale_ring[slot * _PAGE + key]
        entry = Int32(0)
        if cutlass.const_expr(self.has_table):
            entry = entry_ring[slot]
        next_slot = slot + _GROUPS
        next_phase = phase
        if next_slot >= self.num_stages:
            next_slot -= self.num_stages
            next_phase ^= 1
        if cutlass.const_expr(num_parts == 2):
            warpgroup.wait_group(0)
        if cutlass.const_expr(has_next):
            cute.arch.mbarrier_wait(is_full + next_slot, next_phase)
            cute.arch.sync_warp()
            self._multiply(0, products, fragments, next_slot, query_slot, is_full)
        if cutlass.const_expr(num_parts == 2):
            sums += self._reduce(1, products[1], row_weights, softmax_scale, lane)
        values = self._exchange_rows(sums, lane)
        # Of all lanes, so that no lane's load is on its way any more. Sooner, the loads would be
        # waited for; while the tensor core is at work, nobody is kept.
        loaded = cute.arch.vote_ballot_sync(scale.bitcast(Int32) == entry)
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            _arrive_after(is_empty + slot, Int32(loaded))
        is_inside = position < num_keys
        place = address
        for pair in cutlass.range_constexpr(len(values)):
            value = values[pair]
            if cutlass.const_expr(v.is_fp8):
                value = value * scale
            is_scored = entry >= 0
            if cutlass.const_expr(v.has_mask):
                is_scored = is_scored and allowed[pair] != 0
            if not is_scored:
                value = Float32(float("-inf"))
            store_global(place, value.bitcast(Int32), is_inside and has_row[pair])
            place += row_bytes
        if cutlass.const_expr(has_next):
            warpgroup.wait_group(0)
        return next_slot, next_phase, position + stride * _PAGE, address + address_step

    @cute.jit
    def _load_mask(self, mask, sequence, query, num_rows, position, num_keys) -> list:
        """The mask at this lane's key, by row of its half."""
        allowed = []
        for i in cutlass.range_constexpr(self.half_rows):
            value = Int32(0)
            if i < num_rows and position < num_keys:
                value = Int32(mask[sequence, query + i, position])
            allowed.append(value)
        return allowed

    @cute.jit
    def _reduce(self, part: cutlass.Constexpr, products, row_weights, softmax_scale, lane) -> list:
        """Sums over two lanes' heads of weight * relu(product * scale), by row of a part.

        Of the 2 keys that four lanes hold parts of, a lane ends up with key `lane % 2`.
        """
        is_odd_key = lane % 2 == 1
        first_weight = part * self.half_rows * self.num_pairs * 2
        sums = []
        for i in cutlass.range_constexpr(self.rows_of_parts[part]):
            both = []
            for of_two in cutlass.range_constexpr(2):
                total = Float32(0.0)
                for j in cutlass.range_constexpr(self.num_pairs * 2):
                    product = products[(i * self.num_pairs + j // 2) * 4 + of_two * 2 + j % 2]
                    if cutlass.const_expr(not self.has_table):
                        product = product * softmax_scale
                    # Keeps NaN, as torch.relu does.
                    positive = cute.arch.fmax(product, Float32(0.0), nan=True)
                    weight = row_weights[first_weight + i * self.num_pairs * 2 + j]
                    total = _fma(positive, weight, total)
                both.append(total)
            sums.append(_exchange(both[0], both[1], is_odd_key, 1))
        return sums

    @cute.jit
    def _exchange_rows(self, sums, lane) -> list:
        """Sums over all heads, of the rows of half `lane // 2 % 2`."""
        is_odd = lane // 2 % 2 == 1
        values = []
        for i in cutlass.range_constexpr(self.half_rows):
            if cutlass.const_expr(i + self.half_rows < self.v.num_rows):
                values.append(_exchange(sums[i], sums[i + self.half_rows], is_odd, 2))
            else:
                values.append(sums[i] + cute.arch.shuffle_sync_bfly(sums[i], 2))
        return values


def _arrive_after(barrier, value: Int32) -> None:
    """Arrive on a barrier once a value is there, which came from loads of all lanes.

    A page's slot is filled again by the copy engine, which does not wait for loads on their way:
    both branches arrive, and which one is taken depends on the value.
    """
    inline_ptx(
        "{\n.reg .pred is_zero;\nsetp.eq.b32 is_zero, {$r1}, 0;\n"
        "@is_zero mbarrier.arrive.shared::cta.b64 _, [{$r0}];\n"
        "@!is_zero mbarrier.arrive.shared::cta.b64 _, [{$r0}];\n}",
        read_only_args=[Int32(barrier.toint()), value],
    )


def _move_nothing_across(unused: Int32) -> None:
    """Keep the assembler from moving what follows in front of what is before.

    It would spread the steps of a product over the stores that follow it, which need not wait for
    one another, and the tensor core would stand still. Across a read of the clock it moves nothing;
    a read without a use would vanish, so a store to shared memory that nobody reads hangs on it.
    """
    llvm.inline_asm(
        None,
        [unused.ir_value()],
        "{\n.reg .b32 now;\n.reg .pred is_time;\nmov.u32 now, %clock;\n"
        "setp.eq.u32 is_time, now, 0x7fffffff;\n@is_time st.shared.b32 [$0], now;\n}",
        "r",
        has_side_effects=True,
        is_align_stack=False,
        asm_dialect=llvm.AsmDialect.AD_ATT,
    )


def _load_global_v2(address: Int64) -> tuple[Float32, Float32]:
    """Two adjacent floats of global memory, 8-byte aligned."""
    return inline_ptx(
        "ld.global.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address],
    )


@cute.jit
def _exchange(even: Float32, odd: Float32, is_odd: Boolean, distance: cutlass.Constexpr) -> Float32:
    """Sum over two lanes of `even` where this lane is even, of `odd` where it is odd."""
    kept = even
    sent = odd
    if is_odd:
        kept = odd
        sent = even
    return kept + cute.arch.shuffle_sync_bfly(sent, distance)


def _fma(a: Float32, b: Float32, c: Float32) -> Float32:
    return inline_ptx(
        "fma.rn.f32 {$w0}, {$r0}, {$r1}, {$r2};",
        write_only_types=[Float32],
        read_only_args=[a, b, c],
    )


def compile_variant(variant: Variant, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`."""
    v = variant

    def tensor(dtype: torch.dtype, rank: int, align: int, *strides: Any) -> Any:
        free = tuple(cute.sym_int64() for _ in range(rank - len(strides)))
        shape = tuple(cute.sym_int32() for _ in range(rank))
        return make_fake_tensor(_CUTE_TYPES[dtype], shape, free + strides, assumed_align=align)

    q_dtype = torch.uint8 if v.is_fp8 else v.key_dtype
    q = make_fake_tensor(
        _CUTE_TYPES[q_dtype], (cute.sym_int32(), _DIM), (_DIM, 1), assumed_align=16
    )
    if v.is_fp8:
        keys = tensor(torch.uint8, 2, 16, cute.sym_int64(divisibility=16), 1)
    else:
        keys = make_fake_tensor(
            _CUTE_TYPES[v.key_dtype],
            (cute.sym_int32(), cute.sym_int32(), _DIM),
            (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1),
            assumed_align=16,
        )
    return compile_kernel(
        IndexerScoresKernel(variant),
        q,
        tensor(v.weight_dtype, 2, 8, cute.sym_int64(divisibility=2), 1)
        if v.has_weight_pairs
        else tensor(v.weight_dtype, 2, v.weight_dtype.itemsize),
        keys,
        None if v.table_dtype is None else tensor(v.table_dtype, 2, v.table_dtype.itemsize),
        tensor(v.length_dtype, 1, v.length_dtype.itemsize),
        None if v.start_dtype is None else tensor(v.start_dtype, 1, v.start_dtype.itemsize),
        tensor(torch.uint8, 3, 1) if v.has_mask else None,
        tensor(torch.float32, 2, 4, 1),
        Int32(1),
        Int32(1),
        Float32(1.0),
        Int32(1),
        arch=arch,
        options=options,
    )


@functools.cache
def _compiled(variant: Variant, arch: str) -> Any:
    return compile_variant(variant, arch)


def indexer_scores_cute(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    keys: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    softmax_scale: float,
    *,
    max_len: int,
    block_table: torch.Tensor | None = None,
    is_causal: bool = False,
    early_windows: bool = False,
    num_stages: int = 16,
    use_pdl: bool = True,
) -> torch.Tensor:
    """Launch the kernel; return fp32 [B, S, max_len].

    Args:
        q_BSHD: any strides; copied where rows are not adjacent.
        weights_BSH: any strides.
        keys: [B, T, D], FP8 pages uint8 [pages, 64 * (D + 4)] or pages [pages, 64, D]; the last
            axis contiguous, the others by multiples of 16 bytes.
        lengths_BS: any strides; [B] if causal.
        starts_BS: any strides.
        key_mask: bool view [B, S, max_len], any strides, or None.
        softmax_scale: factor of the products; not applied to those of pages.
        max_len: T.
        block_table: [B, P] of pages.
        is_causal, early_windows: see `indexer_scores_paged`.
        num_stages: pages in flight a block, at most; at least 4.
        use_pdl: start before the kernels ahead have ended; reads nothing but early windows
            until then.
    """
    num_batch, num_queries, num_heads, head_dim = q_BSHD.shape
    scores_BST = torch.empty(
        (num_batch, num_queries, max_len), dtype=torch.float32, device=q_BSHD.device
    )
    if not scores_BST.numel():
        return scores_BST
    num_rows = rows_of_tile(num_queries, num_heads)
    weights = weights_BSH.reshape(-1, num_heads)
    has_weight_pairs = (
        weights.dtype == torch.float32
        and weights.stride(1) == 1
        and weights.stride(0) % 2 == 0
        and weights.data_ptr() % 8 == 0
    )
    # A copy of them made just ahead would come too late.
    has_copies = any(t is not None and not t.is_contiguous() for t in (lengths_BS, starts_BS))
    has_early_windows = early_windows and use_pdl and not has_copies
    variant = Variant(
        key_dtype=q_BSHD.dtype,
        num_heads=num_heads,
        num_rows=num_rows,
        weight_dtype=weights_BSH.dtype,
        length_dtype=lengths_BS.dtype,
        table_dtype=None if block_table is None else block_table.dtype,
        start_dtype=None if starts_BS is None else starts_BS.dtype,
        has_mask=key_mask is not None,
        is_causal=is_causal,
        has_early_windows=has_early_windows,
        num_stages=num_stages,
        use_pdl=use_pdl,
        has_weight_pairs=has_weight_pairs,
    )
    q = q_BSHD.view(torch.uint8) if variant.is_fp8 else q_BSHD
    num_tiles = num_batch * -(-num_queries // variant.num_rows)
    num_blocks = min(num_multiprocessors(q.device), num_tiles * -(-max_len // _PAGE))
    _compiled(variant, arch_of(q.device))(
        _aligned(q.reshape(-1, head_dim).contiguous()),
        weights,
        keys,
        block_table,
        lengths_BS.reshape(-1),
        None if starts_BS is None else starts_BS.reshape(-1),
        None if key_mask is None else key_mask.view(torch.uint8),
        scores_BST.view(-1, max_len),
        num_queries,
        num_tiles,
        softmax_scale,
        num_blocks,
    )
    return scores_BST


def rows_of_tile(num_queries: int, num_heads: int) -> int:
    """Query rows of a tile: as many as fit share a key's only read, more are dealt out alike."""
    most = min(MAX_ROWS, MAX_COLUMNS // num_heads)
    num_tiles = -(-num_queries // most)
    return -(-num_queries // num_tiles) if num_tiles <= MAX_ROWS else most


def _aligned(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, or a copy where it does not start at a multiple of 16 bytes."""
    return tensor.clone() if tensor.data_ptr() % 16 else tensor
