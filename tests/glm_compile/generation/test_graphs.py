"""When graphs of iterations are captured, found again and given up, on a stand-in for the device.

The stand-in's capture runs nothing: it keeps what was called. A replay calls it. So the texts are
right only if a replayed iteration needs nothing that the host would have to hand to it.
"""

from __future__ import annotations

import dataclasses
import gc
import weakref
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from glm_compile.cache import PagedCache
from glm_compile.errors import UnsupportedError
from glm_compile.generation import api, graphs
from glm_compile.generation.graphs import GraphedIteration, _explain
from glm_compile.generation.iteration import Block, Iteration
from glm_compile.generation.loop import DecodingLoop
from glm_compile.generation.prompt import compact_prompt
from tests.glm_compile.generation.drafts import (
    NEW,
    greedy_reference,
    note_loops,
    padded,
    prompt_of,
    random_mtp,
    run,
)
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers


class FakeGraph:
    """Keeps the iterations that were run while it captured, and runs them in a replay."""

    capturing: FakeGraph | None = None

    def __init__(self) -> None:
        self.captured: list[tuple[Iteration, tuple[Any, ...], dict[str, torch.Tensor]]] = []

    def replay(self) -> None:
        for iteration, lengths, outputs in self.captured:
            block = run_iteration(iteration, None, *lengths)
            for name, buffer in outputs.items():
                buffer.copy_(getattr(block, name))


run_iteration = Iteration.run


def run_or_capture(iteration: Any, view: Any = None, *lengths: Any) -> Block:
    if FakeGraph.capturing is None:
        return run_iteration(iteration, view, *lengths)
    state = iteration.state
    batch_size, width = state.block_BS.shape
    if lengths and lengths[0] is not None:
        width = 1 + lengths[0]
    shape = (batch_size, width, iteration.target.model.config.vocab_size)
    outputs = {n: torch.zeros(shape) for n in ("scores_BSV", "logits_BSV")}
    FakeGraph.capturing.captured.append((iteration, lengths, outputs))
    return Block(**outputs)


@contextmanager
def capture(graph: FakeGraph, **kwargs: Any) -> Any:
    FakeGraph.capturing = graph
    try:
        yield
    finally:
        FakeGraph.capturing = None


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    """The loops that calls have run, on the stand-in."""
    stream = SimpleNamespace(wait_stream=lambda other: None)
    generator = SimpleNamespace(clone_state=lambda: None, graphsafe_set_state=lambda state: None)
    for name, value in {
        "Stream": lambda device: stream,
        "current_stream": lambda: stream,
        "stream": lambda s: nullcontext(),
        "set_stream": lambda s: None,
        "device": lambda d: nullcontext(),
        "current_device": lambda: 0,
        "default_generators": [generator],
        "graph_pool_handle": lambda: object(),
        "CUDAGraph": FakeGraph,
        "graph": capture,
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    # A build of torch for CUDA has it, and would ask for the real pool.
    monkeypatch.setattr(torch._C, "_cuda_endAllocateToPool", lambda *args: None, raising=False)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
    monkeypatch.setattr(Iteration, "run", run_or_capture)
    monkeypatch.setattr(api, "wants_cuda_graph", lambda *args, **kwargs: True)
    return note_loops(monkeypatch)


@pytest.fixture(scope="module")
def model() -> Any:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1, indexer_types=["full"])
    return tiny_model(config)


def keep_steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> api.Steps:
    """Steps that are kept between calls as a compiled model's are, and run eagerly."""
    kept = api.Steps(model, None)
    with kept.borrow_cache(2, 64, 1) as cache:
        pass

    @contextmanager
    def borrow(batch_size: int, num_tokens: int, num_layers: int) -> Any:
        cache.reset()
        yield cache

    monkeypatch.setattr(kept, "borrow_cache", borrow)
    monkeypatch.setattr(api.Steps, "of", lambda *args: kept)
    return kept


@pytest.fixture
def steps(model: Any, monkeypatch: pytest.MonkeyPatch) -> api.Steps:
    return keep_steps(model, monkeypatch)


