"""Experts, router and whole MoE layers of the release, few tokens. Weights are cold.

    pytest tests/benchmarks/test_moe_benchmark.py --benchmark-enable

The library's experts are torch's grouped product, as transformers uses it. A table ends the run:
microseconds, times the library's, and how much of the distinct experts' byte floor is reached. A
layer (norm, router, routed and shared expert, sums) is compared with its steps as ops of their own.

Shape legend: M tokens, K experts of a token, E experts, C hidden size, I intermediate size.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm_compile.ops.moe import moe_experts, moe_layer, moe_router
from glm_compile.ops.moe.reference import moe_experts_grouped
from glm_compile.ops.rms_norm import rms_norm
from tests.benchmarks.conftest import cold_copies, device, printed, time_replays

# Without a GPU the benchmark only proves that it runs.
E, C, I, K = (256, 6144, 2048, 8) if device() == "cuda" else (8, 64, 32, 2)  # noqa: E741


@pytest.fixture(scope="module")
def experts() -> tuple[torch.Tensor, torch.Tensor]:
    """gate_up and down: one layer's, of which each call reads other experts."""
    weights = (
        torch.empty(shape, device=device(), dtype=torch.bfloat16)
        for shape in ((E, 2 * I, C), (E, C, I))
    )
    gate_up, down = (w.normal_(0, w.shape[2] ** -0.5) for w in weights)
    return gate_up, down


def _line(
    bandwidth: float | None,
    name: str,
    M: int,
    distinct: float,
    ours: float,
    library: float,
    num_bytes: float,
) -> str:
    floor = f"{num_bytes / bandwidth / ours:5.0%} of the floor" if bandwidth else ""
    return (
        f"{name} M={M:2} ({distinct:5.1f} experts): {ours * 1e6:7.1f} us, "
        f"{'steps apart' if name == 'layer' else 'library'} {library * 1e6:7.1f}, "
        f"{library / ours:.2f}x, {floor}"
    )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (what, M, distinct experts, our seconds, the others', bytes), printed at the end."""
    yield from printed(request, _line)


def random_calls(M: int, number: int) -> list[tuple[torch.Tensor, ...]]:
    """(x, router weights, ids): experts of a token are distinct, otherwise random."""
    return [
        (
            torch.randn(M, C, device=device()).bfloat16(),
            torch.rand(M, K, device=device()),
            torch.rand(M, E, device=device()).topk(K).indices,
        )
        for _ in range(number)
    ]


@pytest.mark.parametrize("M", [1, 2, 4, 6, 8, 16, 32])
@pytest.mark.parametrize("backend", [None, "cute", "triton"])
def test_moe_experts(
    gpu_bench: Any, benchmark: Any, table: list, experts: Any, M: int, backend: str | None
) -> None:
    if device() == "cpu" and backend:
        pytest.skip("the kernels need a CUDA device")
    if backend == "triton" and M > 16:
        pytest.skip("the kernel takes 16 tokens")
    benchmark.group = f"moe_experts M={M}"
    inputs = random_calls(M, 6)
    distinct = statistics.mean(ids.unique().numel() for _, _, ids in inputs)
    num_bytes = distinct * 3 * I * C * 2
    output = gpu_bench(
        lambda x, weights, ids: moe_experts(x, weights, ids, *experts, backend=backend),
        inputs,
        bytes_moved=num_bytes,
        note=f"{distinct:.1f} distinct experts, cold",
    )
    if device() == "cuda" and not benchmark.disabled and backend is None:
        library = statistics.median(
            time_replays(lambda *call: moe_experts_grouped(*call, *experts), inputs)
        )
        ours = benchmark.extra_info["median_us"] * 1e-6
        benchmark.extra_info["times_library"] = library / ours
        table.append(("experts", M, distinct, ours, library, num_bytes))
    assert output.shape == (M, C)


@pytest.mark.parametrize("M", [1, 2, 4, 6, 8])
@pytest.mark.parametrize("backend", [None, "cute", "separate"])
def test_moe_layer(
    gpu_bench: Any, benchmark: Any, table: list, experts: Any, M: int, backend: str | None
) -> None:
    if device() == "cpu" and backend == "cute":
        pytest.skip("the kernels need a CUDA device")
    benchmark.group = f"moe_layer M={M}"

    def weight(*shape: int) -> torch.Tensor:
        return torch.randn(shape, device=device(), dtype=torch.bfloat16) * shape[-1] ** -0.5

    x = torch.randn(M, C, device=device()).bfloat16()
    norm_weight = torch.ones(C, device=device(), dtype=torch.bfloat16)
    bias = torch.randn(E, device=device()) * 0.1
    layers = [
        (weight(E, C), weight(I, C), weight(I, C), weight(C, I))
        for _ in range(4 if device() == "cuda" else 1)
    ]
    normed = rms_norm(x, norm_weight, eps=1e-5)
    chosen = [moe_router(normed, layer[0], bias, K)[1] for layer in layers]
    distinct = statistics.mean(ids.unique().numel() for ids in chosen)
    num_bytes = (distinct + 1) * 3 * I * C * 2 + 2 * E * C

    def run(router: torch.Tensor, *shared: torch.Tensor, as_: str | None = backend) -> torch.Tensor:
        norm = {"norm_weight_C": norm_weight, "eps": 1e-5}
        return moe_layer(
            x, router, bias, K, *experts, *shared, residual_MC=x, **norm, scale=2.5, backend=as_
        )

    output = gpu_bench(run, layers, bytes_moved=num_bytes, note=f"{distinct:.1f} distinct experts")
    if device() == "cuda" and not benchmark.disabled and backend is None:
        apart = statistics.median(time_replays(lambda *a: run(*a, as_="separate"), layers))
        ours = benchmark.extra_info["median_us"] * 1e-6
        benchmark.extra_info["times_separate"] = apart / ours
        table.append(("layer", M, distinct, ours, apart, num_bytes))
    assert output.shape == (M, C)


@pytest.mark.parametrize("M", [1, 6, 16])
@pytest.mark.parametrize("backend", [None, "reference"])
def test_moe_router(gpu_bench: Any, benchmark: Any, M: int, backend: str | None) -> None:
    benchmark.group = f"moe_router M={M}"
    x = torch.randn(M, C, device=device()).bfloat16()
    bias = torch.randn(E, device=device()) * 0.1
    inputs = [(torch.randn(E, C, device=device()),) for _ in range(cold_copies(4 * E * C))]
    weights, ids = gpu_bench(
        lambda weight: moe_router(x, weight, bias, K, scale=2.5, backend=backend),
        inputs,
        bytes_moved=4 * E * C,
        note="weight cold",
    )
    assert weights.shape == ids.shape == (M, K)
