"""Draw two iterations of decoding: what the GPU does, and what the host does meanwhile.

    python -m tests.benchmarks.plot_timeline examples/tiny_glm52 examples/decoding_tiny.png
    python -m tests.benchmarks.plot_timeline slice examples/decoding_slice.png \
        --cache-len 131072 --trace slice.json

Needs a CUDA device. The trace is in Chrome's format (chrome://tracing, Perfetto); a profiler makes
the kernels of a graph a little slower than they are.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

import torch

from tests.benchmarks import plotting
from tests.benchmarks.decoding_runs import (
    PHASES,
    Span,
    Trace,
    decode,
    make_slice,
    measured,
    trace_call,
)

COLORS = dict(zip(PHASES, ("#1f77b4", "#d62728", "#2ca02c", "#9467bd", "#7f7f7f")))
COPY_COLOR, HOST_COLOR, WAIT_COLOR = "#ff7f0e", "#8c564b", "#e7e7e7"
WAIT = "cudaEventSynchronize"


def window(trace: Trace, first: int = 2) -> tuple[float, float]:
    """From a little before one iteration to a little behind the next one."""
    if len(trace.iterations) < 2:
        raise ValueError(
            f"plot_timeline: two captured iterations are needed, found {len(trace.iterations)}; "
            "decode more tokens"
        )
    first = min(first, len(trace.iterations) - 2)
    start, end = trace.iterations[first].start, trace.iterations[first + 1].end
    margin = 0.04 * (end - start)
    return start - margin, end + margin


def plot(trace: Trace, target: Path, title: str) -> None:
    """Write the picture: a row for the GPU, one for the host."""
    pyplot = plotting.load_pyplot()
    start, end = window(trace)
    figure, axes = pyplot.subplots(figsize=(11, 2.6))
    for iteration in trace.iterations:
        for phase in iteration.phases:
            draw(axes, phase, 1, COLORS[phase.name], start, end)
    for span in trace.between:
        draw(axes, span, 1, COPY_COLOR, start, end)
    for span in trace.host:
        draw(axes, span, 0, WAIT_COLOR if span.name == WAIT else HOST_COLOR, start, end)
    handles = [pyplot.Rectangle((0, 0), 1, 1, color=color) for color in COLORS.values()]
    names = list(COLORS)
    has_copies = any(span.end > start and span.start < end for span in trace.between)
    copies = [("results to the host", COPY_COLOR)] if has_copies else []
    for name, color in (
        *copies,
        ("host: launches", HOST_COLOR),
        ("host: waits for results", WAIT_COLOR),
    ):
        handles.append(pyplot.Rectangle((0, 0), 1, 1, color=color))
        names.append(name)
    axes.legend(handles, names, ncol=4, fontsize="x-small", loc="upper center")
    axes.set(xlim=(0, end - start), ylim=(-0.6, 2.4), xlabel="us", title=title)
    axes.set_yticks([0, 1], ["host", "GPU"])
    figure.tight_layout()
    figure.savefig(target, dpi=150)
    pyplot.close(figure)


def draw(axes: Any, span: Span, row: int, color: str, start: float, end: float) -> None:
    """One box, as far as it lies in the window."""
    if span.end < start or span.start > end:
        return
    left = max(span.start, start)
    width = min(span.end, end) - left
    edge = {"edgecolor": "white", "linewidth": 0.5} if width > 0.01 * (end - start) else {}
    axes.barh(row, width, left=left - start, height=0.7, color=color, **edge)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="a checkpoint's folder, or 'slice': random weights")
    parser.add_argument("target", type=Path, help="image to write")
    parser.add_argument("--trace", type=Path, help="where the Chrome trace goes")
    parser.add_argument("--cache-len", type=int, default=8192, help="tokens behind the slice")
    parser.add_argument("--num-drafts", type=int, default=5)
    options = parser.parse_args()

    torch.set_grad_enabled(False)
    is_slice = options.model == "slice"
    if is_slice:
        model, mtp = make_slice("cuda")
        ids = torch.zeros(1, options.cache_len - 64, dtype=torch.long, device="cuda")
    else:
        import glm_compile

        model, mtp = glm_compile.load(options.model, device="cuda", dtype=torch.bfloat16)
        ids = torch.randint(5, model.config.vocab_size, (1, 300), device="cuda")
    compiled = torch.compile(model, backend="glm", fullgraph=True)

    def call() -> Any:
        return decode(compiled, ids, mtp, options.num_drafts, 48, cuda_graph=True)

    with measured(is_slice):
        call()
        trace = trace_call(call, options.trace)
    name = "slice of the release, random weights" if is_slice else Path(options.model).name
    title = (
        f"{name}: two iterations with {options.num_drafts} drafts "
        f"({torch.cuda.get_device_name()}), idle between them {trace.idle_share:.2%}"
    )
    plot(trace, options.target, title)
    print(title)


if __name__ == "__main__":
    main()
