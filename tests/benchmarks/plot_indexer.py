"""Plot the indexer benchmark: latency of one layer's indexer against context length.

python -m tests.benchmarks.plot_indexer indexer.json indexer_latency.png
"""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tests.benchmarks import plotting

LABELS = {
    ("exact", "inductor"): "transformers, torch.compile (Inductor)",
    ("exact", "compiled"): "glm backend, exact tier",
    ("fp8", "compiled"): "glm backend, FP8 tier",
}

Lines = dict[tuple[str, str], list[tuple[int, float]]]


def read_lines(report: Mapping[str, Any], num_rows: int) -> Lines:
    """(context, microseconds) of each path, ascending, from a pytest-benchmark JSON report."""
    lines: Lines = collections.defaultdict(list)
    for entry in report["benchmarks"]:
        facts = entry["extra_info"]
        key = (facts.get("tier"), facts.get("path"))
        if key in LABELS and facts["rows"] == num_rows:
            lines[key].append((facts["context"], facts["median_us"]))
    return {key: sorted(points) for key, points in lines.items()}


def plot(report: Mapping[str, Any], target: Path, rows: Sequence[int] = (1, 6)) -> None:
    """Write the plot, one panel for each number of query rows."""
    pyplot = plotting.load_pyplot()
    figure, panels = pyplot.subplots(1, len(rows), figsize=(5 * len(rows), 4), sharey=True)
    for panel, num_rows in zip([panels] if len(rows) == 1 else panels, rows):
        draw(panel, read_lines(report, num_rows), LABELS)
        panel.set_title(f"{num_rows} query row{'s' if num_rows > 1 else ''}")
    first = panels if len(rows) == 1 else panels[0]
    first.set_ylabel("one layer's indexer (us)")
    first.legend(fontsize="small")
    device = report["benchmarks"][0]["extra_info"]["device"]
    date = report["datetime"][:10]
    figure.suptitle(f"GLM-5.2 indexer, hidden state to positions ({device}, {date})")
    figure.tight_layout()
    figure.savefig(target, dpi=150)


def draw(panel: Any, lines: Mapping[Any, Sequence], labels: Mapping[Any, str]) -> None:
    """Draw lines of (context, time) into a panel with logarithmic axes, a label in one colour."""
    for i, (key, label) in enumerate(labels.items()):
        if points := lines.get(key):
            panel.plot(*zip(*points), marker="o", label=label, color=f"C{i}")
    contexts = sorted({context for points in lines.values() for context, _ in points})
    panel.set(xscale="log", yscale="log", xlabel="cached tokens")
    panel.set_xticks(contexts, [_short(context) for context in contexts])
    panel.minorticks_off()
    panel.grid(True, alpha=0.3)


def _short(num_tokens: int) -> str:
    return f"{num_tokens >> 20}M" if num_tokens >= 1 << 20 else f"{num_tokens >> 10}K"


if __name__ == "__main__":
    plotting.run(__doc__, "JSON report of pytest-benchmark", plot)
