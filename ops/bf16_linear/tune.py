"""Measure how to split each weight of GLM-5.2 on this GPU, and where the library is faster.

    python -m glm_compile.ops.bf16_linear.tune                  # all weights, prints the table
    python -m glm_compile.ops.bf16_linear.tune 2784x6144 --write
    python -m glm_compile.ops.bf16_linear.tune --jobs 8 --write
    python -m glm_compile.ops.bf16_linear.tune --keep --jobs 8 --json linears.json

Times are CUDA-graph replays over copies of the weight that exceed the L2 cache, so weights are
cold; our launches follow each other by programmatic dependent launch, as they do in a graph of a
whole step. `--write` puts the choices in `measured.py`, `--json` the times in a file to plot;
`--keep` measures the choices that are there.
Processes (`--jobs`) compile side by side and measure one at a time. Nothing is tuned when an op is
called.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import functools
import json
import math
import multiprocessing
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from glm_compile.ops._dispatch import num_multiprocessors
from glm_compile.ops.bf16_linear.config import FEW_ROWS, StreamConfig, stream_config_for
from glm_compile.ops.bf16_linear.measured import LIBRARY, MANY_ROWS, MEASURED

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
# What the choices are made by: drafts of five and the token before them, and the most rows.
_CHOSEN_BY = (6, 16)
# Another split is taken for many rows where it takes this part of the time of the one for few.
_ANOTHER_BELOW = 0.99

# Tiles of a block from which on it may pay to draw them.
_DRAWN_FROM = 4
_COLD_BYTES = 180e6
_BYTES_PER_GRAPH = 2e9
_REPLAYS = 20
_READ_BYTES_PER_US = 4.56e6


def candidates(
    num_features: int, num_columns: int, num_processors: int = 132
) -> Iterator[StreamConfig]:
    """Splits worth a try on a GPU of so many multiprocessors; clusters are tried as 132 have room.

    Multiprocessors are an H200's by default.
    """
    for config in _splits(num_features, num_columns, num_processors):
        yield config
        if config.cluster > 1 or config.blocks_per_processor > 1:
            # Blocks of the next kernel that come early take room and bandwidth from these.
            yield dataclasses.replace(config, late=True)
        if config.cluster > 1 and num_columns % (config.stage_columns * config.cluster) == 0:
            # Where x is a good part of what is read, and all blocks would begin with the same one.
            yield dataclasses.replace(config, is_turned=True)
            yield dataclasses.replace(config, is_turned=True, late=True)
        if config.cluster == 1 and num_features >= _DRAWN_FROM * num_processors * config.tile:
            yield dataclasses.replace(config, is_dynamic=True)


def _splits(num_features: int, num_columns: int, num_processors: int) -> Iterator[StreamConfig]:
    def whole_waves(blocks: int) -> int:
        return math.ceil(num_features / blocks / 8) * 8

    is_wide = num_columns > 4096
    stages = [s for s in (1024, 512, 256) if num_columns % s == 0][1 if is_wide else 0 :][:2]
    one_wave = whole_waves(num_processors)
    # Every tile reads x again, so wide x asks for tall tiles.
    tiles = {one_wave, 24, 32, 48} if is_wide else {one_wave, 16, 24, 32, 48}
    for tile in sorted(tiles):
        if tile <= min(one_wave, 48) or tile == 16:
            stage = stages[0] if tile <= 24 or len(stages) == 1 else min(512, stages[0])
            yield StreamConfig(tile, stage, 8, 2 if stage == 1024 else 4)
    if one_wave > 48 and num_columns >= 4096:
        yield StreamConfig(48, 256, 8, 4)
        yield StreamConfig(64, 256, 8, 4)
        yield StreamConfig(96, 256, 8, 4)
    if num_columns <= 4096:
        yield StreamConfig(16, min(512, stages[0]), 8, 2, blocks_per_processor=2)
    # Not all multiprocessors can be in clusters of four and eight.
    for cluster, num_clusters in ((2, 66), (4, 30), (8, 14)):
        tile = whole_waves(num_clusters)
        for stage in (512, 256):
            most = (48 if stage == 512 else 96) // (cluster // 2)
            if tile <= most and num_columns % (stage * cluster) == 0:
                yield StreamConfig(tile, stage, 8, 4, cluster)
                if tile == 40 and cluster == 2:
                    # Fewer blocks read x, which counts with many rows.
                    yield StreamConfig(48, stage, 8, 4, cluster)
                break


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


def _set_lock(lock: Any) -> None:
    """A worker's own start: what it measures waits for what others measure."""
    global _alone
    _alone = lock


