"""Decoding as the benchmarks measure it: models, calls behind a filled cache, times, traces.

A slice's weights are random, so nearly every draft is rejected and a rate of tokens means nothing;
an iteration's time does not depend on it. Its prompt is never run: a cache with random rows takes
its place.

Shape legend: B batch, S tokens of a step, C hidden, V vocabulary.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import glm_compile
from glm_compile import bench
from glm_compile.generation import api
from glm_compile.generation.loop import DecodingLoop
from glm_compile.mtp import GlmMoeDsaMtp

#: Names of what an iteration is made of, in its order.
PHASES = ("verify", "accept", "draft-extend", "drafts", "relay")
# Kernels that end a phase: greedy drafts end in an argmax, of one launch or two. The name of a
# kernel in CuTe DSL holds its module's.
_ACCEPT, _ARGMAX, _ARGMAX_END = "accept_block_kernel", "row_argmax", "best_part_kernel"
# A graph of fewer kernels is no iteration.
_MIN_KERNELS = 20


def make_slice(device: str, **overrides: Any) -> tuple[Any, GlmMoeDsaMtp]:
    """Slice of the release (`bench.slice_config`) with an MTP layer, random weights in bf16."""
    config = bench.slice_config(
        num_nextn_predict_layers=1, index_share_for_mtp_iteration=True, **overrides
    )
    model = bench.make_model(config, device)
    return model, make_mtp(model)


def make_mtp(model: Any) -> GlmMoeDsaMtp:
    """MTP layer with random weights of the size that `bench.make_model` takes."""
    mtp = GlmMoeDsaMtp(model)
    for name, parameter in mtp.named_parameters():
        if parameter.dim() > 1:
            parameter.data.normal_(0.0, parameter.shape[-1] ** -0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.data.fill_(1.0)
        else:
            parameter.data.zero_()
    for buffer in mtp.buffers():
        buffer.zero_()
    return mtp


class MeasuredLoop(DecodingLoop):
    """Notes how long the host works in each iteration, and how long it waits."""

    last: MeasuredLoop

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.host_s: list[float] = []
        self._waited = 0.0
        MeasuredLoop.last = self

    def _iterate(self) -> None:
        self._waited, start = 0.0, time.perf_counter()
        super()._iterate()
        self.host_s.append(time.perf_counter() - start - self._waited)

    def _read_block(self, slot: int) -> list[list[int]]:
        start = time.perf_counter()
        rows = super()._read_block(slot)
        self._waited += time.perf_counter() - start
        return rows


class FilledLoop(MeasuredLoop):
    """Finds the prompt in the cache: random rows, and random drafts behind them."""

    def _prefill(self) -> None:
        for pages in self.cache._pages():
            pages.normal_()
        prompt, state = self.request.prompt, self.state
        self.cache.set_lengths(prompt.lengths_B)
        vocab_size = self.target.model.config.vocab_size
        logits_B1V = torch.randn(
            self.request.batch_size, 1, vocab_size, device=state.counts_B.device
        ).to(self.cache.dtype)
        block = self.iteration.accept(logits_B1V, prompt.ids_BP[:, :0], self._view())
        self._launch(block, self._random_state(), is_prompt=True)
        if not self.is_overlapped:
            self._settle()
        state.block_BS.random_(0, vocab_size)


@contextlib.contextmanager
def measured(is_filled: bool) -> Iterator[None]:
    """Calls of `generate` meanwhile are measured, behind a filled cache if asked for."""
    original = api.DecodingLoop
    api.DecodingLoop = FilledLoop if is_filled else MeasuredLoop  # type: ignore[misc]
    try:
        yield
    finally:
        api.DecodingLoop = original  # type: ignore[misc]


@dataclass(frozen=True)
class IterationTime:
    """Times of one call's iterations, microseconds.

    Attributes:
        wall_us: of an iteration, all of the decoding divided by their number.
        host_us: the host's own work in it, without waiting for the device; median.
        gpu_us: a captured iteration replayed back to back; None where nothing is captured.
        num_iterations: iterations of the call.
        accept_length: tokens that an iteration added, mean.
        tokens_per_s: new tokens a second, all sequences.
    """

    wall_us: float
    host_us: float
    gpu_us: float | None
    num_iterations: int
    accept_length: float
    tokens_per_s: float


def time_iterations(call: Callable[[], Any], *, is_filled: bool, repeats: int = 3) -> IterationTime:
    """Time a call of `generate` that returns a dict; the best of some repeats, warmed up."""
    times = []
    with measured(is_filled):
        call()
        for _ in range(repeats):
            result = call()
            loop = MeasuredLoop.last
            seconds = result.timings["decode"] / result.num_iterations
            times.append((seconds, statistics.median(loop.host_s), result))
        gpu_us = None if loop.graphed is None else replay_us(loop.graphed)
    seconds, host_s, result = min(times, key=lambda entry: entry[0])
    accept_length = float(result.accept_lengths.float().mean())
    num_rows = result.accept_lengths.shape[1]
    return IterationTime(
        wall_us=seconds * 1e6,
        host_us=host_s * 1e6,
        gpu_us=gpu_us,
        num_iterations=result.num_iterations,
        accept_length=accept_length,
        tokens_per_s=accept_length * num_rows / seconds,
    )


def replay_us(graphed: Any, count: int = 20) -> float | None:
    """Microseconds of a captured iteration, replayed back to back; its rows are finished."""
    captured = [entry[0] for entry in graphed._graphs.values() if entry is not None]
    if not captured:
        return None
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for event in (start, end):
        for _ in range(count):
            captured[-1].replay()
        event.record()
    end.synchronize()
    return start.elapsed_time(end) / count * 1e3


def idle_between(call: Callable[[], Any]) -> tuple[float, float]:
    """(microseconds between an iteration and the next, share of them), medians of one call.

    By events around each replay, without a profiler, which slows the launches of graphs down and so
    makes gaps of its own; the events' own time is in it.
    """
    events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
    replay = torch.cuda.CUDAGraph.replay

    def timed(graph: torch.cuda.CUDAGraph) -> None:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        replay(graph)
        end.record()
        events.append((start, end))

    torch.cuda.CUDAGraph.replay = timed  # type: ignore[method-assign]
    try:
        call()
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]
    torch.cuda.synchronize()
    pairs = list(itertools.pairwise(events[2:]))
    if not pairs:
        raise ValueError("idle_between: too few captured iterations; decode more tokens")
    idle = statistics.median(one[1].elapsed_time(other[0]) for one, other in pairs)
    period = statistics.median(one[0].elapsed_time(other[0]) for one, other in pairs)
    return idle * 1e3, idle / period


# -- traces ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Span:
    """Something that took from `start` to `end`, microseconds."""

    name: str
    start: float
    end: float


@dataclass(frozen=True)
class TracedIteration:
    """One replay of a captured iteration.

    Attributes:
        phases: of `PHASES`; each draft step is one of its own.
        num_kernels: nodes of the graph that ran.
    """

    start: float
    end: float
    phases: list[Span]
    num_kernels: int


@dataclass(frozen=True)
class Trace:
    """What a profiler saw of a call's decoding.

    Attributes:
        iterations: captured ones, without the first two.
        between: other work of the GPU: copies of results.
        host: calls into the CUDA runtime.
    """

    iterations: list[TracedIteration]
    between: list[Span]
    host: list[Span]

    @property
    def idle_us(self) -> list[float]:
        """Between each iteration and the next, without copies."""
        gaps = []
        for one, other in itertools.pairwise(self.iterations):
            inside = [s for s in self.between if one.end - 1 <= s.start < other.start]
            gaps.append(max(0.0, other.start - one.end - sum(s.end - s.start for s in inside)))
        return gaps

    @property
    def idle_share(self) -> float:
        """Median idle time between iterations, of the time from one's start to the next's."""
        starts = [iteration.start for iteration in self.iterations]
        period = statistics.median(b - a for a, b in itertools.pairwise(starts))
        return statistics.median(self.idle_us) / period


def kernel_us(graph: torch.cuda.CUDAGraph, parts: Sequence[str]) -> float:
    """Microseconds that a replay takes for kernels with one of these in their name; median.

    Of each only what lies behind the end of those before it, as kernels overlap.
    """
    from torch.profiler import ProfilerActivity, profile

    graph.replay()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(5):
            graph.replay()
            torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    return statistics.median(critical_us(events, parts))


def critical_us(events: Sequence[Mapping[str, Any]], parts: Sequence[str]) -> list[float]:
    """For each launch of a graph in a trace: what kernels of these names add to its time."""
    launches = collections.defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launches[event["args"].get("correlation")].append(event)
    sums = []
    for kernels in launches.values():
        end, total = 0.0, 0.0
        for event in sorted(kernels, key=lambda event: event["ts"]):
            own_end = event["ts"] + event["dur"]
            if any(part in event["name"] for part in parts):
                total += max(0.0, own_end - max(end, event["ts"]))
            end = max(end, own_end)
        sums.append(total)
    return sums


def trace_call(call: Callable[[], Any], target: Path | None = None) -> Trace:
    """Run a call under the profiler; the Chrome trace goes to `target`."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        call()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(path))
        text = path.read_text(encoding="utf-8")
    if target is not None:
        target.write_text(text, encoding="utf-8")
    return read_trace(json.loads(text)["traceEvents"])


