"""Blocks of fewer drafts where few are accepted: the text stays as it is."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import glm_compile
from glm_compile.generation.draft_length import AdaptiveDraftLength, draft_lengths
from glm_compile.generation.loop import DecodingLoop
from tests.glm_compile.generation.drafts import (
    VOCAB,
    ScriptedMtp,
    cached_rows,
    greedy_reference,
    note_loops,
    padded,
    prompt_of,
    random_mtp,
    run,
)
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers

NUM_DRAFTS = 5
NEW = 46


@pytest.fixture(scope="module")
def model() -> Any:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1, indexer_types=["full"])
    return tiny_model(config)


@pytest.fixture(scope="module")
def texts(model: Any) -> list[list[int]]:
    rows = prompt_of(12), prompt_of(5, 1)
    return [greedy_reference(model, row, NEW)[0].tolist() for row in rows]


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    return note_loops(monkeypatch)


# -- the choice -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("longest", "lengths"), [(1, (1,)), (2, (2, 1)), (3, (3, 2, 1)), (5, (5, 3, 1)), (7, (7, 4, 1))]
)
def test_few_lengths_to_choose_from(longest: int, lengths: tuple[int, ...]) -> None:
    assert draft_lengths(longest) == lengths


def test_the_length_follows_what_is_accepted() -> None:
    chosen = AdaptiveDraftLength(5)
    for _ in range(20):
        chosen.learn(chosen.length, [1 + chosen.length])
        assert chosen.length == 5
    for _ in range(40):
        chosen.learn(chosen.length, [1])
    assert chosen.length == 1 and chosen.rate < 0.2
    seen = []
    for _ in range(30):
        chosen.learn(chosen.length, [1 + chosen.length])
        seen.append(chosen.length)
    assert seen[-1] == 5 and seen == sorted(seen)


@pytest.mark.parametrize(("rate", "length"), [(0.95, 5), (0.55, 3), (0.1, 1)])
def test_a_rate_settles_at_the_length_of_most_tokens_for_the_time(rate: float, length: int) -> None:
    """Sixteen sequences, so that the estimate is near the rate."""
    chosen = AdaptiveDraftLength(5)
    generator = torch.Generator().manual_seed(0)
    lengths = []
    for _ in range(150):
        coins = torch.rand(16, chosen.length, generator=generator) < rate
        kept = 1 + coins.long().cumprod(dim=1).sum(dim=1)
        chosen.learn(chosen.length, kept.tolist())
        lengths.append(chosen.length)
    assert lengths[50:].count(length) > 80
    assert abs(chosen.rate - rate) < 0.1


def test_it_does_not_waver() -> None:
    """Where two lengths are as good, neither result of a block changes anything."""
    chosen = AdaptiveDraftLength(5)
    for _ in range(60):
        for count in (3, 4, 2, 5):
            chosen.learn(chosen.length, [min(count, 1 + chosen.length)])
    before = chosen.length
    for _ in range(20):
        for count in (3, 4, 2, 5):
            chosen.learn(chosen.length, [min(count, 1 + chosen.length)])
            assert chosen.length == before


def test_a_block_that_ends_all_sequences_teaches_nothing() -> None:
    chosen = AdaptiveDraftLength(5)
    before = chosen.rate
    chosen.learn(5, [])
    assert chosen.rate == before


# -- decoding -------------------------------------------------------------------------------------


def in_phases(iteration: int, row: int) -> int:
    """First all drafts are right, then none, at the end all again."""
    return 0 if 2 <= iteration < 30 else NUM_DRAFTS


def decode(model: Any, texts: Any, mtp: Any = None, **kwargs: Any) -> Any:
    ids, mask = padded([prompt_of(12), prompt_of(5, 1)], "left")
    mtp = mtp or ScriptedMtp(texts, in_phases, VOCAB, inner=random_mtp(model))
    kwargs = {"num_draft_tokens": NUM_DRAFTS, "adaptive_draft_length": True} | kwargs
    return run(model, ids, mtp, attention_mask=mask, max_new_tokens=NEW, **kwargs)


def test_greedy_text_is_that_of_a_fixed_length(
    model: Any, texts: list[list[int]], loops: list[Any]
) -> None:
    fixed = decode(model, texts, adaptive_draft_length=False)
    adaptive = decode(model, texts)
    for b, (text, width) in enumerate(zip(texts, (12, 5))):
        assert adaptive.sequences[b, 12:].tolist() == text[width:]
    assert torch.equal(fixed.sequences, adaptive.sequences)
    tried = [loop._num_verified for loop in loops]
    assert tried[0] == [] and loops[0].draft_length is None
    assert tried[1][0] == 5 and min(tried[1]) == 1
    assert set(tried[1]) <= {5, 3, 1}
    # Fewer tokens went through the model for about as many iterations.
    count = adaptive.num_iterations
    assert sum(1 + k for k in tried[1][:count]) < 0.8 * 6 * fixed.num_iterations
    assert count <= 1.2 * fixed.num_iterations


CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "eos": {"eos_token_id": list(range(1, VOCAB, 40))},
    "scores": {"output_scores": True, "output_logits": True},
    "processors": {"repetition_penalty": 1.4, "no_repeat_ngram_size": 3},
    "criterion": {"stopping_criteria": [lambda ids, scores: ids[:, -1] + ids.shape[1] > 535]},
    "own processor": {"logits_processor": [lambda ids, scores: scores.roll(1, dims=-1)]},
    "sampling": {"do_sample": True, "temperature": 3.0},
    "indexer in every draft step": {"index_share": False},
}


@pytest.mark.parametrize("case", CASES)
def test_a_host_that_runs_ahead_chooses_the_same(
    model: Any, texts: list[list[int]], loops: list[Any], case: str
) -> None:
    results = []
    for overlap in (False, True):
        torch.manual_seed(2)
        mtp = random_mtp(model) if case in ("sampling", "indexer in every draft step") else None
        results.append(decode(model, texts, mtp, overlap=overlap, **CASES[case]))
    assert torch.equal(results[0].sequences, results[1].sequences)
    assert torch.equal(results[0].accept_lengths, results[1].accept_lengths)
    count = results[0].num_iterations
    tried = [loop._num_verified[:count] for loop in loops]
    assert tried[0] == tried[1] and len(set(tried[0])) > 1
    for name in ("scores", "logits"):
        if getattr(results[0], name) is not None:
            assert len(getattr(results[0], name)) == NEW
            for ours, theirs in zip(getattr(results[0], name), getattr(results[1], name)):
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_caches_equal_ones_rebuilt_from_scratch(
    model: Any, texts: list[list[int]], loops: list[DecodingLoop]
) -> None:
    """Also those of the MTP layer, behind blocks of all lengths."""
    inner = random_mtp(model)
    decode(model, texts, ScriptedMtp(texts, in_phases, VOCAB, inner=inner))
    loop = loops[-1]
    assert len(set(loop._num_verified)) == 3
    for b, text in enumerate(texts):
        length = int(loop.cache.lengths[b])
        ids = torch.tensor([text[: length + 1]])
        fresh = glm_compile.PagedCache(model.config, 1, 64, num_mtp_layers=1)
        fresh.auto_advance = False
        hidden, _ = loop.target.prompt(ids[:, :-1], torch.zeros(1, dtype=torch.long), fresh)
        inner.extend(ids[:, 1:], hidden, torch.arange(length)[None], None, fresh)
        fresh.set_lengths(length)
        for layer in range(len(fresh.layers)):
            for ours, rebuilt in zip(
                cached_rows(loop.cache, layer, b), cached_rows(fresh, layer, 0)
            ):
                torch.testing.assert_close(ours, rebuilt, rtol=1e-4, atol=1e-4)


def test_one_draft_cannot_be_fewer(model: Any, texts: list[list[int]], loops: list[Any]) -> None:
    for count in (0, 1):
        decode(model, texts, num_draft_tokens=count)
        assert loops[-1].draft_length is None
