"""Split the Dynamo graph of a model into its kinds of layers, each compiled once.

Targets `GlmMoeDsaModel.forward` (transformers 5.20 and 5.24): the loop over decoder layers is
unrolled in the graph, and every node's `nn_module_stack` says which layer it belongs to, so the
program order is

    head | layer 0 | layer 1 | ... | layer N-1 | tail

Segments with the same operations, constants and inputs are one kind. For GLM-5.2 that leaves five
of them (head, dense with an indexer, MoE without, MoE with an indexer, tail) where the graph has 80
segments.

    graph, 78 layers   ->   kinds[0]() ; kinds[1]() x3 ; kinds[2]() ; ... ; kinds[4]()

Nothing numeric happens here, and the order of mutations is the program's, because the split is made
before functionalization. The graph is not edited.

Use:

    split = split_layer_kinds(graph_module, example_inputs)
    compiled = [compile(kind.graph_module, kind.example_inputs) for kind in split.kinds]
    runner = split.make_runner(compiled)      # same arguments and results as graph_module.forward

`kind.uses[u].inputs[i]` tells what the i-th placeholder of `kind.graph_module` stands for in its
u-th use: `parameter` is the state_dict name for a weight or buffer
(`model.layers.3.self_attn.q_a_proj.weight`).

Raises `No` with the reason where it cannot split; the caller then compiles the whole graph as one.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes._dynamo_graph import (
    example_value,
    parameter_name,
    source_name,
)
from glm_compile.fx_passes.base import No, clean_path

LAYER_CLASS = "GlmMoeDsaDecoderLayer"


@dataclass(frozen=True)
class InputSource:
    """What a placeholder of a kind stands for in one of its uses.

    Attributes:
        name: the node of the split graph whose value goes in.
        argument: position among the split graph's own inputs, None for a value made by an earlier
            step.
        parameter: state_dict name if it is a parameter or buffer of the compiled module, else None.
        source: Dynamo's expression for an input of the split graph, else None.
    """

    name: str
    argument: int | None
    parameter: str | None
    source: str | None


@dataclass(frozen=True)
class LayerUse:
    """One segment of the split graph.

    Attributes:
        layer: module path of the decoder layer (`model.layers.3`), None for head and tail.
        inputs: one per placeholder of the kind, in order.
    """

    layer: str | None
    inputs: tuple[InputSource, ...]


@dataclass
class LayerKind:
    """A graph that stands for one or more segments.

    Attributes:
        index: position in `LayerKinds.kinds`.
        graph_module: takes its inputs positionally, returns a tuple.
        example_inputs: fake tensors and symbolic integers of the first use, of Dynamo's fake mode:
            what `compile_fx` and `aot_module_simplified` take inside a backend call.
        uses: the segments it stands for, in program order.
    """

    index: int
    graph_module: fx.GraphModule
    example_inputs: list[Any]
    uses: list[LayerUse] = field(default_factory=list)

    @property
    def name(self) -> str:
        """`head`, `layer_0`, ... by the first use; for logs and dumps."""
        layer = self.uses[0].layer
        if layer is not None:
            return "layer_" + layer.rpartition(".")[2]
        return "head" if self.index == 0 else "tail"


@dataclass(frozen=True)
class Step:
    """One call of a kind: where its inputs are and where its results go.

    Attributes:
        kind: index into `LayerKinds.kinds`.
        inputs: slots, one per placeholder.
        outputs: slots, one per result; None for a result that this use does not need.
        frees: slots that no later step reads.
    """

    kind: int
    inputs: tuple[int, ...]
    outputs: tuple[int | None, ...]
    frees: tuple[int, ...]


@dataclass
class LayerKinds:
    """The split graph. `num_arguments` slots hold the graph's inputs, the others what steps make.

    Attributes:
        results: one per output of the graph: (slot, None) or (None, constant).
    """

    kinds: list[LayerKind]
    steps: list[Step]
    num_arguments: int
    num_slots: int
    results: tuple[tuple[int | None, Any], ...]

    def make_runner(self, compiled: Sequence[Callable[..., Any]]) -> Callable[..., tuple[Any, ...]]:
        """Callable with the split graph's inputs and outputs that runs the compiled kinds in order.

        Args:
            compiled: one callable per kind, `compiled[i](*inputs) -> tuple or list`.
        """
        if len(compiled) != len(self.kinds):
            raise ValueError(f"{len(self.kinds)} kinds, {len(compiled)} compiled functions")
        program = [
            (
                compiled[step.kind],
                _getter(step.inputs),
                tuple((i, slot) for i, slot in enumerate(step.outputs) if slot is not None),
                step.frees,
            )
            for step in self.steps
        ]
        num_arguments, num_spare = self.num_arguments, self.num_slots - self.num_arguments
        results = self.results

        def run(*args: Any) -> tuple[Any, ...]:
            if len(args) != num_arguments:
                raise TypeError(f"expected {num_arguments} inputs, got {len(args)}")
            slots = [*args, *([None] * num_spare)]
            for function, get, stores, frees in program:
                made = function(*get(slots))
                for position, slot in stores:
                    slots[slot] = made[position]
                for slot in frees:
                    slots[slot] = None
                del made
            return tuple(constant if slot is None else slots[slot] for slot, constant in results)

        return run


def split_layer_kinds(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any] | None = None,
    *,
    max_kinds: int = 16,
) -> LayerKinds:
    """Split a Dynamo graph into kinds of segments.

    Args:
        graph_module: not edited; may hold ops of this package.
        example_inputs: used for inputs whose node carries no `example_value`.
        max_kinds: more kinds than this are taken for a split that does not pay.

    Raises:
        No: the graph cannot be split; the message is the reason.
    """
    graph = graph_module.graph
    placeholders = graph.find_nodes(op="placeholder")
    values = {
        node: example_value(node)
        if example_value(node) is not None
        else (example_inputs[i] if example_inputs is not None else None)
        for i, node in enumerate(placeholders)
    }
    segments = _segments(graph)
    _check_no_open_state(segments)
    symbols = {
        str(value.node.expr): node
        for node, value in values.items()
        if isinstance(value, torch.SymInt) and value.node.expr.is_Symbol
    }

    slot_of: dict[fx.Node, int] = {node: i for i, node in enumerate(placeholders)}
    for segment in segments:
        segment.find_borders(symbols, values)

    groups: dict[Hashable, list[_Segment]] = {}
    for segment in segments:
        groups.setdefault(segment.signature(values), []).append(segment)
    if len(groups) > max_kinds:
        raise No(
            f"{len(groups)} different kinds of layers (limit {max_kinds}): the layers differ in "
            "operations, constants or input layouts"
        )

    kinds: list[LayerKind] = []
    kind_outputs: list[list[int]] = []
    kind_of: dict[int, int] = {}
    for group in groups.values():
        outputs = sorted({segment.index_of[node] for segment in group for node in segment.outputs})
        first = group[0]
        kind = LayerKind(
            len(kinds),
            first.build(graph_module, outputs),
            [values.get(node, example_value(node)) for node in first.inputs],
        )
        for segment in group:
            kind_of[id(segment)] = kind.index
            kind.uses.append(
                LayerUse(
                    segment.layer, tuple(_input_source(node, slot_of) for node in segment.inputs)
                )
            )
        kinds.append(kind)
        kind_outputs.append(outputs)

    result_nodes = graph.output_node().args[0]
    if not isinstance(result_nodes, tuple | list):
        result_nodes = (result_nodes,)
    num_slots = len(placeholders)
    for segment in segments:
        for node in segment.outputs:
            slot_of[node] = num_slots
            num_slots += 1
    kept = {node for node in result_nodes if isinstance(node, fx.Node)}
    if any(not isinstance(node, fx.Node) and _holds_node(node) for node in result_nodes):
        raise No("nested graph outputs")

    steps = []
    last_read = {
        node: i
        for i, segment in enumerate(segments)
        for node in (*segment.outputs, *segment.inputs)
    }
    for i, segment in enumerate(segments):
        wanted = set(segment.outputs)
        steps.append(
            Step(
                kind_of[id(segment)],
                tuple(slot_of[node] for node in segment.inputs),
                tuple(
                    slot_of[segment.nodes[position]] if segment.nodes[position] in wanted else None
                    for position in kind_outputs[kind_of[id(segment)]]
                ),
                tuple(
                    slot_of[node]
                    for node, step in last_read.items()
                    if step == i and node not in kept
                ),
            )
        )
    results = tuple(
        (slot_of[node], None) if isinstance(node, fx.Node) else (None, node)
        for node in result_nodes
    )
    return LayerKinds(kinds, steps, len(placeholders), num_slots, results)


def layer_of(node: fx.Node) -> tuple[str, str] | None:
    """(key of the call, module path) of the decoder layer that made `node`, None outside."""
    for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
        name = module_class if isinstance(module_class, str) else module_class.__qualname__
        if name.rpartition(".")[2] == LAYER_CLASS:
            return key, clean_path(path)
    return None


class _Segment:
    """A run of nodes of one layer, with what crosses its borders."""

    def __init__(self, layer: str | None, nodes: list[fx.Node]) -> None:
        self.layer = layer
        self.nodes = nodes
        self.index_of = {node: i for i, node in enumerate(nodes)}
        self.inputs: list[fx.Node] = []
        self.outputs: list[fx.Node] = []

    def find_borders(self, symbols: dict[str, fx.Node], values: dict[fx.Node, Any]) -> None:
        """Inputs by first use, after the symbols that sizes need; outputs in program order."""
        inputs: dict[fx.Node, None] = {}
        sizes: dict[fx.Node, None] = {}
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source not in self.index_of and source.op != "get_attr":
                    inputs[source] = None
            for name in _free_symbols(example_value(node)):
                if name in symbols:
                    sizes[symbols[name]] = None
            if any(user not in self.index_of for user in node.users):
                self.outputs.append(node)
        for source in inputs:
            for name in _free_symbols(values.get(source, example_value(source))):
                if name in symbols:
                    sizes[symbols[name]] = None
        self.inputs = [*sizes, *(node for node in inputs if node not in sizes)]

    def signature(self, values: dict[fx.Node, Any]) -> Hashable:
        """Equal for segments that one compiled graph can serve."""
        names: dict[fx.Node, tuple[str, int]] = {
            **{node: ("in", i) for i, node in enumerate(self.inputs)},
            **{node: ("op", i) for i, node in enumerate(self.nodes)},
        }
        storages: dict[int, int] = {}
        metas = []
        for node in self.inputs:
            value = values.get(node, example_value(node))
            metas.append(_describe(value))
            key = value.untyped_storage()._cdata if isinstance(value, torch.Tensor) else None
            metas.append(None if key is None else storages.setdefault(key, len(storages)))
        body = tuple(
            (
                node.op,
                node.target,
                _freeze(node.args, names),
                _freeze(node.kwargs, names),
            )
            for node in self.nodes
        )
        return tuple(metas), body

    def build(self, owner: fx.GraphModule, outputs: list[int]) -> fx.GraphModule:
        """Copy the nodes into a graph of their own that returns the nodes at `outputs`."""
        graph = fx.Graph()
        copies: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            copy = graph.placeholder(node.name, node.type if node.op == "placeholder" else None)
            copy.meta = {k: v for k, v in node.meta.items() if k != "grapharg"}
            source = getattr(node, "_dynamo_source", None)
            if source is None and "grapharg" in node.meta:
                source = node.meta["grapharg"].source
            if source is not None:
                copy._dynamo_source = source  # type: ignore[attr-defined]
            copies[node] = copy
        for node in self.nodes:
            for source in node.all_input_nodes:
                if source.op == "get_attr" and source not in copies:
                    copies[source] = graph.node_copy(source)
            copies[node] = graph.node_copy(node, lambda n: copies[n])
        graph.output(tuple(copies[self.nodes[i]] for i in outputs))
        module = fx.GraphModule(owner, graph, class_name="GlmLayerKind")
        return module


def _segments(graph: fx.Graph) -> list[_Segment]:
    """Runs of nodes by layer. Nodes without a layer amid one layer's nodes belong to that layer."""
    runs: list[tuple[tuple[str, str] | None, list[fx.Node]]] = []
    for node in graph.nodes:
        if node.op in ("placeholder", "get_attr", "output"):
            continue
        layer = layer_of(node)
        if runs and runs[-1][0] == layer:
            runs[-1][1].append(node)
        else:
            runs.append((layer, [node]))
    if all(layer is None for layer, _nodes in runs):
        raise No(f"no node carries a module stack with a {LAYER_CLASS}")
    merged: list[tuple[tuple[str, str] | None, list[fx.Node]]] = []
    for i, (layer, nodes) in enumerate(runs):
        following = runs[i + 1][0] if i + 1 < len(runs) else None
        before = merged[-1][0] if merged else None
        if before is not None and before == (following if layer is None else layer):
            merged[-1][1].extend(nodes)
        else:
            merged.append((layer, list(nodes)))
    seen = set()
    for layer, _nodes in merged:
        if layer is not None and layer in seen:
            raise No(f"the nodes of {layer[1]} are not contiguous")
        seen.add(layer)
    return [_Segment(layer and layer[1], nodes) for layer, nodes in merged]


