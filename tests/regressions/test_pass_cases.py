"""Public bug reports that can hit the graph rewrites, by case id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import fx, nn

from glm_compile.cache import PagedCache
from glm_compile.fx_passes import make_passes
from glm_compile.fx_passes.base import PassOptions, PassResult
from tests.fx_passes.aten_graphs import (
    LEVELS,
    Capture,
    capture,
    count_ops,
    graph_text,
    mark_indexer_topk,
)
from tests.fx_passes.tiny_indexer import C, D, H, P, TinyIndexer, make_inputs, trace_indexer
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

INDEXER_PASSES = ("indexer_topk", "indexer_prologue")


def run_passes(gm: fx.GraphModule, **options: Any) -> dict[str, PassResult]:
    results = {p.name: p(gm) for p in make_passes(PassOptions(**options))}
    gm.graph.lint()
    return results


def prologue_of(gm: fx.GraphModule) -> fx.Node:
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.indexer_prologue.default)
    return call


def one_layer(dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    config = tiny_config(
        num_hidden_layers=1, indexer_types=["full"], first_k_dense_replace=1, **overrides
    )
    return config, tiny_model(config, dtype=dtype)


class HalfSplitIndexer(TinyIndexer):
    def rotate_one(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x[..., : P // 2], x[..., P // 2 :]
        return x * cos.unsqueeze(2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("kind", "interleaved"), [(TinyIndexer, True), (HalfSplitIndexer, False)])
def test_idx_1_each_rope_layout_is_read_from_the_graph(
    kind: type[TinyIndexer], interleaved: bool, level: str
) -> None:
    gm, flat = trace_indexer(kind(), make_inputs(past=0), level=level)
    selected, keys = gm(*flat)
    assert run_passes(gm)["indexer_prologue"].num_matches == 1
    assert prologue_of(gm).args[8] is interleaved
    new_selected, new_keys = gm(*flat)
    assert torch.equal(selected, new_selected)
    torch.testing.assert_close(keys, new_keys, atol=4e-6, rtol=4e-6)


@pytest.mark.parametrize("level", LEVELS)
def test_idx_2_fp32_gates_stay_fp32_and_bf16_scaling_is_refused(level: str) -> None:
    module = TinyIndexer(torch.bfloat16, gates=torch.float32)
    inputs = make_inputs(past=0, dtype=torch.bfloat16)
    gm, flat = trace_indexer(module, inputs, level=level)
    selected, _ = gm(*flat)
    results = run_passes(gm)
    assert results["indexer_prologue"].num_matches == 1
    assert prologue_of(gm).args[2].meta["val"].dtype == torch.float32
    # The fp32 rows join no bf16 group.
    assert all(len(group) < 2 for group in results["merge_linears"].groups)  # type: ignore[attr-defined]
    assert torch.equal(selected, gm(*flat)[0])

    class ScaledInBf16(TinyIndexer):
        def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
            return (self.weights_proj(hidden) * self.gate_scale).float()

    gm, _ = trace_indexer(ScaledInBf16(torch.bfloat16), inputs, level=level)
    (declined,) = run_passes(gm)["indexer_prologue"].declined
    assert "scaled in torch.bfloat16" in declined.reason


@pytest.mark.parametrize("level", LEVELS)
def test_idx_3_unequal_formats_of_wk_and_weights_proj_stay_apart(level: str) -> None:
    module = TinyIndexer(torch.bfloat16, gates=torch.float32)
    gm, flat = trace_indexer(module, make_inputs(past=0, dtype=torch.bfloat16), level=level)
    before = gm(*flat)[0]
    result = run_passes(gm)["merge_linears"]
    assert result.num_matches == 0
    assert count_ops(gm)["glm.merged_linear"] == 0
    assert torch.equal(before, gm(*flat)[0])


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("norm_dtype", [torch.float32, torch.bfloat16])
def test_idx_4_k_norm_is_a_layer_norm_with_its_own_eps(level: str, norm_dtype: torch.dtype) -> None:
    """Rows of non-zero mean and tiny variance, so that mean, bias and eps all matter."""

    class Offset(TinyIndexer):
        norm_eps = 1e-6

        def __init__(self) -> None:
            super().__init__(torch.bfloat16, norm=norm_dtype)
            self.wk.weight.copy_(self.wk.weight[:1].expand(D, C) * (1 + 1e-3 * torch.randn(D, C)))

    inputs = make_inputs(past=0, dtype=torch.bfloat16)
    gm, flat = trace_indexer(Offset(), inputs, level=level)
    _, keys = gm(*flat)
    assert run_passes(gm)["indexer_prologue"].num_matches == 1
    assert prologue_of(gm).args[5] == pytest.approx(1e-6)
    torch.testing.assert_close(gm(*flat)[1], keys, atol=2**-6, rtol=2**-6)

    class Rms(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(D))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5))

    class WithRms(TinyIndexer):
        def __init__(self) -> None:
            super().__init__()
            self.k_norm = Rms()

    gm, _ = trace_indexer(WithRms(), make_inputs(past=0), level=level)
    (declined,) = run_passes(gm)["indexer_prologue"].declined
    assert declined.reason == "k_norm is an RMSNorm, expected LayerNorm with bias"


@pytest.mark.parametrize("scale", [2.0**-2, 3.0**-0.5])
def test_idx_7_the_scale_is_folded_in_fp32_only(scale: float) -> None:
    """In the exact tier over pages D^-0.5 goes into the weights, which are fp32 there."""
    module = TinyIndexer(torch.bfloat16)
    module.gate_scale = scale
    gm, flat = trace_indexer(module, make_inputs(past=0, dtype=torch.bfloat16))
    selected, _ = gm(*flat)
    assert run_passes(gm)["indexer_topk"].num_matches == 1
    (scores,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.indexer_scores.default)
    assert scores.args[1].meta["val"].dtype == torch.float32
    assert scores.args[6] == pytest.approx(D**-0.5)
    assert prologue_of(gm).args[9] == pytest.approx(scale)
    assert torch.equal(gm(*flat)[0], selected)


@pytest.mark.parametrize("level", LEVELS)
def test_comp_2_an_extra_cast_is_declined_with_its_place_and_nothing_else_changes(
    level: str,
) -> None:
    class ExtraCast(TinyIndexer):
        def project_k(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.k_norm(self.wk(hidden).to(torch.bfloat16).float()).unsqueeze(2)

    gm, flat = trace_indexer(ExtraCast(), make_inputs(past=0), level=level)
    before = gm(*flat)
    results = run_passes(gm)
    assert results["indexer_prologue"].num_matches == 0
    (declined,) = results["indexer_prologue"].declined
    assert declined.reason == ("extra cast between wk and k_norm (float32 -> bfloat16 -> float32)")
    ops = count_ops(gm)
    assert ops["glm.indexer_prologue"] == 0
    assert ops["glm.indexer_scores"] == 1
    for a, b in zip(before, gm(*flat)):
        torch.testing.assert_close(a, b, atol=4e-6, rtol=4e-6)


def test_comp_2_a_graph_without_an_indexer_is_left_alone() -> None:
    gm = fx.symbolic_trace(nn.ReLU())
    text = graph_text(gm)
    for result in run_passes(gm).values():
        assert (result.num_matches, result.declined) == (0, [])
    assert graph_text(gm) == text


@pytest.mark.parametrize("level", LEVELS)
def test_comp_3_one_graph_serves_other_batch_sizes_and_lengths(level: str) -> None:
    """Compiled for B = 2, S = 20 (equal to no other size), run at other sizes."""
    config, model = one_layer()
    backend = Capture(level, make_passes(PassOptions()), mark_indexer_topk)
    compiled = torch.compile(model, backend=backend, fullgraph=True)
    for batch, tokens in ((2, 20), (3, 20), (3, 27), (5, 11)):
        ids = torch.randint(0, config.vocab_size, (batch, tokens))
        torch._dynamo.mark_dynamic(ids, 0)
        torch._dynamo.mark_dynamic(ids, 1)
        logits = compiled(ids, use_cache=False).logits
        assert len(backend.graphs) == 1
        assert float((logits - model(ids, use_cache=False).logits).abs().max()) < 2e-5
    for name in INDEXER_PASSES:
        assert backend.graphs[0].results[name].num_matches == 1


class Reshaped(TinyIndexer):
    """A reshape of the user's own beside the region; the match must not eat it."""

    def finish(self, selected: torch.Tensor, k: torch.Tensor, scores: torch.Tensor) -> Any:
        return selected.reshape(-1), k.reshape(k.shape[0], -1)


