"""Steps of a compiled model: found, compiled alike, and compiled once."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import glm_compile
from glm_compile.cache import PagedCache
from glm_compile.errors import UnsupportedError
from glm_compile.generation import loop
from glm_compile.generation.steps import MtpSteps, Steps, unwrap_compiled
from glm_compile.mtp import select_row
from tests.glm_compile.generation.drafts import (
    Uncompiled,
    greedy_reference,
    padded,
    prompt_of,
    random_mtp,
)
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers

OPTIONS = {"inner": "eager"}


def small_model(indexer_types: Sequence[str] = ("full",)) -> Any:
    """Few layers, quick to trace; the first is MoE."""
    return tiny_model(
        tiny_config(
            num_hidden_layers=len(indexer_types),
            first_k_dense_replace=0,
            indexer_types=list(indexer_types),
        )
    )


@pytest.fixture(scope="module")
def model() -> Any:
    return small_model()


def compile_in_place(model: Any, backend: Any) -> Any:
    model.compile(backend=backend, fullgraph=True)
    return model


def compile_forward(model: Any, backend: Any) -> Any:
    model.forward = torch.compile(model.forward, backend=backend, fullgraph=True)
    return model


WAYS = [
    lambda model, backend: torch.compile(model, backend=backend, fullgraph=True),
    compile_in_place,
    compile_forward,
]


@pytest.mark.parametrize("way", WAYS, ids=["compile(model)", "model.compile()", "model.forward"])
def test_the_backend_of_a_compiled_model_is_found(way: Any) -> None:
    counter = CompileCounterWithBackend("eager")
    model = small_model()
    compiled = way(model, counter)
    plain, compiler = unwrap_compiled(compiled)
    assert plain is model and compiler is not None
    step = compiler(lambda x: x + 1)
    assert step(torch.zeros(2)).tolist() == [1, 1]
    assert counter.frame_count == 1


def test_options_are_found(model: Any) -> None:
    compiled = torch.compile(model, backend="glm", options={"indexer_dtype": "fp8"})
    _, compiler = unwrap_compiled(compiled)
    assert compiler is not None and compiler.options == {"indexer_dtype": "fp8"}
    with Steps.of(model, compiler).borrow_cache(1, 10, 0) as cache:
        assert cache.index_dtype == torch.float8_e4m3fn


def test_a_plain_model_has_no_compiler(model: Any) -> None:
    assert unwrap_compiled(model) == (model, None)
    assert Steps.of(model, None) is not Steps.of(model, None)


def test_an_unknown_kind_of_compiled_model_is_an_error(model: Any) -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self._orig_mod = model

    with pytest.raises(UnsupportedError, match="cannot find the backend"):
        unwrap_compiled(Wrapper())


def test_steps_belong_to_their_model() -> None:
    compiled = torch.compile(small_model(), backend="eager")
    steps = Steps.of(*unwrap_compiled(compiled))
    assert Steps.of(*unwrap_compiled(compiled)) is steps
    other = copy.deepcopy(compiled)
    plain, compiler = unwrap_compiled(other)
    assert Steps.of(plain, compiler).model is plain is not steps.model


def test_compiled_steps_keep_a_cache_while_it_is_large_enough(model: Any) -> None:
    steps = Steps.of(*unwrap_compiled(torch.compile(model, backend="eager")))

    def borrow(batch_size: int, num_tokens: int) -> Any:
        with steps.borrow_cache(batch_size, num_tokens, 1) as cache:
            assert cache.lengths.tolist() == [0] * batch_size
            cache.set_lengths(7)
            return cache

    cache = borrow(1, 40)
    assert borrow(1, 100) is cache and cache.max_cache_len == 256
    larger = borrow(1, 300)
    assert larger is not cache and larger.max_cache_len == 512
    assert borrow(1, 20) is larger
    with torch.inference_mode():
        assert borrow(2, 20).batch_size == 2
    assert borrow(2, 20).batch_size == 2
    with steps.borrow_cache(1, 9, 1) as outer, steps.borrow_cache(1, 9, 1) as inner:
        assert outer is not inner
    with pytest.raises(RuntimeError), steps.borrow_cache(1, 9, 1) as failed:
        raise RuntimeError
    assert borrow(1, 9) is failed


@torch._dynamo.config.patch(recompile_limit=2)
def test_graphs_are_counted_per_batch_size(model: Any) -> None:
    """More batch sizes than Dynamo allows graphs of one function."""
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    ids = prompt_of(9)
    for batch_size in (1, 2, 3):
        got = glm_compile.generate(compiled, ids.expand(batch_size, -1), max_new_tokens=2)
        assert got.shape == (batch_size, 11)


def test_parts_of_a_prompt_are_one_graph(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    mtp, ids = random_mtp(model), prompt_of(21)
    call: dict[str, Any] = {"mtp": mtp, "num_draft_tokens": 2, "max_new_tokens": 4}
    whole = glm_compile.generate(compiled, ids, **call)
    before = counter.frame_count
    monkeypatch.setattr(loop, "MIN_CHUNK", 1)
    for num_rows in (8, 5, 4):  # the last part has 5, 1 and 1 columns, or would have
        monkeypatch.setattr(loop, "MAX_PROMPT_ROWS", num_rows)
        assert torch.equal(glm_compile.generate(compiled, ids, **call), whole)
    assert counter.frame_count == before


def test_select_row() -> None:
    values = torch.arange(12).view(2, 3, 2)
    assert select_row(values, torch.tensor([2, 0])).tolist() == [[[4, 5]], [[6, 7]]]


@pytest.mark.parametrize("has_hook", [False, True])
def test_only_the_last_accepted_row_meets_experts(model: Any, has_hook: bool) -> None:
    """All rows reach the cache; a hook on the layer sees them, as one of transformers would."""
    mtp, seen, layers = random_mtp(model), [], []
    ids, hidden = torch.randint(0, 500, (2, 4)), torch.randn(2, 4, model.config.hidden_size)
    row = torch.tensor([1, 3])
    mtp.layer.mlp.gate.register_forward_hook(lambda *call: seen.append(call[-1][-1].shape[0]))
    if has_hook:
        mtp.layer.register_forward_hook(lambda *call: layers.append(call[-1][0].shape[1]))
    caches, results = [], []
    for _ in range(2):
        cache = PagedCache(model.config, 2, 64, num_mtp_layers=1)
        cache.auto_advance = False
        cache.set_lengths([5, 2])
        for pages in cache._pages():
            pages.copy_(torch.randn(pages.shape, generator=torch.Generator().manual_seed(1)))
        caches.append(cache)
    found, _logits, *seed = MtpSteps(mtp, None, True).extend(ids, hidden, row, caches[0])
    positions = caches[1].lengths[:, None] + torch.arange(4)
    results, topk = mtp.extend(ids, hidden, positions, None, caches[1])
    torch.testing.assert_close(found, select_row(results, row))
    wanted = mtp.gather_seed(select_row(topk, row), caches[1], caches[1].lengths + row + 1)
    for ours, theirs in zip(seed, wanted):
        torch.testing.assert_close(ours, theirs)
    for ours, theirs in zip(caches[0]._pages(), caches[1]._pages()):
        torch.testing.assert_close(ours, theirs)
    assert seen == ([8, 8] if has_hook else [2, 8])
    assert layers == ([4, 4] if has_hook else [])


def test_a_compiled_model_through_the_backend_with_ragged_rows() -> None:
    model = small_model(["full", "shared"])
    compiled = torch.compile(model, backend="glm", fullgraph=True, options=OPTIONS)
    # The text ends before the cache's 256th row, the drafts behind it do not; a capacity that is
    # asked for is the least, as in transformers.
    rows = [prompt_of(244), prompt_of(237, 1)]
    ids, mask = padded(rows, "left")
    references = [greedy_reference(model, row, 9) for row in rows]
    got = glm_compile.generate(
        compiled,
        ids,
        mask,
        mtp=random_mtp(model),
        num_draft_tokens=4,
        max_new_tokens=9,
        max_cache_len=5,
        eos_token_id=None,
    )
    for b, (row, reference) in enumerate(zip(rows, references)):
        assert torch.equal(got[b, ids.shape[1] :], reference[0, row.shape[1] :])


def test_warmup_compiles_what_generate_runs(model: Any) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    mtp = random_mtp(model)
    seconds = glm_compile.warmup(compiled, mtp, batch_sizes=(2,), num_draft_tokens=2)
    assert list(seconds) == [2]
    before = counter.frame_count
    for drafts in (0, 2):
        glm_compile.generate(
            compiled, prompt_of(7).expand(2, -1), mtp=mtp, num_draft_tokens=drafts, max_new_tokens=5
        )
    assert counter.frame_count == before


def test_warmup_needs_no_tokenizer(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Which the model's own stop strings would need in a call."""
    monkeypatch.setattr(model.generation_config, "stop_strings", ["\n\n"])
    with pytest.raises(ValueError, match="stop_strings"):
        glm_compile.generate(model, prompt_of(4), max_new_tokens=2)
    assert list(glm_compile.warmup(model, num_draft_tokens=0)) == [1]
    assert model.generation_config.stop_strings == ["\n\n"]


