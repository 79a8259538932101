"""A layer's indexer through the backend: three launches before the scores, and the same numbers.

Shape legend: B batch, S tokens of the step, T cached tokens, C hidden.
"""

from __future__ import annotations

import copy
import re
from typing import Any

import pytest
import torch
from torch import fx
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from glm_compile.fx_passes import canonical, layouts
from glm_compile.ops.indexer_scores import indexer_scores_paged
from glm_compile.ops.merged_linear import adjacent_block
from glm_compile.pipeline import _Rewrite
from glm_compile.report import last_report
from tests.indexer_layer import (
    RELEASE,
    IndexerOfLayer,
    make_cache,
    one_layer_config,
    ops_step,
    paged_step,
    prologue_step,
    static_step,
)

BF16 = torch.bfloat16
NUM_CACHED, MAX_LEN, S = 70, 128, 6
# What has read the layer's input at least once before the scores.
PROLOGUE = {
    "static": "glm.indexer_prologue_rows.default",
    "paged": "glm.indexer_prologue_paged.default",
    "paged_fp8": "glm.indexer_prologue_fp8.default",
}


class Case:
    """A layer with a cache of 70 random keys, and a step of six tokens."""

    def __init__(
        self, kind: str, device: str = "cpu", *, is_full_size: bool = False, **options: Any
    ) -> None:
        where = {"dtype": BF16, "device": device}
        self.kind, self.device = kind, device
        self.config = one_layer_config(**(RELEASE if is_full_size else {}))
        self.layer = IndexerOfLayer(self.config, **options, **where)
        self.norm = GlmMoeDsaRMSNorm(self.config.hidden_size).to(**where).requires_grad_(False)
        self.hidden = torch.randn(1, S, self.config.hidden_size, **where)
        self.position = torch.tensor(NUM_CACHED, device=device)
        self.tables = self.layer.tables(self.hidden, self.position)
        self.cache = make_cache(self.config, kind, MAX_LEN, **where)
        past = torch.randn(1, NUM_CACHED, self.config.index_head_dim, **where)
        self.cache.update_indexer(past, 0)
        if kind != "static":
            self.cache.lengths.fill_(NUM_CACHED)

    def step(self, cache: Any, has_norm: bool = False) -> Any:
        """The step over a cache: a function without arguments."""
        if self.kind == "static":
            call, more = static_step(self.layer, cache, MAX_LEN), (self.position,)
        else:
            call, more = paged_step(self.layer, cache, S), ()

        def run() -> Any:
            hidden = self.norm(self.hidden) if has_norm else self.hidden
            return call(hidden, *self.tables, *more)

        return run

    def compile(self, step: Any, inner: str = "eager") -> Any:
        options = {"inner": inner, "indexer_dtype": "fp8" if self.kind == "paged_fp8" else "auto"}
        return torch.compile(step, backend="glm", fullgraph=True, options=options)

    def keys(self, cache: Any) -> torch.Tensor:
        """The index keys that a cache holds."""
        layer = cache.layers[0]
        return layer.indexer_keys if self.kind == "static" else layer.key_pages


def final_graphs(monkeypatch: pytest.MonkeyPatch) -> list[fx.GraphModule]:
    """The graphs that the inner compiler gets, as they come."""
    graphs: list[fx.GraphModule] = []
    rewrite = _Rewrite.__call__

    def keep(self: _Rewrite, graph_module: fx.GraphModule) -> None:
        rewrite(self, graph_module)
        graphs.append(fx.GraphModule(graph_module, copy.deepcopy(graph_module.graph)))

    monkeypatch.setattr(_Rewrite, "__call__", keep)
    return graphs


def prologue_nodes(graph: fx.Graph, hidden: fx.Node) -> list[str]:
    """What is computed from `hidden` for the scores: neither views nor parts of a result."""
    after: set[fx.Node] = {hidden}
    for node in graph.nodes:
        if any(source in after for source in node.all_input_nodes):
            after.add(node)
    (scores,) = [n for n in graph.nodes if str(n.target).startswith("glm.indexer_scores")]
    before: set[fx.Node] = set()
    front = list(scores.all_input_nodes)
    while front:
        node = front.pop()
        if node not in before:
            before.add(node)
            front.extend(node.all_input_nodes)
    names = []
    for node in graph.nodes:
        is_part = canonical.is_view(node) or layouts.is_getitem(node) or _is_slice(node)
        if node in after & before and node.op == "call_function" and not is_part:
            names.append(str(node.args[0] if "auto_func" in str(node.target) else node.target))
    return names


