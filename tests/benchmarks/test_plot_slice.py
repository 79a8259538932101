"""The plot reads what the slice benchmark and the command write."""

from __future__ import annotations

import pytest

from tests.benchmarks.plot_slice import plot, read_floor, read_lines, read_times


def step(backend, query_len, cache_len, median_us, floor_us=3400.0):
    facts = {"backend": backend, "query_len": query_len, "cache_len": cache_len}
    return {**facts, "median_us": median_us, "floor_us": floor_us, "device": "card"}


TIMES = [
    step("glm", 6, 131_072, 4600.0),
    step("glm", 6, 8192, 4500.0),
    step("glm", 1, 8192, 3000.0, 1900.0),
    step("inductor", 6, 8192, 11700.0),
    step("inductor", 6, 1 << 20, None),
]


def test_lines_ascend_and_leave_out_what_did_not_fit():
    assert read_lines(TIMES, 6) == {
        "glm": [(8192, 4.5), (131_072, 4.6)],
        "inductor": [(8192, 11.7)],
    }


def test_the_floor_is_that_of_as_many_query_tokens():
    assert read_floor(TIMES, 6) == 3.4 and read_floor(TIMES, 1) == 1.9
    assert read_floor(TIMES, 2) is None


def test_both_kinds_of_report_are_read():
    assert read_times(TIMES) == TIMES
    assert read_times({"benchmarks": [{"extra_info": t} for t in TIMES]}) == TIMES


def test_an_image_is_written(tmp_path):
    pytest.importorskip("matplotlib")
    target = tmp_path / "slice.png"
    plot(TIMES, target)
    assert target.read_bytes().startswith(b"\x89PNG")
