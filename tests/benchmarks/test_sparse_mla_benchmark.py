"""Sparse MLA of GLM-5.2: rows of one sequence, 2048 of 128K tokens each, latents cold.

    pytest tests/benchmarks/test_sparse_mla_benchmark.py --benchmark-enable

A table ends the run: microseconds, times plain torch's (gather, matmul, softmax, matmul), and how
much of the byte floor is reached. The floor counts every selected token once: rows select at
random, so few rows share hardly any, and many rows all there are.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from glm_compile.ops.sparse_mla import sparse_mla
from tests.benchmarks.conftest import cold_copies, device, printed, time_replays

IS_GPU = device() == "cuda"
NUM_ROWS = [1, 2, 4, 6, 8, 16, 64, 2048] if IS_GPU else [1, 6]
NUM_HEADS = [64, 32, 8] if IS_GPU else [4]
RANK, ROPE_DIM = (512, 64) if IS_GPU else (64, 16)
NUM_SLOTS, NUM_TOKENS, PAGE = (2048, 131_072, 64) if IS_GPU else (64, 640, 64)
WIDTH = RANK + ROPE_DIM
SCALE = 256**-0.5
# What plain torch gathers at once: 2.4 GB.
TORCH_ROWS = 1024


def _line(
    bandwidth: float | None,
    num_rows: int,
    num_heads: int,
    ours: float,
    of_torch: float,
    num_bytes: float,
    flops: float,
) -> str:
    floor = f"{num_bytes / bandwidth / ours:5.0%} of the byte floor" if bandwidth else ""
    return (
        f"{num_rows:5} rows, {num_heads:2} heads: {ours * 1e6:8.2f} us, torch "
        f"{of_torch * 1e6:9.2f}, {of_torch / ours:5.2f}x, {floor}, "
        f"{flops / ours / 1e12:4.0f} TFLOP/s"
    )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """(rows, heads, our seconds, torch's, bytes, flops), printed at the end."""
    yield from printed(request, _line)


def plain_torch(q_RHC: torch.Tensor, pages: torch.Tensor, slots_RK: torch.Tensor) -> torch.Tensor:
    """What torch has for this: a gather and two batched products in bf16."""
    parts = []
    tokens = pages.view(-1, WIDTH)
    for first in range(0, len(q_RHC), TORCH_ROWS):
        rows = slice(first, first + TORCH_ROWS)
        latent_RKC = tokens[slots_RK[rows]]
        score_RHK = (q_RHC[rows] @ latent_RKC.mT) * SCALE
        probability_RHK = score_RHK.softmax(-1, dtype=torch.float32).to(q_RHC.dtype)
        parts.append(probability_RHK @ latent_RKC[..., :RANK])
    return torch.cat(parts)


@pytest.mark.parametrize("num_heads", NUM_HEADS)
@pytest.mark.parametrize("num_rows", NUM_ROWS)
def test_sparse_mla(
    gpu_bench: Any, benchmark: Any, table: list, num_rows: int, num_heads: int
) -> None:
    """Each call selects other tokens of a pool of pages, through a block table of its own."""
    benchmark.group = f"sparse_mla rows={num_rows} heads={num_heads}"
    token_bytes = 2 * WIDTH
    num_selected = min(num_rows * NUM_SLOTS, NUM_TOKENS)
    calls = cold_copies(num_selected * token_bytes)
    sequences = min(2, calls)
    pages_each = NUM_TOKENS // PAGE
    pages = torch.randn(sequences * pages_each, PAGE, WIDTH, device=device(), dtype=torch.bfloat16)
    tables = torch.randperm(len(pages), device=device()).int().view(sequences, 1, pages_each)
    q = torch.randn(num_rows, num_heads, WIDTH, device=device()).bfloat16()
    inputs = []
    for i in range(calls):
        chosen = torch.rand(min(num_rows, 64), NUM_TOKENS, device=device()).topk(NUM_SLOTS, -1)
        indices = chosen.indices.sort(-1).values.int()
        indices = indices.repeat(-(-num_rows // 64), 1)[:num_rows]
        inputs.append((tables[i % sequences], indices))
    num_bytes = num_selected * token_bytes + num_rows * num_heads * 2 * (WIDTH + RANK)
    flops = 2 * num_rows * num_heads * NUM_SLOTS * (WIDTH + RANK)

    def ours(block_table: torch.Tensor, indices: torch.Tensor) -> torch.Tensor:
        return sparse_mla(
            q,
            pages,
            indices,
            SCALE,
            kv_lora_rank=RANK,
            block_table=block_table,
            rows_per_sequence=num_rows,
        )

    got = gpu_bench(ours, inputs, bytes_moved=num_bytes, flops=flops, note="latents cold, q hot")
    slots = [
        (page_table[0].long()[indices.long() // PAGE] * PAGE + indices % PAGE,)
        for page_table, indices in inputs
    ]
    want = plain_torch(q, pages, slots[0][0])
    assert (got.float() - want.float()).abs().max() <= 0.02 * want.float().abs().max()
    if IS_GPU and not benchmark.disabled:
        of_torch = statistics.median(time_replays(lambda rows: plain_torch(q, pages, rows), slots))
        seconds = benchmark.extra_info["median_us"] * 1e-6
        benchmark.extra_info["times_torch"] = of_torch / seconds
        table.append((num_rows, num_heads, seconds, of_torch, num_bytes, flops))
