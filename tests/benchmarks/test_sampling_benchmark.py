"""What an iteration does outside of the layers, beside the same in torch's own operations.

    pytest tests/benchmarks/test_sampling_benchmark.py --benchmark-enable

A table ends the run: microseconds of each op by its kernel and by its reference, which is what
torch's operations take. Rows of logits were just written, so they are hot.

Shape legend: B batch, S rows of a block, k drafts, V vocabulary, C hidden, K selected tokens.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from glm_compile.ops.accept_block import FIRST_TOKEN, accept_block
from glm_compile.ops.draft_seed import draft_seed
from glm_compile.ops.filtered_softmax import filtered_softmax
from glm_compile.ops.forbid_ngrams import forbid_ngrams
from glm_compile.ops.mtp_input import mtp_input
from glm_compile.ops.rejection_sampling import draw_token, rejection_sample
from glm_compile.ops.rejection_sampling.random_numbers import Purpose, row_keys
from glm_compile.ops.repetition_penalty import repetition_penalty
from glm_compile.ops.row_argmax import row_argmax
from tests.benchmarks.conftest import device, printed, time_replays

IS_GPU = device() == "cuda"
# Without a GPU the benchmark only proves that it runs.
V, C, X, K = (154_880, 6144, 576, 2048) if IS_GPU else (500, 64, 24, 32)
NUM_DRAFTS = 5
FILTERS = {
    "softmax": (1.0, 0, 1.0),
    "top-k 50": (0.7, 50, 1.0),
    "top-p 0.95": (0.7, 0, 0.95),
    "top-k 50, top-p 0.95": (0.7, 50, 0.95),
}

# Takes the backend, None for the default one.
Run = Callable[[str | None], Any]


def _line(
    bandwidth: float | None, name: str, batch_size: int, ours: float, reference: float
) -> str:
    return (
        f"{name:33} B={batch_size:3}: {ours * 1e6:8.2f} us, torch's operations "
        f"{reference * 1e6:9.2f} us, {reference / ours:5.1f}x"
    )


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (name, batch, our seconds, the reference's), printed at the end."""
    yield from printed(request, _line)


def integers(*shape: int, high: int = 1) -> torch.Tensor:
    return torch.randint(0, high, shape, device=device())


def make_argmax(batch_size: int) -> Run:
    logits_B1V = torch.randn(batch_size, 1, V, device=device(), dtype=torch.bfloat16)
    return lambda backend: row_argmax(logits_B1V, backend=backend)


def make_accept(batch_size: int) -> Run:
    S = 1 + NUM_DRAFTS
    block_BS, predicted_BS = integers(batch_size, S), integers(batch_size, S)
    state = {
        "eos_ids_E": integers(8) - 1,
        "budget": integers() + 10**9,
        "prompt_width": integers(),
        "text_BW": integers(batch_size, 100_000),
        "counts_B": integers(batch_size),
        "finished_B": integers(batch_size).bool(),
        "kept_B": integers(batch_size),
        "tokens_BS": integers(batch_size, S),
        "bonus_B": block_BS[:, 0],
        "row_B": integers(batch_size),
        "results_NBR": integers(4, batch_size, FIRST_TOKEN + S),
        "turns_B": integers(batch_size),
        "lengths_B": integers(batch_size).int(),
    }

    def run(backend: str | None) -> torch.Tensor:
        # The text would grow out of its buffer.
        state["counts_B"].zero_()
        accept_block(predicted_BS, block_BS[:, 1:], **state, backend=backend)
        return state["kept_B"]

    return run


def make_filter(name: str) -> Callable[[int], Run]:
    def make(batch_size: int) -> Run:
        logits_RV = 3 * torch.randn(batch_size, V, device=device())
        return lambda backend: filtered_softmax(logits_RV, *FILTERS[name], backend=backend)

    return make