class ScaledByTensor(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        return torch.relu(scores * torch.full((), self.softmax_scale))


class Einsum(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return torch.relu(torch.einsum("bshd,btd->bsht", q.float(), k.float()) * D**-0.5)


class ReshapedInside(TinyIndexer):
    def project_q(self, q_resid: torch.Tensor) -> torch.Tensor:
        return self.wq_b(q_resid.reshape(-1, q_resid.shape[-1])).reshape(*q_resid.shape[:2], H, D)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [Reshaped, ScaledByTensor, Einsum, ReshapedInside])
def test_comp_4_equivalent_spellings_match_alike(kind: type[TinyIndexer], level: str) -> None:
    gm, flat = trace_indexer(kind(), make_inputs(past=0), level=level)
    selected, keys = gm(*flat)
    results = run_passes(gm)
    assert [results[name].num_matches for name in INDEXER_PASSES] == [1, 1]
    new_selected, new_keys = gm(*flat)
    assert torch.equal(selected, new_selected)
    torch.testing.assert_close(keys, new_keys, atol=4e-6, rtol=4e-6)


def run_paged(
    level: str, fp8: bool, max_len: int = 128, num_steps: int = 1
) -> tuple[Any, PagedCache, PagedCache]:
    """(graph, the cache after compiled steps of 6, the cache after eager ones)."""
    config, model = one_layer()
    index_dtype = torch.float8_e4m3fn if fp8 else None
    passes = make_passes(PassOptions(indexer_dtype="fp8" if fp8 else "auto"))
    ids = torch.randint(0, config.vocab_size, (1, 20 + 6 * num_steps))
    caches = [
        PagedCache(config, 1, max_len, dtype=torch.float32, index_dtype=index_dtype)
        for _ in range(2)
    ]
    for cache in caches:
        model(ids[:, :20], **{CACHE_ARGUMENT: cache})
    captured = None
    for step in range(num_steps):
        new = ids[:, 20 + 6 * step : 26 + 6 * step]
        _, captured = capture(
            model,
            new,
            level=level,
            passes=passes,
            dynamo_stage=mark_indexer_topk,
            **{CACHE_ARGUMENT: caches[0]},
        )
        model(new, **{CACHE_ARGUMENT: caches[1]})
    return captured, caches[0], caches[1]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fp8", [False, True])
def test_comp_5_the_write_stays_before_the_read_and_happens_once(level: str, fp8: bool) -> None:
    captured, cache, expected = run_paged(level, fp8)
    ops = count_ops(captured.after)
    # The index keys are the prologue's to write, the latents stay with the cache's own op.
    writer = "glm.indexer_prologue_fp8" if fp8 else "glm.indexer_prologue_paged"
    assert ops[writer] == 1
    if not fp8:
        assert ops["glm.paged_write"] == 1
    graph = captured.after.graph
    (scores,) = graph.find_nodes(
        op="call_function", target=torch.ops.glm.indexer_scores_paged.default
    )
    # The pages that the scores read are what the write returns, not the buffer before it.
    pages = scores.args[2]
    assert pages.op == "call_function"
    order = list(graph.nodes)
    assert order.index(pages.args[0]) < order.index(scores)
    exact = [(c.layers[0].key_pages, c.layers[0].latent_pages) for c in (cache, expected)]
    for new, old in zip(*exact):
        torch.testing.assert_close(new.float(), old.float(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fp8", [False, True])
def test_comp_7_no_page_is_cloned_whatever_the_cache_length(level: str, fp8: bool) -> None:
    """The passes add no op that makes a tensor of the size of the cache."""
    sizes = []
    for max_len in (128, 256):
        captured, cache, _ = run_paged(level, fp8, max_len)
        pages = cache.layers[0].key_pages

        def large(gm: fx.GraphModule, num: int = pages.numel(), dtype: Any = pages.dtype) -> int:
            return sum(
                1
                for node in gm.graph.nodes
                if node.op == "call_function"
                and isinstance(node.meta.get("val"), torch.Tensor)
                and node.meta["val"].numel() >= num
                and node.meta["val"].dtype == dtype
                and node.target in (torch.ops.aten.clone.default, torch.ops.aten.cat.default)
            )

        sizes.append((large(captured.before), large(captured.after)))
        # The bases of the functionalized writes are the buffers: they are written in place.
        writes = [n for n in captured.after.graph.nodes if "auto_functionalized" in str(n.target)]
        for write in writes:
            (base,) = write.kwargs["_all_bases"]
            assert base.op == "placeholder"
    for before, after in sizes:
        assert after <= before
    assert sizes[0] == sizes[1]


@pytest.mark.parametrize("level", LEVELS)
def test_comp_9_no_weight_is_concatenated_or_copied_in_the_graph(level: str) -> None:
    config, model = one_layer(torch.bfloat16)
    ids = torch.randint(0, config.vocab_size, (1, 12))
    _, captured = capture(
        model,
        ids,
        level=level,
        passes=make_passes(PassOptions()),
        dynamo_stage=mark_indexer_topk,
        use_cache=False,
    )
    aten = torch.ops.aten
    copies = (aten.cat.default, aten.clone.default, aten._to_copy.default, aten.stack.default)
    graph = captured.after.graph
    weights = {
        n
        for n in graph.find_nodes(op="placeholder")
        if isinstance(n.meta.get("val"), torch.Tensor)
        and n.meta["val"].dim() == 2
        and n.meta["val"].dtype == torch.bfloat16
    }
    assert len(weights) > 8
    for node in graph.nodes:
        if node.target in copies or node.target is torch.ops.prims.convert_element_type.default:
            assert weights.isdisjoint(node.all_input_nodes)
    merged = [n for n in graph.nodes if "merged_linear" in str(n.target)]
    assert all(weight.op == "placeholder" for node in merged for weight in node.args[1])
