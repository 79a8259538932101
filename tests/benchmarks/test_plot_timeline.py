"""Traces are read as a profiler writes them, and drawn."""

from __future__ import annotations

from typing import Any

import pytest

from tests.benchmarks.decoding_runs import critical_us, phase_times, read_trace
from tests.benchmarks.plot_timeline import plot, window

NAMES = [
    *["layer"] * 18, "row_argmax_kernel", "best_part_kernel", "accept_block_kernel",
    *["layer"] * 3, "row_argmax_kernel", "best_part_kernel",
    *["layer"] * 2, "row_argmax_kernel", "best_part_kernel",
    *["layer"] * 2, "row_argmax_kernel", "cat",
]  # fmt: skip
PERIOD = 2.0 * len(NAMES) + 7


def make_events(count: int) -> list[dict[str, Any]]:
    """Iterations of kernels of 1.5 us every 2 us; a copy of 1 us behind each; 7 us until the next
    one's first kernel, of which 1 us is the copy's and half a us the last kernel's rest."""
    events: list[dict[str, Any]] = []

    def add(cat: str, name: str, ts: float, dur: float, **args: Any) -> None:
        events.append({"cat": cat, "name": name, "ts": ts, "dur": dur, "args": args})

    for i in range(count):
        start = 100 + i * PERIOD
        for k, name in enumerate(NAMES):
            add("kernel", name, start + 2 * k, 1.5, correlation=i)
        add("gpu_memcpy", "Memcpy DtoH", start + 2 * len(NAMES) + 1, 1.0, correlation=1000 + i)
        add("cuda_runtime", "cudaGraphLaunch", start - 50, 8.0)
        add("cuda_runtime", "cudaEventSynchronize", start - 30, 25.0)
    add("kernel", "prompt", 10.0, 5.0, correlation=5000)
    return events[::-1]


def test_iterations_are_found_in_a_trace() -> None:
    trace = read_trace(make_events(5))
    assert len(trace.iterations) == 3 and trace.iterations[0].start == 100 + 2 * PERIOD
    assert trace.iterations[0].num_kernels == len(NAMES)
    assert trace.idle_us == [7 + 0.5 - 1.0] * 2
    assert trace.idle_share == pytest.approx(6.5 / PERIOD)


def test_phases_are_told_by_the_kernels_that_end_them() -> None:
    trace = read_trace(make_events(3))
    names = [phase.name for phase in trace.iterations[0].phases]
    assert names == ["verify", "accept", "draft-extend", "drafts", "drafts", "relay"]
    assert phase_times(trace) == pytest.approx(
        {"verify": 35.5, "accept": 5.5, "draft-extend": 9.5, "drafts": 7.5 + 5.5, "relay": 1.5}
    )


def test_a_kernel_that_starts_early_waits_for_the_phase_before() -> None:
    events = make_events(3)
    for event in events:
        if event["name"] == "row_argmax_kernel":
            event["ts"] -= 1.5
            event["dur"] += 1.5
    times = phase_times(read_trace(events))
    # Verify ends where its last layer does; the argmax counts from there.
    assert (times["verify"], times["accept"]) == pytest.approx((35.5, 6.0))


def test_time_of_kernels_is_what_they_add() -> None:
    """The second starts before the first has ended, the third ends with the second."""
    spans = [
        ("own", 0.0, 4.0),
        ("other_part", 3.0, 5.0),
        ("other_part", 4.0, 4.0),
        ("own", 9.0, 1.0),
    ]
    events = [
        {"cat": "kernel", "name": name, "ts": ts, "dur": dur, "args": {"correlation": 1}}
        for name, ts, dur in spans
    ]
    assert critical_us(events, ["other_"]) == [4.0] and critical_us(events, ["own"]) == [5.0]


def test_a_picture_of_two_iterations(tmp_path: Any) -> None:
    pytest.importorskip("matplotlib")
    trace = read_trace(make_events(6))
    start, end = window(trace)
    first, second = trace.iterations[2:4]
    assert start < first.start and second.end < end < second.end + 0.1 * PERIOD
    plot(trace, tmp_path / "timeline.png", "two iterations")
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    with pytest.raises(ValueError, match="two captured iterations are needed"):
        window(read_trace(make_events(3)))
