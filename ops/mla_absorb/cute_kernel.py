"""The absorbed products in CuTe DSL for sm_90a: each head's matrix streams through shared memory.

A block computes a tile of out features of one head. Its warps share out the reduction: each asks
the copy engine for its part of the matrix, in lines of 128 bytes, then waits for the kernels ahead,
loads what it multiplies of the rows straight into registers, multiplies by tensor cores (16 out
features by 8 rows) and puts its sums where its part of the matrix was. Sums are added up in one
order, so results are the same in every run, and a row's depend neither on the other rows nor on
their number.

W_UK has its out features along its rows, so it is read transposed (ldmatrix). W_UV has the
reduction there: the tensor cores do not care which columns they multiply as long as both sides
agree, so a lane takes eight adjacent ones, of the matrix and of a row. Its lines are swizzled; a
tile's rows are dealt to lanes such that the lanes that are served together use all banks.

Under programmatic dependent launch the matrix is requested before the kernels ahead have ended,
rows are read after. Dependents are let in only then, or at once where that was measured to be
faster: they wait for this kernel, which waits for those ahead, before they read what was computed.
What they read early are weights, which no kernel of a step writes.

Shape legend: B batch, S query tokens, R = B * S rows, H heads, K reduction (N or L), L rank of the
latent, P rope dim.
"""

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx
from cutlass.cute.nvgpu import cpasync
from cutlass.cute.runtime import make_fake_tensor
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import (
    WARP,
    load_shared_v4,
    shared_address,
    store_shared_float,
)
from glm_compile.ops._cute.stream import (
    load_global_16_bytes,
    load_global_word,
    mma_bf16,
    multiply_bf16,
    pack_bf16,
    unpack_bf16,
)
from glm_compile.ops.mla_absorb.config import (
    LINE,
    QUERY_ROWS,
    has_early_dependents,
    query_tile,
    value_tile,
)

_LINE_BYTES = LINE * 2
# Rows of one product.
_ROWS = 8


@dataclass(frozen=True)
class Variant:
    """What a kernel is specialised for.

    Attributes:
        num_reduced: K.
        num_features: out features of a head.
        tile: out features of a block.
        is_transposed: the matrix has its out features along its rows: W_UK.
        row_blocks: of 8 rows; 1 or 2.
        num_copied: P, values of each head to copy behind the product.
        rotation: how these are rotated: `interleaved` or `half split` pairs; None copies them.
        use_pdl: ask for the matrix before the kernels ahead have ended.
        lets_in_early: let dependents in before the kernels ahead have ended.
    """

    num_reduced: int
    num_features: int
    tile: int
    is_transposed: bool
    row_blocks: int = 1
    num_copied: int = 0
    rotation: str | None = None
    use_pdl: bool = True
    lets_in_early: bool = False

    @property
    def num_warps(self) -> int:
        return self.num_reduced // (QUERY_ROWS if self.is_transposed else LINE)


