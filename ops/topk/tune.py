"""Measure variants of the CuTe top-k: what the table in `config.py` is made from.

    python -m glm_compile.ops.topk.tune [--shapes 6x8192 1x1048576] [--chosen] [--seconds 50]

Prints, for each shape, the variants by their time: microseconds of a call, the median of CUDA-graph
replays, scores hot where they fit in L2; * is the table's choice. A variant that selects other
positions than the reference is marked WRONG. Rows that are hard to select from follow, for the
fastest variant and for the table's choice.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Iterator

import torch

from glm_compile.ops.topk.config import Variant, default_variant
from glm_compile.ops.topk.reference import topk_select_reference

K = 2048
SHAPES = [
    f"{num_rows}x{num_keys}"
    for num_rows in (6, 1, 16, 64, 2048)
    for num_keys in (2048, 8192, 32_768, 81_920, 131_072, 262_144, 1_048_576)
    if num_rows * num_keys <= 1 << 28
]
# Rows whose result is compared: the reference sorts, and is slow.
_CHECKED_ROWS = 64

ADVERSARIAL: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "constant": torch.zeros_like,
    "plateau": lambda scores: scores.clamp(min=0),
    "five": lambda scores: (scores * 1.2).round().clamp(-2, 2),
    "near": lambda scores: 1 + scores.abs() * 1e-4,
    "ascending": lambda scores: scores.sort(dim=-1).values,
}


def register_variants(num_keys: int, clusters: list[int]) -> Iterator[Variant]:
    """Ways to hold a row in registers, at most 32 keys a thread."""
    for cluster in clusters:
        slice_keys = -(-num_keys // (32 * cluster)) * 32
        for num_threads in (256, 512, 1024):
            per_thread = -(-slice_keys // (4 * num_threads)) * 4
            most = 16 if num_threads == 1024 else 32
            if per_thread > most or (num_threads > 256 and slice_keys <= 2 * num_threads):
                continue
            held = num_threads * per_thread
            bits = 11 if cluster == 1 else 8
            for buffer_keys in (0, 4096, 8192):
                yield Variant(
                    "registers", cluster, num_threads, per_thread, bits, held, buffer_keys
                )


def streaming_variants(num_keys: int, cluster: int) -> Iterator[Variant]:
    """Ways to stream a row: threads, keys loaded at once, bits of a bin, buffer, sample."""
    slice_keys = 1 << (-(-num_keys // cluster) - 1).bit_length()
    if cluster > 1:
        for num_threads, per_thread, sampled in (
            (1024, 8, 4),
            (1024, 16, 4),
            (512, 16, 8),
            (512, 32, 8),
        ):
            yield Variant(
                "filtered", cluster, num_threads, per_thread, 8, slice_keys, 8192, sampled
            )
        return
    for num_threads, per_thread, bits, buffer_keys, sampled in (
        (512, 8, 11, 8192, 8),
        (512, 16, 11, 8192, 8),
        (512, 16, 11, 8192, 4),
        (512, 8, 10, 4608, 4),
        (256, 16, 10, 6656, 16),
        (256, 16, 10, 5120, 8),
        (1024, 8, 11, 8192, 4),
    ):
        yield Variant(
            "filtered", 1, num_threads, per_thread, bits, slice_keys, buffer_keys, sampled
        )


def candidates(num_rows: int, num_keys: int) -> list[Variant]:
    """Variants worth measuring: clusters of which all are on the device at once, or one block."""
    clusters = [c for c in (1, 2, 4, 8, 16) if c == 1 or c * num_rows <= 132]
    largest = clusters[-2:]
    found = [default_variant(num_rows, num_keys)]
    found += register_variants(num_keys, clusters if num_keys <= 4096 else largest)
    if num_keys > 8192 * largest[-1]:
        found += streaming_variants(num_keys, largest[-1])
    return list(dict.fromkeys(found))


def measure(scores: torch.Tensor, lengths: torch.Tensor, variant: Variant) -> tuple[float, bool]:
    """(microseconds of a call, whether the result is right)."""
    from glm_compile.ops.topk.cute_kernel import topk_select_cute

    def select() -> torch.Tensor:
        return topk_select_cute(scores, lengths, K, variant=variant)

    selected = select()[:_CHECKED_ROWS]
    checked = slice(0, _CHECKED_ROWS)
    is_right = torch.equal(selected, topk_select_reference(scores[checked], lengths[checked], K))
    calls = 20 if scores.numel() < 1 << 25 else 2
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for _ in range(calls):
            select()
    graph.replay()
    samples = []
    for _ in range(20 if calls > 2 else 5):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        samples.append(start.elapsed_time(end) * 1e3 / calls)
    return statistics.median(samples), is_right


def describe(variant: Variant) -> str:
    """Short name: source, cluster, threads, keys a thread, bits, buffer, sampled keys."""
    name = f"{variant.source[0]}.C{variant.cluster}.N{variant.num_threads}"
    name += f".V{variant.keys_per_thread}.b{variant.bin_bits}"
    return name + (
        f".B{variant.buffer_keys}.s{variant.sampled_keys}" if variant.buffer_keys else ""
    )


def tune(num_rows: int, num_keys: int, is_chosen_only: bool = False, show: int = 5) -> str:
    """One line of the table."""
    torch.manual_seed(time.time_ns() % 2**31)
    scores = torch.randn(num_rows, num_keys, device="cuda")
    lengths = torch.full((num_rows,), num_keys, dtype=torch.int32, device="cuda")
    chosen = default_variant(num_rows, num_keys)
    times: dict[Variant, float] = {}
    notes = []
    for variant in [chosen] if is_chosen_only else candidates(num_rows, num_keys):
        try:
            times[variant], is_right = measure(scores, lengths, variant)
        except Exception as error:
            notes.append(f"{describe(variant)} {type(error).__name__}: {str(error)[:80]}")
            continue
        if not is_right:
            notes.append(f"{describe(variant)} WRONG")
    order = sorted(times, key=lambda variant: times[variant])
    parts = [
        f"{describe(v)}{'*' if v == chosen else ''} {times[v]:.2f}"
        for v in order
        if v in order[:show] or v == chosen
    ]
    if num_rows * num_keys >= 1 << 27 and order:
        parts.append(f"{num_rows * num_keys * 4 / times[order[0]] / 1e6:.2f} TB/s")
    for name, make in ADVERSARIAL.items() if num_rows * num_keys < 1 << 27 else ():
        hard = make(scores)
        for variant in dict.fromkeys([order[0], chosen]):
            micros, is_right = measure(hard, lengths, variant)
            parts.append(f"{name} {micros:.2f}{'' if is_right else ' WRONG'}")
    return f"{num_rows} x {num_keys}: " + " | ".join(parts + notes)


def main(arguments: list[str] | None = None) -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--shapes", nargs="+", default=SHAPES, help="rows x keys, as in 6x8192")
    parser.add_argument("--chosen", action="store_true", help="only the table's choice")
    parser.add_argument("--seconds", type=float, default=3600, help="start no shape after these")
    options = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("needs a CUDA device")
    begin = time.monotonic()
    for shape in options.shapes:
        if time.monotonic() - begin < options.seconds:
            num_rows, num_keys = map(int, shape.split("x"))
            sys.stdout.write(tune(num_rows, num_keys, options.chosen) + "\n")
            sys.stdout.flush()


if __name__ == "__main__":
    main()