def _is_slice(node: fx.Node) -> bool:
    aten = torch.ops.aten
    return layouts.is_call(node, aten.slice.Tensor, aten.split_with_sizes.default)


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("kind", PROLOGUE)
def test_three_ops_lie_between_the_layers_input_and_its_scores(kind, inner, monkeypatch):
    case = Case(kind)
    graphs = final_graphs(monkeypatch)
    case.compile(case.step(case.cache), inner)()
    (graph,) = [module.graph for module in graphs]
    assert prologue_nodes(graph, _hidden(graph)) == [
        "glm.merged_linear.default",
        "glm.rms_norm_linear.default",
        PROLOGUE[kind],
    ]


@pytest.mark.parametrize("inner", ["eager", "inductor"])
@pytest.mark.parametrize("kind", ["paged", "paged_fp8"])
def test_scores_and_selection_follow_the_prologue_and_nothing_else_does(kind, inner, monkeypatch):
    """No lengths and no filling up of short rows: each would be a launch of its own."""
    case = Case(kind)
    graphs = final_graphs(monkeypatch)
    selected, *_ = case.compile(case.step(case.cache), inner)()
    (graph,) = [module.graph for module in graphs]
    calls = [n for n in graph.nodes if n.op == "call_function" and not layouts.is_getitem(n)]
    names = [str(n.args[0] if "auto_func" in str(n.target) else n.target) for n in calls]
    names = [n for c, n in zip(calls, names) if not canonical.is_view(c) and not _is_slice(c)]
    assert [name for name in names if name != "aten.copy_.default"] == [
        "glm.merged_linear.default",
        "glm.rms_norm_linear.default",
        PROLOGUE[kind],
        "glm.indexer_scores_paged.default",
        "glm.topk_select.default",
    ]
    assert selected.shape == (1, S, case.config.index_topk) and selected.min() >= 0
    (scores,) = [n for n in calls if n.target == torch.ops.glm.indexer_scores_paged.default]
    assert layouts.named_args(scores)["early_windows"]


def test_gates_in_fp32_are_a_linear_of_their_own(monkeypatch):
    case = Case("paged_fp8", has_fp32_gates=True)
    graphs = final_graphs(monkeypatch)
    case.compile(case.step(case.cache))()
    (graph,) = [module.graph for module in graphs]
    names = prologue_nodes(graph, _hidden(graph))
    assert sorted(names) == sorted(
        [
            "glm.merged_linear.default",
            "glm.indexer_gates.default",
            "glm.rms_norm_linear.default",
            PROLOGUE["paged_fp8"],
        ]
    )


def _hidden(graph: fx.Graph) -> fx.Node:
    (merged,) = graph.find_nodes(op="call_function", target=torch.ops.glm.merged_linear.default)
    return merged.args[0]


@pytest.mark.parametrize("kind", PROLOGUE)
def test_compiled_step_equals_the_modules(kind):
    case = Case(kind)
    cache = copy.deepcopy(case.cache)
    expected = case.step(cache)()
    actual = case.compile(case.step(case.cache))()
    report = last_report()
    assert report.ok and report.matches["rms_norm_linear"] == 1
    torch.testing.assert_close(case.keys(case.cache), case.keys(cache))
    for new, old in zip(actual[1:], expected[1:]):
        torch.testing.assert_close(new, old, atol=2e-2, rtol=2e-2)
    same = [set(a) & set(b) for a, b in zip(actual[0][0].tolist(), expected[0][0].tolist())]
    assert sum(map(len, same)) >= (0.8 if kind == "paged_fp8" else 0.95) * actual[0].numel()