def pair(length: int = 12) -> torch.Tensor:
    return torch.cat([prompt_of(length), prompt_of(length, 1)])


def assert_plain(result: Any, model: Any, ids: torch.Tensor, count: int = NEW) -> None:
    for sequence, row in zip(result.sequences, ids):
        assert torch.equal(sequence, greedy_reference(model, row[None], count)[0])


def captures(loop: DecodingLoop) -> int:
    assert loop.graphed is not None
    return loop.graphed.num_captures


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_a_graph_that_was_captured_ahead_is_found(
    model: Any, steps: Any, loops: list[Any], num_drafts: int
) -> None:
    mtp, state = random_mtp(model), torch.get_rng_state()
    api._capture_ahead(model, mtp, torch.ones(2, 3, dtype=torch.long), num_drafts, None)
    assert captures(loops[-1]) == 1 and torch.equal(torch.get_rng_state(), state)
    api.generate(model, pair(), mtp=mtp, num_draft_tokens=num_drafts, max_new_tokens=NEW)
    assert captures(loops[-1]) == 1 and loops[0].graphed is loops[1].graphed


@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_calls_in_turn_share_a_graph(
    model: Any, steps: Any, loops: list[Any], overlap: bool, num_drafts: int
) -> None:
    mtp = random_mtp(model)
    for length, count in ((12, NEW), (3, 9), (20, 5)):
        result = run(
            model, pair(length), mtp, num_draft_tokens=num_drafts, max_new_tokens=count,
            overlap=overlap,
        )  # fmt: skip
        assert_plain(result, model, pair(length), count)
    assert [captures(loop) for loop in loops] == [1, 1, 1]
    assert len({id(loop.graphed) for loop in loops}) == 1


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_calls_with_processors_share_a_graph(
    model: Any, steps: Any, loops: list[Any], num_drafts: int
) -> None:
    """Of the text before nothing is left; limits, ends and forbidden tokens are each call's own."""
    mtp = random_mtp(model)
    for length, forbidden in ((12, [4, 5]), (7, [6]), (12, [4, 5])):
        fields: dict[str, Any] = {
            "repetition_penalty": 1.6,
            "min_new_tokens": 5,
            "suppress_tokens": forbidden,
            "no_repeat_ngram_size": 2,
            "forced_eos_token_id": 7,
            "eos_token_id": list(range(0, 512, 3)),
        }
        result = run(model, pair(length), mtp, num_draft_tokens=num_drafts, **fields)
        for sequence, row in zip(result.sequences, pair(length)):
            expected = greedy_reference(model, row[None], NEW, **fields)[0]
            assert torch.equal(sequence[: len(expected)], expected)
    assert len({id(loop.graphed) for loop in loops}) == 1 and captures(loops[-1]) == 1


def test_a_short_call_captures_nothing(model: Any, steps: Any, loops: list[Any]) -> None:
    """Its one iteration behind the prompt is the warm-up."""
    assert_plain(run(model, pair(), max_new_tokens=2), model, pair(), 2)
    assert captures(loops[-1]) == 0
    assert_plain(run(model, pair()), model, pair())
    assert captures(loops[-1]) == 1 and loops[0].graphed is loops[1].graphed


def test_other_work_has_another_graph(model: Any, steps: Any, loops: list[Any]) -> None:
    for fields in ({}, {"temperature": 0.5}, {"temperature": 0.6}, {"temperature": 0.5}):
        run(model, pair(), do_sample=bool(fields), **fields)
    graphed = [loop.graphed for loop in loops]
    assert graphed[1] is graphed[3] and len({id(g) for g in graphed}) == 3


def test_scores_are_those_of_each_iteration(model: Any, steps: Any, loops: list[Any]) -> None:
    """A graph writes them to one place; each is copied before the next replay."""
    result = run(model, pair(), output_scores=True, output_logits=True)
    assert_plain(result, model, pair())
    for place, (scores, logits) in enumerate(zip(result.scores, result.logits)):
        assert torch.equal(scores.argmax(-1), result.sequences[:, 12 + place])
        assert torch.equal(scores, logits)


