"""Batches of compiled models are brought to a few sizes: rows that nobody sees, one memory.

A stand-in for the compiler leaves the steps as they are.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_compile.generation import api
from glm_compile.generation.graphs import GraphStore
from glm_compile.generation.loop import DecodingLoop
from glm_compile.generation.padding import BATCH_SIZES
from glm_compile.generation.steps import Steps
from tests.glm_compile.generation.drafts import (
    NEW,
    cached_rows,
    greedy_reference,
    padded,
    prompt_of,
    random_mtp,
    run,
)
from tests.tiny_models import tiny_config, tiny_model


class Uncompiled:
    """A compiler that compiles nothing."""

    def __init__(self) -> None:
        self.owner = SimpleNamespace()
        self.options: dict[str, Any] = {}

    def __call__(self, step: Any) -> Any:
        return step


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(
        tiny_config(num_hidden_layers=2, first_k_dense_replace=1, indexer_types=["full", "full"])
    )


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    """Loops of calls that take the model for a compiled one."""
    compiler, made = Uncompiled(), []
    monkeypatch.setattr(api, "unwrap_compiled", lambda model: (model, compiler))

    class Noted(DecodingLoop):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            made.append(self)

    monkeypatch.setattr(api, "DecodingLoop", Noted)
    return made


def prompts(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return padded([prompt_of(3 + 4 * b, b) for b in range(count)], "left")


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize("count", [1, 5, 7])
def test_rows_are_as_if_there_were_no_others(
    model: Any, loops: list[DecodingLoop], count: int, num_drafts: int
) -> None:
    ids, mask = prompts(count)
    mtp = random_mtp(model) if num_drafts else None
    got = run(model, ids, mtp, attention_mask=mask, num_draft_tokens=num_drafts)
    assert loops[-1].cache.batch_size == next(size for size in BATCH_SIZES if size >= count)
    assert got.sequences.shape[0] == count and got.accept_lengths.shape[1] == count
    for b in range(count):
        alone = greedy_reference(model, prompt_of(3 + 4 * b, b), NEW)
        assert torch.equal(got.sequences[b, -NEW:], alone[0, -NEW:])


def test_a_seed_gives_the_same_with_and_without_them(
    model: Any, loops: list[DecodingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts(5)
    texts = []
    for is_padded in (True, False):
        if not is_padded:
            monkeypatch.setattr(api, "pad_batch", lambda request: request)
        torch.manual_seed(3)
        call: dict[str, Any] = {"attention_mask": mask, "num_draft_tokens": 2, "do_sample": True}
        texts.append(run(model, ids, random_mtp(model), **call).sequences)
        assert loops[-1].cache.batch_size == (6 if is_padded else 5)
    assert torch.equal(texts[0], texts[1])


@pytest.mark.parametrize(
    "fields",
    [
        {"output_scores": True},
        {"output_logits": True},
        {"stopping_criteria": [lambda ids, scores, **_: torch.zeros(len(ids), dtype=torch.bool)]},
        {"logits_processor": [lambda ids, scores: scores]},
        {"do_sample": True},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_no_rows_where_somebody_sees_them(
    model: Any, loops: list[DecodingLoop], fields: dict[str, Any]
) -> None:
    ids, mask = prompts(5)
    run(model, ids, attention_mask=mask, max_new_tokens=3, **fields)
    assert loops[-1].cache.batch_size == 5


def test_processors_get_rows_too(model: Any, loops: list[DecodingLoop]) -> None:
    ids, mask = prompts(5)
    fields: dict[str, Any] = {
        "repetition_penalty": 1.6,
        "encoder_repetition_penalty": 0.7,
        "encoder_no_repeat_ngram_size": 3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 4,
        "suppress_tokens": [4],
    }
    with torch.inference_mode():
        got = run(model, ids, random_mtp(model), attention_mask=mask, num_draft_tokens=2, **fields)
    assert loops[-1].cache.batch_size == 6
    for b in range(5):
        # Padding of a prompt counts in transformers: so the same batch, plain.
        alone = run(model, ids[b : b + 1], attention_mask=mask[b : b + 1], **fields)
        assert torch.equal(got.sequences[b], alone.sequences[0])


def test_what_is_in_them_changes_nothing(
    model: Any, loops: list[DecodingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """NaN in all of their cache, before each of many iterations."""
    ids, mask = prompts(5)
    call: dict[str, Any] = {"attention_mask": mask, "num_draft_tokens": 1, "max_new_tokens": 90}
    mtp = random_mtp(model)
    expected = run(model, ids, mtp, **call)
    iterate, calls = DecodingLoop._iterate, []

    def poison(loop: DecodingLoop) -> None:
        pages = loop.cache.block_table[5:].flatten().long()
        for layer in loop.cache.layers:
            for tensor in (layer.latent_pages, layer.key_pages):
                tensor[pages] = torch.nan
        calls.append(1)
        iterate(loop)

    monkeypatch.setattr(DecodingLoop, "_iterate", poison)
    got = run(model, ids, mtp, **call)
    assert len(calls) > 50
    assert torch.equal(got.sequences, expected.sequences)
    assert torch.equal(got.accept_lengths, expected.accept_lengths)


def test_batches_in_turn_share_one_memory(model: Any, loops: list[DecodingLoop]) -> None:
    texts = {}
    for count in (6, 2, 5, 2, 1, 6):
        ids, mask = prompts(count)
        text = run(model, ids, attention_mask=mask).sequences
        assert torch.equal(text, texts.setdefault(count, text))
    caches = [loop.cache for loop in loops]
    assert caches[0] is caches[2] is caches[5] and caches[1] is caches[3]
    assert len({cache.layers[1].key_pages.data_ptr() for cache in caches}) == 1
    assert cached_rows(caches[4], 0, 0)[0].shape[0] == int(caches[4].lengths[0])


def test_a_larger_call_takes_a_new_memory(
    model: Any, loops: list[DecodingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    cleared: list[int] = []
    monkeypatch.setattr(GraphStore, "clear", lambda store: cleared.append(1))
    run(model, prompt_of(5))
    run(model, prompt_of(5), max_cache_len=4096)
    run(model, prompt_of(5))
    assert len(cleared) == 1  # what is held by graphs must go before the new one is made
    assert [loop.cache.max_cache_len for loop in loops] == [256, 4096, 4096]
    steps = Steps.of(model, api.unwrap_compiled(model)[1])
    assert [cache.max_cache_len for cache in steps._caches] == [4096]