class MlaAbsorbKernel:
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: Variant) -> None:
        v = variant
        self.v = variant
        self.num_threads = v.num_warps * WARP
        self.num_rows = v.row_blocks * _ROWS
        # Rows of a part's box: 128 bytes wide.
        self.box_rows = QUERY_ROWS if v.is_transposed else v.tile
        self.num_boxes = v.tile // LINE if v.is_transposed else 1
        self.box_bytes = self.box_rows * _LINE_BYTES
        self.part_bytes = self.num_boxes * self.box_bytes
        self.num_outputs = -(-self.num_rows * v.tile // 2 // self.num_threads)
        # The blocks of a head share the copies out.
        self.copy_stride = self.num_threads * (v.num_features // v.tile)
        # What is rotated goes in pairs.
        self.num_parts = v.num_copied // 2 if v.rotation else v.num_copied
        self.num_copies = -(-self.num_rows * self.num_parts // self.copy_stride)

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        copied: cute.Tensor | None,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        weight: cute.Tensor,
        output: cute.Tensor,
        head_rows: Int32,
        skipped_rows: Int32,
        stream: Any,
    ) -> None:
        v = self.v
        box_layout = cute.make_composed_layout(
            cute.make_swizzle(3, 4, 3),
            0,
            cute.make_layout((self.box_rows, LINE), stride=(LINE, 1)),
        )
        atom, coords = cpasync.make_tiled_tma_atom(
            cpasync.CopyBulkTensorTileG2SOp(), weight, box_layout, (self.box_rows, LINE)
        )
        num_heads = output.shape[1]
        num_blocks = (output.shape[0] + self.num_rows - 1) // self.num_rows
        self.kernel(atom, coords, x, copied, cos, sin, output, head_rows, skipped_rows).launch(
            grid=(v.num_features // v.tile, num_heads, num_blocks),
            block=(self.num_threads, 1, 1),
            stream=stream,
            use_pdl=v.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        atom: cute.CopyAtom,
        coords: cute.Tensor,
        x: cute.Tensor,
        copied: cute.Tensor | None,
        cos: cute.Tensor | None,
        sin: cute.Tensor | None,
        output: cute.Tensor,
        head_rows: Int32,
        skipped_rows: Int32,
    ) -> None:
        v = self.v
        tid, _, _ = cute.arch.thread_idx()
        block, head, row_block = cute.arch.block_idx()
        lane = cute.arch.lane_idx()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        allocator = SmemAllocator()
        boxes = allocator.allocate_tensor(
            BFloat16,
            cute.make_layout(
                (self.box_rows, LINE, v.num_warps * self.num_boxes),
                stride=(LINE, 1, self.box_rows * LINE),
            ),
            1024,
            swizzle=cute.make_swizzle(3, 4, 3),
        )
        barriers = allocator.allocate_tensor(Int64, cute.make_layout(v.num_warps), 16).iterator
        is_full = barriers + warp
        first = block * v.tile

        if lane == 0:
            cute.arch.mbarrier_init(is_full, 1)
            cute.arch.mbarrier_init_fence()
        # Costs nothing: the machine code initialises for the warp as a whole, which race checkers
        # take for another lane's write.
        cute.arch.sync_warp()
        if lane == 0:
            cute.arch.mbarrier_arrive_and_expect_tx(is_full, self.part_bytes)
        cute.arch.sync_warp()
        first_row = head * head_rows + skipped_rows
        for box in cutlass.range_constexpr(self.num_boxes):
            if cutlass.const_expr(v.is_transposed):
                corner = (first_row + warp * QUERY_ROWS, first + box * LINE)
            else:
                corner = (first_row + first, warp * LINE)
            source = cute.local_tile(
                cute.domain_offset(corner, coords), (self.box_rows, LINE), (0, 0)
            )
            to, source = cpasync.tma_partition(
                atom,
                0,
                cute.make_layout(1),
                cute.group_modes(boxes, 0, 2),
                cute.group_modes(source, 0, 2),
            )
            cute.copy(atom, source, to[None, warp * self.num_boxes + box], tma_bar_ptr=is_full)

        # Everything below may come from the kernel ahead.
        if cutlass.const_expr(v.lets_in_early):
            cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if cutlass.const_expr(not v.lets_in_early):
            cute.arch.griddepcontrol_launch_dependents()
        first_of_block = row_block * self.num_rows
        num_rows = cutlass.min(output.shape[0] - first_of_block, self.num_rows)
        x_parts = self._load_rows(x, head, first_of_block, num_rows, warp, lane)
        kept = []
        if cutlass.const_expr(v.num_copied > 0):
            place = (head, first_of_block, num_rows, block * self.num_threads + tid)
            if cutlass.const_expr(v.rotation is not None):
                kept = self._load_pairs(copied, cos, sin, place)
            else:
                kept = self._load_copied(copied, place)

        part = shared_address(boxes.iterator) + warp * self.part_bytes
        cute.arch.mbarrier_wait(is_full, 0)
        total = [
            [[Float32(0.0) for _ in range(4)] for _ in range(v.row_blocks)]
            for _ in range(v.tile // 16)
        ]
        if cutlass.const_expr(v.is_transposed):
            self._multiply_transposed(total, x_parts, part, lane)
        else:
            self._multiply(total, x_parts, part, lane)
        if cutlass.const_expr(v.num_copied > 0):
            self._store_copied(kept, output, place)
        # Nobody else reads this part.
        cute.arch.sync_warp()
        self._put_sums(total, part, lane)
        cute.arch.sync_threads()
        base = shared_address(boxes.iterator)
        for i in cutlass.range_constexpr(self.num_outputs):
            index = tid + i * self.num_threads
            row = index // (v.tile // 2)
            feature = index % (v.tile // 2) * 2
            if row < num_rows:
                at = base + self._sum_offset(row, feature)
                sum0 = Float32(0.0)
                sum1 = Float32(0.0)
                for w in cutlass.range_constexpr(v.num_warps):
                    value0, value1 = _load_floats(at + w * self.part_bytes)
                    sum0 += value0
                    sum1 += value1
                offset = (
                    Int64(first_of_block + row) * Int64(output.stride[0])
                    + Int64(head) * Int64(output.stride[1])
                    + Int64(first + feature)
                )
                _store_word(output.iterator.toint() + offset * 2, pack_bf16(sum0, sum1))

    @cute.jit
    def _row_offset(self, tensor, row, head) -> Int64:
        """Elements ahead of a row's head in a [B, S, H, *] tensor."""
        num_queries = Int32(tensor.shape[1])
        return (
            Int64(row // num_queries) * Int64(tensor.stride[0])
            + Int64(row % num_queries) * Int64(tensor.stride[1])
            + Int64(head) * Int64(tensor.stride[2])
        )

    @cute.jit
    def _load_rows(self, x, head, first_row, num_rows, warp, lane) -> list:
        """This warp's part of the rows, as the tensor cores take it; zeros beyond the rows."""
        v = self.v
        group = lane // 4
        loaded = []
        for n in cutlass.range_constexpr(v.row_blocks):
            row = group + n * _ROWS
            wanted = Int32(row < num_rows)
            offset = self._row_offset(x, first_row + row * wanted, head)
            words = []
            if cutlass.const_expr(v.is_transposed):
                address = (
                    x.iterator.toint() + (offset + Int64(warp * QUERY_ROWS + lane % 4 * 2)) * 2
                )
                for half in cutlass.range_constexpr(QUERY_ROWS // 8):
                    words.append(load_global_word(address + half * 16, wanted))
            else:
                address = x.iterator.toint() + (offset + Int64(warp * LINE + lane % 4 * 8)) * 2
                for half in cutlass.range_constexpr(2):
                    words.extend(load_global_16_bytes(address + half * 64, wanted))
            loaded.append(words)
        return loaded

    @cute.jit
    def _load_copied(self, copied, place) -> list:
        """This thread's share of what is copied."""
        v = self.v
        head, first_row, num_rows, first_copy = place
        kept = []
        for i in cutlass.range_constexpr(self.num_copies):
            index = first_copy + i * self.copy_stride
            row = index // v.num_copied
            wanted = Int32(row < num_rows)
            source = self._row_offset(copied, first_row + row * wanted, head)
            source += Int64(index % v.num_copied) * Int64(copied.stride[3])
            kept.append([_load_half(copied.iterator.toint() + source * 2, wanted)])
        return kept

    @cute.jit
    def _load_pairs(self, rotated, cos, sin, place) -> list:
        """This thread's share of what is rotated: (x1 cos - x2 sin, x2 cos + x1 sin) of each pair.

        Products and sums are rounded to bf16 one by one, as torch rounds them.
        """
        v = self.v
        head, first_row, num_rows, first_pair = place
        loaded = []
        for i in cutlass.range_constexpr(self.num_copies):
            index = first_pair + i * self.copy_stride
            row = index // self.num_parts
            pair = index % self.num_parts
            wanted = Int32(row < num_rows)
            token = first_row + row * wanted
            source = self._row_offset(rotated, token, head)
            first = pair
            second = pair + self.num_parts
            if cutlass.const_expr(v.rotation == "interleaved"):
                first = pair * 2
                second = pair * 2 + 1
            base = rotated.iterator.toint()
            stride = Int64(rotated.stride[3])
            words = [
                _load_half(base + (source + Int64(at) * stride) * 2, wanted)
                for at in (first, second)
            ]
            num_queries = Int32(rotated.shape[1])
            for table in (cos, sin):
                offset = (
                    Int64(token // num_queries) * Int64(table.stride[0])
                    + Int64(token % num_queries) * Int64(table.stride[1])
                    + Int64(pair) * Int64(table.stride[2])
                )
                words.append(_load_half(table.iterator.toint() + offset * 2, wanted))
            loaded.append(words)
        kept = []
        for i in cutlass.range_constexpr(self.num_copies):
            x1, x2, angle_cos, angle_sin = loaded[i]
            # (x1 cos, x2 sin) and (x2 cos, x1 sin).
            left = multiply_bf16(_join_halves(x1, x2), _join_halves(angle_cos, angle_sin))
            right = multiply_bf16(_join_halves(x2, x1), _join_halves(angle_cos, angle_sin))
            x1_cos, x2_sin = unpack_bf16(left)
            x2_cos, x1_sin = unpack_bf16(right)
            turned = pack_bf16(x1_cos - x2_sin, x2_cos + x1_sin)
            kept.append([turned, turned >> 16])
        return kept

    @cute.jit
    def _store_copied(self, kept, output, place) -> None:
        v = self.v
        head, first_row, num_rows, first_copy = place
        for i in cutlass.range_constexpr(self.num_copies):
            index = first_copy + i * self.copy_stride
            row = index // self.num_parts
            if row < num_rows:
                target = (
                    Int64(first_row + row) * Int64(output.stride[0])
                    + Int64(head) * Int64(output.stride[1])
                    + Int64(v.num_features + index % self.num_parts)
                )
                # The second of a pair goes to the second half.
                for j in cutlass.range_constexpr(len(kept[i])):
                    address = output.iterator.toint() + (target + j * self.num_parts) * 2
                    _store_half(address, kept[i][j])

    def _multiply_transposed(self, total, x_parts, part, lane) -> None:
        """Rows of the matrix are the reduction: fragments come out of ldmatrix turned."""
        row = lane % 8 + lane // 16 * 8
        chunk = lane // 8 % 2
        line = part + row * _LINE_BYTES
        for step in range(QUERY_ROWS // 16):
            for tile in range(self.v.tile // 16):
                box, inside = divmod(tile * 2, 8)
                at = line + (box * self.box_bytes + step * 16 * _LINE_BYTES)
                a = _load_turned(at + ((chunk + inside) ^ (row % 8)) * 16)
                for n, words in enumerate(x_parts):
                    b = (words[2 * step], words[2 * step + 1])
                    total[tile][n] = mma_bf16(a, b, total[tile][n])

    def _multiply(self, total, x_parts, part, lane) -> None:
        """Rows of the matrix are out features: a lane takes 16 bytes of each of its rows."""
        row = self._row_of_lane(lane)
        line = part + row * _LINE_BYTES
        for window in range(2):
            # Rows 8 further down have the same swizzle.
            column = ((lane % 4 + window * 4) ^ row) * 16
            for tile in range(self.v.tile // 16):
                at = line + column + tile * 16 * _LINE_BYTES
                upper = load_shared_v4(at)
                lower = load_shared_v4(at + 8 * _LINE_BYTES)
                for half in (0, 2):
                    a = (upper[half], lower[half], upper[half + 1], lower[half + 1])
                    for n, words in enumerate(x_parts):
                        b = (words[window * 4 + half], words[window * 4 + half + 1])
                        total[tile][n] = mma_bf16(a, b, total[tile][n])

    def _row_of_lane(self, lane):
        """The row of 8, or out feature, that a lane's group of four takes.

        Eight lanes are served at a time: two rows, which must differ in bit 2 to fill all banks.
        """
        group = lane // 4
        if self.v.is_transposed:
            return group
        return group // 2 + group % 2 * 4

    def _sum_offset(self, row, feature):
        """Bytes ahead of a sum in its part; the swizzle lets a warp's stores use all banks."""
        # A wider swizzle would put what is at a row's end into the next one.
        eights = self.v.tile // 8
        groups = min(eights & -eights, 4)
        return (row * self.v.tile + (feature ^ (row // 2 % groups * 8))) * 4

    def _put_sums(self, total, part, lane) -> None:
        for tile in range(self.v.tile // 16):
            for n in range(self.v.row_blocks):
                for i in range(4):
                    row = lane % 4 * 2 + (n * _ROWS + i % 2)
                    feature = self._row_of_lane(lane) + (tile * 16 + i // 2 * 8)
                    store_shared_float(part + self._sum_offset(row, feature), total[tile][n][i])


def _load_turned(address: Int32) -> tuple:
    """Four 8 x 8 blocks of 16-bit values of shared memory, each transposed; a row a lane."""
    return inline_ptx(
        "ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];",
        write_only_types=[Int32] * 4,
        read_only_args=[address],
    )


def _store_word(address: Int64, value: Int32) -> None:
    inline_ptx("st.global.b32 [{$r0}], {$r1};", read_only_args=[address, value])


def _load_half(address: Int64, is_wanted: Int32) -> Int32:
    """A 16-bit value of global memory, or anything where it is not wanted."""
    return inline_ptx(
        "{\n.reg .pred wanted;\n.reg .b16 value, none;\nsetp.ne.s32 wanted, {$r1}, 0;\n"
        "mov.b16 none, 0;\nmov.b16 value, 0;\n@wanted ld.global.b16 value, [{$r0}];\n"
        "mov.b32 {$w0}, {value, none};\n}",
        write_only_types=[Int32],
        read_only_args=[address, is_wanted],
    )


def _join_halves(low: Int32, high: Int32) -> Int32:
    """The low halves of two words as one word."""
    return inline_ptx(
        "prmt.b32 {$w0}, {$r0}, {$r1}, 0x5410;",
        write_only_types=[Int32],
        read_only_args=[low, high],
    )


def _store_half(address: Int64, value: Int32) -> None:
    """Store the low half of a word."""
    inline_ptx(
        "{\n.reg .b16 low, high;\nmov.b32 {low, high}, {$r1};\nst.global.b16 [{$r0}], low;\n}",
        read_only_args=[address, value],
    )


def _load_floats(address: Int32) -> tuple[Float32, Float32]:
    """Two adjacent floats of shared memory."""
    return inline_ptx(
        "ld.shared.v2.f32 {{$w0}, {$w1}}, [{$r0}];",
        write_only_types=[Float32, Float32],
        read_only_args=[address],
    )


def compile_variant(variant: Variant, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`."""
    v = variant

    def tensor(rank: int, align: int, divisibility: int, last_stride: Any) -> Any:
        strides = tuple(cute.sym_int64(divisibility=divisibility) for _ in range(rank - 1))
        shape = tuple(cute.sym_int32() for _ in range(rank))
        return make_fake_tensor(BFloat16, shape, (*strides, last_stride), assumed_align=align)

    return compile_kernel(
        MlaAbsorbKernel(variant),
        tensor(4, 4, 2, 1) if v.is_transposed else tensor(4, 16, 8, 1),
        tensor(4, 2, 1, cute.sym_int64()) if v.num_copied else None,
        *((tensor(3, 2, 1, cute.sym_int64()) if v.rotation else None) for _ in range(2)),
        tensor(2, 16, 8, 1),
        tensor(3, 4, 2, 1),
        Int32(1),
        Int32(1),
        arch=arch,
        options=options,
    )


@functools.cache
def _compiled(variant: Variant, arch: str) -> Any:
    return compile_variant(variant, arch)


def _run(
    x_BSHK: torch.Tensor,
    copied_BSHP: torch.Tensor | None,
    tables: tuple[torch.Tensor | None, torch.Tensor | None],
    kv_b_weight: torch.Tensor,
    output: torch.Tensor,
    variant: Variant,
) -> None:
    """Launch the kernel; `output` is [..., H, F + P]."""
    num_heads = x_BSHK.shape[2]
    head_rows = kv_b_weight.shape[0] // num_heads
    _compiled(variant, arch_of(output.device))(
        x_BSHK,
        copied_BSHP,
        *tables,
        kv_b_weight,
        output.view(-1, *output.shape[-2:]),
        head_rows,
        0 if variant.is_transposed else head_rows - variant.num_features,
    )


def _row_blocks(x_BSHK: torch.Tensor) -> int:
    return 1 if x_BSHK.shape[0] * x_BSHK.shape[1] <= _ROWS else 2


def _with_batch(tensor: torch.Tensor) -> torch.Tensor:
    """[B, S, H, *]; strides of axes of size 1 mean nothing, and become ones that fit."""
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    if 1 in tensor.shape[:3]:
        strides = [
            8 if size == 1 else stride
            for size, stride in zip(tensor.shape[:3], tensor.stride(), strict=False)
        ]
        tensor = tensor.as_strided(tensor.shape, (*strides, tensor.stride(3)))
    return tensor


def absorb_query_cute(
    q_nope: torch.Tensor,
    q_rot: torch.Tensor,
    kv_b_weight: torch.Tensor,
    cos: torch.Tensor | None = None,
    sin: torch.Tensor | None = None,
    interleaved: bool = True,
    *,
    tile: int | None = None,
    lets_in_early: bool | None = None,
) -> torch.Tensor:
    """Launch the kernel; `tile` and `lets_in_early` override the choices of `config`."""
    rank = kv_b_weight.shape[1]
    num_heads, num_nope = q_nope.shape[-2:]
    num_copied = q_rot.shape[-1]
    output = q_nope.new_empty((*q_nope.shape[:-1], rank + num_copied))
    if not output.numel():
        return output
    x_BSHN = _with_batch(q_nope)
    rotation = None
    if cos is not None and sin is not None and num_copied:
        rotation = "interleaved" if interleaved else "half split"
        cos, sin = (table.expand(*x_BSHN.shape[:2], num_copied) for table in (cos, sin))
    variant = Variant(
        num_reduced=num_nope,
        num_features=rank,
        tile=tile or query_tile(num_heads, rank),
        is_transposed=True,
        row_blocks=_row_blocks(x_BSHN),
        num_copied=num_copied,
        rotation=rotation,
        lets_in_early=has_early_dependents(num_heads) if lets_in_early is None else lets_in_early,
    )
    copied = _with_batch(q_rot) if num_copied else None
    tables = (cos, sin) if rotation else (None, None)
    _run(x_BSHN, copied, tables, kv_b_weight, output, variant)
    return output


def project_values_cute(
    o: torch.Tensor,
    kv_b_weight: torch.Tensor,
    num_values: int,
    *,
    tile: int | None = None,
    lets_in_early: bool | None = None,
) -> torch.Tensor:
    """Launch the kernel; `tile` and `lets_in_early` override the choices of `config`."""
    num_heads, rank = o.shape[-2:]
    output = o.new_empty((*o.shape[:-1], num_values))
    if not output.numel():
        return output
    x_BSHL = _with_batch(o)
    variant = Variant(
        num_reduced=rank,
        num_features=num_values,
        tile=tile or value_tile(num_heads, num_values),
        is_transposed=False,
        row_blocks=_row_blocks(x_BSHL),
        lets_in_early=has_early_dependents(num_heads) if lets_in_early is None else lets_in_early,
    )
    _run(x_BSHL, None, (None, None), kv_b_weight, output, variant)
    return output
