r"""bf16 linears of the release, few rows, beside the library's. Weights are cold, x is hot.

    pytest tests/benchmarks/test_bf16_linear_benchmark.py --benchmark-enable \
        --benchmark-json linears.json
    python -m tests.benchmarks.plot_bf16_linear linears.json examples/bf16_linear_speedup.png

A table ends the run: microseconds, times the library's, and how much of the byte floor is reached.
Launches follow each other by programmatic dependent launch where a backend has it.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from glm_compile.ops.bf16_linear import bf16_linear
from glm_compile.ops.bf16_linear.tune import SHAPES
from glm_compile.ops.rms_norm_linear import rms_norm_linear
from tests.benchmarks.conftest import cold_copies, device, printed, time_replays

RELEASE_SHAPES = [shape for of_size in SHAPES.values() for shape in of_size]
# Without a GPU the benchmark only proves that it runs.
SMALL_SHAPES = [(96, 128)]


def _line(bandwidth: float | None, N: int, K: int, M: int, ours: float, library: float) -> str:
    floor = f"{2 * N * K / bandwidth / ours:5.0%} of the floor" if bandwidth else ""
    return (
        f"{N:6} x {K:5} M={M:2}: {ours * 1e6:7.2f} us, library {library * 1e6:7.2f}, "
        f"{library / ours:.2f}x, {floor}"
    )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (N, K, M, our seconds, the library's) that are printed at the end."""
    yield from printed(request, _line)


@pytest.mark.parametrize("N, K", RELEASE_SHAPES if device() == "cuda" else SMALL_SHAPES)
@pytest.mark.parametrize("M", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize("backend", [None, "triton"])
def test_bf16_linear(
    gpu_bench: Any, benchmark: Any, table: list, N: int, K: int, M: int, backend: str | None
) -> None:
    if device() == "cpu" and backend == "triton":
        pytest.skip("Triton needs a CUDA device")
    benchmark.group = f"bf16_linear N={N} K={K} M={M}"
    x = torch.randn(M, K, device=device()).bfloat16()
    weights = [
        (torch.randn(N, K, device=device(), dtype=torch.bfloat16),)
        for _ in range(cold_copies(2 * N * K))
    ]
    output = gpu_bench(
        lambda weight: bf16_linear(x, weight, backend=backend),
        weights,
        bytes_moved=2 * (N * K + M * K + M * N),
        note="weights cold",
    )
    if device() == "cuda" and not benchmark.disabled and backend is None:
        library = statistics.median(time_replays(lambda weight: F.linear(x, weight), weights))
        ours = benchmark.extra_info["median_us"] * 1e-6
        facts = {"N": N, "K": K, "M": M, "library_us": library * 1e6}
        benchmark.extra_info.update(facts, times_library=library / ours)
        table.append((N, K, M, ours, library))
    assert output.shape == (M, N)


@pytest.mark.parametrize("M", [1, 6, 16])
@pytest.mark.parametrize("ours", [True, False])
def test_merged_products_of_the_prologue(
    gpu_bench: Any, benchmark: Any, M: int, ours: bool
) -> None:
    """q_a + kv_a + wk + weights_proj, the norm, q_b + wq_b: as a layer with an indexer has them."""
    benchmark.group = f"prologue products M={M}"
    num_hidden, num_merged, num_rank, num_out = (
        (6144, 2784, 2048, 20480) if device() == "cuda" else (128, 96, 64, 80)
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device(), dtype=torch.bfloat16)

    x, norm_weight = random(M, num_hidden), random(num_rank)
    num_bytes = 2 * (num_merged * num_hidden + num_out * num_rank)
    weights = [
        (random(num_merged, num_hidden), random(num_out, num_rank))
        for _ in range(cold_copies(num_bytes))
    ]

    def fused(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        merged = bf16_linear(x, first)
        return rms_norm_linear(merged[:, :num_rank], norm_weight, second, eps=1e-5)

    def apart(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        merged = F.linear(x, first)
        normed = F.rms_norm(merged[:, :num_rank], (num_rank,), norm_weight, 1e-5)
        return F.linear(normed, second)

    output = gpu_bench(
        fused if ours else apart, weights, bytes_moved=num_bytes, note="weights cold"
    )
    assert output.shape == (M, num_out)


@pytest.mark.parametrize("M", [1, 6])
@pytest.mark.parametrize("ours", [True, False])
def test_products_of_a_dense_layer(gpu_bench: Any, benchmark: Any, M: int, ours: bool) -> None:
    """o, the norm, gate and up, SwiGLU, down, the next norm, q_a + kv_a, with both residuals."""
    benchmark.group = f"dense layer products M={M}"
    num_attended, num_hidden, num_inner, num_merged = (
        (16384, 6144, 12288, 2624) if device() == "cuda" else (96, 64, 80, 72)
    )

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device(), dtype=torch.bfloat16)

    attended, residual = random(M, num_attended), random(M, num_hidden)
    norm_weight = random(num_hidden)
    shapes = (
        (num_hidden, num_attended),
        (2 * num_inner, num_hidden),
        (num_hidden, num_inner),
        (num_merged, num_hidden),
    )
    num_bytes = 2 * sum(N * K for N, K in shapes)
    weights = [
        tuple(random(*shape) / shape[1] ** 0.5 for shape in shapes)
        for _ in range(cold_copies(num_bytes))
    ]

    def fused(*layer: torch.Tensor) -> torch.Tensor:
        o, gate_up, down, qkv_a = layer
        hidden = bf16_linear(attended, o, residual=residual)
        inner = rms_norm_linear(hidden, norm_weight, gate_up, eps=1e-5, has_swiglu=True)
        hidden = bf16_linear(inner, down, residual=hidden)
        return rms_norm_linear(hidden, norm_weight, qkv_a, eps=1e-5)

    def apart(*layer: torch.Tensor) -> torch.Tensor:
        o, gate_up, down, qkv_a = layer
        hidden = residual + F.linear(attended, o)
        normed = F.rms_norm(hidden, (num_hidden,), norm_weight, 1e-5)
        gate, up = F.linear(normed, gate_up).chunk(2, dim=-1)
        hidden = hidden + F.linear(F.silu(gate) * up, down)
        return F.linear(F.rms_norm(hidden, (num_hidden,), norm_weight, 1e-5), qkv_a)

    output = gpu_bench(
        fused if ours else apart, weights, bytes_moved=num_bytes, note="weights cold"
    )
    assert output.shape == (M, num_merged)
