"""split_layer_kinds: kinds, their inputs' names, numbers and cache contents of the runner."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import fx

from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.layer_kinds import split_layer_kinds
from tests.fx_passes.dynamo_graphs import Recorder, filled_cache, small_model, tokens
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

TEN_LAYERS = {
    "num_hidden_layers": 10,
    "first_k_dense_replace": 3,
    "indexer_types": ["full"] * 3 + ["shared"] * 3 + ["full"] + ["shared"] * 3,
}


def cache_tensors(kwargs: dict[str, Any]) -> list[torch.Tensor]:
    found = []
    for layer in kwargs[CACHE_ARGUMENT].layers:
        for name in ("keys", "values", "indexer_keys", "cumulative_length"):
            value = getattr(layer, name, None)
            if isinstance(value, torch.Tensor):
                found.append(value)
    return found


def assert_two_steps_equal(
    model: torch.nn.Module, recorder: Recorder, kind: str, queries: int = 6
) -> None:
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    ours, theirs = (filled_cache(model, kind, 2) for _ in range(2))
    for step in range(2):
        ids = tokens(2, queries, seed=step)
        assert torch.equal(compiled(ids, **ours).logits, model(ids, **theirs).logits)
    pairs = list(zip(cache_tensors(ours), cache_tensors(theirs)))
    assert pairs and all(torch.equal(a, b) for a, b in pairs)


def test_ten_layers_are_five_kinds() -> None:
    """Head, dense with an indexer, MoE without, MoE with an indexer, tail; after the rewrite."""
    model = tiny_model(tiny_config(**TEN_LAYERS))
    recorder = Recorder(kinds=True)
    assert_two_steps_equal(model, recorder, "static")
    (split,) = recorder.splits
    uses = [[use.layer for use in kind.uses] for kind in split.kinds]
    layers = [f"model.layers.{i}" for i in range(10)]
    assert uses == [
        [None],
        layers[:3],
        [*layers[3:6], *layers[7:]],
        [layers[6]],
        [None],
    ]
    assert [kind.name for kind in split.kinds] == ["head", "layer_0", "layer_3", "layer_6", "tail"]
    assert len(split.steps) == 12

    # What is not a parameter or a cache tensor: hidden, cos, sin, and the selection.
    shared = split.kinds[2].uses[-1]
    made = [source for source in shared.inputs if source.argument is None]
    assert len(made) == 4
    names = [source.parameter for source in shared.inputs if source.parameter]
    assert "model.layers.9.self_attn.q_a_proj.weight" in names
    assert set(names) <= set(dict(model.named_parameters())) | set(dict(model.named_buffers()))
    for kind in split.kinds:
        assert len(kind.example_inputs) == len(kind.graph_module.graph.find_nodes(op="placeholder"))
        for use in kind.uses:
            assert len(use.inputs) == len(kind.example_inputs)
            assert [s.parameter is None for s in use.inputs] == [
                s.parameter is None for s in kind.uses[0].inputs
            ]


def test_bounds_sit_in_the_head() -> None:
    """Layers with an indexer take lengths and padding, never a mask; shared ones a selection."""
    recorder = Recorder(kinds=True)
    mask = torch.ones(2, 26, dtype=torch.long)
    mask[0, :3] = 0
    model = small_model()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    compiled(tokens(2, 6), **filled_cache(model, "static", 2, mask, attention_mask=mask))
    (split,) = recorder.splits
    assert len(split.kinds) == 4
    for kind, num_masks in zip(split.kinds[1:-1], (1, 0)):
        bools = [
            value
            for value in kind.example_inputs
            if isinstance(value, torch.Tensor) and value.dtype == torch.bool
        ]
        assert [tuple(value.shape) for value in bools] == [(2, 1, 96)] * num_masks


def test_symbolic_lengths() -> None:
    """A DynamicCache's length is a SymInt input of the kinds that need it."""
    model = small_model()
    recorder = Recorder(kinds=True)
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    ours, theirs = (filled_cache(model, "dynamic", 2) for _ in range(2))
    for step in range(4):
        ids = tokens(2, 1, seed=step)
        assert torch.equal(compiled(ids, **ours).logits, model(ids, **theirs).logits)
    assert len(recorder.splits) == 2
    needed = set()
    for kind in recorder.splits[1].kinds:
        symbols = {
            str(symbol)
            for value in kind.example_inputs
            if isinstance(value, torch.Tensor)
            for size in value.shape
            if isinstance(size, torch.SymInt)
            for symbol in size.node.expr.free_symbols
        }
        given = {str(v) for v in kind.example_inputs if isinstance(v, torch.SymInt)}
        assert symbols <= given
        needed |= symbols
    assert needed