def test_two_mtp_layers_in_turn_are_compiled_once_each(model: Any) -> None:
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    layers = [random_mtp(model), random_mtp(model)]

    def call(mtp: Any) -> None:
        glm_compile.generate(compiled, prompt_of(9), mtp=mtp, num_draft_tokens=2, max_new_tokens=5)

    for mtp in layers:
        call(mtp)
    before = counter.frame_count
    for mtp in layers * 2:
        call(mtp)
    assert counter.frame_count == before


def test_an_mtp_layer_that_is_dropped_is_released(model: Any) -> None:
    """And found again until then; a copy of it, and another model, have steps of their own."""
    steps = [Steps(model, Uncompiled()), Steps(model, Uncompiled())]  # type: ignore[arg-type]
    mtp = random_mtp(model)
    with steps[0].borrow_cache(1, 40, 1) as cache:
        pass

    def of(layer: Any, owner: Steps = steps[0], num_drafts: int = 2) -> MtpSteps:
        return owner.for_mtp(layer, cache, True, num_drafts)

    assert of(mtp) is of(mtp) is not of(mtp, num_drafts=20)
    assert of(mtp, steps[1]) is not of(mtp)
    first = of(mtp)
    for other in (copy.copy(mtp), copy.deepcopy(mtp), pickle.loads(pickle.dumps(mtp))):
        assert of(other).mtp is other and of(mtp) is first and of(other) is of(other)
    del first
    released = [weakref.ref(of(mtp, steps[1])), weakref.ref(mtp), weakref.ref(mtp.eh_proj.weight)]
    del steps[1], other
    gc.collect()
    assert [ref() is None for ref in released] == [True, False, False]
    del mtp
    gc.collect()
    assert all(ref() is None for ref in released)