def test_a_weight_that_moved_is_found(model: Any, steps: Any, loops: list[Any]) -> None:
    run(model, pair())
    held = model.lm_head.weight.data
    model.lm_head.weight.data = held.clone()
    try:
        assert_plain(run(model, pair()), model, pair())
        assert captures(loops[-1]) == 2 and loops[0].graphed is loops[1].graphed
    finally:
        model.lm_head.weight.data = held


def test_graphs_of_another_cache_are_given_up(model: Any, steps: Any, loops: list[Any]) -> None:
    run(model, pair())
    other = api.Steps(model, None)._make_cache(2, 64, 1)
    request, iteration = loops[0].request, loops[0].iteration
    with steps.graphs.borrow(request, loops[0].target, None, other) as graphed:
        assert graphed is not loops[0].graphed
        # A call inside another one finds none.
        with steps.graphs.borrow(request, loops[0].target, None, other) as inner:
            assert inner is not graphed
    assert len(steps.graphs._graphs) == 2  # those of the first memory are kept beside them
    pools = {id(g.iteration.cache): g.pool for g in steps.graphs._graphs.values()}
    assert pools[id(other)] is not pools[id(iteration.cache)]
    steps.graphs.keep([other])
    assert all(g.iteration.cache is other for g in steps.graphs._graphs.values())


def test_a_row_that_ends_earlier_stays_as_it_is(model: Any, steps: Any, loops: list[Any]) -> None:
    ids, mask = padded([prompt_of(12), prompt_of(5, 1)], "left")
    texts = [greedy_reference(model, row, NEW)[0] for row in (prompt_of(12), prompt_of(5, 1))]
    stop = int(texts[0][12 + 4])

    def criterion(text: torch.Tensor, scores: Any, **_: Any) -> torch.Tensor:
        return text[:, -1] == stop

    for fields in ({"eos_token_id": stop}, {"stopping_criteria": [criterion]}):
        result = run(model, ids, attention_mask=mask, pad_token_id=7, **fields)
        for b, width in enumerate((12, 5)):
            new = texts[b][width:].tolist()
            end = new.index(stop) + 1 if stop in new else NEW
            got = result.sequences[b, 12:].tolist()
            assert got == new[:end] + [7] * (len(got) - end)


