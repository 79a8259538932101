"""Top-k 2048 of GLM-5.2, from one row of a decode step to a prefill chunk, against torch.topk.

    pytest tests/benchmarks/test_topk_benchmark.py --benchmark-enable

A table ends the run: microseconds, times torch.topk, and how much of the byte floor is reached.
Scores are hot where they fit in L2: the indexer has just written them. The floor is reading each
score once from device memory, so hot rows may exceed it. Launches follow each other by programmatic
dependent launch.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from glm_compile.ops.topk import topk_plan, topk_select
from tests.benchmarks.conftest import device, printed, time_replays
from tests.ops import topk_oracle

IS_GPU = device() == "cuda"
K = 2048 if IS_GPU else 64
LENGTHS = [2048, 8192, 32_768, 81_920, 131_072, 262_144, 1_048_576] if IS_GPU else [64, 512, 4096]
ROW_COUNTS = [1, 2, 4, 6, 16, 64, 2048] if IS_GPU else [1, 6]
DECODE_ROWS = 6
CHECKED_ROWS = 64

ROWS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda r, t: torch.randn(r, t, device=device()),
    "zero plateau": lambda r, t: torch.randn(r, t, device=device()).clamp(min=0),
    "constant": lambda r, t: torch.zeros(r, t, device=device()),
    "five values": lambda r, t: torch.randint(-2, 3, (r, t), device=device()).float(),
    "one bucket": lambda r, t: 1 + torch.rand(r, t, device=device()) * 1e-4,
    "ascending": lambda r, t: torch.randn(r, t, device=device()).sort(dim=-1).values,
    "descending": lambda r, t: torch.randn(r, t, device=device()).sort(-1, True).values,
    "above zeros": lambda r, t: _with_ties(r, t),
    "ties at end": lambda r, t: (torch.arange(t, device=device()) >= t - K).float().repeat(r, 1),
}


def _with_ties(num_rows: int, num_keys: int) -> torch.Tensor:
    """Zeros but for K - 1 higher scores, or half the row."""
    scores = torch.zeros(num_rows, num_keys, device=device())
    above = torch.randperm(num_keys, device=device())[: min(K - 1, num_keys // 2)]
    scores[:, above] = 1 + torch.rand(num_rows, len(above), device=device())
    return scores


def glm(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return topk_select(scores, lengths, K, plan=plan)


def triton(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return topk_select(scores, lengths, K, plan=plan, backend="triton")


def torch_topk(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return scores.topk(K, dim=-1).indices.int()


def _line(
    bandwidth: float | None,
    what: str,
    num_rows: int,
    num_keys: int,
    ours: float,
    library: float | None,
) -> str:
    line = f"{what:12} {num_rows:4} x {num_keys:7}: {ours * 1e6:8.2f} us"
    if library is not None:
        line += f", torch.topk {library * 1e6:8.2f}, {library / ours:5.2f}x"
    if bandwidth:
        floor = _bytes(num_rows, num_keys) / bandwidth
        line += f", floor {floor * 1e6:7.2f}, {floor / ours:4.0%} of it"
    return line


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (what, R, T, our seconds, torch's or None) that are printed at the end."""
    yield from printed(request, _line)


def _bytes(num_rows: int, num_keys: int) -> int:
    return num_rows * (num_keys + K) * 4


def run(
    gpu_bench: Any, fn: Callable[..., torch.Tensor], scores: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """Measure; compare with torch; return the arguments of a call."""
    num_rows, num_keys = scores.shape
    lengths = torch.full((num_rows,), num_keys, dtype=torch.int32, device=scores.device)
    arguments = (scores, lengths, topk_plan(lengths, K))
    moved = _bytes(num_rows, num_keys)
    selected = gpu_bench(fn, [arguments], bytes_moved=moved, note="scores hot")
    checked = slice(0, CHECKED_ROWS)
    topk_oracle.assert_same_scores_as_torch(selected[checked], scores[checked], lengths)
    return arguments


@pytest.mark.parametrize("num_keys", LENGTHS)
@pytest.mark.parametrize("num_rows", ROW_COUNTS)
def test_topk(gpu_bench: Any, benchmark: Any, table: list, num_rows: int, num_keys: int) -> None:
    arguments = run(gpu_bench, glm, ROWS["normal"](num_rows, num_keys))
    if not IS_GPU or benchmark.disabled:
        return
    library = statistics.median(time_replays(torch_topk, [arguments]))
    ours = benchmark.extra_info["median_us"] * 1e-6
    benchmark.extra_info["times_library"] = library / ours
    table.append(("normal", num_rows, num_keys, ours, library))


@pytest.mark.skipif(not IS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_topk_decode_triton(gpu_bench: Any, benchmark: Any, table: list, num_keys: int) -> None:
    run(gpu_bench, triton, ROWS["normal"](DECODE_ROWS, num_keys))
    if not benchmark.disabled:
        ours = benchmark.extra_info["median_us"] * 1e-6
        table.append(("in Triton", DECODE_ROWS, num_keys, ours, None))


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "normal"])
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_topk_decode_adversarial(
    gpu_bench: Any, benchmark: Any, table: list, num_keys: int, kind: str
) -> None:
    run(gpu_bench, glm, ROWS[kind](DECODE_ROWS, num_keys))
    if IS_GPU and not benchmark.disabled:
        ours = benchmark.extra_info["median_us"] * 1e-6
        table.append((kind, DECODE_ROWS, num_keys, ours, None))
