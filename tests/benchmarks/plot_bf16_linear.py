"""Plot the bf16 linears: speed-up over the library's against the number of rows.

    python -m glm_compile.ops.bf16_linear.tune --keep --json linears.json
    python -m tests.benchmarks.plot_bf16_linear linears.json examples/bf16_linear_speedup.png

A report of `test_bf16_linear_benchmark.py` (`--benchmark-json`) is read as well.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from glm_compile.ops.bf16_linear.tune import SHAPES
from tests.benchmarks import plotting

# Weights with a line of their own: what a layer of the release reads on one device.
DRAWN = [(2784, 6144), (20480, 2048), (6144, 16384), (2048, 2048), (6144, 2048)]

Lines = dict[str, list[tuple[int, float]]]


def read_times(report: Any) -> list[Mapping[str, Any]]:
    """Times of a pytest-benchmark report, or of what `tune --json` writes."""
    if isinstance(report, list):
        return report
    facts = (entry["extra_info"] for entry in report["benchmarks"])
    return [fact for fact in facts if "library_us" in fact]


def read_lines(times: Sequence[Mapping[str, Any]]) -> Lines:
    """(M, library's time over ours) of each drawn weight and of geometric means, ascending.

    Where the op takes the library's product itself, it is once as fast.
    """
    by_shape: dict[tuple[int, int], dict[int, float]] = collections.defaultdict(dict)
    for t in times:
        speedup = 1.0 if t.get("is_library") else t["library_us"] / t["median_us"]
        by_shape[t["N"], t["K"]][t["M"]] = speedup
    lines: Lines = {}
    for name, shapes in (("all weights", list(by_shape)), *_by_number_of_devices()):
        by_rows: dict[int, list[float]] = collections.defaultdict(list)
        for shape in shapes:
            for num_rows, speedup in by_shape.get(shape, {}).items():
                by_rows[num_rows].append(speedup)
        if by_rows:
            lines[f"geometric mean, {name}"] = sorted(
                (num_rows, statistics.geometric_mean(speedups))
                for num_rows, speedups in by_rows.items()
            )
    for shape in DRAWN:
        if shape in by_shape:
            lines["{} x {}".format(*shape)] = sorted(by_shape[shape].items())
    return lines


def _by_number_of_devices() -> list[tuple[str, list[tuple[int, int]]]]:
    return [
        (f"{number} device{'s' if number > 1 else ''}", shapes) for number, shapes in SHAPES.items()
    ]


def plot(times: Sequence[Mapping[str, Any]], target: Path) -> None:
    """Write the plot: geometric means on the left, single weights on the right."""
    pyplot = plotting.load_pyplot()
    lines = read_lines(times)
    figure, panels = pyplot.subplots(1, 2, figsize=(10, 4), sharey=True)
    for name, points in lines.items():
        is_mean = name.startswith("geometric mean")
        label = name.removeprefix("geometric mean, ")
        style = {"color": "black", "linewidth": 2} if label == "all weights" else {}
        panels[0 if is_mean else 1].plot(*zip(*points), marker="o", label=label, **style)
    rows = sorted({t["M"] for t in times})
    for panel, title in zip(panels, ("geometric means", "single weights (N x K)")):
        panel.axhline(1.0, color="grey", linestyle=":")
        panel.set(xscale="log", xlabel="rows of x", title=title)
        panel.set_xticks(rows, list(map(str, rows)))
        panel.minorticks_off()
        panel.grid(True, alpha=0.3)
        panel.legend(fontsize="small", loc="upper right", framealpha=0.5)
    panels[0].set_ylabel("times as fast as the library")
    figure.suptitle(f"GLM-5.2's bf16 linears, weights cold ({times[0]['device']})")
    figure.tight_layout()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    plotting.run(
        __doc__,
        "JSON of tune or of pytest-benchmark",
        lambda report, target: plot(read_times(report), target),
    )
