"""Sparse MLA for few rows in CuTe DSL for sm_90a: a cluster a row, a share of its tokens a block.

A block gathers its tokens with `cp.async` into swizzled shared memory, 64 at a time in two halves,
and uses them twice: as keys (64 heads x 576 x 64 tokens by one warpgroup, each half another one)
and, read the other way, as values (64 heads x 64 tokens x 512, each warpgroup 256 columns). The
probabilities lie where the half's rotated parts were, which only the keys need. The maximum that
they are taken against rises only when it is passed by far, so sums are seldom rescaled. Both
products are wgmma, which other architectures do not have: they take the Triton kernel.

At the end the blocks of a cluster tell each other their maxima and sums; each scales its part of
the result, rounds it to bf16 and stores in every peer the columns that are this peer's to add up,
in the order of the blocks. Nothing depends on timing: results are bitwise equal over repeats. The
queries' shared memory receives the parts: a peer that has told its sums needs its queries no more.

Shape legend: R rows, H heads, L kv_lora rank (512), P rope dim (64), C = L + P, K selected slots,
X pages or sequences, Y tokens of one.
"""

import functools
import math
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx
from cutlass.cute.nvgpu import OperandMajorMode, cpasync, warpgroup
from cutlass.cute.nvgpu.warpgroup import OperandSource
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.utils import hopper_helpers as hopper

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import (
    WARP,
    exp2,
    inverse,
    load_shared_v2,
    load_shared_v4,
    peer_address,
    quad_sum,
    send_v2,
    send_v4,
    shared_address,
    store_shared,
    store_shared_v2,
)
from glm_compile.ops._cute.stream import pack_bf16, unpack_bf16
from glm_compile.ops.sparse_mla.config import (
    CUTE_MAX_HEADS,
    CUTE_PAGE,
    CUTE_RANK,
    CUTE_ROPE_DIM,
    MAX_SPLITS,
    PAIR_TOKENS,
    cluster_size,
    split_size,
)

_GROUP = 128
_NUM_THREADS = 2 * _GROUP
_NUM_WARPS = _NUM_THREADS // WARP
_HEADS = CUTE_MAX_HEADS
_WIDTH = CUTE_RANK + CUTE_ROPE_DIM
# A half's tokens, and the columns of one swizzled tile of 64 rows of 128 bytes.
_HALF = PAIR_TOKENS // 2
_TILE = 64
_NUM_TILES = _WIDTH // _TILE
_TILE_BYTES = _HALF * 128
_HALF_BYTES = _NUM_TILES * _TILE_BYTES
_HALF_VALUES = _HALF_BYTES // 2
# Columns of a warpgroup's part of the result, and of what one thread packs in 16 bytes.
_COLUMNS = CUTE_RANK // 2
_VECTOR_COLUMNS = 32
_NUM_VECTORS = _COLUMNS // _VECTOR_COLUMNS
# A vector's columns for all heads, as they travel to a peer.
_BLOCK_BYTES = _HEADS * 64
# Blocks of the second kernel for a row, and columns that one of its threads adds up.
_SUM_BLOCKS = CUTE_RANK // _VECTOR_COLUMNS * _HEADS // 8
_SUM_COLUMNS = 8
# Powers of two that probabilities may exceed 1 by before the maximum is raised.
_HEADROOM = 8.0

_CUTE_TYPES = {torch.int32: Int32, torch.int64: Int64}


@dataclass(frozen=True)
class Variant:
    """What a kernel is specialised for.

    Attributes:
        cluster: blocks a row.
        is_single: a block has one pair of halves, and keeps its queries in registers.
        split_tokens: not 0: blocks of a row, any number, take so many tokens each, a half or a
            pair, and leave what they have summed in memory for a second kernel; no cluster.
        num_heads: H, at most 64.
        index_dtype: of the indices.
        table_dtype: of the block table, None without.
        is_paged: whether the latents' first axis counts pages.
        use_pdl: start before the kernels ahead have ended.
    """

    cluster: int
    is_single: bool = False
    split_tokens: int = 0
    num_heads: int = _HEADS
    index_dtype: torch.dtype = torch.int32
    table_dtype: torch.dtype | None = torch.int32
    is_paged: bool = True
    use_pdl: bool = True