def test_kinds_compile_by_aot() -> None:
    """Each kind is a graph that AOTAutograd takes, with mutation of its inputs."""
    from functorch.compile import make_boxed_func
    from torch._dynamo.backends.common import aot_autograd

    model = small_model()
    compiler = aot_autograd(fw_compiler=lambda gm, _inputs: make_boxed_func(gm.forward))

    def backend(graph_module: fx.GraphModule, example_inputs: list[Any]) -> Any:
        split = split_layer_kinds(graph_module, example_inputs)
        return split.make_runner(
            [compiler(kind.graph_module, kind.example_inputs) for kind in split.kinds]
        )

    compiled = torch.compile(model, backend=backend, fullgraph=True)
    ours, theirs = (filled_cache(model, "static", 2) for _ in range(2))
    for step in range(2):
        ids = tokens(2, 6, seed=step)
        assert torch.equal(compiled(ids, **ours).logits, model(ids, **theirs).logits)
    assert all(torch.equal(a, b) for a, b in zip(cache_tensors(ours), cache_tensors(theirs)))


def test_hidden_states_may_be_asked_for() -> None:
    model = small_model()
    recorder = Recorder(kinds=True)
    ids = tokens(2, 26)
    options = {"use_cache": False, "output_hidden_states": True}
    found = torch.compile(model, backend=recorder)(ids, **options)
    expected = model(ids, **options)
    assert torch.equal(found.logits, expected.logits)
    assert all(torch.equal(a, b) for a, b in zip(found.hidden_states, expected.hidden_states))
    assert max(len(split.kinds) for split in recorder.splits) == 4


def test_draft_steps_in_one_graph_share_a_kind() -> None:
    """A layer that is called several times has a segment for each call."""
    from glm_compile.cache import PagedCache
    from glm_compile.mtp import GlmMoeDsaMtp

    model = small_model()
    mtp = GlmMoeDsaMtp(model)
    cache = PagedCache(model.config, 2, 64, num_mtp_layers=1)
    model(tokens(2, 20), **{CACHE_ARGUMENT: cache})
    topk = torch.arange(10, 18, dtype=torch.int32).expand(2, 1, 8)
    seed = mtp.gather_seed(topk, cache)
    hidden = torch.randn(2, 1, 128)

    def drafts(token: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        made = []
        for step in range(3):
            positions = torch.full((2, 1), 20 + step)
            hidden = mtp.draft(token, hidden, positions, seed)
            token = mtp.compute_logits(hidden).argmax(-1)
            made.append(token)
        return torch.cat(made, 1)

    recorder = Recorder(kinds=True)
    found = torch.compile(drafts, backend=recorder, fullgraph=True)(tokens(2, 1), hidden)
    assert torch.equal(found, drafts(tokens(2, 1), hidden))
    assert (recorder.mask.route, recorder.mask.num_attention) == ("proven", 3)
    (split,) = recorder.splits
    assert [len(kind.uses) for kind in split.kinds if kind.uses[0].layer] == [3]


# --- graphs made by hand -------------------------------------------------------------------------


class GlmMoeDsaDecoderLayer(torch.nn.Module):
    """Stands for transformers' class: layers are recognised by its name."""

    def __init__(self, factor: float = 2.0) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.rand(4))
        self.factor = factor

    def forward(self, x: torch.Tensor, counter: torch.Tensor) -> torch.Tensor:
        counter.add_(1)
        return (x * self.weight * self.factor + counter).relu()


class Stack(torch.nn.Module):
    def __init__(self, factors: list[float]) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(GlmMoeDsaDecoderLayer(f) for f in factors)

    def forward(self, x: torch.Tensor, counter: torch.Tensor) -> tuple[Any, ...]:
        x = x + 1
        for layer in self.layers:
            x = layer(x, counter)
        return x.sum(), counter * 2, 7


