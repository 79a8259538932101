"""Top-k 2048 of GLM-5.2, from one row of a decode step to a prefill chunk, against torch.topk.

    pytest tests/benchmarks/test_topk_benchmark.py --benchmark-enable

Scores are hot where they fit in L2: the indexer has just written them. `times_floor` is against
reading each score once from device memory, so hot rows may be below 1.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm_compile.ops.topk import topk_plan, topk_select
from tests.benchmarks.conftest import device
from tests.ops import topk_oracle

IS_GPU = device() == "cuda"
K = 2048 if IS_GPU else 64
LENGTHS = [2048, 8192, 32_768, 81_920, 131_072, 262_144, 1_048_576] if IS_GPU else [64, 512, 4096]
ROW_COUNTS = [1, 2, 4, 6, 16, 64, 2048] if IS_GPU else [1, 6]
DECODE_ROWS = 6
# 1 GiB of scores: more would say the same.
MOST_SCORES = 1 << 28
CHECKED_ROWS = 64

ROWS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda r, t: torch.randn(r, t, device=device()),
    "zero plateau": lambda r, t: torch.randn(r, t, device=device()).clamp(min=0),
    "constant": lambda r, t: torch.zeros(r, t, device=device()),
    "five values": lambda r, t: torch.randint(-2, 3, (r, t), device=device()).float(),
    "one bucket": lambda r, t: 1 + torch.rand(r, t, device=device()) * 1e-4,
    "ascending": lambda r, t: torch.randn(r, t, device=device()).sort(dim=-1).values,
}


def glm(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return topk_select(scores, lengths, K, plan=plan)


def triton(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return topk_select(scores, lengths, K, plan=plan, backend="triton")


def torch_topk(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return scores.topk(K, dim=-1).indices.int()


def run(gpu_bench: Any, fn: Callable[..., torch.Tensor], scores: torch.Tensor) -> None:
    num_rows, num_keys = scores.shape
    lengths = torch.full((num_rows,), num_keys, dtype=torch.int32, device=scores.device)
    arguments = (scores, lengths, topk_plan(lengths, K))
    moved = scores.numel() * 4 + num_rows * K * 4
    selected = gpu_bench(fn, [arguments], bytes_moved=moved, note="scores hot")
    if fn is not torch_topk:
        checked = slice(0, CHECKED_ROWS)
        topk_oracle.assert_same_scores_as_torch(selected[checked], scores[checked], lengths)


SHAPES = [(r, t) for r in ROW_COUNTS for t in LENGTHS if r * t <= MOST_SCORES]


@pytest.mark.parametrize("fn", [glm, torch_topk], ids=["glm", "torch"])
@pytest.mark.parametrize(("num_rows", "num_keys"), SHAPES)
def test_topk(
    gpu_bench: Any, num_rows: int, num_keys: int, fn: Callable[..., torch.Tensor]
) -> None:
    run(gpu_bench, fn, ROWS["normal"](num_rows, num_keys))


@pytest.mark.skipif(not IS_GPU, reason="needs a CUDA device")
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_topk_decode_triton(gpu_bench: Any, num_keys: int) -> None:
    run(gpu_bench, triton, ROWS["normal"](DECODE_ROWS, num_keys))


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "normal"])
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_topk_decode_adversarial(gpu_bench: Any, num_keys: int, kind: str) -> None:
    run(gpu_bench, glm, ROWS[kind](DECODE_ROWS, num_keys))
