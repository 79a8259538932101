"""Router logits of few tokens in CuTe DSL, and the norm before them: one launch.

A block takes a few experts and whole rows: it asks for their weights, waits for the kernels ahead,
loads all tokens, norms them, and adds the products up in one order that does not depend on the
number of tokens. Every block norms every token, which costs less than another launch; the first
blocks store a normed token each, for the experts.

Dependents are let in at once: they ask for weights, and wait for this kernel, so for all ahead,
before they read what was computed.

Shape legend: M tokens, C hidden size, E experts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32, Int32, Int64
from cutlass.cute.arch import inline_ptx
from cutlass.memory import SmemAllocator

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.device import WARP
from glm_compile.ops._cute.fakes import matrix, vector
from glm_compile.ops._cute.stream import (
    load_global_16_bytes,
    norm_bf16,
    reciprocal_sqrt,
    sum_of_squares,
    unpack_bf16,
)
from glm_compile.ops.moe.config import MAX_CUTE_TOKENS

# Threads of a block, columns of a thread at a time.
THREADS = 256
VECTOR = 8
# Tokens that are held in registers.
TOKENS = MAX_CUTE_TOKENS
_WARPS = THREADS // WARP


@dataclass(frozen=True)
class LogitsVariant:
    """What the kernel is specialised for.

    Attributes:
        num_columns: C.
        is_wide: the router's weight is fp32, else bf16.
        has_norm: x is normed first.
        use_pdl: start before the kernels ahead have ended.
    """

    num_columns: int
    is_wide: bool
    has_norm: bool
    use_pdl: bool = True

    @property
    def num_parts(self) -> int:
        """Vectors of a row that a thread holds."""
        return -(-self.num_columns // (THREADS * VECTOR))

    @property
    def num_experts(self) -> int:
        """Experts of a block: few blocks leave other multiprocessors to the kernel behind."""
        return 2 if self.is_wide else 4


class LogitsKernel:
    """One variant of the kernel; `__call__` is its launcher."""

    def __init__(self, variant: LogitsVariant) -> None:
        self.v = variant

    @cute.jit
    def __call__(
        self,
        x: cute.Tensor,
        norm_weight: cute.Tensor | None,
        weight: cute.Tensor,
        normed: cute.Tensor | None,
        logits: cute.Tensor,
        counters: cute.Tensor,
        eps: Float32,
        stream: Any,
    ) -> None:
        self.kernel(x, norm_weight, weight, normed, logits, counters, eps).launch(
            grid=((weight.shape[0] + self.v.num_experts - 1) // self.v.num_experts, 1, 1),
            block=(THREADS, 1, 1),
            stream=stream,
            use_pdl=self.v.use_pdl,
        )

    @cute.kernel
    def kernel(
        self,
        x: cute.Tensor,
        norm_weight: Any,
        weight: cute.Tensor,
        normed: Any,
        logits: cute.Tensor,
        counters: cute.Tensor,
        eps: Float32,
    ) -> None:
        v = self.v
        num_experts = v.num_experts
        tid, _, _ = cute.arch.thread_idx()
        block, _, _ = cute.arch.block_idx()
        num_blocks, _, _ = cute.arch.grid_dim()
        warp = cute.arch.make_warp_uniform(cute.arch.warp_idx())
        lane = cute.arch.lane_idx()
        cute.arch.griddepcontrol_launch_dependents()
        allocator = SmemAllocator()
        # Sums of the warps: squares of the tokens, products of the tokens with the experts.
        squares = allocator.allocate_tensor(Float32, cute.make_layout(TOKENS * _WARPS), 16)
        sums = allocator.allocate_tensor(
            Float32, cute.make_layout(TOKENS * num_experts * _WARPS), 16
        )
        num_tokens = x.shape[0]
        columns = [(part * THREADS + tid) * VECTOR for part in range(v.num_parts)]
        is_column = [Int32(column < v.num_columns) for column in columns]
        parts = range(v.num_parts)
        weights = [
            [
                self._load_weight(weight, block * num_experts + e, columns[p], is_column[p])
                for p in parts
            ]
            for e in range(num_experts)
        ]
        norm_words = [(Int32(0),) * 4 for _ in parts]
        if cutlass.const_expr(v.has_norm):
            norm_words = [
                load_global_16_bytes(
                    norm_weight.iterator.toint() + Int64(columns[p]) * 2, is_column[p]
                )
                for p in parts
            ]
        cute.arch.griddepcontrol_wait()
        if block == 0 and tid < counters.shape[0]:
            counters[tid] = Int32(0)
        tokens = [
            [
                load_global_16_bytes(
                    x.iterator.toint() + (Int64(m) * Int64(x.stride[0]) + Int64(columns[p])) * 2,
                    is_column[p] & Int32(m < num_tokens),
                )
                for p in parts
            ]
            for m in range(TOKENS)
        ]
        scales = [Float32(1.0) for _ in range(TOKENS)]
        if cutlass.const_expr(v.has_norm):
            for m in cutlass.range_constexpr(TOKENS):
                if m < num_tokens:
                    square = _warp_sum(
                        sum_of_squares([word for part in tokens[m] for word in part])
                    )
                    if lane == 0:
                        squares[m * _WARPS + warp] = square
            cute.arch.sync_threads()
            for m in cutlass.range_constexpr(TOKENS):
                square = squares[m * _WARPS]
                for w in cutlass.range_constexpr(1, _WARPS):
                    square += squares[m * _WARPS + w]
                scales[m] = reciprocal_sqrt(square * (1.0 / v.num_columns) + eps)
        for m in cutlass.range_constexpr(TOKENS):
            if m < num_tokens:
                words = self._norm(tokens[m], norm_words, scales[m])
                if cutlass.const_expr(v.has_norm):
                    # Blocks store a token each, or several where they are few.
                    is_own = Int32(block == m % num_blocks)
                    for p in cutlass.range_constexpr(v.num_parts):
                        address = (
                            normed.iterator.toint()
                            + (Int64(m) * Int64(normed.stride[0]) + Int64(columns[p])) * 2
                        )
                        _store_16_bytes(address, words[p], is_column[p] & is_own)
                for e in cutlass.range_constexpr(num_experts):
                    total = _warp_sum(_dot(words, weights[e]))
                    if lane == 0:
                        sums[(m * num_experts + e) * _WARPS + warp] = total
        cute.arch.sync_threads()
        expert = block * num_experts + tid % num_experts
        if tid < num_tokens * num_experts and expert < weight.shape[0]:
            total = sums[tid * _WARPS]
            for w in cutlass.range_constexpr(1, _WARPS):
                total += sums[tid * _WARPS + w]
            logits[tid // num_experts, expert] = total

    def _load_weight(self, weight, expert, column, is_column) -> list[Any]:
        """Words of a vector of an expert's row: fp32, or pairs of bf16."""
        size = 4 if self.v.is_wide else 2
        is_wanted = is_column & Int32(expert < weight.shape[0])
        row = Int64(expert) * Int64(weight.stride[0]) + Int64(column)
        address = weight.iterator.toint() + row * size
        words = list(load_global_16_bytes(address, is_wanted))
        if self.v.is_wide:
            words += load_global_16_bytes(address + 16, is_wanted)
        return words

    def _norm(self, words, norm_words, scale):
        """A token's words, normed: rounded, times the norm's weight, rounded again."""
        if not self.v.has_norm:
            return words
        return [
            [norm_bf16(word, norm_word, scale) for word, norm_word in zip(*vectors)]
            for vectors in zip(words, norm_words)
        ]


