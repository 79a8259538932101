"""Plot the slice benchmark: time of a decode step against context length.

python -m tests.benchmarks.plot_slice slice.json slice_step.png
"""

from __future__ import annotations

import argparse
import collections
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.benchmarks.plot_indexer import draw

LABELS = {
    "eager": "transformers, eager",
    "inductor": "transformers, torch.compile (Inductor)",
    "glm": "glm backend, exact tier",
    "glm-fp8": "glm backend, FP8 tier",
}


def read_lines(times: list[Mapping[str, Any]], query_len: int) -> dict[str, list]:
    """(context, milliseconds) of each backend, ascending; steps without a time are left out."""
    lines: dict[str, list] = collections.defaultdict(list)
    for t in times:
        if t["query_len"] == query_len and t["median_us"]:
            lines[t["backend"]].append((t["cache_len"], t["median_us"] / 1e3))
    return {backend: sorted(points) for backend, points in lines.items()}


def read_times(report: Any) -> list[Mapping[str, Any]]:
    """Steps of a pytest-benchmark report, or of what `glm-compile bench --json` writes."""
    if isinstance(report, list):
        return report
    return [entry["extra_info"] for entry in report["benchmarks"]]


def plot(times: list[Mapping[str, Any]], target: Path, query_len: int = 6) -> None:
    """Write the plot of steps with `query_len` query tokens."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, panel = pyplot.subplots(figsize=(6, 4))
    draw(panel, read_lines(times, query_len), LABELS)
    panel.set_ylabel("decode step (ms)")
    panel.legend(fontsize="small")
    floor = next((t["floor_us"] for t in times if t["floor_us"]), None)
    if floor:
        panel.axhline(floor / 1e3, color="grey", linestyle=":")
        panel.annotate("weights alone", (0.02, floor / 1e3), xycoords=("axes fraction", "data"))
    panel.set_title(f"GLM-5.2 slice, {query_len} query tokens ({times[0]['device']})", fontsize=10)
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("report", type=Path, help="JSON of pytest-benchmark or glm-compile bench")
    parser.add_argument("target", type=Path, help="image to write")
    options = parser.parse_args()
    plot(read_times(json.loads(options.report.read_text(encoding="utf-8"))), options.target)


if __name__ == "__main__":
    main()