def run_stack(model: torch.nn.Module) -> Recorder:
    recorder = Recorder(rewrite=False, kinds=True)
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    x = torch.rand(3, 4)
    ours, theirs = torch.zeros(()), torch.zeros(())
    found, expected = compiled(x, ours), model(x, theirs)
    assert torch.equal(found[0], expected[0]) and torch.equal(found[1], expected[1])
    assert found[2] == 7 and torch.equal(ours, theirs)
    return recorder


def test_constants_separate_kinds() -> None:
    (split,) = run_stack(Stack([2.0, 3.0, 2.0, 2])).splits
    assert [len(kind.uses) for kind in split.kinds] == [1, 2, 1, 1, 1]


def test_input_layouts_separate_kinds() -> None:
    model = Stack([2.0, 2.0, 2.0]).requires_grad_(False)
    model.layers[1].weight = torch.nn.Parameter(torch.rand(8)[::2], requires_grad=False)
    (split,) = run_stack(model).splits
    assert [len(kind.uses) for kind in split.kinds] == [1, 2, 1, 1]


def test_too_many_kinds() -> None:
    recorder = run_stack(Stack([float(i) for i in range(20)]))
    (reason,) = recorder.unsplit
    assert reason.startswith("22 different kinds of layers (limit 16)")


def test_no_module_stack() -> None:
    recorder = Recorder(rewrite=False)
    torch.compile(lambda x: x + 1, backend=recorder)(torch.rand(3))
    with pytest.raises(No, match="no node carries a module stack with a GlmMoeDsaDecoderLayer"):
        split_layer_kinds(recorder.graphs[0])


def test_layers_that_are_not_contiguous() -> None:
    model = Stack([2.0, 2.0])
    recorder = Recorder(rewrite=False)
    torch.compile(model, backend=recorder)(torch.rand(3, 4), torch.zeros(()))
    (graph,) = recorder.graphs
    first, *_, last = [n for n in graph.graph.nodes if n.op.startswith("call")]
    inner = [n for n in graph.graph.nodes if "layers" in str(n.meta.get("nn_module_stack"))]
    last.meta["nn_module_stack"] = inner[-1].meta["nn_module_stack"]
    first.meta["nn_module_stack"] = last.meta["nn_module_stack"]
    with pytest.raises(No, match=r"the nodes of layers\.1 are not contiguous"):
        split_layer_kinds(graph)


def test_dead_slots_are_freed() -> None:
    """A hidden state lives until the next layer has read it, not until the end of the call."""
    recorder = Recorder(rewrite=False)
    torch.compile(Stack([2.0] * 4), backend=recorder)(torch.rand(3, 4), torch.zeros(()))
    split = split_layer_kinds(recorder.graphs[0])
    alive: list[int] = []
    made: list[weakref.ref] = []

    def counting(function: Any) -> Any:
        def call(*args: Any) -> Any:
            alive.append(sum(ref() is not None for ref in made))
            results = function(*args)
            made.extend(weakref.ref(r) for r in results if isinstance(r, torch.Tensor))
            return results

        return call

    runner = split.make_runner([counting(kind.graph_module) for kind in split.kinds])
    runner(*[v for v in _real_inputs(recorder.graphs[0])])
    assert max(alive) <= 2


def _real_inputs(graph_module: fx.GraphModule) -> list[torch.Tensor]:
    inputs = graph_module.graph.find_nodes(op="placeholder")
    return [torch.rand(tuple(node.meta["example_value"].shape)) for node in inputs]


def test_runner_checks_its_arguments() -> None:
    recorder = Recorder(rewrite=False)
    torch.compile(Stack([2.0]), backend=recorder)(torch.rand(3, 4), torch.zeros(()))
    split = split_layer_kinds(recorder.graphs[0])
    with pytest.raises(ValueError, match="3 kinds, 0 compiled functions"):
        split.make_runner([])
    with pytest.raises(TypeError, match="inputs, got 1"):
        split.make_runner([k.graph_module for k in split.kinds])(torch.rand(3, 4))