def _check_no_open_state(segments: list[_Segment]) -> None:
    """A context that is entered in one segment and left in another would be lost by the split."""
    for segment in segments:
        depth = 0
        for node in segment.nodes:
            name = getattr(node.target, "__name__", str(node.target))
            depth += name.startswith("_enter_") - name.startswith("_exit_")
        if depth:
            raise No(
                f"a context (autocast or the like) is open across the border of "
                f"{segment.layer or 'the head or tail'}"
            )


def _input_source(node: fx.Node, arguments: dict[fx.Node, int]) -> InputSource:
    return InputSource(node.name, arguments.get(node), parameter_name(node), source_name(node))


def _getter(slots: tuple[int, ...]) -> Callable[[list[Any]], Sequence[Any]]:
    if len(slots) > 1:
        return operator.itemgetter(*slots)
    return lambda values: [values[slot] for slot in slots]


def _free_symbols(value: Any) -> list[str]:
    """Names of the symbols in a value's size, stride or number, in order of appearance."""
    numbers: list[Any] = []
    if isinstance(value, torch.Tensor):
        numbers.extend(value.shape)
        numbers.extend(value.stride() if value.layout is torch.strided else ())
    elif isinstance(value, torch.SymInt):
        numbers.append(value)
    names: dict[str, None] = {}
    for number in numbers:
        if isinstance(number, torch.SymInt):
            names.update(dict.fromkeys(sorted(str(s) for s in number.node.expr.free_symbols)))
    return list(names)


