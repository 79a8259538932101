"""What a compiled layer launches between its projections and its attention, and what is declined.

The latents' norm, rotation and store and the query's rotation are a part of other launches; graphs
of passes are read here, because they do not depend on a GPU.
"""

from __future__ import annotations

import re

import pytest
import torch

import glm_compile
from glm_compile.cache import PagedCache
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
from tests.glm_compile.test_indexer_layer import launches
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

BF16 = torch.bfloat16

# Neither inputs nor views nor parts of a result: what is a launch on a GPU.
_PARTS = "view|_unsafe_view|slice|transpose|permute|split_with_sizes|unsqueeze|squeeze|expand"
_LAUNCH = re.compile(
    rf"= (?!getitem|aten\.(?:{_PARTS})\b|input)(?:auto_functionalized_v2\()?([\w.]+)"
)


def attention_launches(text: str) -> list[list[str]]:
    """What each attention of graphs as text runs from the product that makes q to its values."""
    found: list[list[str]] = []
    names: list[str] = []
    for line in text.splitlines():
        # Lengths alone are integers of torch's ops: made once a step where its mask is the loop's.
        match = None if re.search(r": int\d+\[.*= aten", line) else _LAUNCH.search(line)
        name = "" if match is None else match[1].removesuffix(".default").removeprefix("glm.")
        if name.endswith("linear"):
            names = []
        elif name == "mla_project_values":
            found.append(names)
        elif name and name != "advance":  # of the cache's lengths, once a forward
            names.append(name)
    return found


@pytest.mark.parametrize(("tier", "query_len"), [("exact", 6), ("fp8", 1)])
def test_one_launch_lies_between_the_projections_and_the_absorbed_product(tier, query_len):
    """It norms, rotates and stores latents, and index keys too where a layer has an indexer."""
    model = small_model(dtype=BF16)
    mtp = random_mtp(model).to(BF16)
    options = {"indexer_dtype": "fp8"} if tier == "fp8" else {}
    report = glm_compile.explain(model, 2, query_len, 100, "paged", options, mtp=mtp)
    prologue = "attention_prologue_fp8" if tier == "fp8" else "attention_prologue_paged"
    full = [prologue, "indexer_scores_paged", "topk_select", "mla_absorb_query", "sparse_mla"]
    shared = ["latent_write", "mla_absorb_query", "sparse_mla"]
    assert attention_launches(final_text(report)) == [full, shared, full]
    assert attention_launches(final_text(report.mtp)) == [full]
    assert report.ok and report.mtp.ok
    assert not report.declined["sparse_mla"] and not report.mtp.declined["sparse_mla"]


@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_other_caches_keep_their_own_store(kind):
    """Their latents are stored by the cache's own code; the query is rotated in the product."""
    model = small_model(dtype=BF16)
    report = glm_compile.explain(model, 2, 6, 100, kind)
    assert report.ok and not report.declined["sparse_mla"]
    text = final_text(report)
    assert "latent_write" not in text and "attention_prologue" not in text
    for line in text.splitlines():
        if "glm.mla_absorb_query" in line:
            assert "None, None, True" not in line


@pytest.mark.newest_transformers
def test_hooks_on_what_makes_latents_are_declined_and_stay_right():
    """The norm's hook in a shared layer, the query's in a full one; the others are replaced."""
    model = small_model()
    layers = [layer.self_attn for layer in model.model.layers]
    layers[1].kv_a_layernorm.register_forward_hook(lambda module, arguments, output: output * 2)
    layers[2].kv_a_layernorm.register_forward_hook(lambda module, arguments, output: output + 1)
    step = Step(model, "paged", 6, batch_size=2)
    actual, cache = step.run(compile_model(model))
    expected, expected_cache = step.run(model)
    assert_logits_close(actual, expected, None)
    for layer, other in zip(cache.layers, expected_cache.layers, strict=True):
        torch.testing.assert_close(layer.latent_pages, other.latent_pages, atol=2e-5, rtol=1e-5)
    report = report_of_last_compilation()
    assert report.ok
    reasons = {declined.where: declined.reason for declined in report.declined["sparse_mla"]}
    assert set(reasons) == {"model.layers.1.self_attn", "model.layers.2.self_attn"}
    for reason, found in zip(reasons.values(), ("mul", "add")):
        assert "latents are made and stored in launches of their own" in reason
        assert f"expected RMSNorm, found {found}" in reason
    text = final_text(report)
    assert text.count("glm.attention_prologue_paged") == 1 and "glm.latent_write" not in text


