"""Plot the slice benchmark: time of a decode step against context length.

python -m tests.benchmarks.plot_slice slice.json slice_step.png
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import plotting
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


def read_floor(times: list[Mapping[str, Any]], query_len: int) -> float | None:
    """Milliseconds to read the weights of our steps with so many query tokens, or None."""
    floors = [
        t["floor_us"]
        for t in times
        if t["query_len"] == query_len and t["floor_us"] and t["backend"].startswith("glm")
    ]
    return statistics.median(floors) / 1e3 if floors else None


def plot(times: list[Mapping[str, Any]], target: Path, query_lens: Sequence[int] = (1, 6)) -> None:
    """Write the plot, one panel for each number of query tokens."""
    pyplot = plotting.load_pyplot()
    figure, panels = pyplot.subplots(
        1, len(query_lens), figsize=(5 * len(query_lens), 4), sharey=True, squeeze=False
    )
    drawn = [t for t in times if t["query_len"] in query_lens]
    top = 2 * max(t["median_us"] or 0 for t in drawn) / 1e3
    lowest = min(t["median_us"] for t in drawn if t["median_us"]) / 1e3
    legend = {}
    for panel, query_len in zip(panels[0], query_lens):
        draw(panel, read_lines(times, query_len), LABELS)
        panel.set_title(f"{query_len} query token{'s' if query_len > 1 else ''}")
        if floor := read_floor(times, query_len):
            panel.axhline(floor, color="grey", linestyle=":")
            place = ("axes fraction", "data")
            panel.annotate("weights alone", (0.02, floor * 0.95), xycoords=place, va="top")
        for t in drawn:
            if t["query_len"] == query_len and t["median_us"] is None:
                colour = f"C{list(LABELS).index(t['backend'])}"
                panel.annotate(
                    "out of memory", (t["cache_len"], top * 0.8), color=colour, ha="right", va="top"
                )
        handles, labels = panel.get_legend_handles_labels()
        legend.update(zip(labels, handles))
    panels[0][0].set_ylim(lowest / 2, top)
    panels[0][0].set_ylabel("decode step (ms)")
    panels[0][0].legend(legend.values(), legend.keys(), fontsize="small")
    figure.suptitle(f"GLM-5.2, three dense and three MoE layers ({times[0]['device']})")
    figure.tight_layout()
    figure.savefig(target, dpi=150)


if __name__ == "__main__":
    plotting.run(
        __doc__,
        "JSON of pytest-benchmark or glm-compile bench",
        lambda report, target: plot(read_times(report), target),
    )
