"""Iterations that are launched before the results of the one before are read: nothing else changes.

Each result is compared with that of a host which waits for every iteration.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, StoppingCriteriaList

import glm_compile
from glm_compile.generation import api
from glm_compile.generation.loop import DecodingLoop
from glm_compile.generation.request import wants_cuda_graph
from tests.glm_compile.generation.drafts import (
    NEW,
    VOCAB,
    ScriptedMtp,
    always,
    cached_rows,
    greedy_reference,
    padded,
    prompt_of,
    random_mtp,
    run,
    unequal,
)
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers

NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def model() -> Any:
    config = tiny_config(
        num_hidden_layers=2, first_k_dense_replace=1, indexer_types=["full", "shared"]
    )
    return tiny_model(config)


@pytest.fixture(scope="module")
def texts(model: Any) -> list[list[int]]:
    """Two prompts of unequal length with what the model says."""
    return [
        greedy_reference(model, row, 24)[0].tolist() for row in (prompt_of(12), prompt_of(5, 1))
    ]


@pytest.fixture(scope="module")
def trained() -> tuple[Any, Any]:
    folder = Path(__file__).parents[3] / "examples" / "tiny_glm52"
    return glm_compile.load(folder, device="cpu", dtype=torch.float32)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    """The loops that calls have run, each with a log of what the host did."""
    made: list[DecodingLoop] = []

    class Noted(DecodingLoop):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            self.log: list[str] = []
            made.append(self)
            publish, read = self.ring.publish, self.ring.read
            self.ring.publish = lambda: (self.log.append("launch"), publish())[1]  # type: ignore[method-assign]
            self.ring.read = lambda slot: (self.log.append("read"), read(slot))[1]  # type: ignore[method-assign]

    monkeypatch.setattr(api, "DecodingLoop", Noted)
    return made


def ragged() -> tuple[torch.Tensor, torch.Tensor]:
    return padded([prompt_of(12), prompt_of(5, 1)], "left")


def scripted(model: Any, texts: list[list[int]], inner: bool = True) -> ScriptedMtp:
    """Unequal accepts, and real cache rows of an MTP layer."""
    return ScriptedMtp(texts, unequal, VOCAB, inner=random_mtp(model) if inner else None)


def ends_with(*tokens: int) -> Any:
    return lambda ids, scores, **_: torch.isin(ids[:, -1], torch.tensor(tokens))


def assert_same(result: Any, expected: Any) -> None:
    assert torch.equal(result.sequences, expected.sequences)
    assert torch.equal(result.accept_lengths, expected.accept_lengths)
    assert result.num_iterations == expected.num_iterations
    for name in ("scores", "logits"):
        ours, theirs = getattr(result, name), getattr(expected, name)
        assert (ours is None) == (theirs is None)
        if ours is not None:
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


# Fields; "text" stands for ids that the model says at these places of the two rows.
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "eos": {"eos_text": [(0, 4), (1, 9)]},
    "criterion": {"stop_text": [(0, 2)]},
    "criterion and eos": {"stop_text": [(1, 5)], "eos_text": [(0, 8)]},
    "scores": {"output_scores": True, "output_logits": True, "eos_text": [(0, 6)]},
    "criterion with scores": {"stop_text": [(0, 6)], "output_scores": True},
    "processors that look at the text": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 3,
        "output_scores": True,
    },
    "processor and criterion": {"no_repeat_ngram_size": 2, "stop_text": [(0, 3)]},
    "sampling with processors": {
        "do_sample": True,
        "repetition_penalty": 1.5,
        "bad_words_ids": [[7], [5, 6]],
        "eos_token_id": list(range(0, VOCAB, 9)),
        "min_new_tokens": 4,
    },
    "own processor on the host": {
        "logits_processor": [lambda ids, scores: scores.roll(1, dims=-1)]
    },
    "warpers": {"do_sample": True, "temperature": 1.7, "top_k": 50, "top_p": 0.9},
    "sampling": {"do_sample": True, "eos_token_id": list(range(0, VOCAB, 9))},
    "plain": {"num_draft_tokens": 0, "eos_text": [(0, 4), (1, 2)]},
    "plain sampling": {
        "num_draft_tokens": 0,
        "do_sample": True,
        "eos_token_id": list(range(0, VOCAB, 9)),
    },
    "indexer in every draft step": {"index_share": False, "eos_text": [(1, 3)]},
    "prompts in chunks": {"prefill_chunk_size": 4, "stop_text": [(0, 0)]},
}


@pytest.mark.parametrize("case", CASES)
def test_a_host_that_runs_ahead_gets_the_same(
    model: Any, texts: list[list[int]], loops: list[Any], case: str
) -> None:
    fields: dict[str, Any] = {"num_draft_tokens": NUM_DRAFTS} | CASES[case]
    said = [text[width:] for text, width in zip(texts, (12, 5))]
    if "eos_text" in fields:
        fields["eos_token_id"] = [said[b][i] for b, i in fields.pop("eos_text")]
    if "stop_text" in fields:
        stops = [said[b][i] for b, i in fields.pop("stop_text")]
        fields["stopping_criteria"] = [ends_with(*stops)]
    ids, mask = ragged()
    random = random_mtp(model)
    results, states, ends = [], [], []
    for overlap in (False, True):
        mtp: Any = scripted(model, texts)
        if fields.get("do_sample") or fields.get("index_share") is False:
            mtp = random
        torch.manual_seed(3)
        results.append(
            run(model, ids, mtp, attention_mask=mask, overlap=overlap, max_new_tokens=20, **fields)
        )
        states.append(torch.get_rng_state())
        loop = loops[-1]
        needs_host = "on the host" in case
        assert loop.is_overlapped == (overlap and not needs_host)
        facts = [loop.counts, loop.finished, loop.cache.lengths.tolist()]
        facts += [loop.state.counts_B.tolist(), loop.state.finished_B.tolist()]
        rows = [r for layer in range(len(loop.cache.layers)) for b in range(2)
                for r in cached_rows(loop.cache, layer, b)]  # fmt: skip
        ends.append((facts, rows))
    assert_same(results[1], results[0])
    assert torch.equal(*states)
    assert ends[1][0] == ends[0][0]
    # Experts round differently with another number of tokens: a row that a criterion has ended
    # still brings some in the iteration in flight.
    for ours, theirs in zip(ends[1][1], ends[0][1]):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_the_next_iteration_is_launched_before_results_are_read(
    model: Any, texts: list[list[int]], loops: list[Any]
) -> None:
    ids, mask = ragged()
    fields = {"num_draft_tokens": NUM_DRAFTS, "attention_mask": mask, "max_new_tokens": 20}
    result = run(model, ids, scripted(model, texts), **fields)
    log, count = loops[-1].log, result.num_iterations
    assert log[:5] == ["launch", "launch", "read", "launch", "read"]
    ahead = [log[:i].count("launch") - log[:i].count("read") for i in range(len(log) + 1)]
    assert max(ahead) == 2
    # Rows that could end with what is in flight are not waited for.
    assert log.count("launch") <= count + 2
    run(model, ids, scripted(model, texts), overlap=False, **fields)
    assert loops[-1].log == ["launch", "read"] * (count + 1)


@pytest.mark.parametrize("budget", [1, 2, 3, 8])
def test_nothing_is_launched_that_cannot_be_needed(
    model: Any, loops: list[Any], budget: int
) -> None:
    """Plain decoding gains one token an iteration, so the host knows the last one."""
    run(model, prompt_of(9), max_new_tokens=budget)
    assert loops[-1].log.count("launch") == budget


@pytest.mark.parametrize("budget", [1, 2, NUM_DRAFTS, NUM_DRAFTS + 1, NUM_DRAFTS + 2])
def test_budgets(model: Any, texts: list[list[int]], budget: int) -> None:
    ids = prompt_of(12)
    for overlap in (False, True):
        mtp = ScriptedMtp(texts, always(3), VOCAB)
        result = run(
            model, ids, mtp, num_draft_tokens=NUM_DRAFTS, max_new_tokens=budget, overlap=overlap
        )
        assert result.sequences[0].tolist() == texts[0][: 12 + budget]
        assert int(result.accept_lengths.sum()) == budget - 1


def test_no_budget_is_refused(model: Any) -> None:
    with pytest.raises(ValueError):
        run(model, prompt_of(5), max_new_tokens=0)


@pytest.mark.parametrize("position", range(2 * NUM_DRAFTS + 3))
def test_an_end_at_every_place_of_a_block(
    model: Any, texts: list[list[int]], loops: list[Any], position: int
) -> None:
    said = texts[0][12:]
    eos = said[position]
    expected = texts[0][: 12 + said.index(eos) + 1]
    for kwargs in ({"eos_token_id": eos}, {"stopping_criteria": [ends_with(eos)]}):
        mtp = ScriptedMtp(texts, always(3), VOCAB)
        result = run(model, prompt_of(12), mtp, num_draft_tokens=NUM_DRAFTS, **kwargs)
        assert result.sequences[0].tolist() == expected
        loop = loops[-1]
        assert loop.counts == loop.state.counts_B.tolist() == [len(expected) - 12]
        assert loop.cache.lengths.tolist() == [len(expected) - 1]
        assert int(result.accept_lengths.sum()) == len(expected) - 13


@pytest.mark.parametrize("index_share", [True, False])
def test_poisoned_rows_beyond_the_kept_ones(
    model: Any, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch, index_share: bool
) -> None:
    iterate = DecodingLoop._iterate

    def poison(loop: DecodingLoop) -> None:
        for layer in loop.cache.layers:
            for pages in (layer.latent_pages, layer.key_pages):
                for b in range(2) if pages is not None else ():
                    table = loop.cache.block_table[b].long()
                    rows = pages[table].flatten(0, 1)
                    rows[int(loop.cache.lengths[b]) :] = 1e3
                    pages[table] = rows.view_as(pages[table])
        iterate(loop)

    ids, mask = ragged()
    mtp: Any = scripted(model, texts) if index_share else random_mtp(model)
    monkeypatch.setattr(DecodingLoop, "_iterate", poison)
    result = run(
        model, ids, mtp, attention_mask=mask, num_draft_tokens=NUM_DRAFTS, max_new_tokens=20,
        index_share=index_share,
    )  # fmt: skip
    for b, (text, width) in enumerate(zip(texts, (12, 5))):
        assert result.sequences[b, 12:].tolist() == text[width : width + 20]


def test_the_state_stays_where_it_is(
    model: Any, texts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A captured iteration finds everything at the same address."""
    iterate, seen = DecodingLoop._iterate, []

    def note(loop: DecodingLoop) -> None:
        tensors = [getattr(loop.state, f.name) for f in dataclasses.fields(loop.state)]
        tensors = [t for t in tensors if t is not None] + [loop.cache.lengths]
        assert all(t.is_contiguous() for t in tensors)
        seen.append([t.data_ptr() for t in tensors])
        iterate(loop)

    monkeypatch.setattr(DecodingLoop, "_iterate", note)
    ids, mask = ragged()
    run(model, ids, random_mtp(model), attention_mask=mask, do_sample=True, max_new_tokens=9)
    assert len(seen) > 3 and all(addresses == seen[0] for addresses in seen)


