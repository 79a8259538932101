"""Top-k 2048 of GLM-5.2's decode step (6 rows) and of a prefill chunk, against torch.topk.

    pytest tests/benchmarks/test_topk_benchmark.py --benchmark-enable

Scores are hot: the indexer has just written them.
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
LENGTHS = [8192, 32_768, 81_920, 131_072, 262_144, 1_048_576] if IS_GPU else [512, 4096]
NUM_ROWS = 6
PREFILL = (2048, 131_072) if IS_GPU else (32, 1024)

ROWS: dict[str, Callable[[int, int], torch.Tensor]] = {
    "normal": lambda r, t: torch.randn(r, t, device=device()),
    "zero plateau": lambda r, t: torch.randn(r, t, device=device()).clamp(min=0),
    "constant": lambda r, t: torch.zeros(r, t, device=device()),
    "one bucket": lambda r, t: 1 + torch.rand(r, t, device=device()) * 1e-4,
}


def glm(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return topk_select(scores, lengths, K, plan=plan)


def torch_topk(scores: torch.Tensor, lengths: torch.Tensor, plan: torch.Tensor) -> torch.Tensor:
    return scores.topk(K, dim=-1).indices.int()


def run(gpu_bench: Any, fn: Callable[..., torch.Tensor], scores: torch.Tensor) -> None:
    num_rows, num_keys = scores.shape
    lengths = torch.full((num_rows,), num_keys, dtype=torch.int32, device=scores.device)
    arguments = (scores, lengths, topk_plan(lengths, K))
    moved = scores.numel() * 4 + num_rows * K * 4
    selected = gpu_bench(fn, [arguments], bytes_moved=moved, note="scores hot")
    if fn is glm:
        topk_oracle.assert_same_scores_as_torch(selected, scores, lengths)


@pytest.mark.parametrize("fn", [glm, torch_topk], ids=["glm", "torch"])
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_topk_decode(gpu_bench: Any, num_keys: int, fn: Callable[..., torch.Tensor]) -> None:
    run(gpu_bench, fn, ROWS["normal"](NUM_ROWS, num_keys))


@pytest.mark.parametrize("kind", [kind for kind in ROWS if kind != "normal"])
@pytest.mark.parametrize("num_keys", LENGTHS)
def test_topk_decode_adversarial(gpu_bench: Any, num_keys: int, kind: str) -> None:
    run(gpu_bench, glm, ROWS[kind](NUM_ROWS, num_keys))


@pytest.mark.parametrize("fn", [glm, torch_topk], ids=["glm", "torch"])
def test_topk_prefill(gpu_bench: Any, fn: Callable[..., torch.Tensor]) -> None:
    run(gpu_bench, fn, ROWS["normal"](*PREFILL))
