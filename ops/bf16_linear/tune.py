"""Measure how to split each weight of GLM-5.2 on this GPU, and where the library is faster.

    python -m glm_compile.ops.bf16_linear.tune                  # all weights, prints the table
    python -m glm_compile.ops.bf16_linear.tune 2784x6144 --write

Times are CUDA-graph replays over copies of the weight that exceed the L2 cache, so weights are
cold; our launches follow each other by programmatic dependent launch, as they do in a graph of a
whole step. `--write` puts the choices in `measured.py`. Nothing is tuned when an op is called.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import math
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.nn.functional as F

from glm_compile.ops.bf16_linear.config import StreamConfig
from glm_compile.ops.bf16_linear.measured import LIBRARY, MEASURED

# (N, K) of the linears of the release over 1, 2, 4 and 8 devices, merged where passes merge them.
SHAPES = {
    1: [
        (2784, 6144),
        (2624, 6144),
        (20480, 2048),
        (16384, 2048),
        (4096, 2048),
        (160, 6144),
        (6144, 16384),
        (4096, 6144),
        (6144, 2048),
        (24576, 6144),
        (6144, 12288),
        (154880, 6144),
    ],
    2: [
        (8192, 2048),
        (6144, 8192),
        (2048, 6144),
        (6144, 1024),
        (12288, 6144),
        (6144, 6144),
        (77440, 6144),
    ],
    4: [(6144, 4096), (1024, 6144), (6144, 512), (6144, 3072), (38720, 6144)],
    8: [(2048, 2048), (512, 6144), (6144, 256), (3072, 6144), (6144, 1536), (19360, 6144)],
}
ROWS = (1, 2, 4, 6, 8, 16)
# What the choice is made by: drafts of five and the token before them, and the widest kernel.
_CHOSEN_BY = (6, 16)
# A split must win by this much over the library to be taken.
_MARGIN = 1.0

_COLD_BYTES = 180e6
_BYTES_PER_GRAPH = 2e9
_REPLAYS = 20
_READ_BYTES_PER_US = 4.56e6


def candidates(num_features: int, num_columns: int) -> Iterator[StreamConfig]:
    """Splits worth a try on a GPU of 132 multiprocessors."""

    def whole_waves(blocks: int) -> int:
        return math.ceil(num_features / blocks / 8) * 8

    stages = [s for s in (1024, 512, 256) if num_columns % s == 0][:2]
    one_wave = whole_waves(132)
    for stage in stages:
        loaders = 2 if stage >= 1024 else 4
        if 16 <= one_wave <= 48:
            yield StreamConfig(one_wave, stage, 8, loaders)
        if one_wave > 24:
            for tile in (16, 24) if stage == 1024 else (24, 32, 40):
                if tile != one_wave:
                    yield StreamConfig(tile, stage, 8, loaders)
    if 32 < one_wave <= 48 and num_columns % 512 == 0 and 256 not in stages:
        yield StreamConfig(one_wave, 256, 8, 4)
    if one_wave > 48 and num_columns >= 4096:
        # Every tile reads x again, so wide x asks for tall tiles.
        yield StreamConfig(64, 512, 8, 4)
        yield StreamConfig(96, 256, 8, 4)
    if num_columns <= 4096:
        yield StreamConfig(16, min(512, stages[0]), 8, 2, blocks_per_processor=2)
        if one_wave <= 24:
            yield StreamConfig(32, min(512, stages[0]), 8, 2)
    for cluster in (2, 4, 8):
        tile = whole_waves(132 // cluster)
        for stage in (512, 256):
            if tile <= 32 and num_columns % (stage * cluster) == 0:
                yield StreamConfig(tile, stage, 8, 4, cluster)


def measure(fn: Callable[[torch.Tensor], object], weights: list[torch.Tensor]) -> float:
    """Microseconds a call: median of replays of a graph over all weights in turn."""
    num_bytes = weights[0].numel() * 2
    calls = max(4, min(24, round(_BYTES_PER_GRAPH / num_bytes)))
    calls = math.ceil(calls / len(weights)) * len(weights)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for weight in weights:
            fn(weight)
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            fn(weights[i % len(weights)])
    times = []
    for _ in range(_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(times[2:])


def tune(
    num_features: int, num_columns: int
) -> tuple[StreamConfig, dict[int, tuple[float, float]]]:
    """Return the best split, and (ours, library's) microseconds for each number of rows."""
    from glm_compile.ops.bf16_linear.cute_kernel import bf16_linear_cute

    num_bytes = 2 * num_features * num_columns
    weights = [
        torch.randn(num_features, num_columns, dtype=torch.bfloat16, device="cuda")
        for _ in range(math.ceil(_COLD_BYTES / num_bytes))
    ]

    def ours(num_rows: int, config: StreamConfig) -> float:
        x = torch.randn(num_rows, num_columns, device="cuda").bfloat16()
        return measure(
            lambda weight: bf16_linear_cute(x, weight, None, None, config=config), weights
        )

    few, many = _CHOSEN_BY
    by_few = {config: ours(few, config) for config in candidates(num_features, num_columns)}
    finalists = sorted(by_few, key=by_few.__getitem__)[:3]
    best = min(finalists, key=lambda config: by_few[config] * ours(many, config))
    times = {}
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_columns, device="cuda").bfloat16()
        library = measure(functools.partial(F.linear, x), weights)
        times[num_rows] = (ours(num_rows, best), library)
    return best, times


def write(measured: dict, library: dict) -> None:
    """Rewrite `measured.py` with these tables."""
    path = Path(__file__).with_name("measured.py")
    head = path.read_text().split("MEASURED:", 2)
    lines = [f"{head[0]}MEASURED:{head[1]}MEASURED: dict[tuple[int, int], tuple[int, ...]] = {{\n"]
    lines += [f"    {shape}: {fields},\n" for shape, fields in sorted(measured.items())]
    lines.append("}\n\nLIBRARY: dict[tuple[int, int], tuple[int, ...]] = {\n")
    lines += [f"    {shape}: {rows},\n" for shape, rows in sorted(library.items())]
    path.write_text("".join(lines) + "}\n")


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("shapes", nargs="*", help="NxK; all weights of the release by default")
    parser.add_argument("--write", action="store_true", help="put the choices in measured.py")
    options = parser.parse_args(arguments)
    shapes = [tuple(map(int, shape.split("x"))) for shape in options.shapes]
    shapes = shapes or [shape for of_size in SHAPES.values() for shape in of_size]
    measured, library = dict(MEASURED), dict(LIBRARY)
    for num_features, num_columns in shapes:
        best, times = tune(num_features, num_columns)
        shape = (num_features, num_columns)
        measured[shape] = dataclasses.astuple(best)
        floor = 2 * num_features * num_columns / _READ_BYTES_PER_US
        lost = sorted({1 << (m - 1).bit_length() for m, (o, f) in times.items() if o > f * _MARGIN})
        library.pop(shape, None)
        if lost:
            library[shape] = tuple(lost)
        lines = [f"{shape}: {measured[shape]},  floor {floor:.2f}, library at {lost}"]
        lines += [
            f"    M={num_rows}: {own:.2f} us, library {other:.2f}, {other / own:.2f}x, "
            f"{floor / own:.0%} of the floor"
            for num_rows, (own, other) in times.items()
        ]
        sys.stdout.write("\n".join([*lines, ""]))
        sys.stdout.flush()
        torch.cuda.empty_cache()
    if options.write:
        write(measured, library)


if __name__ == "__main__":
    with torch.no_grad():
        main(sys.argv[1:])
