"""Device functions of kernels that stream weights: copies into rings, warp-level products, norms.

Imported by kernel files only: needs CuTe DSL. Shared memory is addressed by 32-bit byte addresses.
"""

from __future__ import annotations

from collections.abc import Sequence

from cutlass import Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx


def evict_first_policy() -> Int64:
    """L2 policy of data that is read once."""
    return inline_ptx(
        "createpolicy.fractional.L2::evict_first.b64 {$w0}, 1.0;", write_only_types=[Int64]
    )


def evict_normal_policy() -> Int64:
    """L2 policy of data that others read soon."""
    return inline_ptx(
        "createpolicy.fractional.L2::evict_normal.b64 {$w0}, 1.0;", write_only_types=[Int64]
    )


def bulk_load(
    to: Int32, source: Int64, num_bytes: Int32, barrier: Int32, policy: Int64 | None = None
) -> None:
    """Start copying global memory to shared memory; its bytes count on the barrier at the end.

    Both addresses and the size are multiples of 16. One thread starts one copy.
    """
    copy = "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes"
    arguments = [to, source, num_bytes, barrier]
    if policy is None:
        inline_ptx(f"{copy} [{{$r0}}], [{{$r1}}], {{$r2}}, [{{$r3}}];", read_only_args=arguments)
    else:
        inline_ptx(
            f"{copy}.L2::cache_hint [{{$r0}}], [{{$r1}}], {{$r2}}, [{{$r3}}], {{$r4}};",
            read_only_args=[*arguments, policy],
        )


def load_global_16_bytes(address: Int64, is_wanted: Int32) -> tuple[Int32, Int32, Int32, Int32]:
    """Sixteen aligned bytes of global memory as words, or zeros where they are not wanted."""
    return inline_ptx(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, {$r1}, 0;\n"
        "mov.b32 {$w0}, 0;\nmov.b32 {$w1}, 0;\nmov.b32 {$w2}, 0;\nmov.b32 {$w3}, 0;\n"
        "@wanted ld.global.v4.b32 {{$w0}, {$w1}, {$w2}, {$w3}}, [{$r0}];\n}",
        write_only_types=[Int32, Int32, Int32, Int32],
        read_only_args=[address, is_wanted],
    )


def load_global_word(address: Int64, is_wanted: Int32) -> Int32:
    """One aligned word of global memory, or zero where it is not wanted."""
    return inline_ptx(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, {$r1}, 0;\nmov.b32 {$w0}, 0;\n"
        "@wanted ld.global.b32 {$w0}, [{$r0}];\n}",
        write_only_types=[Int32],
        read_only_args=[address, is_wanted],
    )


def mma_bf16(a: tuple, b: tuple, c: list) -> list:
    """c + A B^T on the tensor cores: A 16 x 16 and B 8 x 16 bf16, c 16 x 8 fp32, as mma.sync does.

    With lane = 4 g + t: a holds (row, pair of columns) (g, t), (g + 8, t), (g, t + 4),
    (g + 8, t + 4); b (g, t), (g, t + 4); c (row, column) (g, 2t), (g, 2t + 1), (g + 8, 2t),
    (g + 8, 2t + 1).
    """
    return list(
        inline_ptx(
            "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{$w0}, {$w1}, {$w2}, {$w3}},"
            " {{$r0}, {$r1}, {$r2}, {$r3}}, {{$r4}, {$r5}}, {{$r6}, {$r7}, {$r8}, {$r9}};",
            write_only_types=[Float32] * 4,
            read_only_args=[*a, *b, *c],
        )
    )


def unpack_bf16(pair: Int32) -> tuple[Float32, Float32]:
    """The two bf16 of a word, the one at the lower address first.

    Assembly, because the compiler would rather keep what it unpacked than unpack it again.
    """
    return inline_ptx(
        "shl.b32 {$w0}, {$r0}, 16;\nand.b32 {$w1}, {$r0}, 0xffff0000;",
        write_only_types=[Float32, Float32],
        read_only_args=[pair],
    )


def pack_bf16(first: Float32, second: Float32) -> Int32:
    """Two floats rounded to bf16, the first one at the lower address."""
    return inline_ptx(
        "cvt.rn.bf16x2.f32 {$w0}, {$r1}, {$r0};",
        write_only_types=[Int32],
        read_only_args=[first, second],
    )


def multiply_bf16(pair: Int32, other: Int32) -> Int32:
    """Products of two pairs of bf16, each rounded to bf16."""
    return inline_ptx(
        "mul.rn.bf16x2 {$w0}, {$r0}, {$r1};",
        write_only_types=[Int32],
        read_only_args=[pair, other],
    )


def next_ticket(address: Int64) -> Int32:
    """Add one to a counter in global memory; what it was."""
    return inline_ptx(
        "atom.relaxed.gpu.global.add.u32 {$w0}, [{$r0}], 1;",
        write_only_types=[Int32],
        read_only_args=[address],
    )


def sum_of_squares(words: Sequence[Int32]) -> Float32:
    """Sum of the squares of pairs of bf16, in their order."""
    total = Float32(0.0)
    for word in words:
        for value in unpack_bf16(word):
            total += value * value
    return total


def norm_bf16(word: Int32, norm_word: Int32, scale: Float32) -> Int32:
    """A pair of bf16 times its row's scale, rounded, times the norm's weight, rounded."""
    first, second = unpack_bf16(word)
    return multiply_bf16(pack_bf16(first * scale, second * scale), norm_word)


def reciprocal_sqrt(value: Float32) -> Float32:
    """rsqrt as torch computes it on the GPU."""
    return inline_ptx(
        "rsqrt.approx.f32 {$w0}, {$r0};", write_only_types=[Float32], read_only_args=[value]
    )
