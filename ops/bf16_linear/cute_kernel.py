"""A bf16 linear for few rows in CuTe DSL for sm_90a: weights stream through shared memory.

One warp of a block keeps a ring of stages full by bulk copies, a row's piece of a stage each; the
others share out a stage's columns between them, multiply by tensor cores (16 out features by 8 rows
of x) and add their sums up at the end of a tile, in one order. Where out features are too few for
all multiprocessors, or x so wide that every block's reading all of it costs much, the blocks of a
cluster share out K as well: each gets a share of the others' sums, and adds up in one order too. So
results are the same in every run, and with one split a row's depend neither on the other rows nor
on their number. A few weights have another split for many rows; it is not taken where rows must not
depend on their number.

Tiles are dealt out, or drawn by a counter where there are many: multiprocessors do not get equal
shares of the memory's bandwidth, and who is faster then does more. A tile's sums are the same
whoever takes it. Where x is a good part of what is read, each tile may begin with another stage, so
that blocks do not all ask for the same part of x.

On request rows go through the model's RMSNorm while they are in registers, and tiles are made of
gates and ups, of which silu(gate) * up is stored.

A lane takes eight adjacent columns of a row, see `_cute.ring`, so x needs no shared memory: each
warp loads the columns that it multiplies, straight into registers.

Under programmatic dependent launch weights are requested before the kernels ahead have ended, x
after. Dependents are let in only then, at once or when all weights have been requested. A kernel
ahead may have let this one in before its own wait, so what is read early is weights alone, which
no kernel of a step writes.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import functools
import threading
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel, rows_to_load
from glm_compile.ops._cute.device import (
    WARP,
    load_shared,
    load_shared_v4,
    peer_address,
    send_v4,
    shared_address,
    store_global,
    store_shared,
)
from glm_compile.ops._cute.fakes import matrix, strided_matrix, vector
from glm_compile.ops._cute.ring import MULTIPLYING, ROWS, SHARED_BYTES, STEP, RingProduct
from glm_compile.ops._cute.stream import (
    bulk_load,
    evict_first_policy,
    load_global_16_bytes,
    next_ticket,
    norm_bf16,
    reciprocal_sqrt,
    sum_of_squares,
)
from glm_compile.ops._dispatch import num_multiprocessors
from glm_compile.ops.bf16_linear.config import (
    MAX_HELD_REGISTERS,
    StreamConfig,
    held_registers,
    norm_config_for,
    stream_config_for,
)


@dataclass(frozen=True)
class Variant:
    """What a kernel is specialised for.

    Attributes:
        num_columns: K.
        tile: out features of a block at a time, a multiple of 8.
        stage_columns: columns of a stage, a multiple of 32 * warps.
        num_stages: of the ring.
        num_warps: that multiply.
        num_loaders: further warps, that load.
        cluster: blocks that share out K.
        row_blocks: of 8 rows of x; 1 or 2.
        is_resident: x stays in registers over all tiles of a block.
        ahead: stages that x is loaded ahead where it is not resident.
        late: when dependents are let in, see `StreamConfig`.
        has_norm, has_bias, has_residual: which optional arguments are given.
        has_swiglu: a tile is as many gates as ups, and what comes out is silu(gate) * up.
        num_static: tiles of a block before it draws the others; 0: all tiles are dealt out.
        is_turned: each tile begins with another stage, see `StreamConfig`; x is not resident then.
    """

    num_columns: int
    tile: int
    stage_columns: int
    num_stages: int
    num_warps: int
    cluster: int
    row_blocks: int
    is_resident: bool
    ahead: int = 2
    num_loaders: int = 1
    late: bool = False
    has_norm: bool = False
    has_bias: bool = False
    has_residual: bool = False
    has_swiglu: bool = False
    num_static: int = 0
    is_turned: bool = False
    use_pdl: bool = True

    @property
    def num_steps(self) -> int:
        """Stages that a block multiplies for a tile."""
        return -(-self.num_columns // self.stage_columns) // self.cluster


class Bf16LinearKernel(RingProduct):
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant, variant.row_blocks)
        v = variant
        # Sums are sent in groups of four features; a block finishes these groups of a tile.
        self.num_owned = self.num_rows * v.tile // (4 * v.cluster)
        self.num_received = v.cluster * self.num_owned * 4 if v.cluster > 1 else 4
        # Features that a tile gives, and the columns of the norm's weight that a block needs.
        self.num_outputs = v.tile // 2 if v.has_swiglu else v.tile
        self.block_columns = v.num_steps * v.stage_columns
        num_norm_words = self.block_columns // 2 if v.has_norm else 4
        self.other_shared_bytes = (
            self.num_sums + self.num_received + v.num_warps * 16 + num_norm_words + v.num_stages + 2
        ) * 4 + 192
        self.num_norm_words = num_norm_words

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        norm_weight: cute.Tensor | None,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        output: cute.Tensor,
        counter: cute.Tensor | None,
        eps: Float32,
        num_blocks: Int32,
        stream: Any,
    ) -> None:
        v = self.v
        row_blocks = (x.shape[0] + self.num_rows - 1) // self.num_rows
        self.kernel(x, weight, norm_weight, bias, residual, output, counter, eps).launch(
            grid=(num_blocks * v.cluster, row_blocks, 1),
            block=(self.num_threads, 1, 1),
            cluster=(v.cluster, 1, 1) if v.cluster > 1 else None,
            stream=stream,
            use_pdl=v.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        weight: cute.Tensor,
        norm_weight: cute.Tensor | None,
        bias: cute.Tensor | None,
        residual: cute.Tensor | None,
        output: cute.Tensor,
        counter: cute.Tensor | None,
        eps: Float32,
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        block, row_block, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        ring = allocator.allocate_tensor(
            Int32, cute.make_layout(v.num_stages * self.stage_bytes // 4), 128
        )
        sums = allocator.allocate_tensor(Float32, cute.make_layout(self.num_sums), 16)
        squares = allocator.allocate_tensor(Float32, cute.make_layout(v.num_warps * 16), 16)
        received = allocator.allocate_tensor(Float32, cute.make_layout(self.num_received), 16)
        norm_words = allocator.allocate_tensor(Int32, cute.make_layout(self.num_norm_words), 16)
        # The tile that begins in a stage, and two places for what was drawn.
        tiles = allocator.allocate_tensor(Int32, cute.make_layout(v.num_stages + 2), 16)
        tiles_address = shared_address(tiles.iterator)
        barriers = allocator.allocate_tensor(Int64, cute.make_layout(2 * v.num_stages + 2), 16)
        is_full = barriers.iterator
        is_empty = barriers.iterator + v.num_stages
        has_sums = barriers.iterator + 2 * v.num_stages
        has_norm = barriers.iterator + (2 * v.num_stages + 1)
        if tid == 0:
            for stage in cutlass.range_constexpr(v.num_stages):
                cute.arch.mbarrier_init(is_full + stage, 1)
                cute.arch.mbarrier_init(is_empty + stage, v.num_warps)
            cute.arch.mbarrier_init(has_sums, 1)
            cute.arch.mbarrier_init(has_norm, 1)
            cute.arch.mbarrier_init_fence()
            if cutlass.const_expr(v.cluster > 1):
                num_bytes = v.cluster * self.num_owned * 16
                cute.arch.mbarrier_arrive_and_expect_tx(has_sums, num_bytes)
        cute.arch.sync_threads()
        if cutlass.const_expr(v.cluster > 1):
            # Who has waited for this may send to the barrier.
            cute.arch.cluster_arrive()
        tile = block // v.cluster
        rank = block % v.cluster
        stride = num_blocks // v.cluster
        if warp >= v.num_warps:
            self._load(
                (weight, norm_weight, counter),
                (ring, norm_words, tiles_address, is_full, is_empty, has_norm),
                (tile, rank, stride),
                warp - v.num_warps,
            )
        else:
            self._multiply(
                (x, weight, bias, residual, output, eps),
                (ring, sums, squares, received, norm_words, tiles_address),
                (is_full, is_empty, has_sums, has_norm),
                (tile, rank, stride, row_block),
            )

    def _num_tiles(self, weight: cute.Tensor) -> Int32:
        num_features = weight.shape[0]
        if self.v.has_swiglu:
            num_features = num_features // 2
        return (num_features + self.num_outputs - 1) // self.num_outputs

    @cute.jit
    def _load(self, tensors, shared, place, loader) -> None:
        v = self.v
        weight, norm_weight, counter = tensors
        ring, norm_words, tiles_address, is_full, is_empty, has_norm = shared
        tile, rank, stride = place
        policy = evict_first_policy()
        if cutlass.const_expr(v.has_norm):
            self._load_norm(norm_weight, norm_words, has_norm, (rank, loader))
        num_features = weight.shape[0]
        if cutlass.const_expr(v.has_swiglu):
            num_features = num_features // 2
        num_tiles = self._num_tiles(weight)
        row_bytes = Int64(weight.stride[0]) * 2
        # From where a tile's gates would go on to its ups.
        gap = Int64(num_features - self.num_outputs) * row_bytes
        ring_address = Int32(ring.iterator.toint()) + loader * self.pitch
        slot = Int32(0)
        phase = Int32(1)
        num_started = Int32(0)
        while tile < num_tiles:
            first = tile * self.num_outputs
            rows = cutlass.min(num_features - first, self.num_outputs)
            row_address = weight.iterator.toint() + Int64(first + loader) * row_bytes
            for step in cutlass.range(v.num_steps, unroll=1):
                turned = step
                if cutlass.const_expr(v.is_turned):
                    turned = (step + tile) % v.num_steps
                column = (rank * v.num_steps + turned) * v.stage_columns
                num_bytes = Int32(v.stage_columns * 2)
                if cutlass.const_expr(v.num_columns % v.stage_columns):
                    num_bytes = cutlass.min(num_bytes, (v.num_columns - column) * 2)
                cute.arch.mbarrier_wait(is_empty + slot, phase)
                to = ring_address + slot * self.stage_bytes
                barrier = Int32((is_full + slot).toint())
                source = row_address + Int64(column) * 2
                with cute.arch.elect_one():
                    if loader == 0:
                        stage_bytes = rows * num_bytes
                        if cutlass.const_expr(v.has_swiglu):
                            stage_bytes = stage_bytes * 2
                        if cutlass.const_expr(v.num_static > 0):
                            store_shared(tiles_address + slot * 4, tile)
                        cute.arch.mbarrier_arrive_and_expect_tx(is_full + slot, stage_bytes)
                    # One thread starts all copies of its warp: the instruction takes addresses that
                    # are the warp's, so lanes with different ones would come one by one, slower.
                    for part in cutlass.range_constexpr(-(-v.tile // v.num_loaders)):
                        row = loader + part * v.num_loaders
                        if cutlass.const_expr(v.has_swiglu):
                            is_up = Int32(row >= self.num_outputs)
                            if row < v.tile and row - is_up * self.num_outputs < rows:
                                from_ = source + Int64(is_up) * gap
                                bulk_load(to, from_, num_bytes, barrier, policy)
                        elif row < rows:
                            bulk_load(to, source, num_bytes, barrier, policy)
                        to += v.num_loaders * self.pitch
                        source += v.num_loaders * row_bytes
                slot += 1
                if slot == v.num_stages:
                    slot = Int32(0)
                    phase ^= 1
            tile += stride
            if cutlass.const_expr(v.num_static > 0):
                num_started += 1
                if num_started >= v.num_static:
                    drawn = tiles_address + (v.num_stages + num_started % 2) * 4
                    tile = self._draw(counter, drawn, (stride, num_tiles), loader)
        if loader == 0 and cutlass.const_expr(v.num_static > 0):
            # No tile begins in this stage: the others are to end.
            cute.arch.mbarrier_wait(is_empty + slot, phase)
            with cute.arch.elect_one():
                store_shared(tiles_address + slot * 4, tile)
                cute.arch.mbarrier_arrive(is_full + slot)
        if cutlass.const_expr(v.late):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        if cutlass.const_expr(v.cluster > 1):
            cute.arch.cluster_wait()

    @cute.jit
    def _draw(self, counter, drawn, sizes, loader) -> Int32:
        """The first tile that no block has taken: one for all loaders, which meet here.

        Blocks do not get equal shares of the memory's bandwidth; who is faster does more. Each
        block draws once in vain, and the last of all tickets sets the counter back.
        """
        v = self.v
        num_blocks, num_tiles = sizes
        if loader == 0:
            # The kernel ahead may count with the same counter.
            cute.arch.griddepcontrol_wait()
            with cute.arch.elect_one():
                num_dealt = v.num_static * num_blocks
                ticket = next_ticket(counter.iterator.toint())
                is_last = ticket == num_tiles - num_dealt + num_blocks - 1
                store_global(counter.iterator.toint(), Int32(0), is_last)
                store_shared(drawn, num_dealt + ticket)
        if cutlass.const_expr(v.num_loaders > 1):
            cute.arch.barrier(barrier_id=2, number_of_threads=v.num_loaders * WARP)
        else:
            cute.arch.sync_warp()
        return load_shared(drawn)

    @cute.jit
    def _load_norm(self, norm_weight, norm_words, has_norm, place) -> None:
        """Ask for the norm's weight, of the columns that this block multiplies."""
        rank, loader = place
        if loader == self.v.num_loaders - 1:
            with cute.arch.elect_one():
                first = rank * self.block_columns
                num_bytes = cutlass.min(self.v.num_columns - first, self.block_columns) * 2
                cute.arch.mbarrier_arrive_and_expect_tx(has_norm, num_bytes)
                bulk_load(
                    shared_address(norm_words.iterator),
                    norm_weight.iterator.toint() + Int64(first) * 2,
                    num_bytes,
                    Int32(has_norm.toint()),
                )

    @cute.jit
    def _multiply(self, tensors, shared, barriers, place) -> None:
        v = self.v
        x, weight, bias, residual, output, eps = tensors
        ring, sums, squares, received, norm_words, tiles_address = shared
        is_full, is_empty, has_sums, has_norm = barriers
        tile, rank, stride, row_block = place
        tid, _, _ = cute.arch.thread_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        group = lane // 4
        # This lane's first column, of the whole K and of a stage.
        own_column = warp * self.warp_columns + (lane % 4) * 8
        first_column = rank * self.block_columns + own_column
        first_row = row_block * self.num_rows
        num_rows = cutlass.min(x.shape[0] - first_row, self.num_rows)
        num_features = weight.shape[0]
        num_tiles = self._num_tiles(weight)
        x_addresses = [
            x.iterator.toint()
            + (Int64(first_row + group + n * ROWS) * Int64(x.stride[0]) + Int64(first_column)) * 2
            for n in range(v.row_blocks)
        ]
        has_row = [Int32(group + n * ROWS < num_rows) for n in range(v.row_blocks)]
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not v.late):
            cute.arch.griddepcontrol_launch_dependents()
        x_parts = []
        if cutlass.const_expr(v.is_resident):
            x_parts = [
                self._load_step(x_addresses, has_row, first_column, step)
                for step in range(v.num_steps * self.steps_per_stage)
            ]
            if cutlass.const_expr(v.has_norm):
                x_parts = self._normed(
                    x_parts,
                    (x_addresses, has_row, own_column, rank),
                    (squares, norm_words, has_norm),
                    (warp, lane, eps),
                )

        own_address = Int32(ring.iterator.toint()) + group * self.pitch + own_column * 2
        slot = Int32(0)
        phase = Int32(0)
        while tile < num_tiles:
            total = self._zero_sums()
            parts = list(x_parts)
            if cutlass.const_expr(not v.is_resident):
                for step in cutlass.range_constexpr(
                    min(v.ahead, v.num_steps) * self.steps_per_stage
                ):
                    parts.append(self._load_x(x_addresses, has_row, (first_column, tile), step))
            for stage in cutlass.range_constexpr(v.num_steps):
                if cutlass.const_expr(not v.is_resident and stage + v.ahead < v.num_steps):
                    for i in cutlass.range_constexpr(self.steps_per_stage):
                        step = (stage + v.ahead) * self.steps_per_stage + i
                        parts.append(self._load_x(x_addresses, has_row, (first_column, tile), step))
                cute.arch.mbarrier_wait(is_full + slot, phase)
                address = own_address + slot * self.stage_bytes
                for i in cutlass.range_constexpr(self.steps_per_stage):
                    step = stage * self.steps_per_stage + i
                    self._multiply_step(total, parts[step], address, first_column, step, i)
                # Loads still under way would read what the next bulk copy puts there: it writes
                # through another proxy, which an arrival alone does not order behind them.
                cute.arch.fence_proxy("async.shared", space="cta")
                cute.arch.sync_warp()
                if lane == 0:
                    cute.arch.mbarrier_arrive(is_empty + slot)
                slot += 1
                if slot == v.num_stages:
                    slot = Int32(0)
                    phase ^= 1
            self._sum_up(total, sums, warp, lane)
            first = tile * v.tile
            if cutlass.const_expr(v.cluster > 1):
                self._finish_cluster(
                    sums,
                    received,
                    has_sums,
                    (output, bias, residual),
                    (first, first_row, num_rows, rank),
                )
            elif cutlass.const_expr(v.has_swiglu):
                self._finish_swiglu(sums, output, (tile, first_row, num_rows))
            else:
                for i in cutlass.range_constexpr(self._outputs_per_thread(1)):
                    index = tid + i * self.num_consumers
                    row = index // v.tile
                    feature = index % v.tile
                    if row < num_rows and first + feature < num_features:
                        value = Float32(0.0)
                        for w in cutlass.range_constexpr(v.num_warps):
                            value += sums[(w * self.num_rows + row) * self.sum_pitch + feature]
                        self._store(value, output, bias, residual, first_row + row, first + feature)
            if cutlass.const_expr(v.num_static > 0):
                cute.arch.mbarrier_wait(is_full + slot, phase)
                tile = load_shared(tiles_address + slot * 4)
            else:
                tile += stride

    def _outputs_per_thread(self, blocks: int) -> int:
        return -(-self.num_rows * self.v.tile // (self.num_consumers * blocks))

    def _load_step(self, addresses, has_row, first_column, step):
        """Words of x of one step: 4 for each block of 8 rows; zeros beyond the rows and K."""
        column = self._column(step)
        loaded = []
        for address, wanted in zip(addresses, has_row, strict=True):
            if self._is_cut(step):
                wanted = wanted & Int32(first_column + column < self.v.num_columns)
            loaded.append(load_global_16_bytes(address + column * 2, wanted))
        return loaded

    def _load_x(self, addresses, has_row, place, step):
        """`_load_step` for a tile whose stages may come in another order."""
        first_column, tile = place
        v = self.v
        if not v.is_turned:
            return self._load_step(addresses, has_row, first_column, step)
        stage, i = divmod(step, self.steps_per_stage)
        column = (stage + tile) % v.num_steps * v.stage_columns + i * STEP
        return [
            load_global_16_bytes(address + Int64(column) * 2, wanted)
            for address, wanted in zip(addresses, has_row, strict=True)
        ]

    @cute.jit
    def _finish_cluster(self, sums, received, has_sums, tensors, place) -> None:
        """Send each block of the cluster its share of the sums; add up what came, and store it.

        A block ends with its own share: what it sent is waited for where it went. It has one tile,
        so nothing arrives twice.
        """
        v = self.v
        output, bias, residual = tensors
        first, first_row, num_rows, rank = place
        tid, _, _ = cute.arch.thread_idx()
        groups_per_row = v.tile // 4
        num_groups = self.num_rows * groups_per_row
        sums_address = shared_address(sums.iterator)
        own_address = shared_address(received.iterator) + rank * (self.num_owned * 16)
        barrier = shared_address(has_sums)
        cute.arch.cluster_wait()
        for i in cutlass.range_constexpr(-(-num_groups // self.num_consumers)):
            group = tid + i * self.num_consumers
            if group < num_groups:
                row = group // groups_per_row
                address = sums_address + (row * self.sum_pitch + group % groups_per_row * 4) * 4
                values = [word.bitcast(Float32) for word in load_shared_v4(address)]
                for w in cutlass.range_constexpr(1, v.num_warps):
                    words = load_shared_v4(address + w * (self.num_rows * self.sum_pitch * 4))
                    values = [
                        value + word.bitcast(Float32)
                        for value, word in zip(values, words, strict=True)
                    ]
                owner = group % v.cluster
                to = own_address + group // v.cluster * 16
                # A block sends to itself as well, by way of its barrier: one path for all.
                send_v4(
                    peer_address(to, owner),
                    [value.bitcast(Int32) for value in values],
                    peer_address(barrier, owner),
                )
        cute.arch.mbarrier_wait(has_sums, 0)
        for i in cutlass.range_constexpr(-(-self.num_owned * 4 // self.num_consumers)):
            index = tid + i * self.num_consumers
            if index < self.num_owned * 4:
                group = index // 4 * v.cluster + rank
                row = group // groups_per_row
                feature = group % groups_per_row * 4 + index % 4
                if row < num_rows and first + feature < output.shape[1]:
                    value = received[index]
                    for peer in cutlass.range_constexpr(1, v.cluster):
                        value += received[peer * (self.num_owned * 4) + index]
                    self._store(value, output, bias, residual, first_row + row, first + feature)

    @cute.jit
    def _finish_swiglu(self, sums, output, place) -> None:
        """Add up gates and ups; store silu(gate) * up, rounded where separate calls would round."""
        v = self.v
        tile, first_row, num_rows = place
        tid, _, _ = cute.arch.thread_idx()
        num_outputs = self.num_rows * self.num_outputs
        for i in cutlass.range_constexpr(-(-num_outputs // self.num_consumers)):
            index = tid + i * self.num_consumers
            row = index // self.num_outputs
            feature = index % self.num_outputs
            to = tile * self.num_outputs + feature
            if row < num_rows and to < output.shape[1]:
                gate = Float32(0.0)
                up = Float32(0.0)
                for w in cutlass.range_constexpr(v.num_warps):
                    at = (w * self.num_rows + row) * self.sum_pitch + feature
                    gate += sums[at]
                    up += sums[at + self.num_outputs]
                gate = Float32(BFloat16(gate))
                silu = Float32(BFloat16(gate / (1.0 + cute.math.exp(-gate))))
                output[first_row + row, to] = BFloat16(silu * Float32(BFloat16(up)))

    @cute.jit
    def _store(self, value, output, bias, residual, row, feature) -> None:
        if cutlass.const_expr(bias is not None):
            value += Float32(bias[feature])
        if cutlass.const_expr(residual is not None):
            value = Float32(BFloat16(value)) + Float32(residual[row, feature])
        output[row, feature] = BFloat16(value)

    @cute.jit
    def _normed(self, parts, columns, shared, place):
        """RMSNorm of the rows in registers, with the roundings of the model's own.

        A block of a cluster reads the other one's columns as well, for their squares alone: that is
        sooner done than an exchange.
        """
        v = self.v
        x_addresses, has_row, own_column, rank = columns
        squares, norm_words, has_norm = shared
        warp, lane, eps = place
        group = lane // 4
        of_rows = [
            sum_of_squares([word for part in parts for word in part[n]])
            for n in range(v.row_blocks)
        ]
        if cutlass.const_expr(v.cluster > 1):
            shift = (1 - 2 * rank) * self.block_columns
            of_rows = self._with_others(
                of_rows,
                [address + Int64(shift) * 2 for address in x_addresses],
                has_row,
                (1 - rank) * self.block_columns + own_column,
            )
        for n in cutlass.range_constexpr(v.row_blocks):
            square = of_rows[n]
            square += cute.arch.shuffle_sync_bfly(square, 1)
            square += cute.arch.shuffle_sync_bfly(square, 2)
            if lane % 4 == 0:
                squares[warp * 16 + n * ROWS + group] = square
        cute.arch.barrier(barrier_id=MULTIPLYING, number_of_threads=self.num_consumers)
        scales = []
        for n in cutlass.range_constexpr(v.row_blocks):
            square = Float32(0.0)
            for w in cutlass.range_constexpr(v.num_warps):
                square += squares[w * 16 + n * ROWS + group]
            scales.append(reciprocal_sqrt(square * (1.0 / v.num_columns) + eps))
        cute.arch.mbarrier_wait(has_norm, 0)
        address = shared_address(norm_words.iterator) + own_column * 2
        first_column = rank * self.block_columns + own_column
        return self._scaled(parts, address, first_column, scales)

    def _with_others(self, of_rows, addresses, has_row, first_column):
        """Sums of squares and those of the columns that the cluster's other block multiplies.

        Two numbers have one sum, whichever comes first: both blocks scale their columns alike.
        """
        loaded = [
            self._load_step(addresses, has_row, first_column, step)
            for step in range(self.v.num_steps * self.steps_per_stage)
        ]
        return [
            square + sum_of_squares([word for part in loaded for word in part[n]])
            for n, square in enumerate(of_rows)
        ]

    def _scaled(self, parts, norm_address, first_column, scales):
        """Rows times their scales, rounded, times the norm's weight, rounded."""
        scaled = []
        for step, part in enumerate(parts):
            norm_words = load_shared_v4(norm_address + self._column(step) * 2)
            if self._is_cut(step):
                # Nobody wrote there beyond K; it may be NaN.
                keep = Int32(0) - Int32(first_column + self._column(step) < self.v.num_columns)
                norm_words = tuple(word & keep for word in norm_words)
            scaled.append(
                [
                    tuple(map(norm_bf16, words, norm_words, [scale] * 4))
                    for words, scale in zip(part, scales, strict=True)
                ]
            )
        return scaled


def compile_variant(variant: Variant, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`."""

    return compile_kernel(
        Bf16LinearKernel(variant),
        matrix(BFloat16, 1, 16, 8),
        matrix(BFloat16, 1, 16, 8),
        vector(BFloat16, 16) if variant.has_norm else None,
        vector(BFloat16, 2) if variant.has_bias else None,
        strided_matrix(BFloat16) if variant.has_residual else None,
        matrix(BFloat16, 1, 2),
        make_fake_tensor(Int32, (1,), (1,), assumed_align=4) if variant.num_static else None,
        Float32(0.0),
        Int32(1),
        arch=arch,
        options=options,
    )


@functools.cache
def compiled(variant: Variant, arch: str) -> Any:
    """`compile_variant`, once.

    A variant that draws its tiles comes with the one that deals them out, so that a captured launch
    which finds no counter compiles nothing.
    """
    if variant.num_static:
        compiled(replace(variant, num_static=0), arch)
    return compile_variant(variant, arch)


@functools.cache
def variant_for(
    num_columns: int,
    num_rows: int,
    config: StreamConfig,
    has_norm: bool = False,
    has_swiglu: bool = False,
) -> Variant:
    """The kernel for so many rows; what decides the order of sums comes from `config` alone."""
    variant = Variant(
        num_columns=num_columns,
        tile=config.tile,
        stage_columns=config.stage_columns,
        num_stages=1,
        num_warps=config.num_warps,
        cluster=config.cluster,
        row_blocks=1 if num_rows <= ROWS else 2,
        is_resident=True,
        num_loaders=config.num_loaders,
        late=config.late,
        has_norm=has_norm,
        has_swiglu=has_swiglu,
    )
    if config.is_turned and num_columns % (config.stage_columns * config.cluster):
        raise ValueError(f"bf16_linear: stages of {num_columns} columns cannot be turned, {config}")
    held = held_registers(num_columns, config, variant.row_blocks)
    if has_norm and held > MAX_HELD_REGISTERS:
        # These are held in any case: more than eight rows are for further blocks of the grid.
        variant = replace(variant, row_blocks=1)
    elif not has_norm and (held > MAX_HELD_REGISTERS or config.is_turned):
        ahead = 3 if variant.row_blocks == 1 else 2
        variant = replace(variant, is_resident=False, ahead=ahead, is_turned=config.is_turned)
    kernel = Bf16LinearKernel(variant)
    left = SHARED_BYTES // config.blocks_per_processor - 1024 - kernel.other_shared_bytes
    # A block never loads more stages ahead than this without having multiplied one.
    num_stages = max(1, min(left // (kernel.stage_bytes + 20), 32))
    # Tiles that are asked for before the kernel ahead has ended are dealt out.
    num_static = -(-num_stages // variant.num_steps) if config.is_dynamic else 0
    return replace(variant, num_stages=num_stages, num_static=num_static)


def num_drawn(variant: Variant, num_rows: int, num_tiles: int, num_blocks: int) -> int:
    """Tiles left to draw when each of `num_blocks` blocks has had its own; 0: all are dealt out.

    Drawing is for one block of rows: others of the grid would count with the same counter.
    """
    is_one_row_block = num_rows <= variant.row_blocks * ROWS
    if not variant.num_static or not is_one_row_block:
        return 0
    return max(0, num_tiles - variant.num_static * num_blocks)


class Counters:
    """Counters of one device, zero before and after each kernel that draws its tiles by one.

    Kernels that may run side by side must not share one. Those of a stream follow each other; a
    captured launch has a counter for itself, since graphs may be replayed side by side. A capture
    can make no new ones: where it finds none left (no call was made before it, or it has more
    launches than the half of `SIZE` that a call keeps free), tiles are dealt out, by a kernel that
    was compiled with the other one; the numbers are the same. Threads may share a device's.
    """

    SIZE = 4096

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.blocks: list[torch.Tensor] = []
        self.num_used = 0
        self.of_stream: dict[int, torch.Tensor] = {}
        self.lock = threading.Lock()

    def take(self) -> torch.Tensor | None:
        """A counter for a launch on the current stream, or None: a capture cannot make more."""
        stream = torch.cuda.current_stream(self.device)
        is_capturing = torch.cuda.is_current_stream_capturing()
        with self.lock:
            if is_capturing:
                return self._next() if self.blocks and self.num_used < self.SIZE else None
            counter = self.of_stream.get(stream.cuda_stream)
            if not self.blocks or self.num_used > self.SIZE // 2:
                self.blocks.append(torch.zeros(self.SIZE, dtype=torch.int32, device=self.device))
                self.num_used = 0
                stream.synchronize()
            if counter is None:
                counter = self.of_stream[stream.cuda_stream] = self._next()
            return counter

    def _next(self) -> torch.Tensor:
        self.num_used += 1
        return self.blocks[-1][self.num_used - 1 : self.num_used]


counters_of = functools.cache(Counters)


def bf16_linear_cute(
    x: torch.Tensor,
    weight_NK: torch.Tensor,
    bias_N: torch.Tensor | None,
    residual: torch.Tensor | None,
    norm_weight_K: torch.Tensor | None = None,
    eps: float = 0.0,
    *,
    has_swiglu: bool = False,
    config: StreamConfig | None = None,
) -> torch.Tensor:
    """Launch the kernel; an x with gaps is made dense first, a weight never.

    With a norm weight x goes through the model's RMSNorm first; see `norm_config_for`. With
    `has_swiglu` the weight is gates, then ups, and silu(gate) * up comes out.
    """
    num_features, num_columns = weight_NK.shape
    num_outputs = num_features // 2 if has_swiglu else num_features
    output = x.new_empty((*x.shape[:-1], num_outputs))
    if not output.numel():
        return output
    x_MK = rows_to_load(x.reshape(-1, num_columns))
    num_rows = x_MK.shape[0]
    if norm_weight_K is not None:
        config = config or norm_config_for(num_features, num_columns, has_swiglu=has_swiglu)
        assert config is not None
    config = config or stream_config_for(num_features, num_columns)
    variant = replace(
        variant_for(num_columns, num_rows, config, norm_weight_K is not None, has_swiglu),
        has_bias=bias_N is not None,
        has_residual=residual is not None,
    )
    num_tiles = -(-num_outputs // (config.tile // 2 if has_swiglu else config.tile))
    most_blocks = num_multiprocessors(x.device) * config.blocks_per_processor
    # A cluster has one tile.
    num_blocks = num_tiles
    if config.cluster == 1:
        num_blocks = -(-num_tiles // -(-num_tiles // most_blocks))
    counter = None
    if num_drawn(variant, num_rows, num_tiles, most_blocks):
        counter = counters_of(x.device).take()
    if counter is not None:
        num_blocks = most_blocks
    elif variant.num_static:
        # The same numbers: no sum depends on who takes which tile.
        variant = replace(variant, num_static=0)
    run = compiled(variant, arch_of(x.device))
    run(
        x_MK,
        weight_NK,
        norm_weight_K,
        None if bias_N is None else bias_N.contiguous(),
        None if residual is None else residual.reshape(num_rows, num_features),
        output.view(num_rows, num_outputs),
        counter,
        eps,
        num_blocks,
    )
    return output
