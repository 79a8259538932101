"""Experts for few tokens in CuTe DSL for sm_90a: weights stream through shared memory.

Two launches: gate_up with SwiGLU; down with the weighted sum. Each block makes the plan for
itself, in shared memory: pairs of one expert form groups of up to eight, in the order of the pairs,
groups that of their experts. So an expert's weights are read once (once more for each further eight
pairs that chose it), no two blocks talk, and nothing is sorted or counted ahead. A shared expert is
one more group, of all tokens; it comes first, because its weights can be asked for before anybody
knows which experts were chosen.

In the first launch the rows of all groups are one long list, of which every block takes as many,
side by side. In the second every block takes as many out features, and these of all groups, so that
it can add up what a token's experts give without another launch. Or blocks draw their tiles, those
of the shared expert apart: who gets more of the memory's bandwidth does more of them, so that all
end together, and a third launch adds up. No number depends on who took which tile: sums are the
same either way, over a token's experts in the order of their ids.

One warp or several of a block keep a ring of stages full by bulk copies, a row's piece of a stage
each; the others share out a stage's columns between them, multiply by tensor cores (16 rows of
weights by 8 pairs) and add their sums up at the end of a tile, in one order. In the first launch
eight rows of the gate and the same of `up` are the 16, so one thread finds both in its sums. What
is multiplied sits in registers for all tiles of a group. So results are the same in every run, and
a token's depend neither on the other tokens nor on their number.

Which experts a token takes comes as ids and weights, or is chosen here, by every block for itself,
from the router's logits: the largest biased scores, one after the other, a warp a token. That costs
less than a launch, because the weights of the shared expert are on their way.

Under programmatic dependent launch the first kernel asks for the shared expert's weights before the
kernels ahead have ended, and so does the second, which also reads logits, ids and router weights
early: they were written two launches ahead at the latest, as the first kernel lets dependents in
only after it has waited.

Shape legend: M tokens, K experts of a token, P = M * K pairs, E experts, C hidden size, I
intermediate size of an expert.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int16, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel, rows_to_load
from glm_compile.ops._cute.device import WARP, load_shared, shared_address, store_shared
from glm_compile.ops._cute.fakes import matrix, strided_matrix
from glm_compile.ops._cute.ring import ROWS, SHARED_BYTES, RingProduct
from glm_compile.ops._cute.stream import (
    bulk_load,
    evict_first_policy,
    load_global_16_bytes,
    next_ticket,
)
from glm_compile.ops._dispatch import num_multiprocessors
from glm_compile.ops.moe.config import MAX_CUTE_PAIRS, StreamConfig, stream_config_for

# Pairs of a group: rows of one product. A shared expert has one group: all tokens.
GROUP = ROWS
# Named barriers beside that of the warps that multiply: of those that load, of all.
_LOADING, _ALL = 2, 3
# Stages of a ring, at most.
MAX_RING = 32
# Above every expert; below the key of every score.
_NO_EXPERT = 2**31 - 1
_NO_KEY = -(2**31)


@dataclass(frozen=True)
class Variant:
    """What a kernel is specialised for.

    Attributes:
        num_columns: in features of a weight: C or I.
        num_features: out features: I or C.
        num_top: K.
        is_gated: the weight holds gates and ups: rows of x are tokens, else pairs, then tokens.
        has_shared: there is an expert of all tokens.
        has_residual: of the second kernel: something is added to the result.
        num_logits: experts that are chosen from here, or 0 where ids are given.
        normalizes: weights that are chosen here are divided by their sum.
        is_dynamic: blocks draw tiles of the chosen experts one after the other.
        tile: rows of weights of a block at a time.
        stage_columns: columns of a stage.
        num_stages: of the ring.
        num_warps: that multiply.
        num_loaders: further warps, that load.
        use_pdl: start before the kernels ahead have ended.
    """

    num_columns: int
    num_features: int
    num_top: int
    is_gated: bool
    has_shared: bool
    has_residual: bool
    num_logits: int
    normalizes: bool
    is_dynamic: bool
    tile: int
    stage_columns: int
    num_stages: int
    num_warps: int = 8
    num_loaders: int = 4
    use_pdl: bool = True

    @property
    def num_steps(self) -> int:
        """Stages of a tile."""
        return -(-self.num_columns // self.stage_columns)

    @property
    def tile_features(self) -> int:
        """Out features of a tile."""
        return self.tile // 2 if self.is_gated else self.tile


class Plan(NamedTuple):
    """What a block knows of the choice, in shared memory.

    Attributes:
        pair_expert: experts of the pairs, or -1.
        head_expert: of those pairs that are the first of a group.
        pair_weight: of the pairs.
        group_expert: experts of the groups.
        group_pairs: pairs of the groups, or -1.
        number: of groups, and two places for what was drawn.
        items: the tile that begins in a stage of the ring.
        places: of the pairs in the order of the sum.
    """

    pair_expert: Any
    head_expert: Any
    pair_weight: Any
    group_expert: Any
    group_pairs: Any
    number: Any
    items: Any
    places: Any


class ExpertKernel(RingProduct):
    """What both kernels share: the plan, the ring, the products of a tile."""

    def __init__(self, variant: Variant) -> None:
        super().__init__(variant, row_blocks=1)
        v = variant
        # Sums of the tokens over their experts, and what the shared expert gives.
        self.num_results = 0 if v.is_gated or v.is_dynamic else 2 * GROUP * v.tile
        num_plan_words = MAX_CUTE_PAIRS * (5 + GROUP // 2) + 4 + MAX_RING
        self.other_shared_bytes = (self.num_sums + self.num_results + num_plan_words) * 4 + 128

    def _allocate(self) -> tuple[Any, ...]:
        """(ring, sums, results, plan, barriers) in shared memory."""
        v = self.v
        allocator = SmemAllocator()
        ring = allocator.allocate_tensor(
            Int32, cute.make_layout(v.num_stages * self.stage_bytes // 4), 128
        )
        sums = allocator.allocate_tensor(Float32, cute.make_layout(self.num_sums), 16)
        results = sums
        if self.num_results:
            results = allocator.allocate_tensor(Float32, cute.make_layout(self.num_results), 16)
        pairs = cute.make_layout(MAX_CUTE_PAIRS)
        plan = Plan(
            allocator.allocate_tensor(Int32, pairs, 16),
            allocator.allocate_tensor(Int32, pairs, 16),
            allocator.allocate_tensor(Float32, pairs, 16),
            allocator.allocate_tensor(Int32, pairs, 16),
            allocator.allocate_tensor(Int16, cute.make_layout(MAX_CUTE_PAIRS * GROUP), 16),
            allocator.allocate_tensor(Int32, cute.make_layout(4), 16),
            allocator.allocate_tensor(Int32, cute.make_layout(MAX_RING), 16),
            allocator.allocate_tensor(Int32, pairs, 16),
        )
        barriers = allocator.allocate_tensor(Int64, cute.make_layout(2 * v.num_stages), 16)
        return ring, sums, results, plan, barriers

    @cute.jit
    def _init_barriers(self, barriers, tid) -> None:
        v = self.v
        if tid == 0:
            for stage in cutlass.range_constexpr(v.num_stages):
                cute.arch.mbarrier_init(barriers.iterator + stage, 1)
                cute.arch.mbarrier_init(barriers.iterator + v.num_stages + stage, v.num_warps)
            cute.arch.mbarrier_init_fence()
        cute.arch.sync_threads()

    @cute.jit
    def _plan(self, choice, factors, scale, num_experts, plan) -> None:
        """Group the pairs by expert. All warps that load take part; the others see it at _ALL.

        `choice` and `factors` are ids and router weights, or logits and the router's bias.
        """
        v = self.v
        pair_expert, head_expert, pair_weight = plan.pair_expert, plan.head_expert, plan.pair_weight
        group_expert, group_pairs = plan.group_expert, plan.group_pairs
        number, places = plan.number, plan.places
        tid, _, _ = cute.arch.thread_idx()
        own = tid - self.num_consumers
        num_loading = v.num_loaders * WARP
        num_pairs = choice.shape[0] * v.num_top
        for i in cutlass.range_constexpr(-(-MAX_CUTE_PAIRS * GROUP // num_loading)):
            index = own + i * num_loading
            if index < MAX_CUTE_PAIRS * GROUP:
                group_pairs[index] = Int16(-1)
        if cutlass.const_expr(v.num_logits):
            token = own // WARP
            while token < choice.shape[0]:
                self._choose(choice, factors, scale, token, pair_expert, pair_weight)
                token += v.num_loaders
        else:
            if own < num_pairs:
                found = Int64(choice[own // v.num_top, own % v.num_top])
                pair_expert[own] = Int32(-1)
                if found >= 0 and found < num_experts:
                    pair_expert[own] = Int32(found)
                if cutlass.const_expr(v.is_dynamic or not v.is_gated):
                    pair_weight[own] = factors[own // v.num_top, own % v.num_top]
        cute.arch.barrier(barrier_id=_LOADING, number_of_threads=num_loading)
        expert = Int32(-1)
        if own < num_pairs:
            expert = pair_expert[own]
        # Pairs of the same expert before this one, and the first pair of its group.
        rank = Int32(0)
        first = own
        if own < num_pairs:
            for other in cutlass.range(num_pairs, unroll=4):
                if other < own and pair_expert[other] == expert:
                    if rank % GROUP == 0:
                        first = other
                    rank += 1
            if rank % GROUP == 0:
                first = own
            head = Int32(_NO_EXPERT)
            if expert >= 0 and rank % GROUP == 0:
                head = expert
            head_expert[own] = head
        cute.arch.barrier(barrier_id=_LOADING, number_of_threads=num_loading)
        if own < num_pairs:
            group = Int32(0)
            num_groups = Int32(0)
            for other in cutlass.range(num_pairs, unroll=4):
                head = head_expert[other]
                if head != _NO_EXPERT:
                    num_groups += 1
                if head < expert or (head == expert and other < first):
                    group += 1
            if expert >= 0:
                group_pairs[group * GROUP + rank % GROUP] = Int16(own)
                if rank % GROUP == 0:
                    group_expert[group] = expert
            if own == 0:
                number[0] = num_groups
            if cutlass.const_expr(v.is_dynamic):
                # A token's experts are added up as they are without: those of lower numbers first.
                start = own // v.num_top * v.num_top
                place = start
                for k in cutlass.range_constexpr(v.num_top):
                    other_expert = pair_expert[start + k]
                    is_same = other_expert == expert and start + k < own
                    if other_expert < expert or is_same:
                        place += 1
                places[own] = place
        cute.arch.barrier(barrier_id=_LOADING, number_of_threads=num_loading)
        cute.arch.barrier_arrive(barrier_id=_ALL, number_of_threads=self.num_threads)

    @cute.jit
    def _choose(self, logits, bias, scale, token, pair_expert, pair_weight) -> None:
        """A warp: the experts of a token by sigmoid + bias, weighed by the sigmoid."""
        v = self.v
        lane = cute.arch.lane_idx()
        count = -(-v.num_logits // WARP)
        experts = [lane + WARP * j for j in range(count)]
        # Lanes beyond the last expert read that one.
        places = [cutlass.min(expert, v.num_logits - 1) for expert in experts]
        values = [logits[token, place] for place in places]
        biases = [bias[0, place] for place in places]
        scores = [Float32(1.0) / (Float32(1.0) + cute.math.exp(-value)) for value in values]
        keys = [
            _select(Int32(expert < v.num_logits), _order_of(score + added), Int32(_NO_KEY))
            for expert, score, added in zip(experts, scores, biases)
        ]
        score_bits = [score.bitcast(Int32) for score in scores]
        total = Float32(0.0)
        own_expert = Int32(0)
        own_bits = Int32(0)
        for k in cutlass.range_constexpr(v.num_top):
            key, expert, bits = self._largest(keys, experts, score_bits)
            best = cute.arch.warp_redux_sync(key, "max")
            candidate = _select(Int32(key == best), expert, Int32(_NO_EXPERT))
            winner = cute.arch.warp_redux_sync(candidate, "min")
            bits = cute.arch.shuffle_sync(bits, winner % WARP)
            total += bits.bitcast(Float32)
            is_own = Int32(lane == k)
            own_expert = _select(is_own, winner, own_expert)
            own_bits = _select(is_own, bits, own_bits)
            keys = [
                _select(Int32(expert == winner), Int32(_NO_KEY), key)
                for expert, key in zip(experts, keys)
            ]
        weight = own_bits.bitcast(Float32)
        if cutlass.const_expr(v.normalizes):
            weight = weight / (total + Float32(1e-20))
        if lane < v.num_top:
            pair_expert[token * v.num_top + lane] = own_expert
            pair_weight[token * v.num_top + lane] = weight * scale

    def _largest(self, keys: list, experts: list, score_bits: list) -> tuple:
        """(key, expert, bits of the score) of a lane's largest key, of equal ones the first."""
        key, expert, bits = keys[0], experts[0], score_bits[0]
        for j in range(1, len(keys)):
            is_larger = Int32(keys[j] > key)
            key = _select(is_larger, keys[j], key)
            expert = _select(is_larger, experts[j], expert)
            bits = _select(is_larger, score_bits[j], bits)
        return key, expert, bits

    @cute.jit
    def _load_tile(
        self, addresses, row_bytes, features, item, ring, plan, barriers, place
    ) -> tuple:
        """Ask for a tile's rows; returns the place in the ring after it.

        `addresses`: of the first row of the tile, of that of its ups; `item`: what was drawn.
        """
        v = self.v
        slot, phase = place
        loader = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - v.num_warps
        policy = evict_first_policy()
        to_loader = Int32(ring.iterator.toint()) + loader * self.pitch
        is_full = barriers.iterator
        is_empty = barriers.iterator + v.num_stages
        own = [address + Int64(loader) * row_bytes for address in addresses]
        rows = features
        if cutlass.const_expr(v.is_gated):
            rows = features * 2
        items = shared_address(plan.items.iterator)
        for step in cutlass.range(v.num_steps, unroll=1):
            column = step * v.stage_columns
            num_bytes = Int32(v.stage_columns * 2)
            if cutlass.const_expr(v.num_columns % v.stage_columns):
                num_bytes = cutlass.min(num_bytes, (v.num_columns - column) * 2)
            cute.arch.mbarrier_wait(is_empty + slot, phase)
            to = to_loader + slot * self.stage_bytes
            barrier = Int32((is_full + slot).toint())
            item_address = items + slot * 4
            with cute.arch.elect_one():
                if loader == 0:
                    if cutlass.const_expr(v.is_dynamic):
                        store_shared(item_address, item)
                    cute.arch.mbarrier_arrive_and_expect_tx(is_full + slot, rows * num_bytes)
                # One thread starts all copies of its warp: the instruction takes addresses that
                # are the warp's, so lanes with different ones would come one by one, slower.
                for part in cutlass.range_constexpr(-(-v.tile // v.num_loaders)):
                    feature, half = self._source_of(part)
                    if loader + part * v.num_loaders < v.tile and feature + loader < features:
                        bulk_load(
                            to + part * v.num_loaders * self.pitch,
                            own[half] + feature * row_bytes + Int64(column) * 2,
                            num_bytes,
                            barrier,
                            policy,
                        )
            slot += 1
            if slot == v.num_stages:
                slot = Int32(0)
                phase ^= 1
        return slot, phase

    @cute.jit
    def _load_items(self, weight, counter, ring, plan, barriers, place) -> None:
        """Draw tiles of the groups, and ask for their rows, until all are taken.

        Blocks do not get equal shares of the memory's bandwidth: who is faster does more. A block's
        first tile is its own; the next is drawn while one is on its way.
        """
        v = self.v
        group_expert, number = plan.group_expert, plan.number
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        loader = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - v.num_warps
        is_leader = loader == 0 and cute.arch.lane_idx() == 0
        row_bytes = Int64(weight.stride[1]) * 2
        num_groups = number[0]
        item = block
        turn = Int32(0)
        while item < self._num_items(num_groups):
            ticket = Int32(0)
            if is_leader:
                ticket = next_ticket(counter.iterator.toint())
            group, first, features = self._item(item, num_groups)
            addresses = self._addresses(weight, group_expert[group], first)
            place = self._load_tile(
                addresses, row_bytes, features, item, ring, plan, barriers, place
            )
            if is_leader:
                number[1 + turn % 2] = ticket + num_blocks
            cute.arch.barrier(barrier_id=_LOADING, number_of_threads=v.num_loaders * WARP)
            item = number[1 + turn % 2]
            turn += 1
        # No tile begins in this stage: the others are to end.
        slot, phase = place
        item_address = shared_address(plan.items.iterator) + slot * 4
        cute.arch.mbarrier_wait(barriers.iterator + v.num_stages + slot, phase)
        with cute.arch.elect_one():
            if loader == 0:
                store_shared(item_address, Int32(-1))
                cute.arch.mbarrier_arrive(barriers.iterator + slot)

    @cute.jit
    def _next_item(self, plan, barriers, place) -> Int32:
        """The tile that begins at a place of the ring, or -1."""
        slot, phase = place
        cute.arch.mbarrier_wait(barriers.iterator + slot, phase)
        return load_shared(shared_address(plan.items.iterator) + slot * 4)

    def _num_items(self, num_groups) -> Int32:
        """Tiles that are drawn."""
        if not self.v.is_gated:
            return num_groups * -(-self.v.num_features // self.v.tile)
        doubles, units = self._units(num_groups)
        return units - doubles

    def _units(self, num_groups) -> tuple:
        """(tiles of two units, units) of the gated kernel.

        A unit is eight out features. The last tiles are units, so that blocks end together.
        """
        num_blocks, _, _ = cute.arch.grid_dim()
        per_group = -(-self.v.num_features // 8)
        units = num_groups * per_group
        if per_group % 2 or self.v.tile_features < 16:
            return Int32(0), units
        return cutlass.max(units - 4 * num_blocks, 0) // 2, units

    def _item(self, item, num_groups) -> tuple:
        """(group, first out feature, number of out features) of a tile."""
        v = self.v
        if not v.is_gated:
            per_group = -(-v.num_features // v.tile)
            first = item % per_group * v.tile
            return item // per_group, first, cutlass.min(v.num_features - first, v.tile)
        doubles, _ = self._units(num_groups)
        per_group = -(-v.num_features // 8)
        unit = item + cutlass.min(item, doubles)
        first = unit % per_group * 8
        size = 8 + 8 * Int32(item < doubles)
        return unit // per_group, first, cutlass.min(v.num_features - first, size)

    def _source_of(self, part: int) -> tuple[int, int]:
        """(out feature, is it of `up`) of row `part * num_loaders` of a tile.

        Tiles of gates alternate: eight rows of the gate, the same eight of `up`.
        """
        row = part * self.v.num_loaders
        if not self.v.is_gated:
            return row, 0
        return row // 16 * 8 + row % 8, int(row % 16 >= 8)

    def _addresses(self, weight: cute.Tensor, expert: Int32, first: Int32) -> list[Int64]:
        """Of row `first` of an expert, and of its up."""
        row_bytes = Int64(weight.stride[1]) * 2
        gate = (
            weight.iterator.toint()
            + Int64(expert) * Int64(weight.stride[0]) * 2
            + Int64(first) * row_bytes
        )
        return [gate, gate + self.v.num_features * row_bytes]

    def _shared_addresses(self, weights: list[cute.Tensor], first: Int32) -> list[Int64]:
        offset = Int64(first) * Int64(weights[0].stride[0]) * 2
        return [weight.iterator.toint() + offset for weight in weights]

    def _own_column(self) -> Int32:
        """This lane's first column of a stage."""
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        return warp * self.warp_columns + (cute.arch.lane_idx() % 4) * 8

    def _load_x(self, x: cute.Tensor, row: Int32, has_row: Int32) -> list[tuple]:
        """This lane's words of a row of x, of all columns of a tile; zeros without a row."""
        own_column = self._own_column()
        address = x.iterator.toint() + (Int64(row) * Int64(x.stride[0]) + Int64(own_column)) * 2
        return [
            self._load_step(address, has_row, own_column, step)
            for step in range(self.v.num_steps * self.steps_per_stage)
        ]

    @cute.jit
    def _multiply_tile(self, x_parts, ring, sums, barriers, place) -> tuple:
        """Put each warp's sums of a tile where all can read them; returns the place after it."""
        v = self.v
        slot, phase = place
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        own_column = self._own_column()
        own_address = Int32(ring.iterator.toint()) + lane // 4 * self.pitch + own_column * 2
        is_full = barriers.iterator
        is_empty = barriers.iterator + v.num_stages
        total = self._zero_sums()
        for stage in cutlass.range_constexpr(v.num_steps):
            cute.arch.mbarrier_wait(is_full + slot, phase)
            address = own_address + slot * self.stage_bytes
            for i in cutlass.range_constexpr(self.steps_per_stage):
                step = stage * self.steps_per_stage + i
                self._multiply_step(total, [x_parts[step]], address, own_column, step, i)
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
        return slot, phase

    def _load_step(self, address, is_wanted, own_column, step):
        """Words of x of one step; zeros where there is no pair and beyond the columns."""
        column = self._column(step)
        if self._is_cut(step):
            is_wanted = is_wanted & Int32(own_column + column < self.v.num_columns)
        return load_global_16_bytes(address + column * 2, is_wanted)

    def _sum_of_warps(self, sums, place):
        value = sums[place]
        for w in range(1, self.v.num_warps):
            value += sums[place + w * GROUP * self.sum_pitch]
        return value


def _select(condition: Int32, value: Int32, other: Int32) -> Int32:
    """`value` where the condition is 1, `other` where it is 0."""
    mask = Int32(0) - condition
    return (value & mask) | (other & ~mask)


def _order_of(value: Float32) -> Int32:
    """A number that is in order as floats are, of which NaN is as large as infinity."""
    bits = value.bitcast(Int32)
    key = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    return _select(Int32(value != value), Int32(0x7F800000), key)


def _share(number: Int32) -> tuple[Int32, Int32]:
    """This block's part of a range of so many: from where to where."""
    block, _, _ = cute.arch.block_idx()
    num_blocks, _, _ = cute.arch.grid_dim()
    return block * number // num_blocks, (block + 1) * number // num_blocks


class GateUpKernel(ExpertKernel):
    """silu(gate x) * (up x) of each pair, and of each token; `__call__` is its launcher."""

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        choice: cute.Tensor,
        factors: cute.Tensor,
        scale: Float32,
        weight: cute.Tensor,
        shared_gate: cute.Tensor | None,
        shared_up: cute.Tensor | None,
        chosen: cute.Tensor | None,
        counters: cute.Tensor | None,
        output: cute.Tensor,
        num_blocks: Int32,
        stream: Any,
    ) -> None:
        given = (x, choice, factors, scale, weight, shared_gate, shared_up, chosen, counters)
        self.kernel(*given, output).launch(
            grid=(num_blocks, 1, 1),
            block=(self.num_threads, 1, 1),
            stream=stream,
            use_pdl=self.v.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        choice: cute.Tensor,
        factors: cute.Tensor,
        scale: Float32,
        weight: cute.Tensor,
        shared_gate: cute.Tensor | None,
        shared_up: cute.Tensor | None,
        chosen: cute.Tensor | None,
        counters: cute.Tensor | None,
        output: cute.Tensor,
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring, sums, _, plan, barriers = self._allocate()
        self._init_barriers(barriers, tid)
        if warp >= v.num_warps:
            given = (choice, factors, scale)
            shared = [shared_gate, shared_up]
            self._load(given, weight, shared, chosen, counters, ring, plan, barriers)
        else:
            cute.arch.griddepcontrol_wait()
            self._multiply(x, output, choice.shape[0], ring, sums, plan, barriers)

    def _routed(self, num_groups) -> tuple[Int32, Int32]:
        """This block's rows of the chosen experts, such that its share of all rows is even."""
        if not self.v.has_shared:
            return _share(num_groups * self.v.num_features)
        shared, shared_end = _share(self.v.num_features)
        row, end = _share((num_groups + 1) * self.v.num_features)
        return row - shared, end - shared_end

    @cute.jit
    def _load(self, choice, weight, shared_weights, chosen, counters, ring, plan, barriers) -> None:
        v = self.v
        place = (Int32(0), Int32(1))
        if cutlass.const_expr(v.has_shared):
            row_bytes = Int64(shared_weights[0].stride[0]) * 2
            row, end = _share(v.num_features)
            while row < end:
                features = cutlass.min(end - row, v.tile_features)
                addresses = self._shared_addresses(shared_weights, row)
                place = self._load_tile(
                    addresses, row_bytes, features, Int32(-1), ring, plan, barriers, place
                )
                row += features
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        self._plan(*choice, weight.shape[0], plan)
        group_expert, number = plan.group_expert, plan.number
        if cutlass.const_expr(v.is_dynamic):
            self._keep_choice(choice[0].shape[0], chosen, plan)
            self._load_items(weight, counters, ring, plan, barriers, place)
        else:
            row, end = self._routed(number[0])
            row_bytes = Int64(weight.stride[1]) * 2
            while row < end:
                first = row % v.num_features
                features = cutlass.min(
                    cutlass.min(end - row, v.num_features - first), v.tile_features
                )
                addresses = self._addresses(weight, group_expert[row // v.num_features], first)
                place = self._load_tile(
                    addresses, row_bytes, features, Int32(-1), ring, plan, barriers, place
                )
                row += features

    @cute.jit
    def _keep_choice(self, num_tokens, chosen, plan) -> None:
        """The first block stores which pairs count, and their weights, for the sum."""
        block, _, _ = cute.arch.block_idx()
        tid, _, _ = cute.arch.thread_idx()
        own = tid - self.num_consumers
        if block == 0 and own < num_tokens * self.v.num_top:
            # A pair of no expert counts nothing, whatever its weight.
            place = plan.places[own]
            chosen[0, place] = Float32(Int32(plan.pair_expert[own] >= 0))
            chosen[1, place] = plan.pair_weight[own]

    @cute.jit
    def _multiply(self, x, output, num_tokens, ring, sums, plan, barriers) -> None:
        v = self.v
        x_row = cute.arch.lane_idx() // 4
        place = (Int32(0), Int32(0))
        group_pairs, number = plan.group_pairs, plan.number
        if cutlass.const_expr(v.has_shared):
            has_token = Int32(x_row < num_tokens)
            token_parts = self._load_x(x, x_row * has_token, has_token)
            row, end = _share(v.num_features)
            while row < end:
                features = cutlass.min(end - row, v.tile_features)
                place = self._multiply_tile(token_parts, ring, sums, barriers, place)
                self._store_shared(sums, output, num_tokens, row, features)
                row += features
        cute.arch.barrier(barrier_id=_ALL, number_of_threads=self.num_threads)
        if cutlass.const_expr(v.is_dynamic):
            num_groups = number[0]
            item = self._next_item(plan, barriers, place)
            while item >= 0:
                group, first, features = self._item(item, num_groups)
                drawn_pair = Int32(group_pairs[group * GROUP + x_row])
                has_drawn = Int32(drawn_pair >= 0)
                drawn_parts = self._load_x(x, drawn_pair * has_drawn // v.num_top, has_drawn)
                place = self._multiply_tile(drawn_parts, ring, sums, barriers, place)
                self._store(sums, output, group_pairs, group, first, features)
                item = self._next_item(plan, barriers, place)
        else:
            row, end = self._routed(number[0])
            while row < end:
                group = row // v.num_features
                end_of_group = cutlass.min((group + 1) * v.num_features, end)
                pair = Int32(group_pairs[group * GROUP + x_row])
                has_pair = Int32(pair >= 0)
                x_parts = self._load_x(x, pair * has_pair // v.num_top, has_pair)
                while row < end_of_group:
                    features = cutlass.min(end_of_group - row, v.tile_features)
                    place = self._multiply_tile(x_parts, ring, sums, barriers, place)
                    self._store(sums, output, group_pairs, group, row % v.num_features, features)
                    row += features

    @cute.jit
    def _store_shared(self, sums, output, num_tokens, first, features) -> None:
        """SwiGLU of a tile of the shared expert; its rows come behind those of the pairs."""
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(-(-GROUP * v.tile_features // self.num_consumers)):
            index = tid + i * self.num_consumers
            row = index // v.tile_features
            feature = index % v.tile_features
            if row < num_tokens and feature < features:
                output[num_tokens * v.num_top + row, first + feature] = self._swiglu(
                    sums, row, feature
                )

    @cute.jit
    def _store(self, sums, output, group_pairs, group, first, features) -> None:
        """SwiGLU of a tile of a group."""
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(-(-GROUP * v.tile_features // self.num_consumers)):
            index = tid + i * self.num_consumers
            row = index // v.tile_features
            feature = index % v.tile_features
            if row < GROUP and feature < features:
                pair = Int32(group_pairs[group * GROUP + row])
                if pair >= 0:
                    output[pair, first + feature] = self._swiglu(sums, row, feature)

    def _swiglu(self, sums, row, feature) -> BFloat16:
        place = row * self.sum_pitch + feature // 8 * 16 + feature % 8
        gate = self._sum_of_warps(sums, place)
        up = self._sum_of_warps(sums, place + 8)
        return BFloat16(gate / (Float32(1.0) + cute.math.exp(-gate)) * up)


class DownKernel(ExpertKernel):
    """Each token's weighted sum over its experts, plus the shared one's; see `ExpertKernel`."""

    @cute.jit
    def __call__(
        self,
        hidden: cute.Tensor,
        choice: cute.Tensor,
        factors: cute.Tensor,
        scale: Float32,
        weight: cute.Tensor,
        shared_down: cute.Tensor | None,
        residual: cute.Tensor | None,
        counters: cute.Tensor | None,
        output: cute.Tensor,
        num_blocks: Int32,
        stream: Any,
    ) -> None:
        given = (hidden, choice, factors, scale, weight, shared_down, residual, counters)
        self.kernel(*given, output).launch(
            grid=(num_blocks, 1, 1),
            block=(self.num_threads, 1, 1),
            stream=stream,
            use_pdl=self.v.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        hidden: cute.Tensor,
        choice: cute.Tensor,
        factors: cute.Tensor,
        scale: Float32,
        weight: cute.Tensor,
        shared_down: cute.Tensor | None,
        residual: cute.Tensor | None,
        counters: cute.Tensor | None,
        output: cute.Tensor,
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        ring, sums, results, plan, barriers = self._allocate()
        self._init_barriers(barriers, tid)
        start, end = _share(Int32(v.num_features))
        if warp >= v.num_warps:
            given = (choice, factors, scale)
            if cutlass.const_expr(v.is_dynamic):
                self._load_all(
                    given, weight, shared_down, counters, ring, plan, barriers, start, end
                )
            else:
                self._load(given, weight, shared_down, ring, plan, barriers, start, end)
        elif cutlass.const_expr(v.is_dynamic):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self._multiply_all(
                hidden, choice.shape[0], output, ring, sums, plan, barriers, start, end
            )
        else:
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
            self._multiply(
                hidden, residual, output, ring, sums, results, plan, barriers, start, end
            )

    @cute.jit
    def _load(self, choice, weight, shared_down, ring, plan, barriers, start, end) -> None:
        v = self.v
        group_expert, number = plan.group_expert, plan.number
        place = (Int32(0), Int32(1))
        row_bytes = Int64(weight.stride[1]) * 2
        first = start
        while first < end:
            features = cutlass.min(end - first, v.tile)
            if cutlass.const_expr(v.has_shared):
                rows = self._shared_addresses([shared_down], first)
                shared_bytes = Int64(shared_down.stride[0]) * 2
                place = self._load_tile(
                    rows, shared_bytes, features, Int32(-1), ring, plan, barriers, place
                )
            if first == start:
                self._plan(*choice, weight.shape[0], plan)
            group = Int32(0)
            while group < number[0]:
                addresses = self._addresses(weight, group_expert[group], first)
                place = self._load_tile(
                    addresses, row_bytes, features, Int32(-1), ring, plan, barriers, place
                )
                group += 1
            first += features

    @cute.jit
    def _multiply(
        self, hidden, residual, output, ring, sums, results, plan, barriers, start, end
    ) -> None:
        v = self.v
        group_pairs, number = plan.group_pairs, plan.number
        num_tokens = output.shape[0]
        x_row = cute.arch.lane_idx() // 4
        place = (Int32(0), Int32(0))
        first = start
        while first < end:
            features = cutlass.min(end - first, v.tile)
            if cutlass.const_expr(v.has_shared):
                has_token = Int32(x_row < num_tokens)
                row = (num_tokens * v.num_top + x_row) * has_token
                token_parts = self._load_x(hidden, row, has_token)
                place = self._multiply_tile(token_parts, ring, sums, barriers, place)
                self._keep_shared(sums, results)
            if first == start:
                cute.arch.barrier(barrier_id=_ALL, number_of_threads=self.num_threads)
            self._clear(results)
            group = Int32(0)
            while group < number[0]:
                pair = Int32(group_pairs[group * GROUP + x_row])
                has_pair = Int32(pair >= 0)
                x_parts = self._load_x(hidden, pair * has_pair, has_pair)
                place = self._multiply_tile(x_parts, ring, sums, barriers, place)
                self._add_group(sums, results, plan, group)
                group += 1
            self._store(results, residual, output, first, features)
            first += features

    @cute.jit
    def _load_all(
        self, choice, weight, shared_down, counters, ring, plan, barriers, start, end
    ) -> None:
        """This block's share of the shared expert, then tiles that it draws."""
        v = self.v
        place = (Int32(0), Int32(1))
        if cutlass.const_expr(v.has_shared):
            row_bytes = Int64(shared_down.stride[0]) * 2
            while start < end:
                features = cutlass.min(end - start, v.tile)
                addresses = self._shared_addresses([shared_down], start)
                place = self._load_tile(
                    addresses, row_bytes, features, Int32(-1), ring, plan, barriers, place
                )
                start += features
        self._plan(*choice, weight.shape[0], plan)
        self._load_items(weight, counters, ring, plan, barriers, place)

    @cute.jit
    def _multiply_all(
        self, hidden, num_tokens, output, ring, sums, plan, barriers, start, end
    ) -> None:
        """Products of the pairs, then of the shared expert with the tokens, as rows of output."""
        v = self.v
        group_pairs, number = plan.group_pairs, plan.number
        tid, _, _ = cute.arch.thread_idx()
        x_row = cute.arch.lane_idx() // 4
        place = (Int32(0), Int32(0))
        num_pairs = num_tokens * v.num_top
        if cutlass.const_expr(v.has_shared):
            has_token = Int32(x_row < num_tokens)
            token_parts = self._load_x(hidden, (num_pairs + x_row) * has_token, has_token)
            while start < end:
                features = cutlass.min(end - start, v.tile)
                place = self._multiply_tile(token_parts, ring, sums, barriers, place)
                for i in cutlass.range_constexpr(self._num_own()):
                    index = tid + i * self.num_consumers
                    row = index // v.tile
                    feature = index % v.tile
                    if row < num_tokens and feature < features:
                        output[num_pairs + row, start + feature] = self._sum_of_warps(
                            sums, row * self.sum_pitch + feature
                        )
                start += features
        cute.arch.barrier(barrier_id=_ALL, number_of_threads=self.num_threads)
        num_groups = number[0]
        item = self._next_item(plan, barriers, place)
        while item >= 0:
            group, first, features = self._item(item, num_groups)
            pair = Int32(group_pairs[group * GROUP + x_row])
            has_pair = Int32(pair >= 0)
            x_parts = self._load_x(hidden, pair * has_pair, has_pair)
            place = self._multiply_tile(x_parts, ring, sums, barriers, place)
            for i in cutlass.range_constexpr(self._num_own()):
                index = tid + i * self.num_consumers
                row = index // v.tile
                feature = index % v.tile
                if row < GROUP and feature < features:
                    own_pair = Int32(group_pairs[group * GROUP + row])
                    if own_pair >= 0:
                        output[plan.places[own_pair], first + feature] = self._sum_of_warps(
                            sums, row * self.sum_pitch + feature
                        )
            item = self._next_item(plan, barriers, place)

    # Each thread owns some (token, feature) of a tile in all of the following.

    def _num_own(self) -> int:
        return -(-GROUP * self.v.tile // self.num_consumers)

    @cute.jit
    def _keep_shared(self, sums, results) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self._num_own()):
            index = tid + i * self.num_consumers
            if index < GROUP * v.tile:
                place = index // v.tile * self.sum_pitch + index % v.tile
                results[GROUP * v.tile + index] = self._sum_of_warps(sums, place)

    @cute.jit
    def _clear(self, results) -> None:
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self._num_own()):
            index = tid + i * self.num_consumers
            if index < GROUP * self.v.tile:
                results[index] = Float32(0.0)

    @cute.jit
    def _add_group(self, sums, results, plan, group) -> None:
        v = self.v
        pair_weight, group_pairs = plan.pair_weight, plan.group_pairs
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self._num_own()):
            index = tid + i * self.num_consumers
            if index < GROUP * v.tile:
                token = index // v.tile
                for row in cutlass.range_constexpr(GROUP):
                    pair = Int32(group_pairs[group * GROUP + row])
                    # A token that has the expert twice has two rows.
                    if pair >= 0 and pair // v.num_top == token:
                        place = row * self.sum_pitch + index % v.tile
                        results[index] += pair_weight[pair] * self._sum_of_warps(sums, place)

    @cute.jit
    def _store(self, results, residual, output, first, features) -> None:
        """Each summand is rounded, and each sum: what plain torch does, in its order."""
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(self._num_own()):
            index = tid + i * self.num_consumers
            token = index // v.tile
            feature = index % v.tile
            if token < output.shape[0] and feature < features:
                value = BFloat16(results[index])
                if cutlass.const_expr(v.has_shared):
                    shared = BFloat16(results[GROUP * v.tile + index])
                    value = BFloat16(Float32(value) + Float32(shared))
                if cutlass.const_expr(v.has_residual):
                    kept = residual[token, first + feature]
                    value = BFloat16(Float32(kept) + Float32(value))
                output[token, first + feature] = value


def compile_variant(variant: Variant, ids_dtype: Any, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`. `ids_dtype` is CuTe's Int32 or Int64."""
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32())
    weight = make_fake_tensor(BFloat16, shape, strides, assumed_align=16)

    def rows() -> Any:
        return matrix(BFloat16, 1, 16, 8)

    choice = strided_matrix(Float32 if variant.num_logits else ids_dtype)
    given = (rows(), choice, strided_matrix(Float32), Float32(1.0), weight)
    shared = [rows() if variant.has_shared else None for _ in range(1 + variant.is_gated)]
    counter = make_fake_tensor(Int32, (1,), (1,), assumed_align=4) if variant.is_dynamic else None
    kernel: ExpertKernel
    others: tuple[Any, ...]
    if variant.is_gated:
        kernel = GateUpKernel(variant)
        chosen = matrix(Float32, 1, 4) if variant.is_dynamic else None
        others = (*shared, chosen, counter, rows())
    else:
        kernel = DownKernel(variant)
        residual = strided_matrix(BFloat16) if variant.has_residual else None
        output = matrix(Float32, 1, 16, 4) if variant.is_dynamic else rows()
        others = (*shared, residual, counter, output)
    return compile_kernel(kernel, *given, *others, Int32(1), arch=arch, options=options)


_compiled = functools.cache(compile_variant)


@dataclass(frozen=True)
class Choice:
    """Which experts the tokens take, and how they are weighed: given, or by the router's logits.

    Attributes:
        ids_or_logits: ids int32 or int64 [M, K], or logits fp32 [M, E].
        factors: router weights fp32 [M, K], or the router's bias fp32 [1, E].
        num_top: K.
        scale: of the weights that are chosen.
        normalizes: see `Variant`.
        counters: int32 [2], zero: blocks draw their tiles by these.
    """

    ids_or_logits: torch.Tensor
    factors: torch.Tensor
    num_top: int
    scale: float = 1.0
    normalizes: bool = False
    counters: torch.Tensor | None = None

    @property
    def num_logits(self) -> int:
        """Experts that are chosen from, or 0 where ids are given."""
        return self.ids_or_logits.shape[1] if self.ids_or_logits.is_floating_point() else 0


@functools.cache
def variant_for(
    num_columns: int,
    num_features: int,
    num_top: int,
    config: StreamConfig,
    *,
    is_gated: bool,
    has_shared: bool = False,
    has_residual: bool = False,
    num_logits: int = 0,
    normalizes: bool = False,
    is_dynamic: bool = False,
) -> Variant:
    """The kernel for a weight, with as many stages as fit."""
    if is_gated and config.tile % 16:
        raise ValueError(f"moe_experts: tiles of gates are multiples of 16 rows, got {config}")
    variant = Variant(
        num_columns=num_columns,
        num_features=num_features,
        num_top=num_top,
        is_gated=is_gated,
        has_shared=has_shared,
        has_residual=has_residual,
        num_logits=num_logits,
        normalizes=normalizes,
        is_dynamic=is_dynamic,
        tile=config.tile,
        stage_columns=config.stage_columns,
        num_stages=1,
        num_warps=config.num_warps,
        num_loaders=config.num_loaders,
    )
    kernel = ExpertKernel(variant)
    left = SHARED_BYTES - 1024 - kernel.other_shared_bytes
    return replace(variant, num_stages=max(1, min(left // (kernel.stage_bytes + 16), MAX_RING)))


def _launch(
    choice: Choice,
    source: torch.Tensor,
    weight: torch.Tensor,
    others: tuple[torch.Tensor | None, ...],
    output: torch.Tensor,
    config: StreamConfig | None,
    *,
    is_gated: bool,
    has_shared: bool,
    has_residual: bool = False,
) -> None:
    num_columns = weight.shape[2]
    variant = variant_for(
        num_columns,
        output.shape[1],
        choice.num_top,
        config or stream_config_for(num_columns, is_gated=is_gated),
        is_gated=is_gated,
        has_shared=has_shared,
        has_residual=has_residual,
        num_logits=choice.num_logits,
        normalizes=choice.normalizes,
        is_dynamic=choice.counters is not None,
    )
    ids_dtype = Int32 if choice.ids_or_logits.dtype == torch.int32 else Int64
    run = _compiled(variant, ids_dtype, arch_of(source.device))
    number = num_multiprocessors(source.device)
    run(source, choice.ids_or_logits, choice.factors, choice.scale, weight, *others, output, number)


def run_gate_up(
    x_MC: torch.Tensor,
    choice: Choice,
    gate_up: torch.Tensor,
    shared: tuple[torch.Tensor, torch.Tensor] | None,
    chosen: torch.Tensor | None,
    hidden: torch.Tensor,
    config: StreamConfig | None = None,
) -> None:
    """Launch the first kernel; rows of `hidden` are pairs, then tokens of the shared expert.

    With counters, `chosen` fp32 [2, P] gets which pairs count, and their weights.
    """
    counter = None if choice.counters is None else choice.counters[:1]
    others = (*(shared or (None, None)), chosen, counter)
    has_shared = shared is not None
    _launch(choice, x_MC, gate_up, others, hidden, config, is_gated=True, has_shared=has_shared)


def run_down(
    hidden: torch.Tensor,
    choice: Choice,
    down: torch.Tensor,
    shared_down: torch.Tensor | None,
    residual: torch.Tensor | None,
    output: torch.Tensor,
    config: StreamConfig | None = None,
) -> None:
    """Launch the second kernel: the layer's output, or with counters fp32 products for `run_sum`,
    whose rows are as those of `hidden`."""
    _launch(
        choice,
        hidden,
        down,
        (shared_down, residual, None if choice.counters is None else choice.counters[1:]),
        output,
        config,
        is_gated=False,
        has_shared=shared_down is not None,
        has_residual=residual is not None,
    )


def moe_experts_cute(
    x_MC: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernels; an x with gaps is made dense first, a weight never."""
    x_MC = rows_to_load(x_MC)
    choice = Choice(ids_MK, weights_MK.float(), ids_MK.shape[1])
    hidden_PI = x_MC.new_empty((ids_MK.numel(), down.shape[2]))
    output_MC = x_MC.new_empty((x_MC.shape[0], down.shape[1]))
    run_gate_up(x_MC, choice, gate_up, None, None, hidden_PI)
    run_down(hidden_PI, choice, down, None, None, output_MC)
    return output_MC