def read_trace(events: Sequence[Mapping[str, Any]]) -> Trace:
    """Find the iterations in a Chrome trace: kernels of one launch of a graph belong together."""
    launches = collections.defaultdict(list)
    for event in events:
        if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset"):
            launches[event["args"].get("correlation")].append(event)
    iterations, between = [], []
    for kernels in launches.values():
        kernels.sort(key=lambda event: event["ts"])
        if len(kernels) < _MIN_KERNELS:
            between += [_span(event) for event in kernels]
            continue
        end = max(event["ts"] + event["dur"] for event in kernels)
        iterations.append(
            TracedIteration(kernels[0]["ts"], end, split_phases(kernels), len(kernels))
        )
    iterations.sort(key=lambda iteration: iteration.start)
    host = [_span(event) for event in events if event.get("cat") == "cuda_runtime"]
    between.sort(key=lambda span: span.start)
    return Trace(iterations[2:], between, sorted(host, key=lambda span: span.start))


def split_phases(kernels: Sequence[Mapping[str, Any]]) -> list[Span]:
    """Phases of a greedy iteration, told by the kernels that end them."""
    names = [event["name"] for event in kernels]
    if not any(_ACCEPT in name for name in names):
        return []
    accept = next(i for i, name in enumerate(names) if _ACCEPT in name)
    first = accept
    while first > 0 and (_ARGMAX in names[first - 1] or _ARGMAX_END in names[first - 1]):
        first -= 1
    # Index behind each argmax that follows: draft-extend ends in one, and each draft step.
    ends = [
        i + 1
        for i in range(accept + 1, len(names))
        if _ARGMAX_END in names[i]
        or (_ARGMAX in names[i] and not (i + 1 < len(names) and _ARGMAX_END in names[i + 1]))
    ]
    cuts = [0, first, accept + 1, *ends, len(names)]
    labels = [
        *PHASES[:2],
        *(PHASES[2:3] if ends else ()),
        *[PHASES[3]] * (len(ends) - 1),
        PHASES[4],
    ]
    spans = []
    for label, (start, stop) in zip(labels, itertools.pairwise(cuts)):
        part = kernels[start:stop]
        if part:
            end = max(event["ts"] + event["dur"] for event in part)
            # A kernel that starts early waits for the phase before.
            begin = max(part[0]["ts"], spans[-1].end) if spans else part[0]["ts"]
            spans.append(Span(label, begin, end))
    return spans


def phase_times(trace: Trace) -> dict[str, float]:
    """Microseconds of each phase of an iteration, all draft steps together, medians."""
    totals = collections.defaultdict(list)
    for iteration in trace.iterations:
        sums: dict[str, float] = collections.defaultdict(float)
        for phase in iteration.phases:
            sums[phase.name] += phase.end - phase.start
        for name, value in sums.items():
            totals[name].append(value)
    return {name: statistics.median(values) for name, values in totals.items()}


def _span(event: Mapping[str, Any]) -> Span:
    return Span(event["name"], event["ts"], event["ts"] + event["dur"])


def decode(
    model: Any, ids_BS: torch.Tensor, mtp: Any, num_drafts: int, count: int, **kwargs: Any
) -> Any:
    """A greedy call that ends by its budget only."""
    kwargs = {"do_sample": False, "eos_token_id": None, "pad_token_id": 0} | kwargs
    return glm_compile.generate(
        model,
        ids_BS,
        attention_mask=torch.ones_like(ids_BS),
        mtp=mtp if num_drafts else None,
        num_draft_tokens=num_drafts,
        max_new_tokens=count,
        return_dict_in_generate=True,
        **kwargs,
    )
