"""How often a model is compiled: once a shape, whatever the position. 64 steps, several prompts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters
from transformers import DynamicCache, StaticCache

import glm_compile
from glm_compile import PagedCache
from glm_compile.generation.api import num_graphs
from glm_compile.report import listening
from tests.compiling import compile_model, small_model, tokens
from tests.glm_compile.generation.drafts import random_mtp
from tests.tiny_models import CACHE_ARGUMENT

NUM_STEPS = 64
PROMPT_LENS = (26, 31, 40)  # and positions on both sides of a page's end
MAX_CACHE_LEN = 160


@contextmanager
def counting() -> Iterator[list[Any]]:
    """Reports of the backend, one a compilation; Dynamo must know of no other, nor of a break."""
    counters.clear()
    reports: list[Any] = []
    with listening(reports.append):
        yield reports
    assert counters["stats"]["unique_graphs"] == len(reports)
    assert not counters["graph_break"]


def empty_cache(model, kind):
    if kind == "static":
        return StaticCache(model.config, max_cache_len=MAX_CACHE_LEN)
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    return PagedCache(model.config, 1, MAX_CACHE_LEN, dtype=model.lm_head.weight.dtype)


# Dynamo takes a length for constant once, before it makes a graph for all of them.
@pytest.mark.parametrize(("kind", "num_expected"), [("static", 1), ("paged", 1), ("dynamic", 2)])
def test_steps_behind_an_eager_prompt(kind, num_expected):
    model = small_model()
    compiled = compile_model(model)
    with counting() as reports:
        for prompt_len in PROMPT_LENS:
            kwargs = {CACHE_ARGUMENT: empty_cache(model, kind)}
            model(tokens(1, prompt_len), **kwargs)
            for _ in range(NUM_STEPS):
                compiled(tokens(1, 1), **kwargs)
            assert len(reports) == num_expected


@pytest.mark.parametrize("kind", ["static", "paged", "dynamic"])
def test_steps_behind_a_compiled_prompt(kind):
    """One graph for prompts of every length, one for steps."""
    model = small_model()
    compiled = compile_model(model)
    with counting() as reports:
        for prompt_len in PROMPT_LENS:
            kwargs = {CACHE_ARGUMENT: empty_cache(model, kind)}
            ids = tokens(1, prompt_len)
            torch._dynamo.mark_dynamic(ids, 1)
            compiled(ids, **kwargs)
            for _ in range(NUM_STEPS):
                compiled(tokens(1, 1), **kwargs)
            assert len(reports) == 2


def test_prompts_without_a_cache():
    model = small_model()
    compiled = compile_model(model)
    with counting() as reports:
        for length in range(9, 9 + NUM_STEPS):
            ids = tokens(1, length)
            torch._dynamo.mark_dynamic(ids, 1)
            compiled(ids, use_cache=False)
    assert len(reports) == 1


def generate(model, num_tokens=NUM_STEPS + 1, **kwargs):
    """Greedy and without an end, unless told otherwise."""
    kwargs = {"do_sample": False, "eos_token_id": None} | kwargs
    return glm_compile.generate(
        model, max_new_tokens=num_tokens, return_dict_in_generate=True, **kwargs
    )


def test_generate_without_drafts():
    """The prompt's graph and the step's; both again for a cache of twice the capacity."""
    compiled = compile_model(small_model())
    with counting() as reports:
        for prompt_len in (*PROMPT_LENS, 1):
            result = generate(compiled, input_ids=tokens(1, prompt_len))
            assert result.num_iterations == NUM_STEPS
            assert len(reports) == num_graphs(0) == 2
        for prompt_len in (250, *PROMPT_LENS):
            generate(compiled, input_ids=tokens(1, prompt_len), num_tokens=8)
            assert len(reports) == 4


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "num_expected"),
    [
        # Prompt, verify; the MTP layer's prompt, extend, draft.
        ({"num_draft_tokens": 5}, 5),
        ({"num_draft_tokens": 5, "do_sample": True}, 5),
        # One draft comes from extend itself.
        ({"num_draft_tokens": 1}, 4),
        # A draft step is an extend of one token.
        ({"num_draft_tokens": 5, "index_share": False}, 5),
    ],
    ids=lambda value: "-".join(map(str, value)) if isinstance(value, dict) else str(value),
)
def test_generate_with_drafts(fields, num_expected):
    model = small_model()
    compiled, mtp = compile_model(model), random_mtp(model)
    with counting() as reports:
        for prompt_len in (*PROMPT_LENS, 1):
            result = generate(compiled, input_ids=tokens(1, prompt_len), mtp=mtp, **fields)
            assert result.num_iterations > NUM_STEPS // 2
            assert len(reports) == num_expected
        # Plain decoding adds its step's graph alone.
        generate(compiled, input_ids=tokens(1, 9), num_tokens=5)
    assert len(reports) == num_expected + 1
