"""Decoding on a GPU: no wait in the loop, graphs of iterations, calls in turn and inside others.

The compiled model's graphs run op by op (`inner="eager"`), which is quick to compile; float32, so
that tokens can be compared with the CPU's.
"""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch

import glm_compile
from glm_compile.errors import UnsupportedError
from glm_compile.generation import api
from glm_compile.generation.loop import DecodingLoop
from glm_compile.generation.state import ResultRing
from tests.glm_compile.generation.drafts import note_loops, padded, prompt_of, random_mtp, run
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.gpu

NEW = 20


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    """Without the reset of Dynamo that other tests start with: all tests share what is compiled."""
    torch.manual_seed(0)
    with torch.no_grad():
        yield


@pytest.fixture(scope="module")
def models() -> tuple[Any, Any]:
    """The same model and MTP layer on the CPU and, compiled, on the GPU."""
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=0, indexer_types=["full"])
    model = tiny_model(config)
    return (model, random_mtp(model)), on_gpu(model)


def on_gpu(model: Any) -> tuple[Any, Any]:
    model = copy.deepcopy(model).cuda()
    compiled = torch.compile(model, backend="glm", fullgraph=True, options={"inner": "eager"})
    return compiled, random_mtp(model)


@pytest.fixture
def loops(monkeypatch: pytest.MonkeyPatch) -> list[DecodingLoop]:
    return note_loops(monkeypatch)


def generate(models: tuple[Any, Any], ids: torch.Tensor, **kwargs: Any) -> Any:
    model, mtp = models
    device = mtp.eh_proj.weight.device
    kwargs = {"num_draft_tokens": 3, "max_new_tokens": NEW} | kwargs
    if "attention_mask" in kwargs:
        kwargs["attention_mask"] = kwargs["attention_mask"].to(device)
    return run(model, ids.to(device), mtp, **kwargs)


MODES = [
    {"overlap": overlap, "cuda_graph": graph}
    for overlap in (True, False)
    for graph in (True, False)
]
CASES: dict[str, dict[str, Any]] = {
    "greedy": {},
    "sampling": {"do_sample": True, "temperature": 0.8, "top_p": 0.9},
    "processors": {
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 3,
        "encoder_no_repeat_ngram_size": 4,
        "encoder_repetition_penalty": 0.8,
        "bad_words_ids": [[7], [5, 6], [9, 6]],
        "sequence_bias": [[[11], 0.5], [[12, 13], 1.0]],
        "min_new_tokens": 4,
        "suppress_tokens": list(range(100, 180)),
        "begin_suppress_tokens": [3, 4],
        "exponential_decay_length_penalty": (6, 1.2),
        "forced_eos_token_id": 20,
        "remove_invalid_values": True,
        "renormalize_logits": True,
    },
    "sampling with processors": {
        "do_sample": True,
        "repetition_penalty": 1.3,
        "no_repeat_ngram_size": 2,
        "bad_words_ids": [[7], [5, 6], [9, 6]],
        "top_k": 90,
        "min_p": 0.001,
        "typical_p": 0.95,
        "epsilon_cutoff": 1e-4,
        "eta_cutoff": 1e-4,
        "top_h": 0.9,
    },
    "plain": {"num_draft_tokens": 0},
    "plain sampling": {"num_draft_tokens": 0, "do_sample": True},
    "scores": {"output_scores": True, "output_logits": True},
    "indexer in every draft step": {"index_share": False},
    "adaptive draft length": {"adaptive_draft_length": True, "max_new_tokens": 40},
    "sampling with an adaptive draft length": {
        "adaptive_draft_length": True,
        "max_new_tokens": 40,
        "do_sample": True,
        "temperature": 2.0,
    },
}


