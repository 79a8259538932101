"""How often a model is compiled: once a shape, whatever the position and the prompt."""

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
from tests.compiling import assert_logits_close, compile_model, short_model, tokens
from tests.glm_compile.generation.drafts import random_mtp
from tests.tiny_models import CACHE_ARGUMENT

NUM_STEPS = 40
PROMPT_LENS = (26, 31, 40)  # from each of them the steps pass a page's end
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


# Behind a prompt that ran eagerly Dynamo takes a dynamic cache's length for constant once, before
# it makes a graph for all of them: tests/glm_compile/test_backend.py.
@pytest.mark.parametrize(
    ("kind", "prompts"),
    [
        ("static", ("eager", "compiled")),
        ("paged", ("eager", "compiled")),
        ("dynamic", ("compiled", "eager")),
    ],
)
def test_prompts_and_steps(kind, prompts):
    """One graph for steps behind prompts of every length, one for the prompts that are compiled."""
    model = short_model()
    compiled = compile_model(model)
    num_expected = 1
    with counting() as reports:
        for prompt in prompts:
            num_expected += prompt == "compiled"
            for prompt_len in PROMPT_LENS:
                kwargs = {CACHE_ARGUMENT: empty_cache(model, kind)}
                ids = tokens(1, prompt_len)
                if prompt == "compiled":
                    torch._dynamo.mark_dynamic(ids, 1)
                (compiled if prompt == "compiled" else model)(ids, **kwargs)
                for _ in range(NUM_STEPS):
                    compiled(tokens(1, 1), **kwargs)
                assert len(reports) == num_expected


@pytest.mark.newest_transformers
def test_prompts_without_a_cache():
    model = short_model()
    compiled = compile_model(model)
    with counting() as reports:
        for length in range(9, 9 + NUM_STEPS):
            ids = tokens(1, length)
            torch._dynamo.mark_dynamic(ids, 1)
            actual = compiled(ids, use_cache=False).logits
            assert_logits_close(actual, model(ids, use_cache=False).logits, None)
    assert len(reports) == 1
    assert reports[0].ok


def generate(model, num_tokens=NUM_STEPS + 1, **kwargs):
    """Greedy and without an end, unless told otherwise."""
    kwargs = {"do_sample": False, "eos_token_id": None} | kwargs
    return glm_compile.generate(
        model, max_new_tokens=num_tokens, return_dict_in_generate=True, **kwargs
    )


@pytest.mark.newest_transformers
def test_generate_without_drafts():
    """The prompt's graph and the step's; both again for a cache of twice the capacity."""
    compiled = compile_model(short_model())
    with counting() as reports:
        for prompt_len in (*PROMPT_LENS, 1):
            result = generate(compiled, input_ids=tokens(1, prompt_len))
            assert result.num_iterations == NUM_STEPS
            assert len(reports) == num_graphs(0) == 2
        for prompt_len in (250, *PROMPT_LENS):
            generate(compiled, input_ids=tokens(1, prompt_len), num_tokens=8)
            assert len(reports) == 4


@pytest.mark.slow
def test_generate_with_drafts():
    """What other calls add to the graphs of the first one, with the same model and MTP layer."""
    model = short_model()
    compiled, mtp = compile_model(model), random_mtp(model)
    num_expected = 0
    calls: list[tuple[dict[str, Any], int, tuple[int, ...]]] = [
        # Prompt, verify; the MTP layer's prompt, extend, draft.
        ({"num_draft_tokens": 5}, 5, (*PROMPT_LENS, 1)),
        ({"num_draft_tokens": 5, "do_sample": True}, 0, (31, 1)),
        # Plain decoding adds its step's graph alone.
        ({"num_draft_tokens": 0}, 1, (9,)),
        # Another verify and extend; the one draft comes from extend itself.
        ({"num_draft_tokens": 1}, 2, (40, 1)),
        # A draft step is an extend of one token.
        ({"num_draft_tokens": 5, "index_share": False}, 3, (40, 1)),
    ]
    with counting() as reports:
        for fields, num_new, prompt_lens in calls:
            num_expected += num_new
            for prompt_len in prompt_lens:
                result = generate(compiled, input_ids=tokens(1, prompt_len), mtp=mtp, **fields)
                assert result.num_iterations > NUM_STEPS // 2
                assert len(reports) == num_expected, fields