_alone: Any = contextlib.nullcontext()


@dataclasses.dataclass(frozen=True)
class Tuned:
    """What was measured of one weight.

    Attributes:
        shape: (N, K).
        few, many: the splits for up to 8 rows and for 9 to 16; equal where another one for many
            rows brings little.
        times: M -> (ours, the library's) microseconds.
        library_at: the M, rounded up to powers of two, that the library gets; None: where it wins.
    """

    shape: tuple[int, int]
    few: StreamConfig
    many: StreamConfig
    times: dict[int, tuple[float, float]]
    library_at: tuple[int, ...] | None = None

    @property
    def lost(self) -> tuple[int, ...]:
        """The M, rounded up to powers of two, at which the library runs."""
        if self.library_at is not None:
            return self.library_at
        return tuple(sorted({_bucket(m) for m, (own, other) in self.times.items() if own > other}))

    def speedups(self) -> list[float]:
        """The library's time over that of what will run, for each M."""
        return [
            1.0 if _bucket(m) in self.lost else other / own
            for m, (own, other) in self.times.items()
        ]


def _bucket(num_rows: int) -> int:
    return 1 << (num_rows - 1).bit_length()


@torch.no_grad()
def tune(shape: tuple[int, int], keep: bool = False) -> Tuned:
    """Measure the splits of a weight [N, K] and the library; or only the splits of the table."""
    few, many = (stream_config_for(*shape, num_rows) for num_rows in _CHOSEN_BY)
    tried = [] if keep else candidates(*shape, num_multiprocessors(torch.device("cuda")))
    splits = list(dict.fromkeys([few, many, *tried]))
    compile_splits(shape, splits)
    with _alone:
        num_copies = math.ceil(_COLD_BYTES / (2 * shape[0] * shape[1]))
        weights = [
            torch.randn(shape, dtype=torch.bfloat16, device="cuda") for _ in range(num_copies)
        ]
        if not keep:
            few, many = _choose(splits, weights)
        times = {}
        for num_rows in ROWS:
            x = _rows(num_rows, weights)
            library = measure(functools.partial(F.linear, x), weights)
            times[num_rows] = (_ours(x, few if num_rows <= FEW_ROWS else many, weights), library)
        weights.clear()
        torch.cuda.empty_cache()
    return Tuned(shape, few, many, times, LIBRARY.get(shape, ()) if keep else None)


def compile_splits(shape: tuple[int, int], splits: Sequence[StreamConfig]) -> None:
    """Compile the kernels of these splits for few rows and for many; none is launched."""
    from glm_compile.ops._cute import arch_of
    from glm_compile.ops.bf16_linear.cute_kernel import compiled, variant_for

    for config in splits:
        for num_rows in _CHOSEN_BY:
            compiled(variant_for(shape[1], num_rows, config), arch_of(torch.device("cuda")))