@pytest.mark.parametrize("kind", ["paged", "paged_fp8"])
def test_ops_in_their_order_are_the_compiled_step(kind):
    """What the benchmark measures is what the backend makes."""
    case = Case(kind)
    cache = copy.deepcopy(case.cache)
    selected, *_ = case.compile(case.step(case.cache))()
    positions = ops_step(case.layer, cache)(case.hidden, *case.tables)
    assert torch.equal(positions, selected[0])
    assert torch.equal(case.keys(cache), case.keys(case.cache))
    slots = ops_step(case.layer, cache, has_slots=True)(case.hidden, *case.tables)
    table = cache.block_table[0].long()
    assert torch.equal(slots.long(), table[positions // 64] * 64 + positions % 64)
    # The layer's weights lie side by side once it is compiled.
    parts = (case.layer.q_b_proj, case.layer.indexer.wq_b)
    assert adjacent_block([part.weight for part in parts]) is not None


@pytest.mark.parametrize("has_fp32_gates", [False, True])
def test_products_are_not_padded_before_the_passes(has_fp32_gates, monkeypatch):
    """Inductor pads rows on a GPU where its benchmark says so; here it would for every product."""
    from torch._inductor.fx_passes import pad_mm

    monkeypatch.setattr(pad_mm, "check_device", lambda *_: True)
    monkeypatch.setattr(pad_mm, "has_triton", lambda: True)
    monkeypatch.setattr(pad_mm, "_should_pad", lambda *_args, **_named: True)
    case = Case("static", has_fp32_gates=has_fp32_gates)
    case.compile(case.step(case.cache, has_norm=True), "inductor")()
    report = last_report()
    assert report.ok and report.matches["merge_linears"] == 2


def launches(fn: Any) -> list[str]:
    """Names of the kernels of one call, in the order of their starts; neither copies nor fills."""
    for _ in range(3):
        fn()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profile:
        fn()
        torch.cuda.synchronize()
    events = [
        event
        for event in profile.events()
        if event.device_type == torch.autograd.DeviceType.CUDA and "Mem" not in event.name
    ]
    return [event.name for event in sorted(events, key=lambda event: event.time_range.start)]


@pytest.mark.gpu
@pytest.mark.parametrize("has_fp32_gates", [False, True])
@pytest.mark.parametrize("kind", PROLOGUE)
def test_compiled_prologue_is_three_launches(kind, has_fp32_gates):
    """Behind the input norm where it is a launch of its own, else with it in the first product.

    Lengths are made once a forward, and here by the step.
    """
    case = Case(kind, "cuda", is_full_size=True, has_fp32_gates=has_fp32_gates)
    names = launches(case.compile(case.step(case.cache, has_norm=True), "inductor"))
    end = next(i for i, name in enumerate(names) if "indexer_prologue" in name)
    norms = [i for i, name in enumerate(names[:end]) if re.search("rsqrt|rms_norm_kernel", name)]
    start = norms[0] + 1 if norms else 0
    between = [name for name in names[start : end + 1] if "arange" not in name]
    assert len(between) == 3 + has_fp32_gates, "\n".join(names)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["paged", "paged_fp8"])
def test_compiled_indexer_is_five_launches(kind):
    case = Case(kind, "cuda", is_full_size=True)
    names = launches(case.compile(case.step(case.cache), "inductor"))
    assert len(names) == 5, "\n".join(names)
    for name, part in zip(names[2:], ("indexer_prologue", "IndexerScores", "Topk"), strict=True):
        assert part in name, "\n".join(names)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["paged", "paged_fp8"])
def test_early_windows_are_those_of_this_replay(kind):
    """Lengths and block table change ahead of the linears, keys and queries just before."""
    max_len, num_long = 20_000, 19_990
    config = one_layer_config(**RELEASE)
    layer = IndexerOfLayer(config, dtype=BF16, device="cuda")
    cache = make_cache(config, kind, max_len, dtype=BF16, device="cuda")
    pages, table = cache.layers[0].key_pages, cache.block_table
    hidden = torch.randn(1, S, config.hidden_size, dtype=BF16, device="cuda")
    tables = layer.tables(hidden, torch.tensor(5, device="cuda"))
    lengths, places = cache.lengths.clone(), table.clone()
    prologue = prologue_step(layer, cache)

    def scores(q: torch.Tensor, weights: torch.Tensor, **early: bool) -> torch.Tensor:
        rows = (q.flatten(0, 1), weights.flatten(0, 1), pages, table, cache.lengths, max_len)
        more = {"rows_per_sequence": S, "is_causal": True, "backend": "cute"}
        return indexer_scores_paged(*rows, **more, **early)

    def step() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        table.copy_(places)
        cache.lengths.copy_(lengths)
        q, weights = prologue(hidden, *tables)
        return q, weights, scores(q, weights, early_windows=True)

    cache.lengths.zero_()
    cache.update_indexer(torch.randn(1, max_len - S, config.index_head_dim).to(hidden), 0)
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        q, weights, early = step()
    for num_cached in (0, 1, 63, 64, 59, 8448, 8443, num_long, *torch.randint(num_long, (12,))):
        places.copy_(places[:, torch.randperm(places.shape[1], device="cuda")])
        lengths.fill_(int(num_cached))
        # What would be found too early.
        table.zero_()
        cache.lengths.fill_(max_len - S)
        graph.replay()
        want = scores(q, weights)
        for row in range(S):
            end = int(num_cached) + row + 1
            assert torch.equal(early[row, :end], want[row, :end])


@pytest.mark.gpu
def test_unfused_prologue_is_eleven_launches_or_more():
    """The same step as Inductor alone compiles it; the scores' ReLU ends it."""
    case = Case("static", "cuda", is_full_size=True)
    names = launches(torch.compile(case.step(case.cache, has_norm=True), fullgraph=True))
    start = next(i for i, name in enumerate(names) if "rsqrt" in name)
    end = next(i for i, name in enumerate(names) if "relu" in name)
    # The keys' cast and the product with them are the scores'. The library cuts a product in two
    # launches or leaves it in one as it likes.
    assert end - start - 1 - 2 >= 11, "\n".join(names)