def _dot(words: list, weights: list) -> Float32:
    """Products of a token's words with an expert's, in the order of the columns."""
    total = Float32(0.0)
    for part, factors in zip(words, weights):
        wide = [value for word in part for value in unpack_bf16(word)]
        if len(factors) == VECTOR:
            values = [factor.bitcast(Float32) for factor in factors]
        else:
            values = [value for factor in factors for value in unpack_bf16(factor)]
        for value, factor in zip(wide, values):
            total += value * factor
    return total


def _warp_sum(value: Float32) -> Float32:
    """Sum over the lanes, the same in all of them."""
    for step in (16, 8, 4, 2, 1):
        value += cute.arch.shuffle_sync_bfly(value, step)
    return value


def _store_16_bytes(address: Int64, words: Any, is_wanted: Int32) -> None:
    inline_ptx(
        "{\n.reg .pred wanted;\nsetp.ne.s32 wanted, {$r5}, 0;\n"
        "@wanted st.global.v4.b32 [{$r0}], {{$r1}, {$r2}, {$r3}, {$r4}};\n}",
        read_only_args=[address, *words, is_wanted],
    )


def compile_logits(variant: LogitsVariant, arch: str, options: str = "") -> Any:
    """Compile one variant; see `compile_kernel`."""

    return compile_kernel(
        LogitsKernel(variant),
        matrix(BFloat16, 1, 16, 8),
        vector(BFloat16, 16) if variant.has_norm else None,
        matrix(Float32, 1, 16, 4) if variant.is_wide else matrix(BFloat16, 1, 16, 8),
        matrix(BFloat16, 1, 16, 8) if variant.has_norm else None,
        matrix(Float32, 1, 4),
        vector(Int32, 4),
        Float32(0.0),
        arch=arch,
        options=options,
    )


_compiled = functools.cache(compile_logits)


def run_logits(
    x_MC: torch.Tensor,
    norm_weight_C: torch.Tensor | None,
    eps: float,
    weight_EC: torch.Tensor,
    normed_MC: torch.Tensor,
    logits_ME: torch.Tensor,
    counters: torch.Tensor,
) -> None:
    """Launch the kernel; `normed_MC` is written where there is a norm, counters are set to 0."""
    is_wide, has_norm = weight_EC.dtype == torch.float32, norm_weight_C is not None
    variant = LogitsVariant(x_MC.shape[1], is_wide, has_norm)
    run = _compiled(variant, arch_of(x_MC.device))
    normed = normed_MC if has_norm else None
    run(x_MC, norm_weight_C, weight_EC, normed, logits_ME, counters, eps)
