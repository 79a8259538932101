"""Indexer scores of GLM-5.2: decode steps of 1 to 64 rows and prefill, 32 heads of 128, keys cold.

A table ends the run: microseconds, times torch, the byte floor and how much of it is reached,
TFLOP/s. The floor counts keys read once and scores written once. Torch has the keys in bf16 in one
tensor and multiplies, applies relu and sums over the heads by einsum; it is measured once for all
kinds of keys, and not where its products take too much memory. Launches follow each other by
programmatic dependent launch.

    pytest tests/benchmarks/test_indexer_scores_benchmark.py --benchmark-enable
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm_compile.ops.fp8_quant import fp8_quant
from glm_compile.ops.indexer_scores import indexer_scores, indexer_scores_paged
from tests.benchmarks.conftest import cold_copies, device, printed, time_replays

IS_GPU = device() == "cuda"
LENGTHS = [2048, 8192, 32_768, 81_920, 131_072, 262_144, 1_048_576] if IS_GPU else [256, 1024]
NUM_ROWS = [1, 2, 4, 6, 16, 64, 2048] if IS_GPU else [1, 6, 16]
NUM_HEADS, HEAD_DIM, PAGE = 32, 128, 64
# Of torch's products of all heads, and their bytes a score.
MAX_TORCH_BYTES = 20e9
TORCH_BYTES = 2 * NUM_HEADS


def query(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(num_rows, NUM_HEADS, HEAD_DIM, device=device()).bfloat16()
    return q, torch.randn(num_rows, NUM_HEADS, device=device())


def causal_lengths(num_rows: int, num_keys: int) -> torch.Tensor:
    """The last rows of a sequence: each sees itself and what is before."""
    return (torch.arange(num_rows, device=device()) + num_keys - num_rows + 1).int()


def flops(lengths: torch.Tensor) -> float:
    return 2.0 * NUM_HEADS * HEAD_DIM * float(lengths.double().sum())


def _line(
    bandwidth: float | None,
    kind: str,
    num_rows: int,
    num_keys: int,
    num_bytes: float,
    num_flops: float,
    ours: float,
    library: float | None,
) -> str:
    line = f"{kind:15} {num_rows:4} x {num_keys:7}: {ours * 1e6:8.2f} us"
    if library is not None:
        line += f", torch {library * 1e6:8.2f}, {library / ours:5.1f}x"
    else:
        gigabytes = num_rows * num_keys * TORCH_BYTES / 1e9
        line += f", torch not run ({gigabytes:.0f} GB)"
    if bandwidth:
        floor = num_bytes / bandwidth
        line += f", floor {floor * 1e6:7.2f}, {floor / ours:4.0%} of it"
    return f"{line}, {num_flops / ours / 1e12:4.0f} TFLOP/s"


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (kind, R, T, bytes, flops, our seconds, torch's or None), printed at the end."""
    yield from printed(request, _line)


@functools.cache
def torch_seconds(num_rows: int, num_keys: int) -> float | None:
    """Torch's time over cold keys; None where its products take too much memory."""
    if num_rows * num_keys * TORCH_BYTES > MAX_TORCH_BYTES:
        return None
    copies = cold_copies(num_keys * HEAD_DIM * 2)
    keys = torch.randn(copies, num_keys, HEAD_DIM, device=device(), dtype=torch.bfloat16)
    q, weights = query(num_rows)
    weights = weights.bfloat16()

    def scores(k_TD: torch.Tensor) -> torch.Tensor:
        products = torch.relu_(q.flatten(0, 1) @ k_TD.T).view(num_rows, NUM_HEADS, num_keys)
        return torch.einsum("rh,rht->rt", weights, products)

    return statistics.median(time_replays(scores, [(k,) for k in keys]))


def note_times(
    table: list, benchmark: Any, kind: str, num_rows: int, num_keys: int, num_bytes: float
) -> None:
    """Add a row of the table to what was just measured, with torch's time."""
    if not IS_GPU or benchmark.disabled:
        return
    ours = benchmark.extra_info["median_us"] * 1e-6
    library = torch_seconds(num_rows, num_keys)
    if library is not None:
        benchmark.extra_info["times_library"] = library / ours
    num_flops = flops(causal_lengths(num_rows, num_keys))
    table.append((kind, num_rows, num_keys, num_bytes, num_flops, ours, library))


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_indexer_scores_paged(
    gpu_bench: Any, benchmark: Any, table: list, num_keys: int, num_rows: int, kind: str
) -> None:
    """Each call reads other pages of one pool, through a block table of its own."""
    page_bytes = PAGE * (HEAD_DIM + 4 if kind == "fp8" else 2 * HEAD_DIM)
    pages_each = math.ceil(num_keys / PAGE)
    copies = cold_copies(pages_each * page_bytes)
    num_pages = pages_each * copies
    q, weights = query(num_rows)
    if kind == "fp8":
        key_bytes = PAGE * HEAD_DIM
        pool = torch.empty(num_pages, page_bytes, dtype=torch.uint8, device=device())
        pool[:, :key_bytes] = torch.randint(
            0, 120, (1, key_bytes), dtype=torch.uint8, device=device()
        )
        pool[:, key_bytes:].view(torch.float32).fill_(0.01)
        q, q_scale = fp8_quant(q)
        weights = weights * q_scale
    else:
        pool = torch.randn(1, PAGE, HEAD_DIM, device=device()).bfloat16()
        pool = pool.repeat(num_pages, 1, 1)
    block_tables = torch.randperm(num_pages, device=device()).int().reshape(copies, 1, pages_each)
    lengths = causal_lengths(num_rows, num_keys)

    def scores(block_table: torch.Tensor) -> torch.Tensor:
        return indexer_scores_paged(
            q, weights, pool, block_table, lengths, num_keys, rows_per_sequence=num_rows
        )

    moved = pages_each * page_bytes + num_rows * num_keys * 4
    inputs = [(block_table,) for block_table in block_tables]
    result = gpu_bench(
        scores, inputs, bytes_moved=moved, flops=flops(lengths), note="keys cold, q hot"
    )
    assert result[..., 0].isfinite().all()
    note_times(table, benchmark, f"{kind} pages", num_rows, num_keys, moved)


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_indexer_scores_contiguous(
    gpu_bench: Any, benchmark: Any, table: list, num_keys: int, num_rows: int
) -> None:
    """The exact tier over a static cache, bf16."""
    copies = cold_copies(num_keys * HEAD_DIM * 2)
    keys = torch.randn(copies, 1, num_keys, HEAD_DIM, device=device(), dtype=torch.bfloat16)
    q, weights = query(num_rows)
    lengths = causal_lengths(num_rows, num_keys)[None]

    def scores(k_BTD: torch.Tensor) -> torch.Tensor:
        return indexer_scores(q[None], weights[None], k_BTD, lengths)

    moved = num_keys * (HEAD_DIM * 2 + num_rows * 4)
    inputs = [(k,) for k in keys]
    result = gpu_bench(
        scores, inputs, bytes_moved=moved, flops=flops(lengths), note="keys cold, q hot"
    )
    assert result[..., 0].isfinite().all()
    note_times(table, benchmark, "bf16 contiguous", num_rows, num_keys, moved)
