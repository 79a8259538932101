"""Published faults of ops inside CUDA graphs: padded rows, stale pointers, first call in a capture.

Shape legend: B sequences of a bucket, T keys, H index heads, D index head dim.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest
import torch

from glm_compile.ops.indexer_scores import indexer_scores_paged
from glm_compile.ops.paged_cache import paged_write
from glm_compile.ops.topk import topk_select

pytestmark = pytest.mark.gpu

BUCKET, NUM_REAL, NUM_PAGES, DIM, HEADS, MAX_LEN, SELECTED = 16, 11, 64, 128, 16, 256, 32


class Step:
    """One indexer step on static buffers: store keys, score them, select."""

    def __init__(self) -> None:
        like = {"device": "cuda", "dtype": torch.bfloat16}
        self.pages = torch.randn(NUM_PAGES, 64, DIM, **like)
        self.new_B1D = torch.randn(BUCKET, 1, DIM, **like)
        self.q_BHD = torch.randn(BUCKET, HEADS, DIM, **like)
        self.weights_BH = torch.rand(BUCKET, HEADS, device="cuda")
        self.table = torch.arange(NUM_PAGES, device="cuda", dtype=torch.int32).view(BUCKET, 4)
        self.lengths_B = torch.zeros(BUCKET, device="cuda", dtype=torch.int32)

    def __call__(self) -> torch.Tensor:
        paged_write(self.pages, self.new_B1D, self.table, self.lengths_B)
        ends_B = self.lengths_B + 1
        scores = indexer_scores_paged(
            self.q_BHD, self.weights_BH, self.pages, self.table, ends_B, MAX_LEN
        )
        return topk_select(scores, ends_B, SELECTED)

    def refill(self, seed: int) -> None:
        """New values in the same memory; rows from NUM_REAL on are padding of the bucket."""
        torch.manual_seed(seed)
        for buffer in (self.pages, self.new_B1D, self.q_BHD):
            buffer.copy_(torch.randn_like(buffer))
        self.lengths_B.copy_(torch.randint(40, 250, (BUCKET,)))
        self.lengths_B[NUM_REAL:] = 0
        self.table[NUM_REAL:] = -1


def test_comp_15_padded_rows_write_nowhere_and_replays_follow_their_inputs() -> None:
    step = Step()
    step.refill(0)
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = step()
    for seed in (1, 2, 3):
        # Memory of anything that was captured by accident is given to somebody else.
        torch.cuda.empty_cache()
        spoilt = [torch.full((1 << 20,), float("nan"), device="cuda") for _ in range(8)]
        step.refill(seed)
        before = step.pages.clone()
        graph.replay()
        replayed, pages = selected.clone(), step.pages.clone()
        padded_pages = torch.arange(NUM_PAGES, device="cuda").view(BUCKET, 4)[NUM_REAL:].flatten()
        assert torch.equal(pages[padded_pages], before[padded_pages])
        step.pages.copy_(before)
        assert torch.equal(step()[:NUM_REAL], replayed[:NUM_REAL])
        assert torch.equal(step.pages, pages)
        del spoilt


def test_comp_16_a_first_call_inside_a_capture_works_or_says_why() -> None:
    """A fresh process, nothing compiled yet, a stream of its own."""
    program = """
        import torch
        from tests.regressions.test_cuda_graph_cases import NUM_REAL, Step

        step = Step()
        step.refill(0)
        graph = torch.cuda.CUDAGraph()
        stream = torch.cuda.Stream()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph, stream=stream):
            selected = step()
        for seed in (1, 2):
            step.refill(seed)
            before = step.pages.clone()
            graph.replay()
            torch.cuda.synchronize()
            replayed = selected.clone()
            step.pages.copy_(before)
            assert torch.equal(step()[:NUM_REAL], replayed[:NUM_REAL])
        print("works")
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0 and done.stdout.strip().endswith("works"), done.stderr[-3000:]
