"""The store of latents as a part of sparse_mla: one op, or a part of the indexer's prologue."""

from __future__ import annotations

import copy
import operator
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx

from glm_compile.cache import PagedCache
from glm_compile.fx_passes.base import PassOptions, PassResult
from glm_compile.fx_passes.indexer_prologue import IndexerPrologue
from glm_compile.fx_passes.indexer_topk import IndexerTopk
from glm_compile.fx_passes.mark_attention import mark_attention
from glm_compile.fx_passes.mask import prove_mask
from glm_compile.fx_passes.sparse_mla import SparseMla
from tests.fx_passes.aten_graphs import LEVELS, capture, count_ops, graph_text
from tests.fx_passes.tiny_attention import (
    EPS,
    Inputs,
    L,
    P,
    TinyAttention,
    attention_step,
    make_inputs,
)
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers

FP32, BF16 = torch.float32, torch.bfloat16
APART = "latents are made and stored in launches of their own"


def rewritten(
    module: TinyAttention, inputs: Inputs, level: str
) -> tuple[fx.GraphModule, PassResult, list[torch.Tensor]]:
    """(graph behind the pass, its result, outputs: compiled, eager, a page's rows of both)."""
    run, flat = attention_step(module, inputs, "paged")
    eager = copy.deepcopy(flat)
    expected = run(*eager)
    options = PassOptions()
    output, captured = capture(run, *flat, level=level, passes=(SparseMla(options),))
    pages = [arguments[len(inputs.step())] for arguments in (flat, eager)]
    return captured.after, captured.results["sparse_mla"], [output, expected, *pages]


class HalfSplit(TinyAttention):
    """DeepSeek's `apply_rotary_pos_emb`, for query and key."""

    def rotate(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x.chunk(2, dim=-1)
        return x * cos.unsqueeze(1) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(1)


class WithoutHeads(TinyAttention):
    """The key is rotated as [B, S, P], sliced out of kv_a's output, and x * x for its square."""

    def norm(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = latents.to(torch.float32)
        return (x * torch.rsqrt((x * x).mean(-1, keepdim=True) + EPS)).to(latents.dtype) * weight

    def latents(
        self, new: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x1, x2 = new[..., L::2], new[..., L + 1 :: 2]
        cos, sin = cos[..., : P // 2], sin[..., : P // 2]
        k_rot = torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)
        return self.norm(new[..., :L], weight).unsqueeze(1), k_rot.unsqueeze(1)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("module", [TinyAttention, HalfSplit, WithoutHeads])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 6)])
def test_one_op_makes_and_stores_the_same_rows(
    module: type[TinyAttention], batch: int, tokens: int, dtype: torch.dtype, level: str
) -> None:
    inputs = make_inputs("paged", batch, tokens, dtype)
    inputs.cache[1][-1] = -1  # a sequence without a page: its rows are not stored
    gm, result, (output, expected, pages, expected_pages) = rewritten(module(), inputs, level)
    assert (result.num_matches, result.declined) == (1, [])
    ops = count_ops(gm)
    assert ops["glm.latent_write"] == 1 and ops["glm.paged_write"] == 0
    gone = ("mul", "cat", "rsqrt", "mean", "neg", "add", "sub", "pow")
    assert not any(name.split(".")[1] in gone for name in ops if name.startswith("aten."))
    # The reference rounds where the model does.
    assert torch.equal(pages, expected_pages)
    tolerance = 2e-5 if dtype == FP32 else 2**-5
    torch.testing.assert_close(output, expected, atol=tolerance, rtol=tolerance)
    text = graph_text(gm)
    assert SparseMla(PassOptions())(gm).num_matches == 0 and graph_text(gm) == text


