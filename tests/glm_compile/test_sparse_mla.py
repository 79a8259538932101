"""Attention over selected latents in whole models: what is left, its cost, what is declined."""

from __future__ import annotations

import math
import re

import pytest
import torch
from torch.profiler import ProfilerActivity, profile
from transformers import StaticCache

from glm_compile.cache import DraftSeed, PagedCache
from glm_compile.errors import MatchError
from glm_compile.ops.causal_mask import causal_mask
from tests.checkpoints import random_mtp
from tests.compiling import (
    NUM_CACHED,
    Step,
    assert_logits_close,
    compile_model,
    final_text,
    report_of_last_compilation,
    small_model,
    tokens,
)
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

BF16 = torch.bfloat16


def shapes_in(text: str) -> list[list[int]]:
    """Shapes of all tensors of graphs as text."""
    found = re.findall(r": \w+\[([\d, ]*)\] = (?!input)", text)
    return [[int(size) for size in shape.split(", ") if size] for shape in found]


def allocated_bytes(step) -> int:
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    return sum(max(event.self_cpu_memory_usage, 0) for event in profiler.key_averages())


def make_cache(model, kind: str, max_cache_len: int):
    if kind == "static":
        return StaticCache(model.config, max_cache_len=max_cache_len)
    return PagedCache(model.config, 2, max_cache_len)