def _describe(value: Any) -> Hashable:
    """What a compiled graph may depend on of an input."""
    if isinstance(value, torch.Tensor):
        offset = value.storage_offset()
        aligned = isinstance(offset, int) and offset * value.element_size() % 64 == 0
        return (
            type(value).__qualname__ if not isinstance(value, torch.nn.Parameter) else "Parameter",
            value.dtype,
            tuple(str(size) for size in value.shape),
            tuple(str(stride) for stride in value.stride()),
            aligned,
            str(value.device),
            value.requires_grad,
            value.is_conj(),
            value.is_neg(),
        )
    if isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool):
        return type(value).__name__, str(value.node.expr)
    return type(value).__qualname__, repr(value)


def _freeze(argument: Any, names: dict[fx.Node, tuple[str, int]]) -> Hashable:
    """Hashable form of a node's argument; constants keep their type (1, 1.0 and True differ)."""
    if isinstance(argument, fx.Node):
        return names.get(argument, ("attribute", str(argument.target)))
    if isinstance(argument, tuple | list):
        return type(argument).__name__, *(_freeze(item, names) for item in argument)
    if isinstance(argument, dict):
        return "dict", *((key, _freeze(item, names)) for key, item in argument.items())
    if isinstance(argument, slice):
        parts = (argument.start, argument.stop, argument.step)
        return "slice", *(_freeze(part, names) for part in parts)
    return type(argument).__name__, repr(argument)


def _holds_node(argument: Any) -> bool:
    found: list[fx.Node] = []
    fx.node.map_arg(argument, found.append)
    return bool(found)