@pytest.mark.parametrize("case", CASES)
def test_all_modes_give_the_same(models: Any, loops: list[Any], case: str) -> None:
    ids, mask = padded([prompt_of(12), prompt_of(5, 1)], "left")
    results, states = [], []
    # Ids that come up, so that rows end apart and something is in flight.
    eos = list(range(3, 512, 17))
    for mode in MODES:
        for _ in range(2):  # the second call finds the graph of the first
            torch.manual_seed(5)
            results.append(
                generate(
                    models[1], ids, attention_mask=mask, eos_token_id=eos, **CASES[case], **mode
                )
            )
            assert (loops[-1].graphed is not None) == mode["cuda_graph"]
            states.append(torch.cuda.get_rng_state())
    assert all(torch.equal(state, states[0]) for state in states)
    for result in results[1:]:
        assert torch.equal(result.sequences, results[0].sequences)
        assert torch.equal(result.accept_lengths, results[0].accept_lengths)
        for name in ("scores", "logits"):
            if getattr(results[0], name) is not None:
                ours, theirs = getattr(result, name), getattr(results[0], name)
                torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    if case in ("greedy", "plain", "processors", "adaptive draft length"):
        expected = generate(models[0], ids, attention_mask=mask, eos_token_id=eos, **CASES[case])
        assert torch.equal(results[0].sequences.cpu(), expected.sequences)


@pytest.mark.parametrize("graph", [True, False])
@pytest.mark.parametrize(
    "case",
    ["greedy", "sampling", "plain sampling", "processors", "sampling with processors"],
)
def test_nothing_in_the_loop_waits(
    models: Any, monkeypatch: pytest.MonkeyPatch, graph: bool, case: str
) -> None:
    """But for reading an event's results. torch raises at every other wait."""
    ids, mask = padded([prompt_of(12), prompt_of(5, 1)], "left")
    fields = {"attention_mask": mask, "cuda_graph": graph, "eos_token_id": 510} | CASES[case]
    generate(models[1], ids, **fields)  # compiles and captures
    iterate, calls = DecodingLoop._iterate, []

    def watched(loop: DecodingLoop) -> None:
        calls.append(1)
        torch.cuda.set_sync_debug_mode("error")
        try:
            iterate(loop)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(DecodingLoop, "_iterate", watched)
    generate(models[1], ids, **fields)
    assert len(calls) > 3


# Calls of the CUDA runtime that wait for the device, but for the event behind the results.
WAITS = ("StreamSynchronize", "DeviceSynchronize", "StreamWaitValue", "cudaMemcpy", "cudaFree")


@pytest.mark.parametrize("case", ["greedy", "sampling"])
def test_a_profiler_sees_no_wait_in_the_loop(models: Any, case: str) -> None:
    """From the first replay to the last: launches, asynchronous copies, events."""
    from torch.profiler import ProfilerActivity, profile

    ids, mask = padded([prompt_of(12), prompt_of(5, 1)], "left")
    fields = {"attention_mask": mask, "cuda_graph": True} | CASES[case]
    generate(models[1], ids, **fields)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        generate(models[1], ids, **fields)
    calls = sorted(
        (event.time_range.start, event.name)
        for event in profiler.events()
        if event.name.startswith("cuda")
    )
    replays = [i for i, (_, name) in enumerate(calls) if name == "cudaGraphLaunch"]
    assert len(replays) > 3
    names = [name for _, name in calls[replays[0] : replays[-1] + 1]]
    assert "cudaEventSynchronize" in names
    waits = [n for n in names if any(w in n for w in WAITS) and n != "cudaMemcpyAsync"]
    assert not waits
    # The next replay is launched before the results of the one before are read.
    first = names[: names.index("cudaEventSynchronize")]
    assert first.count("cudaGraphLaunch") >= 1


def test_batches_are_brought_to_a_size_and_share_its_graph(models: Any, loops: list[Any]) -> None:
    rows = [prompt_of(4 + 3 * b, b) for b in range(6)]
    for count in (5, 6, 5):
        ids, mask = padded(rows[:count], "left")
        got = generate(models[1], ids, attention_mask=mask, cuda_graph=True)
        expected = generate(models[0], ids, attention_mask=mask)
        assert torch.equal(got.sequences.cpu(), expected.sequences)
        assert got.accept_lengths.shape[1] == count
    graphed = [loop.graphed for loop in loops if loop.graphed is not None]
    assert len({id(g) for g in graphed}) == 1 and graphed[0].num_captures == 1


