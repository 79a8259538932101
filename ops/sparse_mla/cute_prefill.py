"""Attention over selected latents for many rows, in CuTe DSL for sm_90a: a row at a time a block.

A block walks over a row's selected tokens in tiles and keeps three kinds of work going at once, on
different tiles of a ring in shared memory:

- Four warps load. A lane looks up one token of a tile (block table, bounds, repetition), then eight
  lanes copy a token 128 bytes at a time, by asynchronous copies of 16 bytes into the swizzled lines
  that the tensor cores read; tokens that do not count are filled with zeros.
- One warpgroup scores: S = Q K^T for all heads (wgmma; a part of Q stays in registers, as shared
  memory is short), the mask, the running maximum and sum of the softmax. It hands the
  probabilities over in bf16.
- Two warpgroups sum up: each has half of the output's columns in registers, scales them where the
  maximum moved, and adds P V, with V the same tile as K, read the other way.

So the tensor cores have the next tile's scores to compute while softmax works on this one's, and
the copies have a whole tile's time. The maximum follows late: sums are scaled only when a tile's
maximum is 2^8 times the one that they were taken with, which changes no digit of the result as
probabilities are floating-point numbers. The last tile of a row is the one with its last
non-negative index.

Blocks are persistent: the loaders go on to the next row while the others finish this one. Blocks
walk over their rows in step, and ascending indices keep them near each other in the cache, so
tokens that several rows selected are mostly found in L2. Results are the same in every run.

Shape legend: R rows, H heads (up to 64), L kv_lora rank (512), P rope dim (64), C = L + P,
K selected slots, X pages (or sequences), Y tokens of a page (or of a sequence).
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
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator
from cutlass.tensor_utils import LayoutEnum
from cutlass.utils import hopper_helpers as hopper

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import (
    WARP,
    exp2,
    inverse,
    load_shared_v4,
    quad_sum,
    shared_address,
    store_shared,
    store_shared_float,
)
from glm_compile.ops._cute.stream import load_global_word, pack_bf16
from glm_compile.ops._dispatch import num_multiprocessors

MAX_HEADS = 64
RANK = 512
ROPE = 64
_WIDTH = RANK + ROPE
_GROUP = 128
_GROUP_WARPS = _GROUP // WARP
# Columns of a 128-byte line.
_LINE = 64
_NUM_LINES = _WIDTH // _LINE
_HALF = RANK // 2
# Registers of a thread that sums up; the others share what is left of a multiprocessor's.
_SUMMER_REGISTERS = 160
# In powers of two: how far a maximum may be ahead of the one that sums were taken with.
_SLACK = 8.0
_NUM_HANDOVERS = 2
_LAST = 1 << 30
_CUTE_INDEX = {torch.int32: Int32, torch.int64: Int64}

# The sizes of the ring are from one NVIDIA H200 on 2026-11-30: 2048 rows of 64 heads, 2048 of 128K
# tokens each, of their own (all rows the same), in microseconds. Tokens of a tile x tiles / lines
# of Q in registers: 48 x 3 / 3 1102 (1048); with about 50 of the host's 48 x 3 / 3 1175 (1101),
# 48 x 3 / 4 1312 (1292), 64 x 2 / 2 1297 (1125), 32 x 5 / 5 1504 (1460). Having L2 fetch 128 or 256
# bytes around each copy brings nothing, 1100 (1046) and 1103 (1049): 132 rows take 82 to 85 either
# way.


@dataclass(frozen=True)
class Variant:
    """What a kernel is specialised for.

    Attributes:
        index_dtype: of the indices.
        table_dtype: of the block table; None without.
        page_size: Y of a paged cache, a power of two; None: indices are positions in Y.
        tile: tokens of a tile: 32, 48 or 64.
        num_stages: tiles of the ring.
        register_lines: of 64 columns of Q that stay in registers.
    """

    index_dtype: torch.dtype = torch.int32
    table_dtype: torch.dtype | None = None
    page_size: int | None = None
    tile: int = 48
    num_stages: int = 3
    register_lines: int = 3


class SparseMlaPrefillKernel:
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        v = variant
        self.v = variant
        self.num_threads = 4 * _GROUP
        self.scorer_registers = 120 if v.register_lines < 5 else 128
        self.loader_registers = 512 - 2 * _SUMMER_REGISTERS - self.scorer_registers
        self.stage_bytes = v.tile * _WIDTH * 2
        self.line_bytes = v.tile * 128
        self.shared_lines = _NUM_LINES - v.register_lines
        self.query_bytes = MAX_HEADS * self.shared_lines * 128
        # Bytes of a line of P: as wide as the tile's width allows.
        self.prob_line = next(width for width in (128, 64, 32) if v.tile * 2 % width == 0)
        self.prob_bytes = MAX_HEADS * v.tile * 2
        self.tokens_per_warp = v.tile // _GROUP_WARPS
        self.num_rounds = self.tokens_per_warp // 4
        # Factors of the sums, then of the output, a float a head each; then whether it is the last.
        self.handover_bytes = (2 * MAX_HEADS + 4) * 4
        self.num_barriers = 2 * (v.num_stages + _NUM_HANDOVERS + 1)
        self.shared_bytes = (
            v.num_stages * (self.stage_bytes + _GROUP_WARPS * 4)
            + self.query_bytes
            + _NUM_HANDOVERS * (self.prob_bytes + self.handover_bytes)
            + self.num_barriers * 8
        )

    @cute.jit
    def __call__(
        self,
        q: cute.Tensor,
        latents: cute.Tensor,
        ropes: cute.Tensor,
        indices: cute.Tensor,
        table: cute.Tensor | None,
        output: cute.Tensor,
        rows_per_sequence: Int32,
        scale: Float32,
        num_blocks: Int32,
        stream: Any,
    ) -> None:
        v = self.v
        k_major, mn_major = OperandMajorMode.K, OperandMajorMode.MN
        one = (1, 1, 1)
        score_tile = (MAX_HEADS, v.tile)
        from_registers = warpgroup.OperandSource.RMEM
        shared_mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, k_major, Float32, one, score_tile
        )
        register_mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, k_major, Float32, one, score_tile, from_registers
        )
        sum_mma = hopper.make_trivial_tiled_mma(
            BFloat16, BFloat16, k_major, mn_major, Float32, one, (MAX_HEADS, _HALF // 2)
        )
        row_major = LayoutEnum.ROW_MAJOR
        key_layout = hopper.make_smem_layout_b(
            row_major, (MAX_HEADS, v.tile, _WIDTH), BFloat16, v.num_stages
        )
        query_layout = hopper.make_smem_layout_a(
            row_major, (MAX_HEADS, v.tile, self.shared_lines * _LINE), BFloat16, 1
        )
        prob_layout = hopper.make_smem_layout_a(
            row_major, (MAX_HEADS, _HALF, v.tile), BFloat16, _NUM_HANDOVERS
        )
        query_tensor = cute.make_tensor(q.iterator, cute.select(q.layout, mode=[1, 2, 0]))
        query_atom, query_coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(),
            query_tensor,
            cute.slice_(query_layout, (None, None, 0)),
            (MAX_HEADS, self.shared_lines * _LINE),
        )
        self.kernel(
            shared_mma,
            register_mma,
            sum_mma,
            key_layout,
            query_layout,
            prob_layout,
            query_atom,
            query_coords,
            q,
            latents,
            ropes,
            indices,
            table,
            output,
            rows_per_sequence,
            scale,
        ).launch(
            grid=(num_blocks, 1, 1),
            block=(self.num_threads, 1, 1),
            stream=stream,
            min_blocks_per_mp=1,
        )

    @cute.kernel
    def kernel(
        self,
        shared_mma: cute.TiledMma,
        register_mma: cute.TiledMma,
        sum_mma: cute.TiledMma,
        key_layout: cute.ComposedLayout,
        query_layout: cute.ComposedLayout,
        prob_layout: cute.ComposedLayout,
        query_atom: cute.CopyAtom,
        query_coords: cute.Tensor,
        q: cute.Tensor,
        latents: cute.Tensor,
        ropes: cute.Tensor,
        indices: cute.Tensor,
        table: cute.Tensor | None,
        output: cute.Tensor,
        rows_per_sequence: Int32,
        scale: Float32,
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        ring = allocator.allocate_tensor(BFloat16, key_layout.outer, 1024, swizzle=key_layout.inner)
        queries = allocator.allocate_tensor(
            BFloat16, query_layout.outer, 1024, swizzle=query_layout.inner
        )
        probs = allocator.allocate_tensor(
            BFloat16, prob_layout.outer, 1024, swizzle=prob_layout.inner
        )
        handovers = allocator.allocate_tensor(
            Int32, cute.make_layout(_NUM_HANDOVERS * self.handover_bytes // 4), 16
        )
        flags = allocator.allocate_tensor(Int32, cute.make_layout(v.num_stages * _GROUP_WARPS), 16)
        barriers = allocator.allocate_tensor(
            Int64, cute.make_layout(self.num_barriers), 16
        ).iterator
        is_full = barriers
        is_empty = is_full + v.num_stages
        has_probs = is_empty + v.num_stages
        is_handed_over = has_probs + _NUM_HANDOVERS
        has_query = is_handed_over + _NUM_HANDOVERS
        is_query_free = has_query + 1
        if warp == 0:
            cpasync.prefetch_descriptor(query_atom)
        if tid == 0:
            for stage in cutlass.range_constexpr(v.num_stages):
                # Every loader once its copies are there, and one of each warp for the flags.
                cute.arch.mbarrier_init(is_full + stage, _GROUP + _GROUP_WARPS)
                cute.arch.mbarrier_init(is_empty + stage, 2 * _GROUP_WARPS)
            for i in cutlass.range_constexpr(_NUM_HANDOVERS):
                cute.arch.mbarrier_init(has_probs + i, _GROUP_WARPS)
                cute.arch.mbarrier_init(is_handed_over + i, 2 * _GROUP_WARPS)
            cute.arch.mbarrier_init(has_query, 1)
            cute.arch.mbarrier_init(is_query_free, _GROUP_WARPS)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()
        shared = (ring, queries, probs, handovers, flags)
        signals = (is_full, is_empty, has_probs, is_handed_over, has_query, is_query_free)
        group = warp // _GROUP_WARPS
        if group == 0:
            cute.arch.setmaxregister_decrease(self.scorer_registers)
            self._score(shared_mma, register_mma, q, scale, shared, signals)
        elif group == 3:
            cute.arch.setmaxregister_decrease(self.loader_registers)
            self._load(
                (query_atom, query_coords),
                (latents, ropes, indices, table, rows_per_sequence),
                shared,
                signals,
            )
        else:
            cute.arch.setmaxregister_increase(_SUMMER_REGISTERS)
            self._sum(sum_mma, output, group - 1, shared, signals)

    @cute.jit
    def _num_tiles(self, indices, row, last_index) -> Int32:
        """Tiles up to the row's last non-negative index; one at least. All lanes of a warp.

        `last_index` is this lane's of the row's last 32.
        """
        lane = cute.arch.lane_idx()
        slot = Int32(indices.shape[1]) - WARP + lane
        last = cute.arch.warp_redux_sync(Int32(last_index >= 0) * (slot + 1), "max")
        while slot - lane > 0 and last == 0:
            slot -= WARP
            index = self._number(self._peek(indices, row, slot))
            last = cute.arch.warp_redux_sync(Int32(index >= 0) * (slot + 1), "max")
        return cutlass.max((last + self.v.tile - 1) // self.v.tile, 1)

    def _peek(self, tensor, row, column):
        """An element of a matrix as it is, not waited for; -1 beyond the columns.

        A branch around the load would be waited for at its end.
        """
        wanted = Int32(column >= 0) & Int32(column < Int32(tensor.shape[1]))
        place = Int64(row) * Int64(tensor.stride[0])
        place += Int64(column * wanted) * Int64(tensor.stride[1])
        address = tensor.iterator.toint() + place * (tensor.element_type.width // 8)
        return _load_integer(address, wanted, tensor.element_type)

    def _number(self, element) -> Int32:
        """The element in 32 bits: -1 if it is negative, the largest if it does not fit."""
        return Int32(cutlass.max(cutlass.min(element, 0x7FFFFFFF), -1))

    @cute.jit
    def _load(self, query_parts, source, shared, signals) -> None:
        v = self.v
        query_atom, query_coords = query_parts
        latents, ropes, indices, table, rows_per_sequence = source
        ring, queries, _, _, flags = shared
        is_full, is_empty, _, _, has_query, is_query_free = signals
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - 3 * _GROUP_WARPS
        num_rows = Int32(indices.shape[0])
        num_outer = Int32(latents.shape[0])
        num_inner = Int32(latents.shape[1])
        # This lane's token of a tile where it looks one up.
        own_token = warp * self.tokens_per_warp + lane
        is_looking = lane < self.tokens_per_warp
        # Where the eight lanes of a token's line put their 16 bytes, in round 0.
        token = warp * self.tokens_per_warp + lane // 8
        ring_address = shared_address(ring.iterator)
        flag_address = shared_address(flags.iterator) + warp * 4
        latent_base = latents.iterator.toint() + lane % 8 * 16
        rope_base = ropes.iterator.toint() + lane % 8 * 16

        slot = Int32(0)
        phase = Int32(1)
        query_phase = Int32(1)
        last_slot = Int32(indices.shape[1]) - WARP + lane
        row = Int32(block)
        last_index = self._peek(indices, row, last_slot)
        while row < num_rows:
            sequence = row // rows_per_sequence
            num_tiles = self._num_tiles(indices, row, self._number(last_index))
            following = cutlass.min(row + num_blocks, num_rows - 1)
            last_index = self._peek(indices, following, last_slot)
            # Looked up ahead: indices two tiles, pages one.
            at = own_token
            index = self._number(self._peek(indices, row, at))
            before = self._number(self._peek(indices, row, at - 1))
            next_index = self._peek(indices, row, at + v.tile)
            next_before = self._peek(indices, row, at + v.tile - 1)
            page = None
            if cutlass.const_expr(table is not None):
                page = self._peek(table, sequence, index // v.page_size)
            for tile in cutlass.range(num_tiles, unroll=1):
                # Where this lane's token lies; -1: it does not count.
                outer = Int32(-1)
                inner = Int32(0)
                if index >= 0 and index != before:
                    if cutlass.const_expr(table is not None):
                        outer = self._number(page)
                        inner = index % v.page_size
                    elif cutlass.const_expr(v.page_size is not None):
                        outer = index // v.page_size
                        inner = index % v.page_size
                    elif index < num_inner:
                        outer = sequence
                        inner = index
                if outer >= num_outer:
                    outer = Int32(-1)
                counts = Int32(0)
                if is_looking and outer >= 0:
                    counts = Int32(1) << lane
                counting = cute.arch.warp_redux_sync(counts, "or")
                at += v.tile
                index = self._number(next_index)
                before = self._number(next_before)
                next_index = self._peek(indices, row, at + v.tile)
                next_before = self._peek(indices, row, at + v.tile - 1)
                if cutlass.const_expr(table is not None):
                    page = self._peek(table, sequence, index // v.page_size)

                cute.arch.mbarrier_wait(is_empty + slot, phase)
                is_last = Int32(tile + 1 == num_tiles) * _LAST
                if lane == 0:
                    store_shared(flag_address + slot * (_GROUP_WARPS * 4), counting | is_last)
                    cute.arch.mbarrier_arrive(is_full + slot)
                stage_address = ring_address + slot * self.stage_bytes
                for i in cutlass.range_constexpr(self.num_rounds):
                    place = lane // 8 + i * 4
                    from_outer = cute.arch.shuffle_sync(outer, place)
                    from_inner = cute.arch.shuffle_sync(inner, place)
                    num_bytes = Int32(16)
                    if from_outer < 0:
                        num_bytes = Int32(0)
                        from_outer = Int32(0)
                        from_inner = Int32(0)
                    to_token = token + i * 4
                    to = stage_address + to_token * 128 + ((lane ^ to_token) % 8) * 16
                    from_latent = latent_base + 2 * (
                        Int64(from_outer) * Int64(latents.stride[0])
                        + Int64(from_inner) * Int64(latents.stride[1])
                    )
                    from_rope = rope_base + 2 * (
                        Int64(from_outer) * Int64(ropes.stride[0])
                        + Int64(from_inner) * Int64(ropes.stride[1])
                    )
                    for line in cutlass.range_constexpr(_NUM_LINES - 1):
                        _copy_16_bytes(
                            to + line * self.line_bytes, from_latent + line * 128, num_bytes
                        )
                    _copy_16_bytes(to + (_NUM_LINES - 1) * self.line_bytes, from_rope, num_bytes)
                cute.arch.cp_async_mbarrier_arrive_noinc(is_full + slot)
                slot += 1
                if slot == v.num_stages:
                    slot = Int32(0)
                    phase ^= 1
                if tile == 0 and warp == 0:
                    # Not earlier: the scores of the row before may still be under way.
                    cute.arch.mbarrier_wait(is_query_free, query_phase)
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive_and_expect_tx(has_query, self.query_bytes)
                    query_from = cute.local_tile(
                        query_coords, (MAX_HEADS, self.shared_lines * _LINE, 1), (0, 0, row)
                    )
                    query_to, query_from = cpasync.tma_partition(
                        query_atom,
                        0,
                        cute.make_layout(1),
                        cute.group_modes(queries, 0, 2),
                        cute.group_modes(query_from, 0, 3),
                    )
                    cute.copy(query_atom, query_from, query_to[None, 0], tma_bar_ptr=has_query)
                    query_phase ^= 1
            row += num_blocks

    @cute.jit
    def _load_query(self, words, q, row, warp, lane) -> None:
        """The last lines of a row's Q into registers, as wgmma takes them; zeros beyond H."""
        is_row = Int32(row < q.shape[0])
        column = self.shared_lines * _LINE + lane % 4 * 2
        for half in cutlass.range_constexpr(2):
            head = warp * 16 + lane // 4 + half * 8
            wanted = is_row & Int32(head < q.shape[1])
            address = q.iterator.toint() + 2 * (
                Int64(row * wanted) * Int64(q.stride[0])
                + Int64(head * wanted) * Int64(q.stride[1])
                + Int64(column)
            )
            for i in cutlass.range_constexpr(self.v.register_lines * _LINE // 8):
                words[half + 2 * i] = load_global_word(address + i * 16, wanted)

    @cute.jit
    def _score(self, shared_mma, register_mma, q, scale, shared, signals) -> None:
        v = self.v
        ring, queries, probs, handovers, flags = shared
        is_full, _, has_probs, is_handed_over, has_query, is_query_free = signals
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        num_rows = Int32(q.shape[0])
        part = shared_mma.get_slice(tid)
        query_part = shared_mma.make_fragment_A(part.partition_A(queries))
        key_part = shared_mma.make_fragment_B(part.partition_B(ring))
        products = cute.make_rmem_tensor(shared_mma.partition_shape_C((MAX_HEADS, v.tile)), Float32)
        num_register_steps = v.register_lines * _LINE // 16
        num_shared_steps = self.shared_lines * _LINE // 16
        held = cute.make_rmem_tensor(
            register_mma.partition_shape_A((MAX_HEADS, max(1, v.register_lines) * _LINE)), BFloat16
        )
        held_words = cute.recast_tensor(held, Int32)
        # This lane's first row of a block of heads, and its first column.
        head = warp * 16 + lane // 4
        column = lane % 4 * 2
        prob_address = shared_address(probs.iterator) + head * self.prob_line + column * 2
        # Lines are swizzled by 16 bytes, with what follows the 128 bytes of the address.
        prob_swizzle = head * self.prob_line // 128 % (self.prob_line // 16)
        handover_address = shared_address(handovers.iterator)
        flag_address = shared_address(flags.iterator)
        all_count = (1 << self.tokens_per_warp) - 1

        slot = Int32(0)
        phase = Int32(0)
        give = Int32(0)
        give_phase = Int32(1)
        query_phase = Int32(0)
        row = Int32(block)
        self._load_query(held_words, q, row, warp, lane)
        while row < num_rows:
            cute.arch.mbarrier_wait(has_query, query_phase)
            query_phase ^= 1
            top0 = Float32(float("-inf"))
            top1 = Float32(float("-inf"))
            sum0 = Float32(0.0)
            sum1 = Float32(0.0)
            is_last = Int32(0)
            while is_last == 0:
                cute.arch.mbarrier_wait(is_full + slot, phase)
                # Copies that are no bulk copies, to be read by the tensor cores.
                cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup.fence()
                shared_mma.set(warpgroup.Field.ACCUMULATE, False)
                for k in cutlass.range_constexpr(num_shared_steps):
                    cute.gemm(
                        shared_mma,
                        products,
                        query_part[None, None, k, 0],
                        key_part[None, None, k, slot],
                        products,
                    )
                    shared_mma.set(warpgroup.Field.ACCUMULATE, True)
                register_mma.set(warpgroup.Field.ACCUMULATE, True)
                for k in cutlass.range_constexpr(num_register_steps):
                    cute.gemm(
                        register_mma,
                        products,
                        held[None, None, k],
                        key_part[None, None, num_shared_steps + k, slot],
                        products,
                    )
                warpgroup.commit_group()
                words = load_shared_v4(flag_address + slot * (_GROUP_WARPS * 4))
                is_last = words[0] & _LAST
                counting = all_count
                for i in cutlass.range_constexpr(_GROUP_WARPS):
                    counting = counting & words[i]
                warpgroup.wait_group(0)
                if is_last != 0:
                    cute.arch.sync_warp()
                    with cute.arch.elect_one():
                        cute.arch.mbarrier_arrive(is_query_free)
                    self._load_query(held_words, q, row + num_blocks, warp, lane)
                if counting != all_count:
                    self._mask(products, words, column)
                tile_top0 = _top(products, 0, v.tile)
                tile_top1 = _top(products, 1, v.tile)
                top0, top_used0, factor0 = _follow(top0, tile_top0 * scale)
                top1, top_used1, factor1 = _follow(top1, tile_top1 * scale)
                prob_words0 = []
                prob_words1 = []
                tile_sum0 = Float32(0.0)
                tile_sum1 = Float32(0.0)
                for i in cutlass.range_constexpr(v.tile // 8):
                    first = exp2(products[4 * i] * scale - top_used0)
                    second = exp2(products[4 * i + 1] * scale - top_used0)
                    tile_sum0 += first + second
                    prob_words0.append(pack_bf16(first, second))
                    first = exp2(products[4 * i + 2] * scale - top_used1)
                    second = exp2(products[4 * i + 3] * scale - top_used1)
                    tile_sum1 += first + second
                    prob_words1.append(pack_bf16(first, second))
                sum0 = sum0 * factor0 + tile_sum0
                sum1 = sum1 * factor1 + tile_sum1

                cute.arch.mbarrier_wait(is_handed_over + give, give_phase)
                to = prob_address + give * self.prob_bytes
                units = self.prob_line // 16
                for i in cutlass.range_constexpr(v.tile // 8):
                    at = to + (prob_swizzle ^ (i % units)) * 16
                    line = i // units * (MAX_HEADS * self.prob_line)
                    store_shared(at + line, prob_words0[i])
                    store_shared(at + (line + 8 * self.prob_line), prob_words1[i])
                cute.arch.fence_proxy("async.shared", space="cta")
                to = handover_address + give * self.handover_bytes + head * 4
                if lane % 4 == 0:
                    store_shared_float(to, factor0)
                    store_shared_float(to + 8 * 4, factor1)
                if is_last != 0:
                    total0 = quad_sum(sum0)
                    total1 = quad_sum(sum1)
                    if lane % 4 == 0:
                        store_shared_float(to + MAX_HEADS * 4, inverse(total0))
                        store_shared_float(to + (MAX_HEADS + 8) * 4, inverse(total1))
                if tid % WARP == 0:
                    # Every warp of the summers reads what its own counterpart wrote.
                    store_shared(
                        handover_address + give * self.handover_bytes + (2 * MAX_HEADS + warp) * 4,
                        is_last,
                    )
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(has_probs + give)
                give += 1
                if give == _NUM_HANDOVERS:
                    give = Int32(0)
                    give_phase ^= 1
                slot += 1
                if slot == v.num_stages:
                    slot = Int32(0)
                    phase ^= 1
            row += num_blocks

    @cute.jit
    def _mask(self, products, words, column) -> None:
        """Scores of tokens that do not count become -inf."""
        bits = Int64(0)
        for i in cutlass.range_constexpr(_GROUP_WARPS):
            of_warp = Int64(words[i] & ((1 << self.tokens_per_warp) - 1))
            bits = bits | (of_warp << (i * self.tokens_per_warp))
        bits = bits >> Int64(column)
        for i in cutlass.range_constexpr(self.v.tile // 8):
            for j in cutlass.range_constexpr(2):
                if (bits >> (8 * i + j)) & Int64(1) == 0:
                    products[4 * i + j] = Float32(float("-inf"))
                    products[4 * i + 2 + j] = Float32(float("-inf"))

    @cute.jit
    def _sum(self, sum_mma, output, half, shared, signals) -> None:
        v = self.v
        ring, _, probs, handovers, _ = shared
        is_full, is_empty, has_probs, is_handed_over, _, _ = signals
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx()) % _GROUP_WARPS
        num_rows = Int32(output.shape[0])
        # The same lines read along the other axis: [columns, tokens, stages].
        value_layout = cute.make_layout(
            ((_LINE, _HALF // _LINE), v.tile, v.num_stages),
            stride=((1, v.tile * _LINE), _LINE, v.tile * _WIDTH),
        )
        values = cute.make_tensor(ring.iterator + half * (_HALF * v.tile), value_layout)
        part = sum_mma.get_slice(tid % _GROUP)
        value_part = sum_mma.make_fragment_B(part.partition_B(values))
        sums = cute.make_rmem_tensor(sum_mma.partition_shape_C((MAX_HEADS, _HALF)), Float32)
        prob_part = sum_mma.make_fragment_A(part.partition_A(probs))
        head = warp * 16 + lane // 4
        handover_address = shared_address(handovers.iterator)
        sum_mma.set(warpgroup.Field.ACCUMULATE, True)

        slot = Int32(0)
        phase = Int32(0)
        take = Int32(0)
        take_phase = Int32(0)
        row = Int32(block)
        while row < num_rows:
            sums.fill(0.0)
            factor0 = Float32(1.0)
            factor1 = Float32(1.0)
            is_last = Int32(0)
            while is_last == 0:
                cute.arch.mbarrier_wait(has_probs + take, take_phase)
                source = handover_address + take * self.handover_bytes
                at = source + head * 4
                scale0 = _load_float(at)
                scale1 = _load_float(at + 8 * 4)
                factor0 = _load_float(at + MAX_HEADS * 4)
                factor1 = _load_float(at + (MAX_HEADS + 8) * 4)
                is_last = _load_int(source + (2 * MAX_HEADS + warp) * 4)
                moved = Int32(scale0 != Float32(1.0)) | Int32(scale1 != Float32(1.0))
                if cute.arch.warp_redux_sync(moved, "max") != 0:
                    for i in cutlass.range_constexpr(_HALF // 8):
                        sums[4 * i] = sums[4 * i] * scale0
                        sums[4 * i + 1] = sums[4 * i + 1] * scale0
                        sums[4 * i + 2] = sums[4 * i + 2] * scale1
                        sums[4 * i + 3] = sums[4 * i + 3] * scale1
                # The tile is there, as it has been scored; this is for the tensor cores' reads.
                cute.arch.mbarrier_wait(is_full + slot, phase)
                cute.arch.fence_proxy("async.shared", space="cta")
                warpgroup.fence()
                for k in cutlass.range_constexpr(v.tile // 16):
                    cute.gemm(
                        sum_mma,
                        sums,
                        prob_part[None, None, k, take],
                        value_part[None, None, k, slot],
                        sums,
                    )
                warpgroup.commit_group()
                warpgroup.wait_group(0)
                cute.arch.sync_warp()
                with cute.arch.elect_one():
                    cute.arch.mbarrier_arrive(is_empty + slot)
                    cute.arch.mbarrier_arrive(is_handed_over + take)
                take += 1
                if take == _NUM_HANDOVERS:
                    take = Int32(0)
                    take_phase ^= 1
                slot += 1
                if slot == v.num_stages:
                    slot = Int32(0)
                    phase ^= 1
            self._store(sums, output, row, head, half, lane, factor0, factor1)
            row += num_blocks

    @cute.jit
    def _store(self, sums, output, row, head, half, lane, factor0, factor1) -> None:
        """Store this thread's two heads of a row.

        Neighbours swap, so that a thread has four adjacent columns of every other block of eight:
        the lanes of a head then write 32 adjacent bytes at once.
        """
        num_heads = Int32(output.shape[1])
        is_odd = lane % 2
        column = half * _HALF + is_odd * 8 + lane % 4 // 2 * 4
        address = output.iterator.toint() + 2 * (
            (Int64(row) * Int64(num_heads) + Int64(head)) * RANK + Int64(column)
        )
        for of_head in cutlass.range_constexpr(2):
            factor = factor1 if of_head else factor0
            wanted = Int32(head + 8 * of_head < num_heads)
            for i in cutlass.range_constexpr(0, _HALF // 8, 2):
                at = 4 * i + 2 * of_head
                even = pack_bf16(sums[at] * factor, sums[at + 1] * factor)
                odd = pack_bf16(sums[at + 4] * factor, sums[at + 5] * factor)
                kept, sent = even, odd
                if is_odd == 1:
                    kept, sent = odd, even
                received = cute.arch.shuffle_sync_bfly(sent, 1)
                first, second = kept, received
                if is_odd == 1:
                    first, second = received, kept
                to = address + (of_head * 8 * RANK * 2 + i * 16)
                _store_words(to, first, second, wanted)


def _top(products, half: int, tile: int) -> Float32:
    """Largest of a head's scores in a tile, over the four lanes that share the head."""
    values = [products[4 * i + 2 * half + j] for i in range(tile // 8) for j in range(2)]
    while len(values) > 1:
        values = [
            cute.arch.fmax(values[i], values[min(i + 1, len(values) - 1)])
            for i in range(0, len(values), 2)
        ]
    top = values[0]
    top = cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 1))
    return cute.arch.fmax(top, cute.arch.shuffle_sync_bfly(top, 2))


@cute.jit
def _follow(top: Float32, tile_top: Float32) -> tuple[Float32, Float32, Float32]:
    """(maximum to go on with, the same or 0 if it is -inf, factor of the sums so far)."""
    factor = Float32(1.0)
    if tile_top > top + Float32(_SLACK):
        # The sums are 0 as long as nothing counted.
        if top > Float32(float("-inf")):
            factor = exp2(top - tile_top)
        top = tile_top
    used = top
    if not (top > Float32(float("-inf"))):
        used = Float32(0.0)
    return top, used, factor


def _copy_16_bytes(to: Int32, source: Int64, num_bytes: Int32) -> None:
    """Start copying 16 aligned bytes to shared memory: `num_bytes` of them, 0 or 16, then zeros."""
    inline_ptx(
        "cp.async.cg.shared.global [{$r0}], [{$r1}], 16, {$r2};",
        read_only_args=[to, source, num_bytes],
    )


def _load_integer(address: Int64, is_wanted: Int32, dtype: Any) -> Any:
    """An integer of global memory, or -1 where it is not wanted."""
    return inline_ptx(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, {$r1}, 0;\n"
        f"mov.b{dtype.width} {{$w0}}, -1;\n"
        f"@wanted ld.global.b{dtype.width} {{$w0}}, [{{$r0}}];\n}}",
        write_only_types=[dtype],
        read_only_args=[address, is_wanted],
    )


def _store_words(address: Int64, first: Int32, second: Int32, is_wanted: Int32) -> None:
    """Two adjacent words to global memory, 8-byte aligned, where they are wanted."""
    inline_ptx(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, {$r3}, 0;\n"
        "@wanted st.global.v2.b32 [{$r0}], {{$r1}, {$r2}};\n}",
        read_only_args=[address, first, second, is_wanted],
    )


def _load_float(address: Int32) -> Float32:
    return inline_ptx(
        "ld.shared.f32 {$w0}, [{$r0}];", write_only_types=[Float32], read_only_args=[address]
    )


def _load_int(address: Int32) -> Int32:
    return inline_ptx(
        "ld.shared.b32 {$w0}, [{$r0}];", write_only_types=[Int32], read_only_args=[address]
    )


def compile_variant(variant: Variant, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`."""
    v = variant

    def rows(width: int) -> Any:
        return make_fake_tensor(
            BFloat16,
            (cute.sym_int32(), cute.sym_int32(), width),
            (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1),
            assumed_align=16,
        )

    def matrix(dtype: torch.dtype) -> Any:
        return make_fake_tensor(
            _CUTE_INDEX[dtype],
            (cute.sym_int32(), cute.sym_int32()),
            (cute.sym_int64(), cute.sym_int64()),
            assumed_align=dtype.itemsize,
        )

    return compile_kernel(
        SparseMlaPrefillKernel(variant),
        rows(_WIDTH),
        rows(RANK),
        rows(ROPE),
        matrix(v.index_dtype),
        None if v.table_dtype is None else matrix(v.table_dtype),
        rows(RANK),
        Int32(1),
        Float32(1.0),
        Int32(1),
        arch=arch,
        options=options,
    )


@functools.cache
def _compiled(variant: Variant, arch: str) -> Any:
    return compile_variant(variant, arch)


def sparse_mla_prefill_cute(
    q_RHC: torch.Tensor,
    latents_XYL: torch.Tensor,
    ropes_XYP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    is_paged: bool = False,
    *,
    variant: Variant | None = None,
) -> torch.Tensor:
    """Launch the kernel; arguments as of `sparse_mla_reference`.

    Latents and ropes are bf16, contiguous in the last axis, every token at a multiple of 16 bytes;
    pages hold a power of two of tokens. q may have any strides: it is copied where the copy engine
    cannot take them.

    Args:
        variant: sizes of the ring, for measurements; the rest of it is set here.
    """
    num_rows, num_heads, _ = q_RHC.shape
    output = q_RHC.new_empty((num_rows, num_heads, RANK))
    if not output.numel():
        return output
    if not latents_XYL.numel() or not indices_RK.shape[1]:
        return output.zero_()
    if sm_scale <= 0:
        # The maximum is one of the products, not of what they are multiplied by.
        q_RHC, sm_scale = q_RHC * (-1 if sm_scale < 0 else 0), -sm_scale or 1.0
    ring = variant or Variant()
    variant = Variant(
        index_dtype=indices_RK.dtype,
        table_dtype=None if block_table is None else block_table.dtype,
        page_size=latents_XYL.shape[1] if is_paged else None,
        tile=ring.tile,
        num_stages=ring.num_stages,
        register_lines=ring.register_lines,
    )
    _compiled(variant, arch_of(q_RHC.device))(
        _aligned(q_RHC),
        latents_XYL,
        ropes_XYP,
        indices_RK,
        block_table,
        output,
        rows_per_sequence,
        sm_scale * math.log2(math.e),
        min(num_rows, num_multiprocessors(q_RHC.device)),
    )
    return output


def _aligned(q_RHC: torch.Tensor) -> torch.Tensor:
    """q, or a dense copy where the copy engine cannot take its strides."""
    strides = q_RHC.stride()
    if (
        strides[2] != 1
        or any(stride <= 0 or stride % 8 for stride in strides[:2])
        or q_RHC.data_ptr() % 16
    ):
        return q_RHC.clone(memory_format=torch.contiguous_format)
    return q_RHC
