"""Indexer scores of GLM-5.2: decode steps of 1 to 64 rows and prefill, 32 heads of 128, keys cold.

The floor counts keys read once and scores written once.

pytest tests/benchmarks/test_indexer_scores_benchmark.py --benchmark-enable
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from glm_compile.ops.fp8_quant import fp8_quant
from glm_compile.ops.indexer_scores import indexer_scores, indexer_scores_paged
from tests.benchmarks.conftest import cold_copies, device

IS_GPU = device() == "cuda"
LENGTHS = [2048, 8192, 32_768, 81_920, 131_072, 1_048_576] if IS_GPU else [256, 1024]
NUM_ROWS = [1, 2, 4, 6, 16, 64, 2048] if IS_GPU else [1, 6, 16]
NUM_HEADS, HEAD_DIM, PAGE = 32, 128, 64
# Scores of one call: 4 GB.
MAX_SCORES = 1 << 30


def query(num_rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(num_rows, NUM_HEADS, HEAD_DIM, device=device()).bfloat16()
    return q, torch.randn(num_rows, NUM_HEADS, device=device())


def causal_lengths(num_rows: int, num_keys: int) -> torch.Tensor:
    """The last rows of a sequence: each sees itself and what is before."""
    return (torch.arange(num_rows, device=device()) + num_keys - num_rows + 1).int()


def flops(lengths: torch.Tensor) -> float:
    return 2.0 * NUM_HEADS * HEAD_DIM * float(lengths.double().sum())


def skip_oversized(num_rows: int, num_keys: int) -> None:
    if num_rows > num_keys or num_rows * num_keys > MAX_SCORES:
        pytest.skip("more rows than keys, or more than 4 GB of scores")


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_indexer_scores_paged(gpu_bench: Any, num_keys: int, num_rows: int, kind: str) -> None:
    """Each call reads other pages of one pool, through a block table of its own."""
    skip_oversized(num_rows, num_keys)
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
    tables = torch.randperm(num_pages, device=device()).int().reshape(copies, 1, pages_each)
    lengths = causal_lengths(num_rows, num_keys)

    def scores(table: torch.Tensor) -> torch.Tensor:
        return indexer_scores_paged(
            q, weights, pool, table, lengths, num_keys, rows_per_sequence=num_rows
        )

    moved = pages_each * page_bytes + num_rows * num_keys * 4
    inputs = [(table,) for table in tables]
    result = gpu_bench(
        scores, inputs, bytes_moved=moved, flops=flops(lengths), note="keys cold, q hot"
    )
    assert result[..., 0].isfinite().all()


@pytest.mark.parametrize("num_rows", NUM_ROWS)
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_indexer_scores_contiguous(gpu_bench: Any, num_keys: int, num_rows: int) -> None:
    """The exact tier over a static cache, bf16."""
    skip_oversized(num_rows, num_keys)
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
