"""A decode step of the slice (3 dense and 3 MoE layers of the release) beside transformers'.

    pytest tests/benchmarks/test_slice_benchmark.py --benchmark-enable --benchmark-json slice.json
    python -m tests.benchmarks.plot_slice slice.json examples/slice_step.png

Batch 1, random weights, CUDA-graph replays; `glm` keeps index keys in bf16, `glm-fp8` in FP8.
`inductor` and `eager` are transformers' own step over a StaticCache. The same from the command
line: `glm-compile bench --query-len 6 --cache-len 8192 131072`.

Shape legend: S query tokens, T tokens of the cache.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm_compile import bench
from tests.benchmarks.conftest import device
from tests.tiny_models import tiny_config

IS_GPU = device() == "cuda"
CONTEXTS = [8192, 32_768, 131_072, 524_288, 1_048_576] if IS_GPU else [256]
ROWS = [1, 2, 4, 6] if IS_GPU else [6]
# transformers' step expands the cache to 64 heads: at 1M that alone is 90 GB.
LONGEST_OF_TRANSFORMERS = 524_288


@pytest.fixture(scope="module")
def model() -> Any:
    return bench.make_model(bench.slice_config() if IS_GPU else tiny_config(), device())


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[bench.StepTime]]:
    """Steps that are printed at the end, each beside transformers' under Inductor."""
    times: list[bench.StepTime] = []
    yield times
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    base = {(t.query_len, t.cache_len): t.median_us for t in times if t.backend == "inductor"}
    for t in times:
        other = base.get((t.query_len, t.cache_len))
        is_ours = t.backend.startswith("glm") and t.median_us and other
        ratio = f", {other / t.median_us:.1f}x Inductor's" if is_ours else ""
        reporter.write_line(bench.line(t) + ratio)


@pytest.fixture(scope="module")
def fresh_graphs() -> Any:
    """Forget compiled graphs where another backend or number of query tokens has its turn."""
    turns: list[tuple[str, int]] = [("", 0)]

    def turn(backend: str, query_len: int) -> None:
        if turns[0] != (backend, query_len):
            torch._dynamo.reset()
        turns[0] = backend, query_len

    return turn


@pytest.mark.parametrize("cache_len", CONTEXTS)
@pytest.mark.parametrize("query_len", ROWS)
@pytest.mark.parametrize("backend", bench.BACKENDS)
def test_slice_step(
    benchmark: Any,
    model: Any,
    table: list,
    fresh_graphs: Any,
    backend: str,
    query_len: int,
    cache_len: int,
) -> None:
    if benchmark.disabled and backend != "eager":
        pytest.skip("compiles for half a minute, and tests of the backend do that too")
    if backend in ("inductor", "eager") and cache_len > LONGEST_OF_TRANSFORMERS:
        pytest.skip("64 heads of 1M expanded keys do not fit on a GPU")
    fresh_graphs(backend, query_len)
    benchmark.group = f"slice step S={query_len} T={cache_len}"
    measured = bench.time_step(
        model, backend, query_len=query_len, cache_len=cache_len, keep_graphs=True
    )
    benchmark.extra_info.update(measured.as_dict())
    if not benchmark.disabled:
        table.append(measured)
        stats = benchmark._make_stats(1)
        benchmark._mode = "time_step"
        stats.update((measured.median_us or float("nan")) * 1e-6)
    else:
        benchmark(lambda: None)
    assert measured.median_us is None or measured.median_us > 0
