"""The absorbed products of a layer, few rows, beside the library's. Weights cold, queries hot.

Called as a compiled layer calls them: queries are parts of a projection's output [B, S, H, N + P],
and the first product rotates them.

    pytest tests/benchmarks/test_mla_absorb_benchmark.py --benchmark-enable

A table ends the run: microseconds of both products of a layer, times torch's batched products over
the same views (without a rotation), the byte floor and how much of it is reached. Launches follow
each other by programmatic dependent launch where a backend has it, so weights of one are read while
the one ahead still works.

Shape legend: R rows, H heads, N nope dim of a query, P rope dim, L rank of the latent, V value dim.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm_compile.ops.mla_absorb import absorb_query, project_values
from tests.benchmarks.conftest import cold_copies, device, printed, time_replays

# Without a GPU the benchmark only proves that it runs.
N, P, L, V = (192, 64, 512, 256) if device() == "cuda" else (24, 8, 32, 16)
HEADS = (64, 32, 16, 8) if device() == "cuda" else (4,)
# Seconds that both products of a whole layer may take with 6 rows, by device.
LIMITS = {"NVIDIA H200": 10e-6}


def _line(
    bandwidth: float | None,
    product: str,
    H: int,
    R: int,
    backend: str,
    ours: float,
    library: float,
    num_bytes: int,
) -> str:
    floor = num_bytes / bandwidth if bandwidth else 0.0
    return (
        f"{product:6} H={H:2} R={R:3} {backend:9}: {ours * 1e6:7.2f} us, "
        f"library {library * 1e6:7.2f}, {library / ours:.2f}x"
        + (f", floor {floor * 1e6:6.2f}, {floor / ours:4.0%} of it" if bandwidth else "")
    )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (product, H, R, backend, our seconds, the library's, bytes), printed at the end."""
    yield from printed(request, _line)


@pytest.fixture(scope="module")
def library_seconds() -> dict[tuple[str, int, int], float]:
    """What the library takes for (product, H, R), measured once for all backends."""
    return {}


@pytest.mark.parametrize("backend", [None, "triton", "reference"])
@pytest.mark.parametrize("product", ["both", "query", "values"])
@pytest.mark.parametrize("H", HEADS)
@pytest.mark.parametrize("R", [1, 6, 16, 64])
def test_mla_absorb(
    gpu_bench: Any,
    benchmark: Any,
    table: list,
    library_seconds: dict[tuple[str, int, int], float],
    R: int,
    H: int,
    product: str,
    backend: str | None,
) -> None:
    if device() == "cpu" and backend == "triton":
        pytest.skip("Triton needs a CUDA device")
    benchmark.group = f"mla_absorb {product} H={H} R={R}"

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=device(), dtype=torch.bfloat16)

    q_nope, q_rot = random(1, R, H, N + P).split([N, P], -1)
    angles = torch.rand(1, R, P // 2, device=device()).repeat(1, 1, 2)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    o = random(R, H, L)
    weight_bytes = 2 * H * (N + V) * L
    weights = [(random(H * (N + V), L),) for _ in range(cold_copies(weight_bytes))]

    def ours(weight: torch.Tensor) -> list[torch.Tensor]:
        outputs = []
        if product != "values":
            outputs.append(absorb_query(q_nope, q_rot, weight, cos=cos, sin=sin, backend=backend))
        if product != "query":
            outputs.append(project_values(o, weight, num_values=V, backend=backend))
        return outputs

    def library(weight: torch.Tensor) -> list[torch.Tensor]:
        """Batched products; what becomes of q_rot is not in it."""
        weight_HFL = weight.view(H, N + V, L)
        outputs = []
        if product != "values":
            outputs.append(torch.bmm(q_nope[0].transpose(0, 1), weight_HFL[:, :N]))
        if product != "query":
            outputs.append(torch.bmm(o.transpose(0, 1), weight_HFL[:, N:].mT))
        return outputs

    width = {"both": N + V, "query": N, "values": V}[product]
    num_bytes = 2 * H * width * L
    outputs = gpu_bench(ours, weights, bytes_moved=num_bytes, note="weights cold")
    if device() == "cuda" and not benchmark.disabled:
        median = benchmark.extra_info["median_us"] * 1e-6
        key = (product, H, R)
        if key not in library_seconds:
            library_seconds[key] = statistics.median(time_replays(library, weights))
        of_library = library_seconds[key]
        benchmark.extra_info["times_library"] = of_library / median
        table.append((product, H, R, backend or "default", median, of_library, num_bytes))
        if (product, H, R, backend) == ("both", HEADS[0], 6, None):
            assert median <= LIMITS.get(torch.cuda.get_device_name(), math.inf)
    assert all(output.shape[-3:-1] == (R, H) for output in outputs)