def test_graphs_of_several_batch_sizes_are_kept(models: Any, loops: list[Any]) -> None:
    """The largest came first, so the others found room in its memory."""
    model, mtp = on_gpu(models[0][0])
    texts: dict[int, torch.Tensor] = {}
    for count in (4, 1, 2, 4, 2, 1):
        ids = torch.cat([prompt_of(9, b) for b in range(count)])
        text = generate((model, mtp), ids, cuda_graph=True).sequences
        assert torch.equal(text, texts.setdefault(count, text))
    graphed = {id(loop.graphed): loop.graphed for loop in loops}
    assert len(graphed) == 3 and all(g.num_captures == 1 for g in graphed.values())


def test_results_are_read_while_the_next_iteration_is_on_its_way(
    models: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    log: list[str] = []
    publish, read = ResultRing.publish, ResultRing.read
    monkeypatch.setattr(ResultRing, "publish", lambda r: log.append("launch") or publish(r))
    monkeypatch.setattr(ResultRing, "read", lambda r, slot: log.append("read") or read(r, slot))
    generate(models[1], prompt_of(12), cuda_graph=True)
    assert log[:5] == ["launch", "launch", "read", "launch", "read"]


@pytest.mark.parametrize("graph", [True, False])
def test_a_processor_of_the_callers_own(models: Any, graph: bool) -> None:
    """It runs on the host; a graph is refused by its name."""

    def forbids_what_came_last(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.scatter(1, ids[:, -1:], -torch.inf)

    ids, mask = padded([prompt_of(12), prompt_of(5, 1)], "left")
    fields = {
        "attention_mask": mask,
        "logits_processor": [forbids_what_came_last],
        "repetition_penalty": 1.3,
    }
    if graph:
        with pytest.raises(ValueError, match="cannot be had with forbids_what_came_last"):
            generate(models[1], ids, cuda_graph=True, **fields)
        return
    got = generate(models[1], ids, **fields)
    assert torch.equal(got.sequences.cpu(), generate(models[0], ids, **fields).sequences)


def test_calls_with_processors_in_turn_share_a_graph(models: Any, loops: list[Any]) -> None:
    """Nothing of the text before is left in a penalty, and limits follow the prompt."""
    fields = {
        "repetition_penalty": 1.5,
        "min_new_tokens": 5,
        "eos_token_id": list(range(0, 512, 3)),
    }
    for ids in (prompt_of(12), prompt_of(3, 2), prompt_of(25, 3)):
        got = generate(models[1], ids, cuda_graph=True, **fields)
        assert torch.equal(got.sequences.cpu(), generate(models[0], ids, **fields).sequences)
    graphs = {id(loop.graphed): loop.graphed for loop in loops if loop.graphed}
    assert [graphed.num_captures for graphed in graphs.values()] == [1]


def test_calls_in_turn_share_a_graph(models: Any, loops: list[Any]) -> None:
    """Other prompts, budgets and ends; other warpers have a graph of their own."""
    pairs = [(prompt_of(12), NEW), (prompt_of(3, 2), 9), (prompt_of(25, 3), NEW)]
    for ids, count in pairs:
        got = generate(models[1], ids, max_new_tokens=count, cuda_graph=True)
        expected = generate(models[0], ids, max_new_tokens=count)
        assert torch.equal(got.sequences.cpu(), expected.sequences)
    assert len({id(loop.graphed) for loop in loops if loop.graphed}) == 1
    graphed = next(loop.graphed for loop in loops if loop.graphed)
    assert graphed.num_captures == 1
    generate(models[1], prompt_of(12), cuda_graph=True, do_sample=True, temperature=0.5)
    assert loops[-1].graphed is not graphed


def test_warmup_captures_what_a_call_in_bfloat16_replays(models: Any, loops: list[Any]) -> None:
    model, mtp = on_gpu(tiny_model(models[0][0].config, dtype=torch.bfloat16))
    glm_compile.warmup(model, mtp, num_draft_tokens=3)
    glm_compile.generate(
        model, prompt_of(12).cuda(), mtp=mtp, num_draft_tokens=3, max_new_tokens=NEW
    )
    assert loops[-1].graphed.num_captures == 1
    assert loops[-1].graphed in [loop.graphed for loop in loops[:-1]]


def test_a_weight_that_moved_is_found(models: Any, loops: list[Any]) -> None:
    model, mtp = on_gpu(models[0][0])
    ids = prompt_of(12)
    generate((model, mtp), ids, cuda_graph=True)
    plain = model._orig_mod
    plain.lm_head.weight.data = plain.lm_head.weight.data.roll(1, dims=0)
    gc.collect()
    torch.cuda.empty_cache()
    got = generate((model, mtp), ids, cuda_graph=True)
    assert loops[-1].graphed.num_captures == 2
    assert torch.equal(got.sequences, generate((model, mtp), ids, cuda_graph=False).sequences)
    # In place there is nothing to find: the graph reads the new values.
    plain.lm_head.weight.data.copy_(plain.lm_head.weight.data.roll(3, dims=0))
    got = generate((model, mtp), ids, cuda_graph=True)
    assert loops[-1].graphed.num_captures == 2
    assert torch.equal(got.sequences, generate((model, mtp), ids, cuda_graph=False).sequences)


def test_two_models_at_once(models: Any) -> None:
    """A streamer that generates, with the same model and with another one, in every put."""
    other = on_gpu(tiny_model(models[0][0].config, seed=9))
    ids, texts = prompt_of(12), []
    for pair in (models[1], other):
        texts.append(generate(pair, ids, cuda_graph=True).sequences)

    class Nested:
        def put(self, value: torch.Tensor) -> None:
            for pair, text in zip((models[1], other), texts):
                got = generate(pair, ids, cuda_graph=pair is other, max_new_tokens=5).sequences
                assert torch.equal(got, text[:, :17])

        def end(self) -> None:
            pass

    outer = generate(models[1], ids, cuda_graph=True, streamer=Nested()).sequences
    assert torch.equal(outer, texts[0])


def test_memory_is_steady(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of compiled steps; `test_endurance_cuda` goes on for longer."""
    iterate, seen = DecodingLoop._iterate, []

    def note(loop: DecodingLoop) -> None:
        iterate(loop)
        seen.append(torch.cuda.memory_allocated())

    monkeypatch.setattr(DecodingLoop, "_iterate", note)
    for _ in range(3):
        generate(models[1], prompt_of(12), max_new_tokens=200, cuda_graph=True)
    first, last = seen[len(seen) // 3 + 5], seen[-3]
    assert last <= first


def test_what_cannot_be_captured_is_an_error(models: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """It names the line; afterwards the device draws numbers and captures as before."""
    monkeypatch.setattr(api.Steps, "of", classmethod(lambda cls, model, _: api.Steps(model, None)))
    model, mtp = models[1]
    attention = model._orig_mod.model.layers[0].self_attn
    handle = attention.register_forward_hook(wait_for_the_device)
    try:
        with pytest.raises(UnsupportedError, match=r"in wait_for_the_device: .*item"):
            generate((model, mtp), prompt_of(12), cuda_graph=True)
    finally:
        handle.remove()
    monkeypatch.undo()
    assert torch.rand(3, device="cuda").isfinite().all()
    ids = prompt_of(12)
    got = generate(models[1], ids, cuda_graph=True)
    assert torch.equal(got.sequences.cpu(), generate(models[0], ids).sequences)


def wait_for_the_device(module: Any, args: Any, output: Any) -> None:
    output[0].sum().item()