@pytest.mark.parametrize("kind", ["static", "paged"])
def test_no_tensor_of_cached_tokens_times_heads_is_left(kind):
    model = small_model()
    ids = tokens(2, NUM_CACHED + 2)
    cache = make_cache(model, kind, 101)
    model(ids[:, :NUM_CACHED], **{CACHE_ARGUMENT: cache})
    actual = compile_model(model)(ids[:, NUM_CACHED:], **{CACHE_ARGUMENT: cache}).logits
    torch.testing.assert_close(actual, model(ids).logits[:, NUM_CACHED:], atol=2e-5, rtol=1e-4)
    sizes = [math.prod(shape) for shape in shapes_in(final_text(report_of_last_compilation()))]
    # Of each cached token there are, at most, the index key or the latent of a contiguous cache.
    held = [size // 101 for size in sizes if size and size % 101 == 0]
    assert max(held, default=0) <= 2 * model.config.index_head_dim
    config = model.config
    assert 2 * config.num_attention_heads * (config.qk_nope_head_dim + 96) not in held


@pytest.mark.newest_transformers
@pytest.mark.parametrize("kind", ["static", "paged"])
def test_attention_costs_the_same_whatever_the_cache_has_room_for(kind):
    """Counted for a layer without an indexer, which scores all that there is room for."""
    model = small_model()
    layer, rotary = model.model.layers[1], model.model.rotary_emb
    hidden = torch.randn(2, 3, 128)
    selection = torch.arange(8, dtype=torch.int32).expand(2, 3, 8)
    results, num_bytes = [], []
    for max_cache_len in (100, 6400):
        torch._dynamo.reset()
        cache = make_cache(model, kind, max_cache_len)
        model(tokens(2, NUM_CACHED), **{CACHE_ARGUMENT: cache})

        @compile_model
        def step(hidden, cache=cache, max_cache_len=max_cache_len):
            lengths = torch.full((2,), NUM_CACHED, dtype=torch.int32)
            positions = NUM_CACHED + torch.arange(3)[None]
            return layer(
                hidden,
                attention_mask=causal_mask(lengths, 3, max_cache_len, torch.bool),
                position_ids=positions,
                position_embeddings=rotary(hidden, position_ids=positions),
                prev_topk_indices=selection,
                **{CACHE_ARGUMENT: cache},
            )[0]

        results.append(step(hidden))
        assert report_of_last_compilation().matches["sparse_mla"] == 1
        num_bytes.append(allocated_bytes(lambda step=step: step(hidden)))
    assert torch.equal(*results)
    # Less than a byte a token, for the block table.
    assert num_bytes[1] - num_bytes[0] < 2 * 6300


class Extended(torch.nn.Module):
    """A linear with a low-rank product beside it."""

    def __init__(self, linear):
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Linear(linear.in_features, 4, bias=False)
        self.up = torch.nn.Linear(4, linear.out_features, bias=False)
        self.requires_grad_(False)

    def forward(self, x):
        return self.linear(x) + self.up(self.down(x))


@pytest.mark.newest_transformers
def test_expansions_that_are_changed_are_declined_and_stay_right():
    model = small_model()
    layers = [layer.self_attn for layer in model.model.layers]
    layers[0].kv_b_proj.register_forward_hook(lambda module, arguments, output: output * 2)
    layers[1].kv_b_proj = Extended(layers[1].kv_b_proj)
    step = Step(model, "static", 6)
    with pytest.raises(MatchError, match="sparse_mla: "):
        step.run(compile_model(model))
    torch._dynamo.reset()
    actual, _ = step.run(compile_model(model, strict=False))
    assert_logits_close(actual, step.run(model)[0], None)
    report = report_of_last_compilation()
    assert (report.matches["sparse_mla"], report.expected["sparse_mla"]) == (1, 3)
    reasons = {declined.where: declined.reason for declined in report.declined["sparse_mla"]}
    assert set(reasons) == {f"model.layers.{i}.self_attn" for i in range(2)}
    assert "kv_b_proj's linear over the latents, found mul" in reasons["model.layers.0.self_attn"]
    assert "kv_b_proj's linear over the latents, found add" in reasons["model.layers.1.self_attn"]


def test_attention_that_shows_its_weights_is_declined():
    model = small_model(attention="eager")
    compiled = compile_model(model, strict=False)
    ids = tokens(1, 24)
    options = {"use_cache": False, "output_attentions": True}
    expected = model(ids, **options)  # first, because it sets up what collects the weights
    actual = compiled(ids, **options)
    assert_logits_close(actual.logits, expected.logits, None)
    report = report_of_last_compilation()
    assert (report.matches["sparse_mla"], report.expected["sparse_mla"]) == (0, 3)
    reasons = {declined.reason for declined in report.declined["sparse_mla"]}
    assert reasons == {"the attention weights have another user (output_attentions=True)"}


@pytest.mark.parametrize("inner", ["eager", pytest.param("inductor", marks=pytest.mark.slow)])
def test_a_selection_of_the_caller_counts_as_its_mask_says(inner):
    """Masked positions, repeats and any order, as transformers' own scatter takes them."""
    model = small_model()
    layer, rotary = model.model.layers[1], model.model.rotary_emb
    hidden = torch.randn(2, 12, 128)
    selection = torch.randint(0, 12, (2, 12, 8), dtype=torch.int32)
    selection[..., 0] = torch.arange(12)  # each row sees one at least
    key_mask = torch.ones(2, 1, 12, dtype=torch.bool)
    key_mask[0, :, 3] = False
    selection[0, 3, 1] = 2

    def step(hidden, selection, key_mask):
        positions = torch.arange(12)[None]
        lengths = torch.zeros(2, dtype=torch.int32)
        return layer(
            hidden,
            attention_mask=causal_mask(lengths, 12, 12, torch.bool, key_mask=key_mask),
            position_ids=positions,
            position_embeddings=rotary(hidden, position_ids=positions),
            prev_topk_indices=selection,
        )[0]

    compiled = compile_model(step, inner=inner)
    for _ in range(2):
        actual = compiled(hidden, selection, key_mask)
        torch.testing.assert_close(actual, step(hidden, selection, key_mask), atol=1e-4, rtol=1e-4)
        selection, key_mask = selection.flip(-1), key_mask.roll(1, -1)
        selection[..., 1] = torch.arange(12)
        selection[0, 4, 2] = 1
    report = report_of_last_compilation()
    assert report.ok and report.matches["sparse_mla"] == 1
    assert "aten.sort.default(where" in final_text(report)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_draft_steps_attend_to_gathered_latents(dtype):
    """One gather for all steps; each step reads its rows in place, in the order they have."""
    model = tiny_model(tiny_config(num_hidden_layers=1, indexer_types=["full"]), dtype=dtype)
    mtp = random_mtp(model).to(dtype)
    cache = PagedCache(model.config, 2, 100, dtype=dtype, num_mtp_layers=1)
    cache.auto_advance = False
    ids = tokens(2, 30)
    hidden = torch.randn(2, 30, 128, dtype=dtype)

    def extend(ids, hidden, cache):
        positions = cache.lengths[:, None] + torch.arange(30)
        hidden, topk = mtp.extend(ids, hidden, positions, None, cache)
        seed = mtp.gather_seed(topk[:, -1:], cache, cache.lengths + 30)
        return hidden[:, -1:].contiguous(), *seed

    def drafts(token, hidden, seed, lengths):
        made = []
        for step in range(3):
            hidden = mtp.draft(token, hidden, lengths[:, None] + step, seed)
            token = mtp.compute_logits(hidden).argmax(-1)
            made.append(hidden)
        return torch.cat(made, 1)

    expected_hidden, *expected_seed = extend(ids, hidden, cache)
    found_hidden, *found_seed = compile_model(extend)(ids, hidden, cache)
    report = report_of_last_compilation()
    assert report.ok and report.matches["sparse_mla"] == 1
    seed_text = final_text(report)
    assert "glm.paged_gather" not in seed_text
    seed = DraftSeed(*found_seed)
    lengths = torch.tensor([30, 30])
    found = compile_model(drafts)(ids[:, :1], found_hidden, seed, lengths)
    report = report_of_last_compilation()
    assert report.ok and report.matches["sparse_mla"] == report.matches["mask"] == 3
    text = final_text(report)
    assert "glm.sparse_mla_contiguous" in text
    for op in ("paged_gather", "glm.paged_write", "attention.default"):
        assert op not in text
    assert "aten.sort.default(where" not in text  # the router sorts its experts
    assert f"[2, {cache.max_cache_len}" not in text
    assert "glm.draft_seed" in seed_text and "aten.where" not in text
    assert torch.equal(found_seed[1], torch.arange(8, dtype=torch.int32).expand(2, 8))
    if dtype == torch.float32:
        tolerance = {"atol": 1e-4, "rtol": 1e-4}
        torch.testing.assert_close(found_hidden, expected_hidden, **tolerance)
        wanted = drafts(ids[:, :1], expected_hidden, DraftSeed(*expected_seed), lengths)
        torch.testing.assert_close(found, wanted, **tolerance)