class Centred(TinyAttention):
    def norm(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().norm(latents - latents.mean(-1, keepdim=True), weight)


class Unrounded(TinyAttention):
    """The weight comes in before the norm's result is rounded."""

    def norm(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        x = latents.to(torch.float32)
        x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
        return (weight * x).to(latents.dtype)


class Scaled(TinyAttention):
    def norm(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return super().norm(latents, weight) * 2


class Unturned(TinyAttention):
    def latents(self, new: Any, weight: Any, cos: Any, sin: Any) -> Any:
        latents, _ = super().latents(new, weight, cos, sin)
        return latents, new[:, None, :, L:].sin()


class OtherTokens(TinyAttention):
    """Latents of the tokens in another order."""

    def latents(self, new: Any, weight: Any, cos: Any, sin: Any) -> Any:
        latents, k_rot = super().latents(new, weight, cos, sin)
        return latents.flip(2), k_rot


class OwnTable(TinyAttention):
    """The key's table is the query's with its tokens mixed up."""

    def latents(self, new: Any, weight: Any, cos: Any, sin: Any) -> Any:
        def mixed(table: torch.Tensor) -> torch.Tensor:
            return table[..., : P // 2].transpose(1, 2).reshape(1, -1, P // 2)

        return super().latents(new, weight, mixed(cos), mixed(sin))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (Unrounded, "latents: expected RMSNorm, found "),
        (Scaled, "latents: expected RMSNorm, found mul"),
        (Unturned, "rope of the key: expected cat"),
        (OtherTokens, "latents: expected RMSNorm, found (flip|rev)"),
        (OwnTable, "rope of the key: cos is not laid out as one row a token"),
    ],
)
def test_near_misses_are_stored_as_they_were(
    module: type[TinyAttention], reason: str, level: str
) -> None:
    inputs = make_inputs("paged", dtype=BF16)
    gm, result, (*_, pages, expected_pages) = rewritten(module(), inputs, level)
    assert result.num_matches == 1
    (declined,) = result.declined
    assert re.search(f"{APART}: {reason}", declined.reason), declined.reason
    assert count_ops(gm)["glm.paged_write"] == 1
    assert torch.equal(pages, expected_pages)


@pytest.mark.parametrize("level", LEVELS)
def test_what_is_done_before_the_norm_stays(level: str) -> None:
    _, result, (*_, pages, expected_pages) = rewritten(Centred(), make_inputs("paged"), level)
    assert (result.num_matches, result.declined) == (1, [])
    assert torch.equal(pages, expected_pages)


# With an indexer ---------------------------------------------------------------------------------


class Edit:
    """A pass that edits the graph, to make a near miss of it."""

    name = "edit"

    def __init__(self, edit: Callable[[fx.Graph], None]) -> None:
        self.edit = edit

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        self.edit(graph_module.graph)
        return PassResult(self.name)


def written(graph: fx.Graph, name: str) -> fx.Node:
    """The functionalized call of an op."""
    (node,) = [
        node
        for node in graph.nodes
        if "auto_functionalized" in str(node.target) and str(node.args[0]) == f"glm.{name}.default"
    ]
    return node


def replace_input(graph: fx.Graph, name: str, argument: str) -> None:
    """Give an op a copy of its argument."""
    node = written(graph, name)
    with graph.inserting_before(node):
        copied = graph.call_function(torch.ops.aten.clone.default, (node.kwargs[argument],))
    copied.meta["val"] = node.kwargs[argument].meta["val"]
    node.update_kwarg(argument, copied)


def layer_step(
    edit: Callable[[fx.Graph], None], is_fp8: bool, level: str
) -> tuple[fx.GraphModule, dict[str, PassResult], Any]:
    """(graph, results, layers of the caches of the compiled and of the eager model) of a step."""
    torch.manual_seed(0)
    model = tiny_model(tiny_config(num_hidden_layers=1, indexer_types=["full"]))
    ids = torch.randint(0, 500, (2, 14))
    caches = []
    for _ in range(2):
        index_dtype = torch.float8_e4m3fn if is_fp8 else None
        cache = PagedCache(model.config, 2, 80, dtype=FP32, index_dtype=index_dtype)
        model(ids[:, :10], **{CACHE_ARGUMENT: cache})
        caches.append(cache)
    options = PassOptions(indexer_dtype="fp8" if is_fp8 else "auto")
    _, captured = capture(
        model,
        ids[:, 10:],
        level=level,
        passes=(IndexerTopk(options), IndexerPrologue(options), Edit(edit), SparseMla(options)),
        dynamo_stage=lambda gm: (mark_attention(gm), prove_mask(gm)),
        **{CACHE_ARGUMENT: caches[0]},
    )
    model(ids[:, 10:], **{CACHE_ARGUMENT: caches[1]})
    return captured.after, captured.results, [cache.layers[0] for cache in caches]


def check_pages(layers: Any) -> None:
    """Latents and exact keys as the eager model stores them, FP8 keys nearly all."""
    ours, theirs = layers
    torch.testing.assert_close(ours.latent_pages, theirs.latent_pages, atol=1e-5, rtol=1e-5)
    if ours.key_pages.dtype == torch.uint8:
        assert (ours.key_pages != theirs.key_pages).float().mean() < 1e-3
    else:
        torch.testing.assert_close(ours.key_pages, theirs.key_pages, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("is_fp8", [False, True])
def test_latents_and_index_keys_are_stored_in_one_op(is_fp8: bool, level: str) -> None:
    gm, results, layers = layer_step(lambda graph: None, is_fp8, level)
    assert results["sparse_mla"].num_matches == 1 and results["sparse_mla"].declined == []
    ops = count_ops(gm)
    name = "attention_prologue_fp8" if is_fp8 else "attention_prologue_paged"
    assert ops[f"glm.{name}"] == 1
    assert not any(ops[f"glm.{gone}"] for gone in ("paged_write", "latent_write"))
    # Each buffer is written back to its own input.
    call = written(gm.graph, name)
    ends = gm.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    kept = {end.args[0]: end.args[1].args[1] for end in ends if end.args[1].args[0] is call}
    assert kept == {base: 2 + i for i, base in enumerate(call.kwargs["_all_bases"])}
    pages = [n for n in gm.graph.nodes if n.target is operator.getitem and n.args == (call, 3)]
    assert [user.target for user in pages[0].users if user not in ends] == [
        torch.ops.glm.sparse_mla.default
    ]
    check_pages(layers)


@pytest.mark.parametrize(
    ("argument", "reason"),
    [
        ("block_table", "another block_table tells where they go"),
        ("lengths_B", "another lengths tells where they go"),
        ("cos_BSP", "another cos rotates them"),
    ],
)
def test_latents_are_stored_apart_where_the_indexer_reads_something_else(
    argument: str, reason: str
) -> None:
    def edit(graph: fx.Graph) -> None:
        replace_input(graph, "indexer_prologue_paged", argument)

    gm, results, layers = layer_step(edit, False, "plain")
    assert results["sparse_mla"].num_matches == 1
    (declined,) = results["sparse_mla"].declined
    assert declined.reason == f"latents are stored apart from the index keys: {reason}"
    ops = count_ops(gm)
    assert ops["glm.latent_write"] == ops["glm.indexer_prologue_paged"] == 1
    check_pages(layers)


def absorbed_after(gm: fx.GraphModule) -> fx.Node | None:
    """What the absorbed product is to run behind."""
    (absorb,) = gm.graph.find_nodes(
        op="call_function", target=torch.ops.glm.mla_absorb_query.default
    )
    *_, after, _backend = absorb.args
    return after


def test_the_absorbed_product_runs_behind_a_selection_that_the_graph_makes() -> None:
    gm, *_ = layer_step(lambda graph: None, False, "plain")
    after = absorbed_after(gm)
    assert after is not None and after.args[0].target is torch.ops.glm.topk_select.default
    gm, *_ = rewritten(TinyAttention(), make_inputs("paged"), "plain")
    assert absorbed_after(gm) is None


@pytest.mark.parametrize("dims", [(1,), (0, 1)])
def test_steps_of_any_length_are_stored_in_one_op(dims: tuple[int, ...]) -> None:
    inputs = make_inputs("paged", dtype=BF16)
    run, flat = attention_step(TinyAttention(), inputs, "paged")
    eager = copy.deepcopy(flat)
    expected = run(*eager)
    for dim in dims:
        for tensor in (*flat[:2], flat[6], *(flat[8:] if dim == 0 else flat[3:5])):
            torch._dynamo.mark_dynamic(tensor, dim)
    output, captured = capture(run, *flat, passes=(SparseMla(PassOptions()),))
    assert captured.results["sparse_mla"].declined == []
    ops = count_ops(captured.after)
    assert ops["glm.latent_write"] == 1
    assert not ops["aten.mul.Tensor"] and not ops["aten.cat"]
    assert torch.equal(flat[7], eager[7])
    torch.testing.assert_close(output, expected, atol=2**-5, rtol=2**-5)
