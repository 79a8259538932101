"""What the scripts that plot benchmarks share: a command line, and matplotlib without a screen."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any


def load_pyplot() -> Any:
    """matplotlib.pyplot, for pictures that go to files."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def run(doc: str | None, report_help: str, plot: Callable[[Any, Path], None]) -> None:
    """Read a JSON report and write its picture; the command line names both.

    Args:
        doc: the script's docstring, whose first line describes it.
        report_help: what wrote the report.
        plot: gets the report and the file to write.
    """
    parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
    parser.add_argument("report", type=Path, help=report_help)
    parser.add_argument("target", type=Path, help="image to write")
    options = parser.parse_args()
    plot(json.loads(options.report.read_text(encoding="utf-8")), options.target)
