"""bf16 linears of the release, few rows, beside the library's. Weights are cold, x is hot.

    pytest tests/benchmarks/test_bf16_linear_benchmark.py --benchmark-enable

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_compile.ops.bf16_linear import bf16_linear
from tests.benchmarks.conftest import cold_copies, device

# (N, K) on one device: the merged projections, o_proj, a dense MLP, the head.
RELEASE_SHAPES = [
    (2784, 6144),
    (2624, 6144),
    (20480, 2048),
    (6144, 16384),
    (24576, 6144),
    (6144, 12288),
    (154880, 6144),
]
# Without a GPU the benchmark only proves that it runs.
SMALL_SHAPES = [(96, 128)]


@pytest.mark.parametrize("N, K", RELEASE_SHAPES if device() == "cuda" else SMALL_SHAPES)
@pytest.mark.parametrize("M", [1, 2, 4, 6, 8, 16])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_bf16_linear(gpu_bench: Any, benchmark: Any, N: int, K: int, M: int, backend: str) -> None:
    if device() == "cpu" and backend == "triton":
        pytest.skip("Triton needs a CUDA device")
    benchmark.group = f"bf16_linear N={N} K={K} M={M}"
    x = torch.randn(M, K, device=device()).bfloat16()
    weights = [
        torch.randn(N, K, device=device(), dtype=torch.bfloat16)
        for _ in range(cold_copies(2 * N * K))
    ]
    output = gpu_bench(
        lambda weight: bf16_linear(x, weight, backend=backend),
        [(weight,) for weight in weights],
        bytes_moved=2 * (N * K + M * K + M * N),
        note="weights cold",
    )
    assert output.shape == (M, N)