@pytest.mark.newest_transformers
def test_latents_that_a_hook_reads_are_stored_all_the_same():
    """What else reads the normed latents gets them; the op makes its own."""
    model, seen = small_model(), []
    norm = model.model.layers[1].self_attn.kv_a_layernorm
    norm.register_forward_hook(lambda module, arguments, output: seen.append(output.sum()))
    step = Step(model, "paged", 6)

    def forward(*args, **kwargs):
        seen.clear()
        output = model(*args, **kwargs)
        output.logits = output.logits + seen[0] * 1e-3
        return output

    expected, expected_cache = step.run(forward)
    actual, cache = step.run(compile_model(forward))
    assert_logits_close(actual, expected, None)
    torch.testing.assert_close(
        cache.layers[1].latent_pages, expected_cache.layers[1].latent_pages, atol=2e-5, rtol=1e-5
    )
    report = report_of_last_compilation()
    assert not report.declined["sparse_mla"]
    assert final_text(report).count("glm.latent_write") == 1


@pytest.mark.gpu
def test_inductor_adds_no_kernel_between_the_projections_and_attention():
    """On a GPU, by name: Inductor calls its own kernels `triton_...`."""
    model = small_model(dtype=BF16).to("cuda")
    cache = PagedCache(model.config, 1, 128, dtype=BF16, device="cuda")
    cache.auto_advance = False
    cache.set_lengths(NUM_CACHED)

    def step(ids: torch.Tensor) -> torch.Tensor:
        positions = cache.lengths[:, None] + torch.arange(6, device="cuda")
        mask = {"indexed_attention": cache.causal_mask(6)}
        return model(
            ids, attention_mask=mask, position_ids=positions, **{CACHE_ARGUMENT: cache}
        ).logits

    compiled, ids = compile_model(step, inner="inductor"), tokens(1, 6).cuda()
    names = launches(lambda: compiled(ids))
    starts = [
        i for i, name in enumerate(names) if re.search("indexer_prologue_k|latent_write_k", name)
    ]
    assert len(starts) == 3, names
    for start in starts:
        end = next(i for i in range(start, len(names)) if re.search("(?i)sparse_?mla", names[i]))
        # The product that makes the queries is the launch before.
        assert not any("triton_" in name for name in names[start - 1 : end]), names


def test_draft_steps_launch_the_product_alone_before_attention():
    model = tiny_model(tiny_config(num_hidden_layers=1, indexer_types=["full"]), dtype=BF16)
    mtp = random_mtp(model).to(BF16)
    cache = PagedCache(model.config, 2, 100, dtype=BF16, num_mtp_layers=1)
    lengths = torch.tensor([30, 20])
    positions = torch.arange(8, dtype=torch.int32).expand(2, 1, 8)
    seed = mtp.gather_seed(positions, cache, lengths)

    def draft(token, hidden, seed):
        for step in range(2):
            hidden = mtp.draft(token, hidden, lengths[:, None] + step, seed)
        return hidden

    token, hidden = tokens(2, 1), torch.randn(2, 1, 128, dtype=BF16)
    compile_model(draft)(token, hidden, seed)
    report = report_of_last_compilation()
    assert report.ok and not report.declined["sparse_mla"]
    # One graph for both steps where they are of one kind.
    launches = attention_launches(final_text(report))
    assert launches
    assert all(names == ["mla_absorb_query", "sparse_mla_contiguous"] for names in launches)