def test_a_streamer_gets_each_token_once_and_in_order(model: Any, texts: list[list[int]]) -> None:
    class Streamer:
        def __init__(self) -> None:
            self.got: list[Any] = []

        def put(self, value: torch.Tensor) -> None:
            self.got += value.flatten().tolist()

        def end(self) -> None:
            self.got.append("end")

    for overlap in (False, True):
        streamer = Streamer()
        mtp = ScriptedMtp(texts, unequal, VOCAB)
        eos = texts[0][20]
        run(
            model, prompt_of(12), mtp, num_draft_tokens=NUM_DRAFTS, streamer=streamer,
            overlap=overlap, eos_token_id=eos,
        )  # fmt: skip
        assert streamer.got == [*texts[0][: texts[0].index(eos, 12) + 1], "end"]


def test_an_interrupt_leaves_a_compiled_model_usable() -> None:
    """Its cache and steps are kept between calls; an iteration was in flight."""
    model = tiny_model(
        tiny_config(num_hidden_layers=1, first_k_dense_replace=1, indexer_types=["full"])
    )
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = prompt_of(12)

    class Interrupted:
        def put(self, value: torch.Tensor) -> None:
            if value.numel() == 1:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(compiled, ids, streamer=Interrupted())
        assert torch.equal(run(compiled, ids).sequences, greedy_reference(model, ids, NEW))


