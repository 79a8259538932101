"""The plot reads what the linears' benchmark and their tuning write."""

from __future__ import annotations

import pytest

from tests.benchmarks.plot_bf16_linear import plot, read_lines, read_times


def time(N, K, M, median_us, library_us, is_library=False):
    facts = {"N": N, "K": K, "M": M, "median_us": median_us, "library_us": library_us}
    return {**facts, "is_library": is_library, "device": "card"}


TIMES = [
    time(2784, 6144, 6, 10.0, 15.0),
    time(2784, 6144, 1, 10.0, 20.0),
    time(2048, 2048, 1, 1.0, 8.0),
    time(24576, 6144, 6, 80.0, 60.0, is_library=True),
]


def test_lines_ascend_and_means_are_geometric():
    lines = read_lines(TIMES)
    assert lines["2784 x 6144"] == [(1, 2.0), (6, 1.5)]
    assert lines["2048 x 2048"] == [(1, 8.0)]
    assert "24576 x 6144" not in lines
    means = dict(lines["geometric mean, all weights"])
    assert means[1] == pytest.approx(4.0) and means[6] == pytest.approx(1.5**0.5)
    assert dict(lines["geometric mean, 8 devices"]) == {1: pytest.approx(8.0)}
    assert dict(lines["geometric mean, 1 device"])[6] == pytest.approx(1.5**0.5)
    assert "geometric mean, 4 devices" not in lines


def test_both_kinds_of_report_are_read():
    assert read_times(TIMES) == TIMES
    others = [{"extra_info": {"device": "card", "median_us": 3.0}}]
    report = {"benchmarks": [*({"extra_info": t} for t in TIMES), *others]}
    assert read_times(report) == TIMES


def test_an_image_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "speedup.png"
    plot(TIMES, target)
    assert target.read_bytes().startswith(b"\x89PNG")
