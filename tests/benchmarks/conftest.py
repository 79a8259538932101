"""`gpu_bench`: pytest-benchmark with CUDA-graph replays for kernels of a few microseconds.

An event pair around one launch of 5 us measures mostly the launch. Here many calls are captured in
one graph, over inputs in rotation where real life finds them cold, and a sample is one replay
divided by its calls. Without a GPU the same benchmark runs on the CPU's clock, and with
`--benchmark-disable` once as a test.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch

from glm_compile.bench import READ_BANDWIDTH

CALLS_PER_GRAPH = 24
REPLAYS, LEAST_REPLAYS = 50, 5
# Seconds of replays for a case: those that take long vary little.
REPLAY_SECONDS = 0.2
# Calls of so many seconds each are in a graph no more often than there are inputs.
LONG_CALL = 5e-3
CPU_ROUNDS = 5


def device() -> str:
    """Where benchmarks run."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def cold_copies(bytes_each: int) -> int:
    """How many inputs in rotation make three times the L2 cache: each call finds its own cold."""
    if device() == "cpu":
        return 1
    l2_bytes = torch.cuda.get_device_properties(0).L2_cache_size
    return max(1, math.ceil(3 * l2_bytes / bytes_each))


def printed(
    request: pytest.FixtureRequest, line: Callable[..., str]
) -> Iterator[list[tuple[Any, ...]]]:
    """Body of a fixture: a list of rows, printed at the end as `line(bandwidth, *row)` says.

    Args:
        request: the fixture's own.
        line: gets the GPU's bytes a second, or None where that is not known.
    """
    rows: list[tuple[Any, ...]] = []
    yield rows
    if not rows:
        return
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    bandwidth = READ_BANDWIDTH.get(torch.cuda.get_device_name())
    reporter.write_line("")
    for row in rows:
        reporter.write_line(line(bandwidth, *row))


def time_replays(fn: Callable[..., Any], inputs: Sequence[tuple]) -> list[float]:
    """Seconds a call, one sample a replay of a graph that holds every input at least once."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())

    def call(arguments: tuple) -> None:
        with torch.cuda.stream(stream):
            fn(*arguments)

    for arguments in inputs:
        call(arguments)
    # Launches count in this one; they are far from being long.
    is_long = _event_seconds(lambda: call(inputs[0]), stream) > LONG_CALL
    rounds = 1 if is_long else math.ceil(CALLS_PER_GRAPH / len(inputs))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for arguments in [*inputs] * rounds:
            fn(*arguments)
    replays = int(REPLAY_SECONDS / _event_seconds(graph.replay))
    replays = min(REPLAYS, max(LEAST_REPLAYS, replays))
    for _ in range(replays // 10):
        graph.replay()
    events = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(replays)]
    for start, end in events:
        start.record()
        graph.replay()
        end.record()
    torch.cuda.synchronize()
    calls = rounds * len(inputs)
    return [start.elapsed_time(end) * 1e-3 / calls for start, end in events]


def _event_seconds(fn: Callable[[], Any], stream: torch.cuda.Stream | None = None) -> float:
    """Seconds on the GPU of one call that works on `stream`."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record(stream)
    fn()
    end.record(stream)
    end.synchronize()
    return start.elapsed_time(end) * 1e-3


def time_on_cpu(fn: Callable[..., Any], inputs: Sequence[tuple]) -> list[float]:
    """Seconds a call by the host's clock."""
    fn(*inputs[0])
    samples = []
    for i in range(CPU_ROUNDS):
        start = time.perf_counter()
        fn(*inputs[i % len(inputs)])
        samples.append(time.perf_counter() - start)
    return samples


@pytest.fixture
def gpu_bench(benchmark: Any) -> Callable[..., Any]:
    """Return `run(fn, inputs=[()], *, bytes_moved=None, flops=None, note="")`.

    `inputs` are argument tuples: one for data that is hot in real life, `cold_copies` of them for
    cold data. The table's times are a call's; `extra_info` holds the median, the byte floor and how
    many times the floor it takes. Returns `fn(*inputs[0])`.
    """

    def run(
        fn: Callable[..., Any],
        inputs: Sequence[tuple] = ((),),
        *,
        bytes_moved: float | None = None,
        flops: float | None = None,
        note: str = "",
    ) -> Any:
        if benchmark.disabled:
            return benchmark(fn, *inputs[0])
        is_cuda = device() == "cuda"
        samples = (time_replays if is_cuda else time_on_cpu)(fn, inputs)
        # The plugin has no public way in for times that it did not take itself.
        benchmark._mode = "gpu_bench"
        stats = benchmark._make_stats(1)
        for sample in samples:
            stats.update(sample)
        median = statistics.median(samples)
        benchmark.extra_info.update(_facts(median, len(inputs), bytes_moved, flops), note=note)
        return fn(*inputs[0])

    return run


def _facts(
    median: float, num_inputs: int, num_bytes: float | None, flops: float | None
) -> dict[str, Any]:
    is_cuda = device() == "cuda"
    name = torch.cuda.get_device_name() if is_cuda else "CPU"
    facts: dict[str, Any] = {
        "device": name,
        "timer": "graph replay" if is_cuda else "perf_counter",
        "inputs_in_rotation": num_inputs,
        "median_us": median * 1e6,
        "torch": torch.__version__,
    }
    bandwidth = READ_BANDWIDTH.get(name)
    if num_bytes:
        facts["GB_per_s"] = num_bytes / median / 1e9
        if bandwidth:
            facts["floor_us"] = num_bytes / bandwidth * 1e6
            facts["times_floor"] = median * bandwidth / num_bytes
    if flops:
        facts["TFLOP_per_s"] = flops / median / 1e12
    return facts
