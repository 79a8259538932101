"""Indexer scores of GLM-5.2's decode step: 6 rows, 32 heads of 128, keys cold.

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
LENGTHS = [8192, 81_920, 131_072, 1_048_576] if IS_GPU else [256, 1024]
NUM_ROWS, NUM_HEADS, HEAD_DIM, PAGE = 6, 32, 128, 64


def query() -> tuple[torch.Tensor, torch.Tensor]:
    q = torch.randn(NUM_ROWS, NUM_HEADS, HEAD_DIM, device=device()).bfloat16()
    return q, torch.randn(NUM_ROWS, NUM_HEADS, device=device())


def flops(num_keys: int) -> float:
    return 2.0 * NUM_ROWS * NUM_HEADS * HEAD_DIM * num_keys


@pytest.mark.parametrize("kind", ["fp8", "bf16"])
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_indexer_scores_paged(gpu_bench: Any, num_keys: int, kind: str) -> None:
    """Each call reads other pages of one pool, through a block table of its own."""
    page_bytes = PAGE * (HEAD_DIM + 4 if kind == "fp8" else 2 * HEAD_DIM)
    pages_each = math.ceil(num_keys / PAGE)
    copies = cold_copies(pages_each * page_bytes)
    num_pages = pages_each * copies
    q, weights = query()
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
    lengths = torch.full((NUM_ROWS,), num_keys, dtype=torch.int32, device=device())

    def scores(table: torch.Tensor) -> torch.Tensor:
        return indexer_scores_paged(
            q, weights, pool, table, lengths, num_keys, rows_per_sequence=NUM_ROWS
        )

    moved = pages_each * page_bytes + NUM_ROWS * num_keys * 4
    inputs = [(table,) for table in tables]
    result = gpu_bench(
        scores, inputs, bytes_moved=moved, flops=flops(num_keys), note="keys cold, q hot"
    )
    assert result.isfinite().all()


@pytest.mark.parametrize("num_keys", LENGTHS)
def test_indexer_scores_contiguous(gpu_bench: Any, num_keys: int) -> None:
    """The exact tier over a static cache, bf16."""
    copies = cold_copies(num_keys * HEAD_DIM * 2)
    keys = torch.randn(copies, 1, num_keys, HEAD_DIM, device=device(), dtype=torch.bfloat16)
    q, weights = query()
    lengths = torch.full((1, NUM_ROWS), num_keys, dtype=torch.int32, device=device())

    def scores(k_BTD: torch.Tensor) -> torch.Tensor:
        return indexer_scores(q[None], weights[None], k_BTD, lengths)

    moved = num_keys * (HEAD_DIM * 2 + NUM_ROWS * 4)
    inputs = [(k,) for k in keys]
    result = gpu_bench(
        scores, inputs, bytes_moved=moved, flops=flops(num_keys), note="keys cold, q hot"
    )
    assert result.isfinite().all()
