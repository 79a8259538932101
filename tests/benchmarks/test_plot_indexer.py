"""The plot reads what the indexer benchmark writes."""

from __future__ import annotations

import pytest

from tests.benchmarks.plot_indexer import plot, read_lines


def report(entries):
    """A pytest-benchmark report of (tier, path, rows, context, microseconds)."""
    names = ("tier", "path", "rows", "context", "median_us")
    benchmarks = [{"extra_info": dict(zip(names, e), device="card")} for e in entries]
    return {"datetime": "2026-11-30T05:00:00", "benchmarks": benchmarks}


ENTRIES = [
    ("fp8", "compiled", 6, 131_072, 60.0),
    ("fp8", "compiled", 6, 8192, 40.0),
    ("fp8", "compiled", 1, 8192, 39.0),
    ("fp8", "slots", 6, 8192, 38.0),
    ("exact", "inductor", 6, 8192, 400.0),
]


def test_a_line_is_one_path_in_ascending_order():
    lines = read_lines(report(ENTRIES), 6)
    assert lines == {
        ("fp8", "compiled"): [(8192, 40.0), (131_072, 60.0)],
        ("exact", "inductor"): [(8192, 400.0)],
    }


def test_an_image_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "latency.png"
    plot(report(ENTRIES), target)
    assert target.read_bytes().startswith(b"\x89PNG")
