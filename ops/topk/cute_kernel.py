"""Top-k in CuTe DSL for sm_90a: one launch, a row's keys spread over the blocks of one cluster.

Shape legend: R rows, T keys of a row, K selected, C blocks of a cluster.

All variants share one method. A score becomes an unsigned key in its order. A histogram finds the
interval of keys that holds the k-th best, and is refined until at most 32 candidates are left. They
are ranked by (key, lower position first), which gives the threshold: the last selected key and its
position. What is at or before it is written in the order of positions, at places that a prefix sum
gives. Nothing depends on timing, so results are bitwise equal over repeats, and equal to the
reference's. Blocks of a cluster exchange data by writing into each other's shared memory.

Where the keys come from differs:

- `registers`: a block holds its slice of the row in registers, from the load to the first
  histogram. Short rows stay there; of longer ones the few keys that may be selected move to a
  buffer in shared memory, which the rest of the work goes through.
- `filtered`: a slice too long for that is streamed once, and only keys above a bound stay, in the
  buffer. The bound is estimated from a sample, among equal keys by position as well; it decides
  about speed alone: when the buffer is full, the best k so far stay and raise the bound; when less
  than k keys pass, the slice is streamed again without a bound.

`_cute/threshold.py` finds the threshold, `_cute/stream.py` fills the buffer, `_cute/output.py`
writes.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import Float32, Int32, Int64, Uint32
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import WARP, clamp_index, load_global, load_global_v4
from glm_compile.ops.topk._cute.entries import (
    ANYWHERE,
    BUFFERED,
    LOWEST,
    VECTOR,
    BufferEntries,
    RegisterEntries,
    Shared,
)
from glm_compile.ops.topk._cute.output import Output
from glm_compile.ops.topk._cute.stream import Stream
from glm_compile.ops.topk.config import Variant, default_variant


class TopkKernel(Stream, Output):
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        self.variant = variant
        self.num_threads = variant.num_threads
        self.num_warps = variant.num_threads // WARP
        self.cluster = variant.cluster
        self.num_bins = 1 << variant.bin_bits
        self.in_registers = variant.source == "registers"
        self.is_compacted = self.in_registers and variant.buffer_keys > 0
        self.bitmap_words = -(-variant.slice_keys // WARP) if variant.buffer_keys else 0
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
            min_blocks_per_mp=self.variant.blocks_per_processor,
            preferred_smem_carveout=100,
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
            self._select_from_registers(
                shared, row_address, lengths, starts, plan, num_keys, target, tid, rank
            )
        else:
            self._select_from_stream(
                shared, row_address, lengths, starts, plan, num_keys, target, tid, rank
            )

    @cute.jit
    def _select_from_registers(
        self, shared, row_address, lengths, starts, plan, num_keys, target, tid, rank
    ) -> None:
        _selected, _out_address, _table, row, k, rows_per_sequence, _page_size = target
        # Slices of the whole row, whatever its length, so that the loads need not wait for it.
        slice_first = rank * self._slice_keys(num_keys)
        place = slice_first + tid * VECTOR
        number = cutlass.const_expr(self.variant.keys_per_thread // VECTOR)
        tiles = self._load_tiles(row_address, place, num_keys, number)
        first, stop = self._window(row, lengths, starts, plan, rows_per_sequence, num_keys)
        window = (first, cutlass.min(stop, slice_first + self._slice_keys(num_keys)))
        self._begin()
        keys: list = []
        for i in cutlass.range_constexpr(number):
            position = place + len(keys) * self.num_threads
            keys += self._count_scores(shared, self._mask(tiles[i], position, window))
        entries = RegisterEntries(keys, place, self.num_threads * VECTOR)
        t_key, t_position, base, num_selected, _turn = self._select(
            shared, entries, k, (first, stop), tid, rank, self.cluster, Int32(0)
        )
        threshold = (t_key, t_position)
        places = (base, num_selected)
        if cutlass.const_expr(self.is_compacted):
            entries = BufferEntries(shared, tid, self.num_threads, holds_keys=True)
            self._write_listed(shared, entries, threshold, places, slice_first, target, tid, rank)
        else:
            self._write_own(shared, entries, threshold, places, target, tid, rank)

    @cute.jit
    def _select_from_stream(
        self, shared, row_address, lengths, starts, plan, num_keys, target, tid, rank
    ) -> None:
        _selected, _out_address, _table, row, k, rows_per_sequence, _page_size = target
        first, stop = self._window(row, lengths, starts, plan, rows_per_sequence, num_keys)
        aligned = first
        if cutlass.const_expr(self.variant.is_vector):
            aligned = first - first % VECTOR
        slice_first = aligned + rank * self._slice_keys(stop - aligned)
        slice_stop = cutlass.min(slice_first + self._slice_keys(stop - aligned), stop)
        source = (row_address, first, slice_first, slice_stop, num_keys)
        self._begin()
        window = (first, stop)
        bound, last_equal, turn = self._sampled_threshold(shared, source, window, k, tid, rank)
        is_tied = last_equal != ANYWHERE
        place = slice_first + tid * VECTOR
        all_owe = Int32(1)
        stopped = place
        owes = all_owe
        count = Int32(0)
        if not is_tied:
            stopped, owes = self._stream(
                shared, source, (bound, last_equal), place, all_owe, tid, is_rising=False
            )
            count = shared.state[BUFFERED]
        if is_tied or count > self.variant.buffer_keys:
            count = self._stream_rising(
                shared, source, (bound, last_equal), k, window, tid, turn, stopped, owes
            )
        if is_tied or bound > Uint32(LOWEST):
            total = count
            if cutlass.const_expr(self.cluster > 1):
                total = self._cluster_total(shared, count, tid, rank, turn)
                turn += 1
            if total < k:
                # The threshold was too high.
                cute.arch.sync_threads()
                if tid == 0:
                    shared.state[BUFFERED] = Int32(0)
                cute.arch.sync_threads()
                everything = (Uint32(LOWEST), Int32(ANYWHERE))
                count = self._stream_rising(
                    shared, source, everything, k, window, tid, turn, place, all_owe
                )
        entries = BufferEntries(shared, tid, self.num_threads, holds_keys=False)
        t_key, t_position, base, num_selected, _turn = self._select(
            shared, entries, k, window, tid, rank, self.cluster, turn, is_tied
        )
        threshold = (t_key, t_position)
        places = (base, num_selected)
        self._write_listed(shared, entries, threshold, places, slice_first, target, tid, rank)

    def _allocate(self) -> Shared:
        allocator = SmemAllocator()

        def words(number: int) -> Any:
            if not number:
                return None
            return allocator.allocate_tensor(Int32, cute.make_layout(number), 16)

        in_cluster = self.cluster if self.cluster > 1 else 0
        barriers = None
        if in_cluster:
            barriers = allocator.allocate_tensor(Int64, cute.make_layout(2), 8)
        return Shared(
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
    def _window(self, row, lengths, starts, plan, rows_per_sequence, num_keys):
        first = Int32(0)
        if cutlass.const_expr(plan is not None):
            first = Int32(plan[row, 0])
            stop = cutlass.min(Int32(plan[row, 1]), num_keys)
        else:
            if cutlass.const_expr(self.variant.is_causal):
                sequence = row // rows_per_sequence
                cached = cutlass.min(lengths[sequence], num_keys)
                stop = clamp_index(cached + (row - sequence * rows_per_sequence + 1), num_keys)
            else:
                stop = clamp_index(lengths[row], num_keys)
            if cutlass.const_expr(starts is not None):
                first = clamp_index(starts[row], num_keys)
        first = cutlass.min(first, stop)
        return first, stop

    @cute.jit
    def _load_scores(self, row_address, position, num_keys):
        """Scores of the VECTOR positions from `position`, -inf beyond the row."""
        score = Float32(float("-inf"))
        scores = [score] * VECTOR
        if cutlass.const_expr(self.variant.is_vector):
            s0, s1, s2, s3 = scores
            if position < num_keys:
                s0, s1, s2, s3 = load_global_v4(row_address + Int64(position) * 4)
            scores = [s0, s1, s2, s3]
        else:
            scores = []
            for e in cutlass.range_constexpr(VECTOR):
                score = Float32(float("-inf"))
                if position + e < num_keys:
                    score = load_global(row_address + Int64(position + e) * 4)
                scores.append(score)
        return scores

    def _load_tiles(self, row_address, position, num_keys, number: int) -> list:
        """Scores of `number` tiles of all threads; this thread's first one is at `position`."""
        tile = self.num_threads * VECTOR
        return [
            self._load_scores(row_address, position + i * tile, num_keys) for i in range(number)
        ]

    @cute.jit
    def _mask(self, scores, position, window):
        """-inf instead of the scores outside the window."""
        first, stop = window
        s0, s1, s2, s3 = scores
        if position < first or position + VECTOR > stop:
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

    row_stride = cute.sym_int64(divisibility=VECTOR if variant.is_vector else 1)
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
    is_causal: bool = False,
    repeat_last: bool = False,
    *,
    variant: Variant | None = None,
) -> torch.Tensor:
    """Return int32 [R, k]; see `topk_select` for the contract."""
    num_rows, num_keys = scores_RT.shape
    selected_RK = torch.empty((num_rows, k), dtype=torch.int32, device=scores_RT.device)
    if not num_rows:
        return selected_RK
    if not num_keys:
        return selected_RK.fill_(0 if repeat_last else -1)
    if num_rows == 1 or num_keys == 1:
        # The stride of an axis of one means nothing, and may be anything.
        row_stride = scores_RT.stride(0) if num_rows > 1 else -(-num_keys // VECTOR) * VECTOR
        scores_RT = scores_RT.as_strided((num_rows, num_keys), (row_stride, 1))
    if plan is not None:
        starts_R = None
    shape = replace(
        variant or default_variant(num_rows, num_keys),
        is_vector=scores_RT.data_ptr() % 16 == 0
        and scores_RT.stride(0) % VECTOR == 0
        and num_keys % VECTOR == 0,
        has_starts=starts_R is not None,
        has_plan=plan is not None,
        has_table=block_table is not None,
        lengths_64=lengths_R.dtype == torch.int64,
        starts_64=starts_R is not None and starts_R.dtype == torch.int64,
        table_64=block_table is not None and block_table.dtype == torch.int64,
        is_causal=is_causal and plan is None,
        repeat_last=repeat_last,
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