def make_rejection(batch_size: int) -> Run:
    probs_BSV = torch.randn(batch_size, 1 + NUM_DRAFTS, V, device=device()).softmax(-1)
    draft_probs_BkV = torch.randn(batch_size, NUM_DRAFTS, V, device=device()).softmax(-1)
    drafts_Bk, counts_B = integers(batch_size, NUM_DRAFTS, high=V), integers(batch_size)
    keys_B = row_keys(integers(), batch_size)
    return lambda backend: rejection_sample(
        probs_BSV, draft_probs_BkV, drafts_Bk, keys_B, counts_B, backend=backend
    )


def make_draw(batch_size: int) -> Run:
    probs_BV = torch.randn(batch_size, V, device=device()).softmax(-1)
    counts_B, keys_B = integers(batch_size), row_keys(integers(), batch_size)
    return lambda backend: draw_token(probs_BV, keys_B, counts_B, Purpose.DRAFT, backend=backend)


def make_penalty(batch_size: int) -> Run:
    scores_BSV = torch.randn(batch_size, 1 + NUM_DRAFTS, V, device=device())
    seen_BV = integers(batch_size, V + 1, high=2).bool()
    text_BW, starts_B = integers(batch_size, 4096, high=V), integers(batch_size) + 4000
    first_B = integers(batch_size)
    return lambda backend: repetition_penalty(
        scores_BSV, seen_BV, text_BW, starts_B, first_B, 0, 1.2, backend=backend
    )


def make_ngrams(batch_size: int) -> Run:
    scores_BSV = torch.randn(batch_size, 1 + NUM_DRAFTS, V, device=device())
    text_BW, starts_B = integers(batch_size, 4096, high=50), integers(batch_size) + 4000
    ngrams_BNG = text_BW.unfold(1, 3, 1)
    return lambda backend: forbid_ngrams(
        scores_BSV, ngrams_BNG, text_BW, starts_B, 0, is_text=True, backend=backend
    )


def make_input(batch_size: int) -> Run:
    hidden_B1C, embedding_VC = (
        torch.randn(size, device=device(), dtype=torch.bfloat16)
        for size in ((batch_size, 1, C), (1000, C))
    )
    norms_2C = torch.randn(2, C, device=device(), dtype=torch.bfloat16)
    ids_B1 = integers(batch_size, 1, high=1000)
    return lambda backend: mtp_input(
        ids_B1, hidden_B1C, embedding_VC, *norms_2C, eps=1e-5, backend=backend
    )


def make_seed(batch_size: int) -> Run:
    pages = torch.randn(2048 if IS_GPU else 4, 64, X, device=device(), dtype=torch.bfloat16)
    num_tokens = 64 * len(pages)
    topk_BSK = integers(batch_size, 1, K, high=num_tokens).sort(-1).values.int()
    table_BP = torch.arange(len(pages), device=device()).int().expand(batch_size, -1)
    lengths_B = integers(batch_size).int() + num_tokens
    return lambda backend: draft_seed(pages, topk_BSK, table_BP, lengths_B, backend=backend)


CASES: dict[str, Callable[[int], Run]] = {
    "row_argmax": make_argmax,
    "accept_block": make_accept,
    "mtp_input": make_input,
    "draft_seed": make_seed,
    **{f"filtered_softmax, {name}": make_filter(name) for name in FILTERS},
    "draw_token": make_draw,
    "rejection_sample": make_rejection,
    "repetition_penalty": make_penalty,
    "forbid_ngrams": make_ngrams,
}


@pytest.mark.parametrize("batch_size", [1, 6, 64] if IS_GPU else [2])
@pytest.mark.parametrize("name", CASES)
def test_op(
    gpu_bench: Any, benchmark: Any, table: list[tuple[Any, ...]], name: str, batch_size: int
) -> None:
    benchmark.group = f"{name} B={batch_size}"
    run = CASES[name](batch_size)
    assert gpu_bench(run, [(None,)], note="hot") is not None
    if IS_GPU and not benchmark.disabled:
        median = benchmark.extra_info["median_us"] * 1e-6
        reference = statistics.median(time_replays(run, [("reference",)]))
        benchmark.extra_info["times_reference"] = reference / median
        table.append((name, batch_size, median, reference))