def test_what_cannot_be_captured_is_an_error(
    model: Any, steps: Any, loops: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    @contextmanager
    def broken(graph: Any, **kwargs: Any) -> Any:
        yield
        raise RuntimeError("operation not permitted when stream is capturing\nmore of it")

    monkeypatch.setattr(torch.cuda, "graph", broken)
    with pytest.raises(UnsupportedError, match=r"not permitted .*; pass cuda_graph=False"):
        run(model, pair())
    monkeypatch.setattr(torch.cuda, "graph", capture)
    assert_plain(run(model, pair()), model, pair())


def test_the_line_that_waits_is_named() -> None:
    def grouped_mm_experts_forward() -> None:
        raise RuntimeError("operation not permitted when stream is capturing\nmore")

    def broken_capture() -> None:
        try:
            grouped_mm_experts_forward()
        finally:
            raise RuntimeError("capture was invalidated")

    with pytest.raises(RuntimeError) as caught:
        broken_capture()
    message = _explain(caught.value)
    assert "test_graphs.py" in message and "in grouped_mm_experts_forward: raise" in message
    assert "not permitted when stream is capturing" in message and "invalidated" not in message
    assert "moe_experts" in message and "cuda_graph=False" in message


def test_graphs_of_one_memory_are_kept(model: Any, steps: Any, loops: list[Any]) -> None:
    run(model, pair())
    cache = loops[0].iteration.cache
    single = PagedCache(model.config, 1, 64, num_mtp_layers=1, memory=cache)
    request, target = loops[0].request, loops[0].target
    fewer = dataclasses.replace(request, prompt=compact_prompt(prompt_of(12)))
    with steps.graphs.borrow(fewer, target, None, single) as graphed:
        assert graphed.iteration.cache is single
    run(model, pair())
    assert loops[-1].graphed is loops[0].graphed and len(steps.graphs._graphs) == 2


def test_kept_graphs_are_few(
    model: Any, steps: Any, loops: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(graphs, "MAX_GRAPHS", 8)
    for i in range(10):
        run(model, pair(3), max_new_tokens=2, do_sample=True, temperature=1 + i / 10)
    kept = list(steps.graphs._graphs.values())
    assert len(kept) == 8 and all(isinstance(g, GraphedIteration) for g in kept)
    assert kept[-1] is loops[-1].graphed


def test_each_pair_of_draft_lengths_is_captured(
    model: Any, steps: Any, loops: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random drafts are hardly accepted: from five to one, and never back."""
    mtp = random_mtp(model)
    for num_captures in (2, 3):
        result = run(
            model, pair(), mtp, num_draft_tokens=5, max_new_tokens=40, adaptive_draft_length=True
        )
        assert_plain(result, model, pair(), 40)
        assert loops[-1].graphed is loops[0].graphed
        assert captures(loops[-1]) >= num_captures
    lengths = list(loops[0].graphed._graphs)  # type: ignore[union-attr]
    assert set(lengths) >= {(5, 5), (1, 1)}


def test_states_that_are_kept_are_not_large(
    model: Any, steps: Any, loops: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    run(model, pair(3), max_new_tokens=2, do_sample=True, temperature=0.5)
    size = loops[-1].state.num_bytes()
    assert size > loops[-1].state.text_BW.nbytes
    monkeypatch.setattr(graphs, "MAX_STATE_BYTES", int(2.5 * size))
    for i in range(4):
        run(model, pair(3), max_new_tokens=2, do_sample=True, temperature=1 + i / 10)
    assert len(steps.graphs._graphs) == 2
    monkeypatch.setattr(graphs, "MAX_STATE_BYTES", 1)
    run(model, pair(3), max_new_tokens=2)
    assert [g is loops[-1].graphed for g in steps.graphs._graphs.values()] == [True]


def test_graphs_of_an_mtp_layer_go_with_it(model: Any, steps: Any, loops: list[Any]) -> None:
    mtp = random_mtp(model)
    for layer in (mtp, None, mtp):
        run(model, pair(), layer)
    assert loops[0].graphed is loops[2].graphed is not loops[1].graphed
    released = [weakref.ref(mtp), weakref.ref(loops[0].graphed), weakref.ref(loops[0].state)]
    loops.clear()
    assert len(steps.graphs._graphs) == 2
    del mtp, layer
    gc.collect()
    assert all(ref() is None for ref in released) and len(steps.graphs._graphs) == 1
    run(model, pair())
    assert captures(loops[0]) == 1


def test_a_model_that_is_dropped_is_released(
    model: Any, loops: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And its cache; its graphs lie with an MTP layer that goes on drafting for another model."""
    mtp, other = random_mtp(model), tiny_model(model.config)
    with monkeypatch.context() as patch:
        kept = keep_steps(other, patch)
        other.__dict__["_steps"] = kept  # model.compile() puts them where the model has them
        for _ in range(2):
            run(other, pair(), mtp)
    assert loops[0].graphed is loops[1].graphed and captures(loops[0]) == 1
    released = [weakref.ref(x) for x in (other, kept, loops[0].graphed, loops[0].cache)]
    loops.clear()
    del other, kept
    gc.collect()
    assert [ref() is None for ref in released] == [True] * 4 and mtp is not None


def test_a_graph_that_is_given_up_is_released(model: Any, steps: Any, loops: list[Any]) -> None:
    mtp = random_mtp(model)
    run(model, pair(), mtp)
    graph = weakref.ref(loops[0].graphed)
    steps.graphs.keep([])
    loops.clear()
    gc.collect()
    assert graph() is None and not steps.graphs._graphs
    run(model, pair(), mtp)
    assert captures(loops[0]) == 1