class SparseMlaKernel:
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        self.v = variant
        self.cluster = variant.cluster
        self.is_half = variant.split_tokens == _HALF
        # Blocks of 32 columns that a block of the cluster adds up.
        self.num_own = 2 * _NUM_VECTORS // self.cluster

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        latents: cute.Tensor,
        ropes: cute.Tensor,
        indices: cute.Tensor,
        table: cute.Tensor | None,
        attended: cute.Tensor,
        parts: cute.Tensor | None,
        part_stats: cute.Tensor | None,
        scale: Float32,
        rows_per_sequence: Int32,
        num_pairs: Int32,
        stream: Any,
    ) -> None:
        k_major = OperandMajorMode.K
        query_source = OperandSource.RMEM if self.v.is_single else OperandSource.SMEM
        # One of each that overwrites and one that adds: set once, since branches share them.
        score_mmas = [
            hopper.make_trivial_tiled_mma(
                BFloat16,
                BFloat16,
                k_major,
                k_major,
                Float32,
                (1, 1, 1),
                (_HEADS, _HALF),
                query_source,
            )
            for _ in range(2)
        ]
        value_mmas = [
            hopper.make_trivial_tiled_mma(
                BFloat16,
                BFloat16,
                k_major,
                OperandMajorMode.MN,
                Float32,
                (1, 1, 1),
                (_HEADS, _COLUMNS),
            )
            for _ in range(2)
        ]
        tile_layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout(((8, 8), (64, 1)), stride=((64, 512), (1, 0))),
        )
        # [H, C, R]
        queries = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[1, 2, 0]))
        load: Any = cpasync.CopyBulkTensorTileG2SOp()
        if cutlass.const_expr(self.cluster > 1):
            load = cpasync.CopyBulkTensorTileG2SMulticastOp()
        query_atom, query_coords = cpasync.make_tiled_tma_atom(
            load, queries, tile_layout, (_HEADS, _TILE)
        )
        self.kernel(
            *score_mmas,
            *value_mmas,
            query_atom,
            query_coords,
            latents,
            ropes,
            indices,
            table,
            attended,
            parts,
            part_stats,
            scale,
            rows_per_sequence,
            num_pairs,
        ).launch(
            grid=(attended.shape[0] * self._num_blocks(parts), 1, 1),
            block=(_NUM_THREADS, 1, 1),
            cluster=(self.cluster, 1, 1) if self.cluster > 1 else None,
            stream=stream,
            min_blocks_per_mp=1,
            use_pdl=self.v.use_pdl,
        )
        if cutlass.const_expr(parts is not None):
            self.sum_kernel(parts, part_stats, attended).launch(
                grid=(_SUM_BLOCKS, attended.shape[0], 1),
                block=(_NUM_THREADS, 1, 1),
                stream=stream,
                use_pdl=self.v.use_pdl,
            )

    @cute.kernel
    def kernel(
        self,
        score_mma: cute.TiledMma,
        score_more_mma: cute.TiledMma,
        value_mma: cute.TiledMma,
        value_more_mma: cute.TiledMma,
        query_atom: cute.CopyAtom,
        query_coords: cute.Tensor,
        latents: cute.Tensor,
        ropes: cute.Tensor,
        indices: cute.Tensor,
        table: cute.Tensor | None,
        attended: cute.Tensor,
        parts: cute.Tensor | None,
        part_stats: cute.Tensor | None,
        scale: Float32,
        rows_per_sequence: Int32,
        num_pairs: Int32,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_blocks = self._num_blocks(parts)
        row = block // num_blocks
        rank = block % num_blocks
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = cute.arch.make_warp_uniform(tid // _GROUP)

        swizzle = cute.make_swizzle(3, 4, 3)
        # Tiles of 64 rows of 64 values, 128 bytes a row.
        rows_by_tile = ((8, 8), (64, _NUM_TILES))
        tile_strides = ((64, 512), (1, _TILE_BYTES // 2))
        query_layout = cute.make_layout(rows_by_tile, stride=tile_strides)
        num_halves = 1 if self.is_half else 2
        token_layout = cute.make_layout(
            (*rows_by_tile, num_halves), stride=(*tile_strides, _HALF_VALUES)
        )
        allocator = SmemAllocator()
        query_part = allocator.allocate_tensor(BFloat16, query_layout, 1024, swizzle=swizzle)
        token_part = allocator.allocate_tensor(BFloat16, token_layout, 1024, swizzle=swizzle)
        # (maximum, sum) of every head: this block's at its own rank, the peers' when they are done.
        stats = allocator.allocate_tensor(Int32, cute.make_layout(self.cluster * _HEADS * 2), 16)
        # By half: what the sums so far are to be multiplied by.
        rescale = allocator.allocate_tensor(Float32, cute.make_layout(2 * _HEADS), 16)
        # By parity of the pair and half: a bit a token.
        masks = allocator.allocate_tensor(Int32, cute.make_layout(2 * 2 * 2), 16)
        barriers = allocator.allocate_tensor(Int64, cute.make_layout(7), 8).iterator
        has_tokens = barriers
        is_empty = barriers + 2
        has_query = barriers + 4
        has_stats = barriers + 5
        has_parts = barriers + 6

        query_address = shared_address(query_part.iterator)
        token_address = shared_address(token_part.iterator)
        stats_address = shared_address(stats.iterator)
        own_stats = stats_address
        if cutlass.const_expr(self.cluster > 1):
            own_stats = stats_address + rank * (_HEADS * 8)
        masks_address = shared_address(masks.iterator)

        if warp == 0:
            cpasync.prefetch_descriptor(query_atom)
        if tid == 0:
            for half in cutlass.range_constexpr(2):
                # Every thread's copies, and every warp's word that its masks are written.
                cute.arch.mbarrier_init(has_tokens + half, _NUM_THREADS + _NUM_WARPS)
                cute.arch.mbarrier_init(is_empty + half, _NUM_WARPS)
            cute.arch.mbarrier_init(has_query, 1)
            cute.arch.mbarrier_init(has_stats, 1)
            cute.arch.mbarrier_init(has_parts, 1)
            cute.arch.mbarrier_init_fence()
            cute.arch.mbarrier_arrive_and_expect_tx(has_query, _NUM_TILES * _TILE_BYTES)
            if cutlass.const_expr(self.cluster > 1):
                cute.arch.mbarrier_arrive_and_expect_tx(has_stats, (self.cluster - 1) * _HEADS * 8)
                cute.arch.mbarrier_arrive_and_expect_tx(
                    has_parts, self.cluster * self.num_own * _BLOCK_BYTES
                )
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_arrive()
        if tid < _HEADS:
            store_shared_v2(own_stats + tid * 8, _bits(Float32(float("-inf"))), Int32(0))

        # Everything below may come from the kernel ahead.
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        source = (latents, ropes, indices, table, row, row // rows_per_sequence)
        first_pair = rank * num_pairs
        # Under way while the blocks of the cluster meet.
        chosen = self._load_indices(source, first_pair, warp, lane)
        if cutlass.const_expr(self.cluster > 1):
            cute.arch.cluster_wait()
        else:
            cute.arch.sync_threads()
        if warp == 0:
            cluster_rank = rank
            if cutlass.const_expr(self.cluster == 1):
                cluster_rank = Int32(0)
            self._load_queries(query_atom, query_coords, query_part, has_query, row, cluster_rank)
        place = self._place(source, self._load_pages(source, chosen))
        self._write_mask(masks_address, place, 0, warp, lane)
        for half in cutlass.range_constexpr(num_halves):
            self._gather(token_address, place, half, has_tokens, warp, lane)

        for mma, is_adding in (
            (score_mma, False),
            (score_more_mma, True),
            (value_mma, False),
            (value_more_mma, True),
        ):
            mma.set(warpgroup.Field.ACCUMULATE, is_adding)
        score_slice = score_mma.get_slice(tid % _GROUP)
        value_slice = value_mma.get_slice(tid % _GROUP)
        if cutlass.const_expr(self.v.is_single):
            query_fragment = cute.make_rmem_tensor(
                score_mma.partition_shape_A((_HEADS, _WIDTH)), BFloat16
            )
        else:
            query_fragment = score_mma.make_fragment_A(score_slice.partition_A(query_part))
        key_fragment = score_mma.make_fragment_B(score_slice.partition_B(token_part))
        # The same tokens as values: columns first, this warpgroup's four tiles of them.
        values = cute.make_tensor(
            token_part.iterator + group * (4 * _TILE_BYTES // 2),
            cute.make_layout(
                ((64, 4), (8, 8), 2), stride=((1, _TILE_BYTES // 2), (64, 512), _HALF_VALUES)
            ),
        )
        value_fragment = value_mma.make_fragment_B(value_slice.partition_B(values))
        # Probabilities lie in the last tile of a half.
        probabilities = cute.make_tensor(
            token_part.iterator + (_NUM_TILES - 1) * (_TILE_BYTES // 2),
            cute.make_layout(((8, 8), (64, 1), 2), stride=((64, 512), (1, 0), _HALF_VALUES)),
        )
        probability_fragment = value_mma.make_fragment_A(value_slice.partition_A(probabilities))
        scores = cute.make_rmem_tensor(score_mma.partition_shape_C((_HEADS, _HALF)), Float32)
        sums = cute.make_rmem_tensor(value_mma.partition_shape_C((_HEADS, _COLUMNS)), Float32)

        head = warp % 4 * 16 + lane // 4
        keys = ((score_mma, score_more_mma), scores, query_fragment, key_fragment)
        weighing = ((value_mma, value_more_mma), sums, probability_fragment, value_fragment)
        memory = (scale, own_stats, rescale, masks_address, token_address)

        cute.arch.mbarrier_wait(has_query, 0)
        if cutlass.const_expr(self.is_half):
            if group == 0:
                self._load_query_registers(query_fragment, query_address, warp, lane)
                self._multiply_keys(keys, has_tokens, 0, Int32(0))
                warpgroup.wait_group(0)
                self._weigh(scores, memory, 0, Int32(0), group, head, lane)
                self._store_stats(part_stats, own_stats, row, rank, head, lane)
            cute.arch.barrier(barrier_id=3, number_of_threads=_NUM_THREADS)
        elif cutlass.const_expr(self.v.is_single):
            # The whole query in registers: the tensor core then reads the tokens alone.
            self._load_query_registers(query_fragment, query_address, warp, lane)
            if group == 0:
                self._multiply_keys(keys, has_tokens, 0, Int32(0))
                warpgroup.wait_group(0)
                self._weigh(scores, memory, 0, Int32(0), group, head, lane)
                cute.arch.barrier_arrive(barrier_id=3, number_of_threads=_NUM_THREADS)
                cute.arch.barrier(barrier_id=1, number_of_threads=_GROUP)
                self._multiply_values(weighing, 0, is_first=True)
                warpgroup.wait_group(0)
                cute.arch.barrier(barrier_id=4, number_of_threads=_NUM_THREADS)
            else:
                self._multiply_keys(keys, has_tokens, 1, Int32(0))
                warpgroup.wait_group(0)
                cute.arch.barrier(barrier_id=3, number_of_threads=_NUM_THREADS)
                # These run while the other half's probabilities are made.
                self._multiply_values(weighing, 0, is_first=True)
                self._weigh(scores, memory, 1, Int32(0), group, head, lane)
                if cutlass.const_expr(self.cluster > 1):
                    self._send_stats(stats_address, has_stats, rank, head, lane)
                elif cutlass.const_expr(self.v.split_tokens > 0):
                    self._store_stats(part_stats, own_stats, row, rank, head, lane)
                cute.arch.barrier_arrive(barrier_id=4, number_of_threads=_NUM_THREADS)
                warpgroup.wait_group(0)
                cute.arch.barrier(barrier_id=2, number_of_threads=_GROUP)
        else:
            sums.fill(0.0)
            # What a warpgroup starts while another product of its own is under way must not hang
            # on a condition: the compiler would wait for each product.
            if group == 0:
                self._multiply_keys(keys, has_tokens, 0, Int32(0))
                warpgroup.wait_group(0)
                self._weigh(scores, memory, 0, Int32(0), group, head, lane)
                cute.arch.barrier_arrive(barrier_id=3, number_of_threads=_NUM_THREADS)
                for pair in cutlass.range(1, num_pairs, unroll=1):
                    phase = pair % 2
                    chosen = self._load_indices(source, first_pair + pair, warp, lane)
                    cute.arch.barrier(barrier_id=1, number_of_threads=_GROUP)
                    self._rescale(sums, rescale, 0, head)
                    self._multiply_values(weighing, 0)
                    paged = self._load_pages(source, chosen)
                    warpgroup.wait_group(0)
                    self._release(is_empty)
                    place = self._place(source, paged)
                    self._write_mask(masks_address, place, phase, warp, lane)
                    cute.arch.mbarrier_wait(is_empty, phase ^ 1)
                    self._gather(token_address, place, 0, has_tokens, warp, lane)
                    cute.arch.barrier(barrier_id=4, number_of_threads=_NUM_THREADS)
                    self._rescale(sums, rescale, 1, head)
                    self._multiply_values(weighing, 1)
                    warpgroup.wait_group(0)
                    self._release(is_empty + 1)
                    cute.arch.mbarrier_wait(is_empty + 1, phase ^ 1)
                    self._gather(token_address, place, 1, has_tokens, warp, lane)
                    self._multiply_keys(keys, has_tokens, 0, phase)
                    warpgroup.wait_group(0)
                    self._weigh(scores, memory, 0, phase, group, head, lane)
                    cute.arch.barrier_arrive(barrier_id=3, number_of_threads=_NUM_THREADS)
                cute.arch.barrier(barrier_id=1, number_of_threads=_GROUP)
                self._rescale(sums, rescale, 0, head)
                self._multiply_values(weighing, 0)
                warpgroup.wait_group(0)
                cute.arch.barrier(barrier_id=4, number_of_threads=_NUM_THREADS)
            else:
                for pair in cutlass.range(num_pairs, unroll=1):
                    phase = pair % 2
                    has_next = pair + 1 < num_pairs
                    if has_next:
                        chosen = self._load_indices(source, first_pair + pair + 1, warp, lane)
                    self._multiply_keys(keys, has_tokens, 1, phase)
                    warpgroup.wait_group(0)
                    cute.arch.barrier(barrier_id=3, number_of_threads=_NUM_THREADS)
                    self._rescale(sums, rescale, 0, head)
                    self._multiply_values(weighing, 0)
                    paged = self._load_pages(source, chosen)
                    self._weigh(scores, memory, 1, phase, group, head, lane)
                    if cutlass.const_expr(self.cluster > 1):  # noqa: SIM102
                        if not has_next:
                            self._send_stats(stats_address, has_stats, rank, head, lane)
                    cute.arch.barrier_arrive(barrier_id=4, number_of_threads=_NUM_THREADS)
                    warpgroup.wait_group(0)
                    if has_next:
                        self._release(is_empty)
                        place = self._place(source, paged)
                        self._write_mask(masks_address, place, phase ^ 1, warp, lane)
                        cute.arch.mbarrier_wait(is_empty, phase)
                        self._gather(token_address, place, 0, has_tokens, warp, lane)
                    cute.arch.barrier(barrier_id=2, number_of_threads=_GROUP)
                    if has_next:
                        self._rescale(sums, rescale, 1, head)
                        self._multiply_values(weighing, 1)
                        warpgroup.wait_group(0)
                        self._release(is_empty + 1)
                        cute.arch.mbarrier_wait(is_empty + 1, phase)
                        self._gather(token_address, place, 1, has_tokens, warp, lane)

        if cutlass.const_expr(self.is_half):
            self._multiply_values(weighing, 0, is_first=True)
        else:
            # The last half is weighed the same by both.
            self._rescale(sums, rescale, 1, head)
            self._multiply_values(weighing, 1)
        if cutlass.const_expr(self.v.split_tokens > 0):
            warpgroup.wait_group(0)
            self._store_part(parts, sums, row, rank, group, head, lane)
        elif cutlass.const_expr(self.cluster == 1):
            weights = self._own_weights(own_stats, head)
            warpgroup.wait_group(0)
            self._store_sums(attended, row, sums, weights, group, head, lane)
        else:
            cute.arch.mbarrier_wait(has_stats, 0)
            weights = self._weights(stats_address, own_stats, head, lane)
            warpgroup.wait_group(0)
            # In the first half's columns of this warpgroup, which no other one reads.
            self._stage(token_address, sums, weights, group, head, lane)
            self._send_parts(token_address, query_address, has_parts, group, rank, head, lane)
            cute.arch.mbarrier_wait(has_parts, 0)
            self._add_parts(query_address, attended, row, rank, tid)

    def _num_blocks(self, parts) -> Any:
        """Blocks that share a row."""
        return self.cluster if parts is None else parts.shape[1]

    @cute.jit
    def _load_indices(self, source, pair, warp, lane):
        """(index of a slot of this warp, index before it): lanes 0 to 7 have the warp's eight of
        the first half, lanes 8 to 15 those of the second."""
        _latents, _ropes, indices, _table, row, _sequence = source
        slot = pair * PAIR_TOKENS + lane // 8 % 2 * _HALF + warp * 8 + lane % 8
        if cutlass.const_expr(self.is_half):
            slot = pair * _HALF + warp * 8 + lane % 8
        index_type = _CUTE_TYPES[self.v.index_dtype]
        index = index_type(-1)
        before = index_type(-1)
        if slot < indices.shape[1]:
            index = indices[row, slot]
            if slot > 0:
                before = indices[row, slot - 1]
        return index, before

    @cute.jit
    def _load_pages(self, source, chosen):
        """(index, page or sequence of its token, whether it may count)."""
        latents, _ropes, _indices, table, _row, sequence = source
        index, before = chosen
        counts = index >= 0 and index != before
        outer = Int32(sequence)
        if cutlass.const_expr(table is not None):
            column = index // CUTE_PAGE
            counts = counts and column < table.shape[1]
            page = table.element_type(-1)
            if counts:
                page = table[sequence, Int32(column)]
            # Compared before it is cut to 32 bits.
            outer = Int32(cutlass.max(cutlass.min(page, latents.shape[0]), -1))
        elif cutlass.const_expr(self.v.is_paged):
            outer = Int32(cutlass.max(cutlass.min(index // CUTE_PAGE, latents.shape[0]), -1))
        else:
            counts = counts and index < latents.shape[1]
        return index, outer, Int32(counts)

    @cute.jit
    def _place(self, source, paged) -> tuple[Int64, Int64, Int32]:
        """(address of the latent, of the rotated part, whether it counts) of a token."""
        latents, ropes, _indices, _table, _row, _sequence = source
        index, outer, may_count = paged
        counts = may_count != 0
        if cutlass.const_expr(self.v.is_paged):
            counts = counts and outer >= 0 and outer < latents.shape[0]
        inner = Int32(0)
        if counts:
            inner = Int32(index % CUTE_PAGE if self.v.is_paged else index)
        else:
            outer = Int32(0)
        latent = latents.iterator.toint() + 2 * (
            Int64(outer) * Int64(latents.stride[0]) + Int64(inner) * Int64(latents.stride[1])
        )
        rope = ropes.iterator.toint() + 2 * (
            Int64(outer) * Int64(ropes.stride[0]) + Int64(inner) * Int64(ropes.stride[1])
        )
        return latent, rope, Int32(counts)

    @cute.jit
    def _write_mask(self, masks_address, place, parity, warp, lane) -> None:
        """A byte of each half's mask: this warp's eight tokens."""
        _latent, _rope, counts = place
        votes = Int32(cute.arch.vote_ballot_sync(counts != 0))
        if lane < 2:
            inline_ptx(
                "{ .reg .b16 low; cvt.u16.u32 low, {$r1}; st.shared.b8 [{$r0}], low; }",
                read_only_args=[
                    masks_address + parity * 16 + lane * 8 + warp,
                    (votes >> (lane * 8)) & 255,
                ],
            )
        cute.arch.sync_warp()

    @cute.jit
    def _gather(self, token_address, place, half: cutlass.Constexpr, has_tokens, warp, lane):
        """Start the copies of this warp's eight tokens of a half; zeros for what does not count."""
        latent, rope, counts = place
        for four in cutlass.range_constexpr(2):
            owner = half * 8 + four * 4 + lane // 8
            in_tile = lane % 8 * 16
            from_latent = _shuffle_address(latent, owner) + in_tile
            from_rope = _shuffle_address(rope, owner) + in_tile
            num_bytes = cute.arch.shuffle_sync(counts, owner) * 16
            token = warp * 8 + four * 4 + lane // 8
            to = token_address + (
                half * _HALF_BYTES + token * 128 + (in_tile ^ ((four * 4 + lane // 8) * 16))
            )
            for tile in cutlass.range_constexpr(_NUM_TILES - 1):
                _copy_16_bytes(to, tile * _TILE_BYTES, from_latent, tile * 128, num_bytes)
            _copy_16_bytes(to, (_NUM_TILES - 1) * _TILE_BYTES, from_rope, 0, num_bytes)
        cute.arch.cp_async_mbarrier_arrive_noinc(has_tokens + half)
        self._release(has_tokens + half)

    def _release(self, barrier) -> None:
        """One arrival for this warp's 32 lanes."""
        cute.arch.sync_warp()
        with cute.arch.elect_one():
            cute.arch.mbarrier_arrive(barrier)

    @cute.jit
    def _load_query_registers(self, query_fragment, query_address, warp, lane) -> None:
        """The 16 heads of this warp, as the A operand has them."""
        words = cute.recast_tensor(query_fragment, Int32)
        row = warp % 4 * 16 + lane % 16
        start = query_address + row * 128
        for step in cutlass.range_constexpr(4):
            piece = step * 2 + lane // 16
            address = start + ((piece ^ (lane % 8)) * 16)
            for tile in cutlass.range_constexpr(_NUM_TILES):
                loaded = _load_matrices(address, tile * _TILE_BYTES)
                for i in cutlass.range_constexpr(4):
                    words[(tile * 4 + step) * 4 + i] = loaded[i]

    @cute.jit
    def _multiply_keys(self, keys, has_tokens, half: cutlass.Constexpr, phase) -> None:
        """Start the products of a half's tokens with the queries, once they are there."""
        mmas, scores, query_fragment, key_fragment = keys
        cute.arch.mbarrier_wait(has_tokens + half, phase)
        # What cp.async wrote, the tensor core reads by another way.
        cute.arch.fence_proxy("async.shared", space="cta")
        warpgroup.fence()
        for k in cutlass.range_constexpr(_WIDTH // 16):
            cute.gemm(
                mmas[k > 0],
                scores,
                query_fragment[None, None, k],
                key_fragment[None, None, k, half],
                scores,
            )
        warpgroup.commit_group()

    @cute.jit
    def _multiply_values(
        self, weighing, half: cutlass.Constexpr, is_first: cutlass.Constexpr = False
    ) -> None:
        """Start adding a half's values, weighed by its probabilities."""
        mmas, sums, probability_fragment, value_fragment = weighing
        warpgroup.fence()
        for k in cutlass.range_constexpr(_HALF // 16):
            cute.gemm(
                mmas[k > 0 or not is_first],
                sums,
                probability_fragment[None, None, k, half],
                value_fragment[None, None, k, half],
                sums,
            )
        warpgroup.commit_group()

    @cute.jit
    def _rescale(self, sums, rescale, half: cutlass.Constexpr, head) -> None:
        """Bring the sums to the maxima that a half has raised; no wgmma on them is under way."""
        factors = (rescale[half * _HEADS + head], rescale[half * _HEADS + head + 8])
        is_rescaled = factors[0] != 1.0 or factors[1] != 1.0
        if cute.arch.vote_any_sync(is_rescaled):
            for block in cutlass.range_constexpr(_COLUMNS // 8):
                for i in cutlass.range_constexpr(4):
                    sums[block * 4 + i] = sums[block * 4 + i] * factors[i // 2]

    def _weigh(self, scores, memory, half: int, phase, group, head, lane) -> None:
        """Turn a half's scores into probabilities, for the tensor core to read."""
        scale, own_stats, rescale, masks_address, token_address = memory
        mask = load_shared_v2(masks_address + phase * 16 + half * 8)
        # All four warps have read the rotated parts before one writes over them.
        cute.arch.barrier(barrier_id=1 + half, number_of_threads=_GROUP)
        address = token_address + (half * _HALF_BYTES + (_NUM_TILES - 1) * _TILE_BYTES)
        self._softmax(scores, mask, scale, own_stats, rescale, half, address, head, lane)
        cute.arch.fence_proxy("async.shared", space="cta")

    @cute.jit
    def _load_queries(self, atom, coords, query_part, has_query, row, rank) -> None:
        """This block's tiles of the row's queries, to all blocks of the cluster; one warp."""
        # (copy), (copy, head tile, tile, row)
        to, source = cpasync.tma_partition(
            atom,
            0,
            cute.make_layout(1),
            cute.group_modes(
                cute.make_tensor(
                    query_part.iterator,
                    cute.make_layout(
                        ((8, 8), (64, 1), _NUM_TILES),
                        stride=((64, 512), (1, 0), _TILE_BYTES // 2),
                    ),
                ),
                0,
                2,
            ),
            cute.group_modes(cute.local_tile(coords, (_HEADS, _TILE), (None, None, None)), 0, 2),
        )
        for i in cutlass.range_constexpr(-(-_NUM_TILES // self.cluster)):
            tile = rank + i * self.cluster
            if tile < _NUM_TILES:
                if cutlass.const_expr(self.cluster > 1):
                    cute.copy(
                        atom,
                        source[None, 0, tile, row],
                        to[None, tile],
                        tma_bar_ptr=has_query,
                        mcast_mask=cutlass.Int16(
                            (1 << self.cluster) - 1 - ((1 << 16) if self.cluster == 16 else 0)
                        ),
                    )
                else:
                    cute.copy(
                        atom, source[None, 0, tile, row], to[None, tile], tma_bar_ptr=has_query
                    )

    @cute.jit
    def _softmax(
        self, scores, mask, scale, own_stats, rescale, half: cutlass.Constexpr, address, head, lane
    ) -> None:
        """Turn a half's scores into probabilities in shared memory; add to the heads' sums."""
        for i in cutlass.range_constexpr(_HALF // 2):
            scores[i] = scores[i] * scale
        if mask[0] & mask[1] != -1:
            words = [word >> (lane % 4 * 2) for word in mask]
            for i in cutlass.range_constexpr(_HALF // 2):
                block, e = i // 4, i % 2
                if (words[block // 4] >> (block % 4 * 8 + e)) & 1 == 0:
                    scores[i] = Float32(float("-inf"))
        for which in cutlass.range_constexpr(2):
            at = head + which * 8
            highest = scores[which * 2]
            for block in cutlass.range_constexpr(_HALF // 8):
                for e in cutlass.range_constexpr(2):
                    highest = cute.arch.fmax(highest, scores[block * 4 + which * 2 + e])
            highest = _quad_max(highest)
            old_bits, sum_bits = load_shared_v2(own_stats + at * 8)
            old = old_bits.bitcast(Float32)
            total = sum_bits.bitcast(Float32)
            top = old
            factor = Float32(1.0)
            if highest > old + _HEADROOM:
                top = highest
                # Before the first token that counts there is nothing to scale.
                if old > Float32(float("-inf")):
                    factor = exp2(old - top)
            shift = top
            if top == Float32(float("-inf")):
                shift = Float32(0.0)
            added = Float32(0.0)
            for block in cutlass.range_constexpr(_HALF // 8):
                first = exp2(scores[block * 4 + which * 2] - shift)
                second = exp2(scores[block * 4 + which * 2 + 1] - shift)
                added += first + second
                store_shared(
                    address + (at * 128 + lane % 4 * 4) + ((block ^ (lane // 4)) * 16),
                    pack_bf16(first, second),
                )
            added = quad_sum(added)
            if lane % 4 == 0:
                store_shared_v2(own_stats + at * 8, _bits(top), _bits(total * factor + added))
                rescale[half * _HEADS + at] = factor
        cute.arch.sync_warp()

    @cute.jit
    def _send_stats(self, stats_address, has_stats, rank, head, lane) -> None:
        """Tell the peers this block's maxima and sums: the four lanes of a head share the peers."""
        barrier = Int32(has_stats.toint())
        for which in cutlass.range_constexpr(2):
            address = stats_address + (rank * _HEADS + head + which * 8) * 8
            top, total = load_shared_v2(address)
            for i in cutlass.range_constexpr(-(-self.cluster // 4)):
                peer = lane % 4 + i * 4
                if peer < self.cluster and peer != rank:
                    send_v2(peer_address(address, peer), top, total, peer_address(barrier, peer))

    @cute.jit
    def _own_weights(self, own_stats, head) -> list:
        """1 / sum of this thread's two heads; 0 where nothing counts."""
        weights = []
        for which in cutlass.range_constexpr(2):
            _top, total = load_shared_v2(own_stats + (head + which * 8) * 8)
            weights.append(inverse(total.bitcast(Float32)))
        return weights

    @cute.jit
    def _weights(self, stats_address, own_stats, head, lane) -> list:
        """What this block's sums of this thread's two heads count in the row's result."""
        weights = []
        for which in cutlass.range_constexpr(2):
            at = (head + which * 8) * 8
            tops = []
            totals = []
            highest = Float32(float("-inf"))
            for i in cutlass.range_constexpr(-(-self.cluster // 4)):
                peer = lane % 4 + i * 4
                top = Float32(float("-inf"))
                total = Float32(0.0)
                if peer < self.cluster:
                    top_bits, total_bits = load_shared_v2(stats_address + peer * (_HEADS * 8) + at)
                    top = top_bits.bitcast(Float32)
                    total = total_bits.bitcast(Float32)
                tops.append(top)
                totals.append(total)
                highest = cute.arch.fmax(highest, top)
            highest = _quad_max(highest)
            if highest == Float32(float("-inf")):
                highest = Float32(0.0)
            total = Float32(0.0)
            for i in cutlass.range_constexpr(len(tops)):
                total += totals[i] * exp2(tops[i] - highest)
            total = quad_sum(total)
            own_top, _own = load_shared_v2(own_stats + at)
            weights.append(exp2(own_top.bitcast(Float32) - highest) * inverse(total))
        return weights

    @cute.jit
    def _stage(self, address, sums, weights, group, head, lane) -> None:
        """Round this thread's scaled sums to bf16 and lay them out by block of 32 columns."""
        for vector in cutlass.range_constexpr(_NUM_VECTORS):
            to = address + (group * _NUM_VECTORS + vector) * _BLOCK_BYTES + lane % 4 * 16
            for which in cutlass.range_constexpr(2):
                words = []
                for j in cutlass.range_constexpr(4):
                    at = (vector * 4 + j) * 4 + which * 2
                    words.append(
                        pack_bf16(sums[at] * weights[which], sums[at + 1] * weights[which])
                    )
                _store_shared_v4(to + (head + which * 8) * 64, words)

    @cute.jit
    def _send_parts(self, staged, received, has_parts, group, rank, head, lane) -> None:
        """Store every peer what this thread has staged for it, from another peer on each block."""
        barrier = Int32(has_parts.toint())
        for i in cutlass.range_constexpr(_NUM_VECTORS):
            vector = group * _NUM_VECTORS + (i + rank * self.num_own) % _NUM_VECTORS
            peer = vector // self.num_own
            to = received + (rank * self.num_own + vector % self.num_own) * _BLOCK_BYTES
            its_barrier = peer_address(barrier, peer)
            for which in cutlass.range_constexpr(2):
                place = (head + which * 8) * 64 + lane % 4 * 16
                words = load_shared_v4(staged + vector * _BLOCK_BYTES + place)
                send_v4(peer_address(to + place, peer), words, its_barrier)

    @cute.jit
    def _add_parts(self, received, attended, row, rank, tid) -> None:
        """Add up this block's columns over the cluster, in the order of its blocks, and store."""
        head = tid // 4
        for own in cutlass.range_constexpr(self.num_own):
            totals = [Float32(0.0) for _ in range(8)]
            for peer in cutlass.range_constexpr(self.cluster):
                words = load_shared_v4(
                    received + ((peer * self.num_own + own) * _BLOCK_BYTES) + tid * 16
                )
                for j in cutlass.range_constexpr(4):
                    first, second = unpack_bf16(words[j])
                    totals[2 * j] += first
                    totals[2 * j + 1] += second
            if head < self.v.num_heads:
                address = attended.iterator.toint() + 2 * (
                    (Int64(row) * self.v.num_heads + head) * CUTE_RANK
                    + (rank * self.num_own + own) * _VECTOR_COLUMNS
                    + tid % 4 * 2
                )
                for j in cutlass.range_constexpr(4):
                    _store_global(address + j * 16, pack_bf16(totals[2 * j], totals[2 * j + 1]))

    @cute.jit
    def _store_stats(self, part_stats, own_stats, row, rank, head, lane) -> None:
        """Leave this block's maxima and sums, each where its warp has written it."""
        if lane % 4 == 0:
            for which in cutlass.range_constexpr(2):
                at = head + which * 8
                top, total = load_shared_v2(own_stats + at * 8)
                part_stats[row, rank, at, 0] = top.bitcast(Float32)
                part_stats[row, rank, at, 1] = total.bitcast(Float32)

    @cute.jit
    def _store_part(self, parts, sums, row, rank, group, head, lane) -> None:
        """Round this thread's sums to bf16 and leave them, by block of 32 columns."""
        start = parts.iterator.toint() + 2 * (
            Int64(row) * Int64(parts.stride[0]) + Int64(rank) * Int64(parts.stride[1])
        )
        for vector in cutlass.range_constexpr(_NUM_VECTORS):
            for which in cutlass.range_constexpr(2):
                words = []
                for j in cutlass.range_constexpr(4):
                    at = (vector * 4 + j) * 4 + which * 2
                    words.append(pack_bf16(sums[at], sums[at + 1]))
                _store_global_v4(
                    start
                    + (group * _NUM_VECTORS + vector) * _BLOCK_BYTES
                    + (head + which * 8) * 64
                    + lane % 4 * 16,
                    words,
                )

    @cute.kernel
    def sum_kernel(
        self, parts: cute.Tensor, part_stats: cute.Tensor, attended: cute.Tensor
    ) -> None:
        """Add up the parts of a row: 8 heads of a block of 32 columns, a share of them a warp."""
        block, row, _ = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        vector = block // 8
        head = block % 8 * 8 + lane // 4
        num_parts = parts.shape[1]
        allocator = SmemAllocator()
        # By warp: 8 sums of each lane, whose columns lie apart so that no two lanes collide.
        sums = allocator.allocate_tensor(
            Float32, cute.make_layout(_NUM_WARPS * _SUM_COLUMNS * WARP), 16
        )
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        start = parts.iterator.toint() + 2 * (
            Int64(row) * Int64(parts.stride[0])
            + vector * (_BLOCK_BYTES // 2)
            + head * 32
            + lane % 4 * 8
        )
        stride = 2 * Int64(parts.stride[1])
        stats_start = part_stats.iterator.toint() + 4 * (
            Int64(row) * Int64(part_stats.stride[0]) + head * 2
        )
        # All loads first, none on a condition: they wait for memory together. Behind the last part
        # it is read again, for nothing. Volatile, or the compiler puts them where they are used.
        loaded = []
        for i in cutlass.range_constexpr(MAX_SPLITS // _NUM_WARPS):
            part = cutlass.min(warp + i * _NUM_WARPS, num_parts - 1)
            loaded.append(_load_global_v4(start + Int64(part) * stride))
        tops = []
        totals = []
        for i in cutlass.range_constexpr(MAX_SPLITS // 4):
            part = cutlass.min(lane % 4 + i * 4, num_parts - 1)
            top, total = _load_global_v2(stats_start + part * (2 * 4 * _HEADS))
            tops.append(top.bitcast(Float32))
            totals.append(total.bitcast(Float32))
        highest = Float32(float("-inf"))
        for i in cutlass.range_constexpr(len(tops)):
            if lane % 4 + i * 4 >= num_parts:
                tops[i] = Float32(float("-inf"))
            highest = cute.arch.fmax(highest, tops[i])
        highest = _quad_max(highest)
        if highest == Float32(float("-inf")):
            highest = Float32(0.0)
        total = Float32(0.0)
        for i in cutlass.range_constexpr(len(tops)):
            tops[i] = exp2(tops[i] - highest)
            total += totals[i] * tops[i]
        scale = inverse(quad_sum(total))
        added = [Float32(0.0) for _ in range(_SUM_COLUMNS)]
        for i in cutlass.range_constexpr(MAX_SPLITS // _NUM_WARPS):
            # Part warp + 8 i: lane warp % 4 of each quad has it, as its (warp // 4 + 2 i)th.
            weight = tops[2 * i]
            if warp >= 4:
                weight = tops[2 * i + 1]
            weight = cute.arch.shuffle_sync(weight, lane // 4 * 4 + warp % 4)
            for j in cutlass.range_constexpr(4):
                first, second = unpack_bf16(loaded[i][j])
                added[2 * j] += first * weight
                added[2 * j + 1] += second * weight
        for j in cutlass.range_constexpr(_SUM_COLUMNS):
            sums[(warp * _SUM_COLUMNS + j) * WARP + lane] = added[j] * scale
        cute.arch.sync_threads()
        # Warp w has the two columns 2 (w % 4) of every lane; the first four warps store them.
        if warp < 4:
            pair = [Float32(0.0), Float32(0.0)]
            for w in cutlass.range_constexpr(_NUM_WARPS):
                for e in cutlass.range_constexpr(2):
                    pair[e] += sums[(w * _SUM_COLUMNS + 2 * warp + e) * WARP + lane]
            if head < self.v.num_heads:
                _store_global(
                    attended.iterator.toint()
                    + 2
                    * (
                        (Int64(row) * self.v.num_heads + head) * CUTE_RANK
                        + vector * _VECTOR_COLUMNS
                        + warp * 8
                        + lane % 4 * 2
                    ),
                    pack_bf16(pair[0], pair[1]),
                )

    @cute.jit
    def _store_sums(self, attended, row, sums, weights, group, head, lane) -> None:
        """Store what a block of its own has summed."""
        for which in cutlass.range_constexpr(2):
            at = head + which * 8
            if at < self.v.num_heads:
                address = attended.iterator.toint() + 2 * (
                    (Int64(row) * self.v.num_heads + at) * CUTE_RANK
                    + group * _COLUMNS
                    + lane % 4 * 2
                )
                for block in cutlass.range_constexpr(_COLUMNS // 8):
                    i = block * 4 + which * 2
                    _store_global(
                        address + block * 16,
                        pack_bf16(sums[i] * weights[which], sums[i + 1] * weights[which]),
                    )


def _bits(value: Float32) -> Int32:
    return value.bitcast(Int32)


def _quad_max(value: Float32) -> Float32:
    value = cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 1))
    return cute.arch.fmax(value, cute.arch.shuffle_sync_bfly(value, 2))


def _shuffle_address(address: Int64, lane: Int32) -> Int64:
    low = cute.arch.shuffle_sync(Int32(address & 0xFFFFFFFF), lane)
    high = cute.arch.shuffle_sync(Int32(address >> 32), lane)
    return inline_ptx(
        "mov.b64 {$w0}, {{$r0}, {$r1}};", write_only_types=[Int64], read_only_args=[low, high]
    )


def _copy_16_bytes(
    to: Int32, to_offset: int, source: Int64, source_offset: int, num_bytes: Int32
) -> None:
    """Start copying 16 bytes of global memory to shared memory: `num_bytes` of them, then zeros."""
    inline_ptx(
        f"cp.async.cg.shared.global.L2::128B [{{$r0}}+{to_offset}], "
        f"[{{$r1}}+{source_offset}], 16, {{$r2}};",
        read_only_args=[to, source, num_bytes],
    )


def _load_matrices(address: Int32, offset: int) -> tuple[Int32, Int32, Int32, Int32]:
    """Four 8 x 8 matrices of bf16; a row of 16 bytes each lane's address."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, "
        f"[{{$r0}}+{offset}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address],
    )


def _store_shared_v4(address: Int32, words: list) -> None:
    inline_ptx(
        "st.shared.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};",
        read_only_args=[address, *words],
    )


def _store_global_v4(address: Int64, words: list) -> None:
    inline_ptx(
        "st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};", read_only_args=[address, *words]
    )


def _load_global_v2(address: Int64) -> tuple[Int32, Int32]:
    return inline_ptx(
        "ld.volatile.global.v2.b32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Int32, Int32],
        read_only_args=[address],
    )


def _load_global_v4(address: Int64) -> tuple[Int32, Int32, Int32, Int32]:
    return inline_ptx(
        "ld.volatile.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address],
    )


def _store_global(address: Int64, value: Int32) -> None:
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def compile_variant(variant: Variant, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`."""
    heads = variant.num_heads

    def cache(width: int) -> Any:
        return make_fake_tensor(
            BFloat16,
            (cute.sym_int32(), cute.sym_int32(), width),
            (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1),
            assumed_align=16,
        )

    def integers(dtype: torch.dtype) -> Any:
        return make_fake_tensor(
            _CUTE_TYPES[dtype],
            (cute.sym_int32(), cute.sym_int32()),
            (cute.sym_int64(), cute.sym_int64()),
            assumed_align=dtype.itemsize,
        )

    def rows(width: int) -> Any:
        shape = (cute.sym_int32(), heads, width)
        return make_fake_tensor(BFloat16, shape, (heads * width, width, 1), assumed_align=16)

    is_split = variant.split_tokens > 0
    num_splits = cute.sym_int32()
    part = _HEADS * CUTE_RANK
    parts = make_fake_tensor(
        BFloat16,
        (cute.sym_int32(), num_splits, part),
        (cute.sym_int64(divisibility=part), part, 1),
        assumed_align=16,
    )
    part_stats = make_fake_tensor(
        Float32,
        (cute.sym_int32(), num_splits, _HEADS, 2),
        (cute.sym_int64(divisibility=2 * _HEADS), 2 * _HEADS, 2, 1),
        assumed_align=8,
    )
    return compile_kernel(
        SparseMlaKernel(variant),
        rows(_WIDTH),
        cache(CUTE_RANK),
        cache(CUTE_ROPE_DIM),
        integers(variant.index_dtype),
        None if variant.table_dtype is None else integers(variant.table_dtype),
        rows(CUTE_RANK),
        parts if is_split else None,
        part_stats if is_split else None,
        Float32(1.0),
        Int32(1),
        Int32(1),
        arch=arch,
        options=options,
    )


@functools.cache
def _compiled(variant: Variant, arch: str) -> Any:
    return compile_variant(variant, arch)


def sparse_mla_decode_cute(
    q_RHC: torch.Tensor,
    latents_XYL: torch.Tensor,
    ropes_XYP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    is_paged: bool = False,
    *,
    cluster: int | None = None,
    split_tokens: int | None = None,
    use_pdl: bool = True,
) -> torch.Tensor:
    """Launch the kernel; return bf16 [R, H, L]. See `sparse_mla_reference` for the arguments.

    Args:
        q_RHC: bf16, any strides; copied unless contiguous.
        latents_XYL: bf16, last axis contiguous, others by multiples of 16 bytes.
        ropes_XYP: likewise.
        indices_RK: any strides.
        sm_scale: factor of the products.
        block_table: any strides.
        rows_per_sequence: row r belongs to sequence r // rows_per_sequence.
        is_paged: whether the first axis counts pages.
        cluster: blocks a row; None takes the measured one.
        split_tokens: 64 or 128: tokens of a block, whose part a second kernel adds to the others';
            0: none; None takes the measured one, unless a cluster is asked for.
        use_pdl: start before the kernels ahead have ended; reads nothing until then.
    """
    num_rows, num_heads, _ = q_RHC.shape
    num_slots = indices_RK.shape[1]
    attended_RHL = q_RHC.new_empty((num_rows, num_heads, CUTE_RANK))
    if not attended_RHL.numel():
        return attended_RHL
    if not latents_XYL.numel() or not num_slots:
        return attended_RHL.zero_()
    if split_tokens is None:
        split_tokens = 0 if cluster else split_size(num_rows, num_slots)
    size = 1 if split_tokens else cluster or cluster_size(num_rows, num_slots)
    num_pairs = 1 if split_tokens else -(-num_slots // (size * PAIR_TOKENS))
    parts_RZX = stats_RZH2 = None
    if split_tokens:
        num_splits = -(-num_slots // split_tokens)
        if num_splits > MAX_SPLITS:
            raise ValueError(
                f"sparse_mla: {num_slots} slots make {num_splits} parts of {split_tokens}, "
                f"at most {MAX_SPLITS} can be added up"
            )
        parts_RZX = q_RHC.new_empty((num_rows, num_splits, _HEADS * CUTE_RANK))
        stats_RZH2 = q_RHC.new_empty((num_rows, num_splits, _HEADS, 2), dtype=torch.float32)
    variant = Variant(
        cluster=size,
        is_single=num_pairs == 1,
        split_tokens=split_tokens,
        num_heads=num_heads,
        index_dtype=indices_RK.dtype,
        table_dtype=None if block_table is None else block_table.dtype,
        is_paged=is_paged,
        use_pdl=use_pdl,
    )
    q_RHC = q_RHC.contiguous()
    _compiled(variant, arch_of(q_RHC.device))(
        q_RHC.clone() if q_RHC.data_ptr() % 16 else q_RHC,
        latents_XYL,
        ropes_XYP,
        indices_RK,
        block_table,
        attended_RHL,
        parts_RZX,
        stats_RZH2,
        sm_scale * math.log2(math.e),
        rows_per_sequence,
        num_pairs,
    )
    return attended_RHL
