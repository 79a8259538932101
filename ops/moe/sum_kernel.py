"""The last kernel of an MoE layer whose blocks have drawn their tiles, in CuTe DSL for sm_90a.

It adds up what `cute_kernel` has left: one product a pair, one a token from the shared expert.

Shape legend: M tokens, K experts of a token, P = M * K pairs, C hidden size.
"""

from __future__ import annotations

import functools
from typing import Any

import cutlass
import cutlass.cute as cute
import torch
from cutlass import BFloat16, Float32

from glm_compile.ops._cute import arch_of, compile_kernel
from glm_compile.ops._cute.fakes import matrix, strided_matrix

# Threads of a block of the sum, a column each.
_SUM_THREADS = 128


class SumKernel:
    """Weighted sum of each token's products, plus what the shared expert gives, plus the residual.

    Each summand is rounded, and each sum: what plain torch does, in its order.
    """

    def __init__(self, num_top: int, has_shared: bool, has_residual: bool) -> None:
        self.num_top = num_top
        self.has_shared = has_shared
        self.has_residual = has_residual

    @cute.jit
    def __call__(
        self,
        products: cute.Tensor,
        chosen: cute.Tensor,
        residual: cute.Tensor | None,
        output: cute.Tensor,
        stream: Any,
    ) -> None:
        self.kernel(products, chosen, residual, output).launch(
            grid=((output.shape[1] + _SUM_THREADS - 1) // _SUM_THREADS, output.shape[0], 1),
            block=(_SUM_THREADS, 1, 1),
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(
        self,
        products: cute.Tensor,
        chosen: cute.Tensor,
        residual: Any,
        output: cute.Tensor,
    ) -> None:
        tid, _, _ = cute.arch.thread_idx()
        block, token, _ = cute.arch.block_idx()
        column = block * _SUM_THREADS + tid
        cute.arch.griddepcontrol_launch_dependents()
        cute.arch.griddepcontrol_wait()
        if column < output.shape[1]:
            rows = [token * self.num_top + k for k in range(self.num_top)]
            # All loads come first: what is not wanted is thrown away.
            values = [products[row, column] for row in rows]
            counts = [chosen[0, row] for row in rows]
            weights = [chosen[1, row] for row in rows]
            shared = Float32(0.0)
            if cutlass.const_expr(self.has_shared):
                shared = products[output.shape[0] * self.num_top + token, column]
            kept = Float32(0.0)
            if cutlass.const_expr(self.has_residual):
                kept = Float32(residual[token, column])
            total = Float32(0.0)
            for k in cutlass.range_constexpr(self.num_top):
                if counts[k] > 0.0:
                    total += weights[k] * values[k]
            value = BFloat16(total)
            if cutlass.const_expr(self.has_shared):
                value = BFloat16(Float32(value) + Float32(BFloat16(shared)))
            if cutlass.const_expr(self.has_residual):
                value = BFloat16(kept + Float32(value))
            output[token, column] = value


def compile_sum(
    num_top: int, has_shared: bool, has_residual: bool, arch: str, options: str = ""
) -> Any:
    """Compile the last kernel; see `compile_kernel`."""
    return compile_kernel(
        SumKernel(num_top, has_shared, has_residual),
        matrix(Float32, 1, 16, 4),
        matrix(Float32, 1, 4),
        strided_matrix(BFloat16) if has_residual else None,
        matrix(BFloat16, 1, 16, 8),
        arch=arch,
        options=options,
    )


_compiled_sum = functools.cache(compile_sum)


def run_sum(
    products: torch.Tensor,
    chosen: torch.Tensor,
    num_top: int,
    residual: torch.Tensor | None,
    output_MC: torch.Tensor,
) -> None:
    """Launch the last kernel, behind one that drew its tiles."""
    num_tokens = output_MC.shape[0]
    has_shared = products.shape[0] > num_tokens * num_top
    arch = arch_of(output_MC.device)
    run = _compiled_sum(num_top, has_shared, residual is not None, arch)
    run(products, chosen, residual, output_MC)