@pytest.mark.parametrize("overlap", [False, True])
def test_an_interrupt_leaves_the_generator_as_transformers_does(model: Any, overlap: bool) -> None:
    """The iteration in flight had drawn from it."""
    ids = prompt_of(12)

    class Interrupted:
        puts = 0

        def put(self, value: torch.Tensor) -> None:
            self.puts += 1
            if self.puts == 4:
                raise KeyboardInterrupt

        def end(self) -> None:
            pass

    fields = {"do_sample": True, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}
    states = []
    for generate, extra in (
        (model.generate, {}),
        (functools.partial(glm_compile.generate, model), {"overlap": overlap}),
    ):
        torch.manual_seed(3)
        with pytest.raises(KeyboardInterrupt):
            generate(ids, streamer=Interrupted(), **fields, **extra)
        states.append(torch.get_rng_state())
    assert torch.equal(*states)


class Drawing:
    """A streamer and a criterion in one that draw random numbers."""

    def __call__(self, ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        torch.rand(3)
        return torch.zeros(len(ids), dtype=torch.bool)

    put = end = lambda self, *args: torch.rand(2)


@pytest.mark.parametrize("place", ["streamer", "stopping_criteria", "list of criteria"])
def test_a_callback_that_draws(model: Any, loops: list[Any], place: str) -> None:
    """Without drafts it draws in between, as in transformers; with drafts it changes nothing."""
    ids, mtp = prompt_of(12), random_mtp(model)
    fields = {"do_sample": True, "max_new_tokens": NEW, "attention_mask": torch.ones_like(ids)}
    fields |= {"eos_token_id": None, "pad_token_id": 0}

    def text_of(generate: Any, has_callback: bool, **extra: Any) -> Any:
        own: dict[str, Any] = {
            "streamer": {"streamer": Drawing()},
            "stopping_criteria": {"stopping_criteria": [Drawing()]},
            "list of criteria": {"stopping_criteria": [StoppingCriteriaList([Drawing()])]},
        }
        torch.manual_seed(3)
        return generate(ids, **fields, **extra, **(own[place] if has_callback else {}))

    ours = functools.partial(glm_compile.generate, model)
    expected = text_of(model.generate, True)
    assert not torch.equal(expected, text_of(model.generate, False))
    for overlap in (False, True):
        assert torch.equal(text_of(ours, True, overlap=overlap), expected)
        assert not loops[-1].is_overlapped
        drafted = [
            text_of(ours, has, overlap=overlap, mtp=mtp, num_draft_tokens=2)
            for has in (True, False)
        ]
        assert torch.equal(*drafted)
        assert loops[-1].is_overlapped == overlap


def test_a_call_inside_another_one(model: Any) -> None:
    """A streamer that generates: both texts are those of calls by themselves."""
    ids, mtp, inner = prompt_of(12), random_mtp(model), []

    class Nested:
        def put(self, value: torch.Tensor) -> None:
            if len(inner) < 2:
                inner.append(run(model, prompt_of(5, 1), mtp, max_new_tokens=4).sequences)

        def end(self) -> None:
            pass

    outer = run(model, ids, mtp, num_draft_tokens=2, streamer=Nested()).sequences
    assert torch.equal(outer, greedy_reference(model, ids, NEW))
    assert all(torch.equal(i, greedy_reference(model, prompt_of(5, 1), 4)) for i in inner)


@pytest.mark.parametrize("do_sample", [False, True])
def test_a_trained_draft_is_accepted_as_often(trained: tuple[Any, Any], do_sample: bool) -> None:
    model, mtp = trained
    words = torch.randint(5, 400, (2, 8), generator=torch.Generator().manual_seed(2))
    ids = words.repeat(1, 5)  # a loop, which the model goes on with
    results = []
    for overlap in (False, True):
        torch.manual_seed(1)
        fields = {"do_sample": do_sample, "temperature": 0.6, "max_new_tokens": 14}
        results.append(run(model, ids, mtp, overlap=overlap, **fields))
    assert_same(*results)
    assert results[0].accept_lengths[:-1].float().mean() > 1.3, results[0].accept_lengths


def test_a_draft_trained_for_it_loses_nothing_by_a_shared_index(trained: tuple[Any, Any]) -> None:
    """The text is the same either way; the drafts are accepted as often."""
    model, mtp = trained
    examples = Path(__file__).parents[3] / "examples"
    tokenizer = AutoTokenizer.from_pretrained(examples / "tiny_glm52")
    text = (examples / "demo_prompt.txt").read_text(encoding="utf-8")
    ids = tokenizer(text, return_tensors="pt").input_ids
    shared, own = (
        run(model, ids, mtp, do_sample=False, max_new_tokens=100, index_share=share)
        for share in (True, False)
    )
    assert torch.equal(shared.sequences, own.sequences)
    ours, theirs = (r.accept_lengths[:-1].float().mean() for r in (shared, own))
    assert ours > 3 and ours > 0.95 * theirs


# -- CUDA graphs: what can be decided without a device --------------------------------------------


def test_a_processor_that_needs_the_host_takes_no_graph(model: Any, loops: list[Any]) -> None:
    ids = prompt_of(5)

    def processor_of(**fields: Any) -> Any:
        run(model, ids, do_sample=True, max_new_tokens=1, **fields)
        return loops[-1].request.processor

    looking = {"repetition_penalty": 1.2, "no_repeat_ngram_size": 3, "eta_cutoff": 0.1}
    for fields in ({}, looking):
        assert processor_of(**fields).why_host is None
        assert processor_of(**fields).signature == processor_of(**fields).signature
    free = processor_of(temperature=0.5, top_p=0.9)
    assert free.why_host is None
    assert free.signature == processor_of(temperature=0.5, top_p=0.9).signature
    assert free.signature != processor_of(temperature=0.6, top_p=0.9).signature
    assert wants_cuda_graph(True, free, model, is_compiled=False)
    assert not wants_cuda_graph(None, free, model, is_compiled=True)  # not on this device
    for fields, name in (
        (
            {"repetition_penalty": 1.2, "prefix_allowed_tokens_fn": lambda b, prefix: [1]},
            "PrefixConstrainedLogitsProcessor",
        ),
        ({"watermarking_config": {}}, "WatermarkLogitsProcessor"),
        ({"logits_processor": [lambda ids, scores: scores]}, "<lambda>"),
    ):
        processor = processor_of(**fields)
        assert processor.why_host == name
        with pytest.raises(ValueError, match=f"cuda_graph=True cannot be had with {name}"):
            wants_cuda_graph(True, processor, model, is_compiled=True)
        assert not wants_cuda_graph(False, processor, model, is_compiled=True)


def test_arguments_of_the_modes(model: Any) -> None:
    with pytest.raises(ValueError, match="cuda_graph=True needs a model on a CUDA device"):
        glm_compile.generate(model, prompt_of(5), cuda_graph=True)