def _rows(num_rows: int, weights: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.randn(num_rows, weights[0].shape[1], device="cuda").bfloat16()


def _ours(x: torch.Tensor, config: StreamConfig, weights: list[torch.Tensor]) -> float:
    from glm_compile.ops.bf16_linear.cute_kernel import bf16_linear_cute

    return measure(lambda weight: bf16_linear_cute(x, weight, None, None, config=config), weights)


def _choose(
    splits: Sequence[StreamConfig], weights: list[torch.Tensor]
) -> tuple[StreamConfig, StreamConfig]:
    """The best splits for few rows and for many; one for both where that costs little."""
    by_few, by_many = (
        {config: _ours(_rows(num_rows, weights), config, weights) for config in splits}
        for num_rows in _CHOSEN_BY
    )
    few = min(by_few, key=by_few.__getitem__)
    many = min(by_many, key=by_many.__getitem__)
    return few, many if by_many[many] <= by_many[few] * _ANOTHER_BELOW else few


def _table(name: str, types: str, values: Mapping[tuple[int, int], object]) -> list[str]:
    rows = [f"    {shape}: {value},\n" for shape, value in sorted(values.items())]
    opening = f"{name}: dict[tuple[int, int], {types}] = {{"
    return [opening, "\n" if rows else "", *rows, "}\n"]


def write(results: Sequence[Tuned]) -> None:
    """Put these choices in `measured.py`; those of other weights stay."""
    measured, many, library = dict(MEASURED), dict(MANY_ROWS), dict(LIBRARY)
    for result in results:
        measured[result.shape] = dataclasses.astuple(result.few)
        for table in (many, library):
            table.pop(result.shape, None)
        if result.many != result.few:
            many[result.shape] = dataclasses.astuple(result.many)
        if result.lost:
            library[result.shape] = result.lost
    path = Path(__file__).with_name("measured.py")
    head = path.read_text().split("MEASURED: dict", 1)[0]
    tables = [
        _table("MEASURED", "tuple[int, ...]", measured),
        _table("MANY_ROWS", "tuple[int, ...]", many),
        _table("LIBRARY", "tuple[int, ...]", library),
    ]
    path.write_text(head + "\n".join("".join(lines) for lines in tables))


def _lines(result: Tuned) -> list[str]:
    floor = _floor(result.shape)
    another = f", {dataclasses.astuple(result.many)} for 16 rows" * (result.many != result.few)
    head = f"{result.shape}: {dataclasses.astuple(result.few)}{another}, floor {floor:.2f}"
    return [f"{head}, library at {list(result.lost)}"] + [
        f"    M={num_rows}: {own:.2f} us, library {other:.2f}, {other / own:.2f}x, "
        f"{floor / own:.0%} of the floor"
        for num_rows, (own, other) in result.times.items()
    ]


def _floor(shape: tuple[int, int]) -> float:
    return 2 * shape[0] * shape[1] / _READ_BYTES_PER_US


def _summary(results: Sequence[Tuned]) -> list[str]:
    by_shape = {result.shape: result.speedups() for result in results}
    groups = {"all weights": list(by_shape)}
    for number, shapes in SHAPES.items():
        groups[f"over {number} device{'s' * (number > 1)}"] = shapes
    lines = []
    for title, shapes in groups.items():
        speedups = [value for shape in shapes for value in by_shape.get(shape, ())]
        if speedups:
            mean = statistics.geometric_mean(speedups)
            lines.append(f"{title}: geometric mean {mean:.3f}x, least {min(speedups):.2f}x")
    return lines


def _facts(results: Sequence[Tuned]) -> list[dict[str, Any]]:
    """What `tests/benchmarks/plot_bf16_linear.py` reads."""
    return [
        {
            "N": result.shape[0],
            "K": result.shape[1],
            "M": num_rows,
            "median_us": own,
            "library_us": other,
            "is_library": _bucket(num_rows) in result.lost,
            "floor_us": _floor(result.shape),
            "device": torch.cuda.get_device_name(),
            "torch": torch.__version__,
        }
        for result in results
        for num_rows, (own, other) in result.times.items()
    ]


def _shape(text: str) -> tuple[int, int]:
    num_features, num_columns = map(int, text.split("x"))
    return num_features, num_columns


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument(
        "shapes", nargs="*", type=_shape, help="NxK; all weights of the release by default"
    )
    parser.add_argument("--write", action="store_true", help="put the choices in measured.py")
    parser.add_argument("--keep", action="store_true", help="measure what measured.py has")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the times to FILE")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="processes (default: 1)")
    options = parser.parse_args(arguments)
    shapes = options.shapes or [shape for of_size in SHAPES.values() for shape in of_size]
    results = []
    context = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(
        options.jobs, context, initializer=_set_lock, initargs=(context.Lock(),)
    ) as pool:
        for done in concurrent.futures.as_completed(
            [pool.submit(tune, shape, options.keep) for shape in shapes]
        ):
            results.append(done.result())
            sys.stdout.write("\n".join([*_lines(results[-1]), ""]))
            sys.stdout.flush()
            if options.json:
                options.json.write_text(json.dumps(_facts(results), indent=1))
            if options.write:
                write(results)
    sys.stdout.write("\n".join([*_summary(results), ""]))


if __name__ == "__main__":
    main(sys.argv[1:])
