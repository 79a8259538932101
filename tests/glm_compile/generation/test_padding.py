"""Batches of compiled models are brought to a few sizes: rows that nobody sees, one memory.

A stand-in for the compiler leaves the steps as they are.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import glm_compile
from glm_compile.cache import PagedCache
from glm_compile.generation import api, padding
from glm_compile.generation.graphs import GraphStore
from glm_compile.generation.loop import DecodingLoop
from glm_compile.generation.padding import BATCH_SIZES
from glm_compile.generation.steps import MtpSteps, Steps, TargetSteps
from tests.glm_compile.generation.drafts import (
    NEW,
    Uncompiled,
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


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model(
        tiny_config(num_hidden_layers=2, first_k_dense_replace=1, indexer_types=["full", "full"])
    )


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    """Loops of calls that take the model for a compiled one."""
    compiler = Uncompiled()
    monkeypatch.setattr(api, "unwrap_compiled", lambda model: (model, compiler))
    return note_loops(monkeypatch)


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
    kept: list[list[Any]] = []
    keep = GraphStore.keep
    monkeypatch.setattr(
        GraphStore, "keep", lambda store, memories: (kept.append(m := [*memories]), keep(store, m))
    )
    run(model, prompt_of(5))
    run(model, prompt_of(5), max_cache_len=4096)
    run(model, prompt_of(5))
    # At the end of each call; and what graphs hold must go before the new one is made.
    assert [len(memories) for memories in kept] == [1, 0, 1, 1]
    assert [loop.cache.max_cache_len for loop in loops] == [256, 4096, 4096]
    steps = Steps.of(model, api.unwrap_compiled(model)[1])
    assert {cache.max_cache_len for cache in steps._caches} == {4096}


def test_a_call_inside_another_one_leaves_its_caches_and_graphs(
    model: Any, loops: list[DecodingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr(
        GraphStore, "keep", lambda store, memories: kept.append({id(m) for m in memories})
    )

    class Nested:
        puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts += 1
            if self.puts == 3:
                run(model, prompt_of(7), max_new_tokens=3, max_cache_len=2048)

        def end(self) -> None:
            pass

    run(model, prompt_of(5), streamer=Nested())
    outer, inner = (loop.cache.memory for loop in loops)
    assert outer is not inner and kept[-2] == {id(outer), id(inner)} and kept[-1] == {id(outer)}
    run(model, prompt_of(5))
    assert loops[-1].cache.memory is outer


def test_no_rows_where_they_would_cost_much(
    model: Any, loops: list[DecodingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    ids, mask = prompts(5)
    for limit, expected in ((512, 6), (511, 5)):
        monkeypatch.setattr(padding, "MAX_PADDING_TOKENS", limit)
        # 281 tokens are needed; a cache for them has room for the next power of two.
        run(model, ids, attention_mask=mask, max_new_tokens=3, max_cache_len=281)
        cache = loops[-1].cache
        assert (cache.batch_size, cache.max_cache_len) == (expected, 512)
        assert cache.num_pages == expected * 512 // 64


def test_parts_of_a_prompt_do_not_wait_for_padding(
    model: Any, loops: list[DecodingLoop], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Only the last part's hidden states are kept until its MTP rows can be made."""
    log: list[str] = []
    for cls, name in ((TargetSteps, "prompt"), (MtpSteps, "extend_prompt")):
        original = cls.__init__

        def init(self: Any, *args: Any, original: Any = original, name: str = name) -> None:
            original(self, *args)
            step = getattr(self, name)
            setattr(self, name, lambda *a: (log.append(name), step(*a))[1])

        monkeypatch.setattr(cls, "__init__", init)
    ids = torch.cat([prompt_of(40, b) for b in range(5)])
    mtp = random_mtp(model)
    call: dict[str, Any] = {"num_draft_tokens": 2, "max_new_tokens": 3}
    got = run(model, ids, mtp, prefill_chunk_size=10, **call)
    assert loops[-1].cache.batch_size == 6
    assert log == ["prompt", "extend_prompt"] * 4
    assert torch.equal(got.sequences, run(model, ids, mtp, **call).sequences)


def test_a_part_is_no_larger_than_the_prompt(model: Any, loops: list[DecodingLoop]) -> None:
    ids = prompt_of(8)
    got = run(model, ids, prefill_chunk_size=10**12)
    assert loops[-1].request.prompt.ids_BP.shape == (1, 8)
    assert torch.equal(got.sequences, greedy_reference(model, ids, NEW))


@pytest.mark.parametrize("size", [2, 3, 4])
def test_no_part_is_one_column(model: Any, loops: list[DecodingLoop], size: int) -> None:
    run(model, prompt_of(13), prefill_chunk_size=size, max_new_tokens=1)
    widths = [stop - start for start, stop in loops[-1]._chunks()]
    assert sum(widths) == 13 and min(widths) > 1 and max(widths) <= max(size, 3)


@pytest.mark.parametrize("value", [2.5, True, "x", 0, -1])
def test_a_part_that_is_no_size_is_named(model: Any, value: Any) -> None:
    with pytest.raises(ValueError, match="prefill_chunk_size"):
        run(model, prompt_of(3), prefill_chunk_size=value)


@pytest.mark.parametrize("batch_sizes", [5, (1.5,), ("a",), (True,), (-1,), "12", (1, "a"), None])
def test_warmup_names_batch_sizes_that_are_none(model: Any, batch_sizes: Any) -> None:
    with pytest.raises(ValueError, match="warmup: batch_sizes must be a sequence of positive"):
        glm_compile.warmup(model, batch_sizes=batch_sizes)


@pytest.mark.parametrize("count", [-2, "x", 1.5])
def test_warmup_names_a_number_of_drafts_that_is_none(model: Any, count: Any) -> None:
    for mtp in (None, random_mtp(model)):
        with pytest.raises(ValueError, match="num_draft_tokens"):
            glm_compile.warmup(model, mtp, num_draft_tokens=count)


def test_a_memory_of_other_layers_is_refused(model: Any) -> None:
    config = model.config
    memory = PagedCache(config, 2, 128, num_mtp_layers=1)
    assert PagedCache(config, 1, 256, num_mtp_layers=1, memory=memory).memory is memory
    address = memory.layers[0].latent_pages.data_ptr()
    with pytest.raises(ValueError, match="6 pages are needed, memory has 4"):
        PagedCache(config, 3, 128, num_mtp_layers=1, memory=memory)
    assert memory.layers[0].latent_pages.data_ptr() == address
    others: list[dict[str, Any]] = [
        {"num_mtp_layers": 0},
        {"num_mtp_layers": 1, "dtype": torch.bfloat16},
        {"num_mtp_layers": 1, "index_dtype": torch.float8_e4m3fn},
    ]
    for fields in others:
        with pytest.raises(ValueError, match="memory must be a cache of the same layers"):
            PagedCache(config, 1, 64, memory=memory, **fields)
    shared = tiny_config(num_hidden_layers=2, indexer_types=["full", "shared"])
    with pytest.raises(ValueError, match="memory must be a cache of the same layers"):
        PagedCache(shared, 1, 64, num_mtp_layers=1, memory=memory)
    with pytest.raises(ValueError, match="memory is on cpu, expected meta"):
        PagedCache(config, 1, 64, num_mtp_layers=1, memory=memory, device="meta")
