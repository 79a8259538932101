"""Routed experts for few tokens in CuTe DSL for sm_90a: weights stream through shared memory.

Three launches: gate_up with SwiGLU, down, the weighted sum. Each block of the first two makes the
plan for itself, in shared memory: pairs of one expert form groups of up to eight, in the order of
the pairs, and a group's tiles are work items, of which every block takes as many, side by side. So
an expert's weights are read once (once more for each further eight tokens that chose it), no two
blocks talk, and nothing is sorted or counted ahead.

One warp or several of a block keep a ring of stages full by bulk copies, a row's piece of a stage
each; the others share out a stage's columns between them, multiply by tensor cores (16 rows of
weights by 8 pairs) and add their sums up at the end of a tile, in one order. In the first launch
eight rows of the gate and the same of `up` are the 16, so one thread finds both in its sums. What
is multiplied sits in registers for all tiles of a group. So results are the same in every run, and
a pair's depend neither on the other pairs nor on their number.

The tensor cores do not care which columns they multiply as long as both sides agree. Here a lane
takes eight adjacent columns of a row, 16 bytes at a time on either side.

Under programmatic dependent launch the first kernel waits for those ahead, whose router says which
experts are read; the second asks for its first weights before the first has ended. It reads the
ids early, too: they were written two launches ahead at the latest, as the first lets dependents in
only after it has waited.

Shape legend: M tokens, K experts of a token, P = M * K pairs, E experts, C hidden size, I
intermediate size of an expert.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int16, Int32, Int64
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import WARP, load_global_v4, load_shared_v4
from glm_compile.ops._cute.stream import (
    bulk_load,
    evict_first_policy,
    load_global_16_bytes,
    mma_bf16,
)
from glm_compile.ops._dispatch import num_multiprocessors
from glm_compile.ops.moe.config import MAX_PAIRS, StreamConfig, stream_config_for

# Columns of one step of a warp: 8 of each of the 4 lanes that share a row.
STEP = 32
# Pairs of a group: rows of one product.
GROUP = 8
# Threads that make the plan, a pair each.
_PLAN_WARPS = MAX_PAIRS // WARP


@dataclass(frozen=True)
class Variant:
    """What a kernel is specialised for.

    Attributes:
        num_columns: in features of a weight: C or I.
        num_features: out features: I or C.
        num_top: K.
        is_gated: the weight holds gates and ups: rows of x are tokens, else pairs.
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

    @property
    def num_tiles(self) -> int:
        """Tiles of an expert."""
        return -(-self.num_features // self.tile_features)


class ExpertKernel:
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        v = variant
        self.v = variant
        self.num_threads = (v.num_warps + v.num_loaders) * WARP
        self.num_consumers = v.num_warps * WARP
        # Half a 128-byte line is left free so that adjacent rows use the other half of the banks.
        self.pitch = v.stage_columns * 2 + 64
        self.stage_bytes = v.tile * self.pitch
        self.warp_columns = v.stage_columns // v.num_warps
        self.steps_per_stage = self.warp_columns // STEP
        self.tile_blocks = -(-v.tile // 16)
        # 4 more than a multiple of 16: stores of a warp's sums meet no bank twice.
        self.sum_pitch = self.tile_blocks * 16 + 4
        num_sums = v.num_warps * GROUP * self.sum_pitch
        num_plan_words = MAX_PAIRS * (2 + GROUP // 2) + _PLAN_WARPS
        self.other_shared_bytes = (num_sums + num_plan_words) * 4 + 128

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        ids: cute.Tensor,
        weight: cute.Tensor,
        output: cute.Tensor,
        num_blocks: Int32,
        stream: Any,
    ) -> None:
        self.kernel(x, ids, weight, output).launch(
            grid=(num_blocks, 1, 1),
            block=(self.num_threads, 1, 1),
            stream=stream,
            use_pdl=self.v.use_pdl,
        )

    @cute.kernel
    def kernel(
        self, x: cute.Tensor, ids: cute.Tensor, weight: cute.Tensor, output: cute.Tensor
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        ring = allocator.allocate_tensor(
            Int32, cute.make_layout(v.num_stages * self.stage_bytes // 4), 128
        )
        sums = allocator.allocate_tensor(
            Float32, cute.make_layout(v.num_warps * GROUP * self.sum_pitch), 16
        )
        # Experts of the pairs, of the groups; pairs of the groups; first pairs of groups, as bits.
        pair_expert = allocator.allocate_tensor(Int32, cute.make_layout(MAX_PAIRS), 16)
        group_expert = allocator.allocate_tensor(Int32, cute.make_layout(MAX_PAIRS), 16)
        group_pairs = allocator.allocate_tensor(Int16, cute.make_layout(MAX_PAIRS * GROUP), 16)
        first_bits = allocator.allocate_tensor(Int32, cute.make_layout(_PLAN_WARPS), 16)
        barriers = allocator.allocate_tensor(Int64, cute.make_layout(2 * v.num_stages), 16)
        is_full = barriers.iterator
        is_empty = barriers.iterator + v.num_stages
        if tid == 0:
            for stage in cutlass.range_constexpr(v.num_stages):
                cute.arch.mbarrier_init(is_full + stage, 1)
                cute.arch.mbarrier_init(is_empty + stage, v.num_warps)
            cute.arch.mbarrier_init_fence()
        if cutlass.const_expr(v.is_gated):
            cute.arch.griddepcontrol_wait()
            cute.arch.griddepcontrol_launch_dependents()
        num_groups = self._plan(
            ids, weight.shape[0], (pair_expert, group_expert, group_pairs, first_bits), tid
        )
        num_items = num_groups * v.num_tiles
        item = block * num_items // num_blocks
        last = (block + 1) * num_items // num_blocks
        if warp >= v.num_warps:
            self._load(weight, group_expert, ring, is_full, is_empty, item, last)
        else:
            if cutlass.const_expr(not v.is_gated):
                cute.arch.griddepcontrol_wait()
                cute.arch.griddepcontrol_launch_dependents()
            self._multiply(x, output, group_pairs, ring, sums, is_full, is_empty, item, last)

    @cute.jit
    def _plan(self, ids, num_experts, plan, tid) -> Int32:
        """Group the pairs by expert; returns the number of groups. All threads take part."""
        v = self.v
        pair_expert, group_expert, group_pairs, first_bits = plan
        num_pairs = ids.shape[0] * v.num_top
        for i in cutlass.range_constexpr(-(-MAX_PAIRS * GROUP // self.num_threads)):
            index = tid + i * self.num_threads
            if index < MAX_PAIRS * GROUP:
                group_pairs[index] = Int16(-1)
        expert = Int32(-1)
        if tid < num_pairs:
            found = Int64(ids[tid // v.num_top, tid % v.num_top])
            if found >= 0 and found < num_experts:
                expert = Int32(found)
        if tid < MAX_PAIRS:
            pair_expert[tid] = expert
        cute.arch.sync_threads()
        # Pairs of the same expert before this one, and the first pair of its group.
        rank = Int32(0)
        first = tid
        if tid < num_pairs:
            for other in cutlass.range(num_pairs, unroll=4):
                if other < tid and pair_expert[other] == expert:
                    if rank % GROUP == 0:
                        first = other
                    rank += 1
        if rank % GROUP == 0:
            first = tid
        bits = cute.arch.vote_ballot_sync(expert >= 0 and rank % GROUP == 0)
        if tid % WARP == 0 and tid < MAX_PAIRS:
            first_bits[tid // WARP] = bits
        cute.arch.sync_threads()
        group = Int32(0)
        num_groups = Int32(0)
        for w in cutlass.range_constexpr(_PLAN_WARPS):
            word = first_bits[w]
            num_groups += cute.arch.popc(word)
            below = word
            if w == first // WARP:
                below = word & ((Int32(1) << (first % WARP)) - 1)
            if w > first // WARP:
                below = Int32(0)
            group += cute.arch.popc(below)
        if expert >= 0:
            group_pairs[group * GROUP + rank % GROUP] = Int16(tid)
            if rank % GROUP == 0:
                group_expert[group] = expert
        cute.arch.sync_threads()
        return num_groups

    @cute.jit
    def _load(self, weight, group_expert, ring, is_full, is_empty, item, last) -> None:
        v = self.v
        loader = cute.arch.make_warp_uniform(cute.arch.warp_idx()) - v.num_warps
        policy = evict_first_policy()
        row_bytes = Int64(weight.stride[1]) * 2
        ring_address = Int32(ring.iterator.toint()) + loader * self.pitch
        slot = Int32(0)
        phase = Int32(1)
        while item < last:
            expert = group_expert[item // v.num_tiles]
            first = item % v.num_tiles * v.tile_features
            features = cutlass.min(v.num_features - first, v.tile_features)
            row_address = (
                weight.iterator.toint()
                + Int64(expert) * Int64(weight.stride[0]) * 2
                + Int64(first + loader) * row_bytes
            )
            rows = features
            if cutlass.const_expr(v.is_gated):
                rows = features * 2
            for step in cutlass.range(v.num_steps, unroll=1):
                column = step * v.stage_columns
                num_bytes = Int32(v.stage_columns * 2)
                if cutlass.const_expr(v.num_columns % v.stage_columns):
                    num_bytes = cutlass.min(num_bytes, (v.num_columns - column) * 2)
                cute.arch.mbarrier_wait(is_empty + slot, phase)
                to = ring_address + slot * self.stage_bytes
                barrier = Int32((is_full + slot).toint())
                source = row_address + Int64(column) * 2
                with cute.arch.elect_one():
                    if loader == 0:
                        cute.arch.mbarrier_arrive_and_expect_tx(is_full + slot, rows * num_bytes)
                    # One thread starts all copies of its warp: the instruction takes addresses that
                    # are the warp's, so lanes with different ones would come one by one, slower.
                    for part in cutlass.range_constexpr(-(-v.tile // v.num_loaders)):
                        feature, offset = self._source_of(part)
                        if loader + part * v.num_loaders < v.tile and feature + loader < features:
                            bulk_load(
                                to + part * v.num_loaders * self.pitch,
                                source + offset * row_bytes,
                                num_bytes,
                                barrier,
                                policy,
                            )
                slot += 1
                if slot == v.num_stages:
                    slot = Int32(0)
                    phase ^= 1
            item += 1

    def _source_of(self, part: int) -> tuple[int, int]:
        """(out feature, row of weights) of row `part * num_loaders` of a tile, from its first.

        Tiles of gates alternate: eight rows of the gate, the same eight of `up`.
        """
        v = self.v
        row = part * v.num_loaders
        if not v.is_gated:
            return row, row
        feature = row // 16 * 8 + row % 8
        return feature, feature + (v.num_features if row % 16 >= 8 else 0)

    @cute.jit
    def _multiply(self, x, output, group_pairs, ring, sums, is_full, is_empty, item, last) -> None:
        v = self.v
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        row = lane // 4
        # This lane's first column.
        own_column = warp * self.warp_columns + (lane % 4) * 8
        own_address = Int32(ring.iterator.toint()) + row * self.pitch + own_column * 2
        slot = Int32(0)
        phase = Int32(0)
        while item < last:
            group = item // v.num_tiles
            last_of_group = cutlass.min((group + 1) * v.num_tiles, last)
            pair = Int32(group_pairs[group * GROUP + row])
            has_pair = Int32(pair >= 0)
            x_row = pair * has_pair
            if cutlass.const_expr(v.is_gated):
                x_row = x_row // v.num_top
            x_address = (
                x.iterator.toint() + (Int64(x_row) * Int64(x.stride[0]) + Int64(own_column)) * 2
            )
            x_parts = [
                self._load_step(x_address, has_pair, own_column, step)
                for step in range(v.num_steps * self.steps_per_stage)
            ]
            while item < last_of_group:
                total = [[Float32(0.0) for _ in range(4)] for _ in range(self.tile_blocks)]
                for stage in cutlass.range_constexpr(v.num_steps):
                    cute.arch.mbarrier_wait(is_full + slot, phase)
                    address = own_address + slot * self.stage_bytes
                    for i in cutlass.range_constexpr(self.steps_per_stage):
                        step = stage * self.steps_per_stage + i
                        self._multiply_step(total, x_parts[step], address, own_column, step, i)
                    # Loads still under way would read what the next bulk copy puts there: it
                    # writes through another proxy, which an arrival alone does not order behind
                    # them.
                    cute.arch.fence_proxy("async.shared", space="cta")
                    cute.arch.sync_warp()
                    if lane == 0:
                        cute.arch.mbarrier_arrive(is_empty + slot)
                    slot += 1
                    if slot == v.num_stages:
                        slot = Int32(0)
                        phase ^= 1
                self._sum_up(total, sums, warp, lane)
                first = item % v.num_tiles * v.tile_features
                self._store(sums, output, group_pairs, group, first)
                item += 1

    def _is_cut(self, step: int) -> bool:
        """Whether columns of a step may lie beyond the last."""
        v = self.v
        is_last = step // self.steps_per_stage == v.num_steps - 1
        return is_last and v.num_columns % v.stage_columns != 0

    def _column(self, step: int) -> int:
        stage, i = divmod(step, self.steps_per_stage)
        return stage * self.v.stage_columns + i * STEP

    def _load_step(self, address, is_wanted, own_column, step):
        """Words of x of one step; zeros where there is no pair and beyond the columns."""
        column = self._column(step)
        if self._is_cut(step):
            is_wanted = is_wanted & Int32(own_column + column < self.v.num_columns)
        return load_global_16_bytes(address + column * 2, is_wanted)

    def _multiply_step(self, total, x_part, address, own_column, step, index) -> None:
        zero = Int32(0)
        for block in range(self.tile_blocks):
            at = address + (block * 16 * self.pitch + index * STEP * 2)
            upper = load_shared_v4(at)
            lower = (zero,) * 4
            if block * 16 + 8 < self.v.tile:
                lower = load_shared_v4(at + 8 * self.pitch)
            if self._is_cut(step):
                # What lies in the ring beyond the columns is left over, and may be NaN.
                keep = zero - Int32(own_column + self._column(step) < self.v.num_columns)
                upper = tuple(word & keep for word in upper)
                lower = tuple(word & keep for word in lower)
            for half in (0, 2):
                a = (upper[half], lower[half], upper[half + 1], lower[half + 1])
                total[block] = mma_bf16(a, x_part[half : half + 2], total[block])

    @cute.jit
    def _sum_up(self, total, sums, warp, lane) -> None:
        """Put this warp's sums where all can read them."""
        # The sums of the tile before have been read.
        cute.arch.barrier(barrier_id=1, number_of_threads=self.num_consumers)
        for block in cutlass.range_constexpr(self.tile_blocks):
            for i in cutlass.range_constexpr(4):
                row = (lane % 4) * 2 + i % 2
                place = block * 16 + lane // 4 + (i // 2) * 8
                sums[(warp * GROUP + row) * self.sum_pitch + place] = total[block][i]
        cute.arch.barrier(barrier_id=1, number_of_threads=self.num_consumers)

    @cute.jit
    def _store(self, sums, output, group_pairs, group, first) -> None:
        """Add the warps' sums up and store them, those of the gated kernel through SwiGLU."""
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        for i in cutlass.range_constexpr(-(-GROUP * v.tile_features // self.num_consumers)):
            index = tid + i * self.num_consumers
            row = index // v.tile_features
            feature = index % v.tile_features
            if row < GROUP and first + feature < v.num_features:
                pair = Int32(group_pairs[group * GROUP + row])
                if pair >= 0:
                    place = row * self.sum_pitch + feature
                    if cutlass.const_expr(v.is_gated):
                        place = row * self.sum_pitch + feature // 8 * 16 + feature % 8
                    value = self._sum_of_warps(sums, place)
                    if cutlass.const_expr(v.is_gated):
                        up = self._sum_of_warps(sums, place + 8)
                        value = value / (Float32(1.0) + cute.math.exp(-value)) * up
                        output[pair, first + feature] = BFloat16(value)
                    else:
                        output[pair, first + feature] = value

    def _sum_of_warps(self, sums, place):
        value = sums[place]
        for w in range(1, self.v.num_warps):
            value += sums[place + w * GROUP * self.sum_pitch]
        return value


# Threads of a block of the last kernel, four columns each.
_SUM_THREADS = 128


class SumKernel:
    """Weighted sum of each token's pairs, in their order; `__call__` is its launcher."""

    def __init__(self, num_top: int) -> None:
        self.num_top = num_top

    @cute.jit
    def __call__(
        self,
        products: cute.Tensor,
        weights: cute.Tensor,
        ids: cute.Tensor,
        output: cute.Tensor,
        num_experts: Int32,
        stream: Any,
    ) -> None:
        columns = _SUM_THREADS * 4
        self.kernel(products, weights, ids, output, num_experts).launch(
            grid=((output.shape[1] + columns - 1) // columns, output.shape[0], 1),
            block=(_SUM_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        products: cute.Tensor,
        weights: cute.Tensor,
        ids: cute.Tensor,
        output: cute.Tensor,
        num_experts: Int32,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        block, token, _ = cute.arch.block_idx()
        column = (block * _SUM_THREADS + tid) * 4
        cute.arch.griddepcontrol_wait()
        cute.arch.griddepcontrol_launch_dependents()
        if column < output.shape[1]:
            total = [Float32(0.0) for _ in range(4)]
            for k in cutlass.range_constexpr(self.num_top):
                expert = Int64(ids[token, k])
                if expert >= 0 and expert < num_experts:
                    offset = Int64(token * self.num_top + k) * Int64(products.stride[0]) + column
                    values = load_global_v4(products.iterator.toint() + offset * 4)
                    for i in cutlass.range_constexpr(4):
                        total[i] += weights[token, k] * values[i]
            for i in cutlass.range_constexpr(4):
                output[token, column + i] = BFloat16(total[i])


def _matrix(dtype: Any, last_stride: Any, align: int, row_divisibility: int = 1) -> Any:
    strides = (cute.sym_int64(divisibility=row_divisibility), last_stride)
    return make_fake_tensor(
        dtype, (cute.sym_int32(), cute.sym_int32()), strides, assumed_align=align
    )


def _ids(dtype: Any) -> Any:
    return _matrix(dtype, cute.sym_int64(), dtype.width // 8)


def compile_variant(variant: Variant, ids_dtype: Any, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`. `ids_dtype` is CuTe's Int32 or Int64."""
    strides = (cute.sym_int64(divisibility=8), cute.sym_int64(divisibility=8), 1)
    shape = (cute.sym_int32(), cute.sym_int32(), cute.sym_int32())
    return compile_kernel(
        ExpertKernel(variant),
        _matrix(BFloat16, 1, 16, 8),
        _ids(ids_dtype),
        make_fake_tensor(BFloat16, shape, strides, assumed_align=16),
        _matrix(BFloat16 if variant.is_gated else Float32, 1, 16, 4),
        Int32(1),
        arch=arch,
        options=options,
    )


def compile_sum(num_top: int, ids_dtype: Any, arch: str, options: str = "") -> Any:
    """Compile the last kernel; see `compile_kernel`."""
    return compile_kernel(
        SumKernel(num_top),
        _matrix(Float32, 1, 16, 4),
        _matrix(Float32, cute.sym_int64(), 4),
        _ids(ids_dtype),
        _matrix(BFloat16, 1, 16, 8),
        Int32(1),
        arch=arch,
        options=options,
    )


_compiled = functools.cache(compile_variant)
_compiled_sum = functools.cache(compile_sum)

# Shared memory of a multiprocessor, less what the system keeps for each block.
_SHARED_BYTES = 226 * 1024


@functools.cache
def variant_for(
    num_columns: int, num_features: int, num_top: int, config: StreamConfig, *, is_gated: bool
) -> Variant:
    """The kernel for a weight, with as many stages as fit."""
    if is_gated and config.tile % 16:
        raise ValueError(f"moe_experts: tiles of gates are multiples of 16 rows, got {config}")
    variant = Variant(
        num_columns=num_columns,
        num_features=num_features,
        num_top=num_top,
        is_gated=is_gated,
        tile=config.tile,
        stage_columns=config.stage_columns,
        num_stages=1,
        num_warps=config.num_warps,
        num_loaders=config.num_loaders,
    )
    kernel = ExpertKernel(variant)
    left = _SHARED_BYTES - 1024 - kernel.other_shared_bytes
    return replace(variant, num_stages=max(1, min(left // (kernel.stage_bytes + 16), 32)))


def run_product(
    source: torch.Tensor,
    ids_MK: torch.Tensor,
    weight: torch.Tensor,
    target: torch.Tensor,
    config: StreamConfig | None = None,
    *,
    is_gated: bool,
) -> None:
    """Launch the kernel over gate_up [E, 2 I, C] or down [E, C, I]; target is [P, features]."""
    num_columns, num_features = weight.shape[2], target.shape[1]
    config = config or stream_config_for(num_columns, is_gated=is_gated)
    variant = variant_for(num_columns, num_features, ids_MK.shape[1], config, is_gated=is_gated)
    run = _compiled(variant, _ids_dtype(ids_MK), arch_of(source.device))
    run(source, ids_MK, weight, target, num_multiprocessors(source.device))


def moe_experts_cute(
    x_MC: torch.Tensor,
    weights_MK: torch.Tensor,
    ids_MK: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """Launch the kernels; an x with gaps is made dense first, a weight never."""
    num_tokens, num_top = ids_MK.shape
    num_experts, num_hidden, num_inner = down.shape
    hidden_PI = x_MC.new_empty((num_tokens * num_top, num_inner))
    product_PC = x_MC.new_empty((num_tokens * num_top, num_hidden), dtype=torch.float32)
    output_MC = x_MC.new_empty((num_tokens, num_hidden))
    run_product(_rows_to_load(x_MC), ids_MK, gate_up, hidden_PI, is_gated=True)
    run_product(hidden_PI, ids_MK, down, product_PC, is_gated=False)
    run = _compiled_sum(num_top, _ids_dtype(ids_MK), arch_of(x_MC.device))
    run(product_PC, weights_MK.float(), ids_MK, output_MC, num_experts)
    return output_MC


def _ids_dtype(ids_MK: torch.Tensor) -> Any:
    return Int64 if ids_MK.dtype == torch.int64 else Int32


def _rows_to_load(x_MC: torch.Tensor) -> torch.Tensor:
    """x with rows that can be loaded 16 bytes at a time."""
    if x_MC.shape[0] == 1:
        # The stride of the only row means nothing, and may be anything.
        x_MC = x_MC.as_strided(x_MC.shape, (-(-x_MC.shape[1] // 8) * 8, x_MC.stride(1)))
    if x_MC.stride(1) != 1 or x_MC.stride(0) % 8 or x_MC.data_ptr() % 16:
        x_MC = x_MC.clone(memory_format=torch.contiguous_format)
    return x_MC
