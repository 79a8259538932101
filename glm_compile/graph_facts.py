"""What a captured graph holds of the model: counted before anything is rewritten.

It is read from the modules that made the nodes, the parameters' names and the linears: by other
means than the passes use, so that a report can compare what they matched with it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from glm_compile.fx_passes._dynamo_graph import example_value, is_pure, op_name, parameter_name
from glm_compile.fx_passes.layer_kinds import layer_of
from glm_compile.options import PASS_NAMES

_MODEL_CLASSES = "GlmMoeDsa"
_INDEXER_CLASS = "GlmMoeDsaIndexer"
_ATTENTION_CLASS = "GlmMoeDsaAttention"
_EXPERTS_CLASS = "GlmMoeDsaExperts"
_ROUTER_CLASS = "GlmMoeDsaTopkRouter"
_VIEWS = ("view", "reshape", "flatten", "unsqueeze", "squeeze", "contiguous")
# Attention over latents reads its weight, and its linear goes.
_EXPANSION = "kv_b_proj"
_CASTS = ("to", "type", "float", "half", "bfloat16")


@dataclass(frozen=True)
class LinearFacts:
    """One call of a linear over a parameter.

    Attributes:
        name: of the weight's module.
        dtype: the weight's.
        input_dtype: dtype of what it reads.
        source: what it reads, before casts and views.
        has_bias: whether a bias is added.
        is_dense: whether the weight's rows lie side by side.
        is_router: whether a router calls it.
    """

    name: str
    dtype: torch.dtype
    input_dtype: torch.dtype
    source: str
    has_bias: bool
    is_dense: bool
    is_router: bool = False

    @property
    def is_mergeable(self) -> bool:
        """Whether it joins what else reads the same input."""
        return self.is_dense and not self.has_bias and "lora_" not in self.name

    @property
    def is_bf16(self) -> bool:
        """Whether weight and input are bf16."""
        return self.dtype == self.input_dtype == torch.bfloat16

    @property
    def is_expansion(self) -> bool:
        """Whether it expands latents to keys and values of every head."""
        return self.name.rpartition(".")[2] == _EXPANSION


@dataclass(frozen=True)
class GraphFacts:
    """What a captured graph holds of the model.

    Attributes:
        classes: names of the model's classes whose forward is in the graph.
        num_layers: calls of decoder layers.
        num_indexers: calls of indexers.
        num_attentions: calls of attention.
        num_routers: calls of routers.
        num_experts: calls of modules of routed experts.
        linears: the calls of linears over a parameter.
        linear_norms: for each norm that only linears read, these.
        has_fp8_keys: whether the cache stores FP8 index keys.
        is_model_code: whether code of the model made any node.
    """

    classes: tuple[str, ...]
    num_layers: int
    num_indexers: int
    num_attentions: int
    num_routers: int
    num_experts: int
    linears: tuple[LinearFacts, ...]
    linear_norms: tuple[tuple[LinearFacts, ...], ...]
    has_fp8_keys: bool
    is_model_code: bool

    @property
    def holds_layers(self) -> bool:
        """Whether a layer's work is in the graph; the layer or a part may be what was compiled."""
        return bool(self.num_layers or self.num_attentions or self.num_indexers)

    @property
    def title(self) -> str:
        """What was captured, for the report."""
        if not self.holds_layers:
            return "part of the model"
        is_mtp = any(linear.name.rpartition(".")[2] == "eh_proj" for linear in self.linears)
        return "MTP layer" if is_mtp else "model"

    def expected(self, disabled: frozenset[str]) -> dict[str, int]:
        """Regions that the passes must find, by report key."""
        has_expansions = "sparse_mla" in disabled or not self.num_attentions
        has_routers = "moe_router" in disabled
        linears = [
            linear
            for linear in self.linears
            if (has_expansions or not linear.is_expansion) and (has_routers or not linear.is_router)
        ]
        groups = _groups(linears) if "merge_linears" not in disabled else []
        grouped = {id(linear) for group in groups for linear in group}
        is_bf16 = [linear for linear in linears if linear.is_bf16 and id(linear) not in grouped]
        norms = [
            readers
            for readers in self.linear_norms
            if all(linear.is_bf16 and linear in linears for linear in readers)
        ]
        counts = {
            "mask": self.num_attentions + self.num_indexers,
            "indexer_prologue": self.num_indexers,
            "indexer_topk": self.num_indexers,
            "sparse_mla": self.num_attentions,
            "merge_linears": len(groups),
            "bf16_linear": len(is_bf16),
            "rms_norm_linear": len(norms),
            "moe_router": self.num_routers,
            "moe_experts": self.num_experts,
        }
        return {name: counts[name] for name in PASS_NAMES if name not in disabled}


def _groups(linears: Sequence[LinearFacts]) -> list[list[LinearFacts]]:
    """Linears that read one input, of one dtype, over at least two weights."""
    groups: dict[tuple[str, torch.dtype], list[LinearFacts]] = {}
    for linear in linears:
        if linear.is_mergeable:
            groups.setdefault((linear.source, linear.dtype), []).append(linear)
    return [group for group in groups.values() if len({linear.name for linear in group}) > 1]


def read_facts(graph_module: fx.GraphModule) -> GraphFacts:
    """Read from a Dynamo graph what it holds of the model, before it is edited."""
    classes: dict[str, None] = {}
    calls: dict[str, set[str]] = {
        name: set() for name in (_INDEXER_CLASS, _ATTENTION_CLASS, _ROUTER_CLASS, _EXPERTS_CLASS)
    }
    layers: set[str] = set()
    linears = []
    norms: dict[fx.Node, tuple[LinearFacts, ...]] = {}
    has_fp8_keys = is_model_code = False
    used = _used_nodes(graph_module.graph)
    for node in graph_module.graph.nodes:
        if node.op == "placeholder":  # in a kind, a value that another layer's module made
            continue
        is_model_code = is_model_code or _is_model_code(node.stack_trace or "")
        for key, (_path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
            name = _class_name(module_class)
            if name.startswith(_MODEL_CLASSES):
                classes[name] = None
            if name in calls:
                calls[name].add(key)
        if (layer := layer_of(node)) is not None:
            layers.add(layer[0])
        if node.op != "call_function":
            continue
        # A draft step that shares the cache computes latents that nobody reads.
        if node.target is torch.nn.functional.linear and node in used:
            linear = _read_linear(node)
            if linear is not None:
                linears.append(linear)
                source = _whole(_read_from(node.all_input_nodes[0], _VIEWS + _CASTS))
                if source not in norms and _is_norm(source):
                    readers = _readers(source, used)
                    if readers is not None:
                        norms[source] = readers
        elif "fp8" in getattr(node.target, "__name__", "") and "paged" in str(node.target):
            has_fp8_keys = True
    return GraphFacts(
        tuple(classes),
        len(layers),
        len(calls[_INDEXER_CLASS]),
        len(calls[_ATTENTION_CLASS]),
        len(calls[_ROUTER_CLASS]),
        len(calls[_EXPERTS_CLASS]),
        tuple(linears),
        tuple(norms.values()),
        has_fp8_keys,
        is_model_code or bool(classes),
    )


def _used_nodes(graph: fx.Graph) -> set[fx.Node]:
    """Nodes that an output or a write depends on."""
    used: set[fx.Node] = set()
    for node in reversed(graph.nodes):
        if not is_pure(node) or any(user in used for user in node.users):
            used.add(node)
    return used


def _read_linear(node: fx.Node) -> LinearFacts | None:
    weight = node.args[1] if len(node.args) > 1 else node.kwargs.get("weight")
    source = node.args[0] if node.args else node.kwargs.get("input")
    bias = node.args[2] if len(node.args) > 2 else node.kwargs.get("bias")
    if not isinstance(weight, fx.Node) or not isinstance(source, fx.Node):
        return None
    dtype = _dtype_of(weight)
    weight = _read_from(weight, _CASTS)
    name, value = parameter_name(weight), example_value(weight)
    if name is None or not isinstance(value, torch.Tensor) or value.dtype != dtype:
        return None
    return LinearFacts(
        module_name(name),
        value.dtype,
        _dtype_of(source) or value.dtype,
        _read_from(source, _VIEWS + _CASTS).name,
        bias is not None,
        value.is_contiguous(),
        (_innermost_module(node) or ("", ""))[1] == _ROUTER_CLASS,
    )


def _read_from(node: fx.Node, methods: Sequence[str]) -> fx.Node:
    """The node under calls of the given methods."""
    while node.op == "call_method" and node.target in methods and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _whole(node: fx.Node) -> fx.Node:
    """The node of which `node` is a slice that leaves nothing out (of logits to keep)."""
    while _is_whole(node) and isinstance(node.args[0], fx.Node):
        node = node.args[0]
    return node


def _is_whole(node: fx.Node) -> bool:
    source = node.args[0] if node.args else None
    if op_name(node) != "getitem" or not isinstance(source, fx.Node):
        return False
    own, whole = example_value(node), example_value(source)
    is_tensor = isinstance(own, torch.Tensor) and isinstance(whole, torch.Tensor)
    return (
        is_tensor
        and len(own.shape) == len(whole.shape)
        and all(map(_is_same, own.shape, whole.shape))
    )


def _is_same(size: Any, other: Any) -> bool:
    return bool(statically_known_true(size == other))


def _is_norm(node: fx.Node) -> bool:
    """Whether the model's RMSNorm made `node`, with its weight last."""
    norm = _innermost_module(node)
    operands = [a for a in node.args if isinstance(a, fx.Node)]
    # Where a default device is set, Dynamo records operators as methods.
    if norm is None or not norm[1].endswith("RMSNorm") or op_name(node) != "mul":
        return False
    return len(operands) == 2 and any(parameter_name(operand) for operand in operands)


def _innermost_module(node: fx.Node) -> tuple[str, str] | None:
    """(key, class name) of the module that made a node."""
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return None
    key, (_path, module_class) = list(stack.items())[-1]
    return key, _class_name(module_class)


def _is_linear(node: fx.Node) -> bool:
    return node.op == "call_function" and node.target is torch.nn.functional.linear


def _readers(node: fx.Node, used: set[fx.Node]) -> tuple[LinearFacts, ...] | None:
    """The linears that read a node; None if anything else does."""
    readers: list[LinearFacts] = []
    for user in node.users:
        if user not in used:
            continue
        if _is_whole(user) or (user.op == "call_method" and user.target in _VIEWS + _CASTS):
            found = _readers(user, used)
        else:
            linear = _read_linear(user) if _is_linear(user) else None
            found = None if linear is None else (linear,)
        if found is None:
            return None
        readers += found
    return tuple(readers)


def _dtype_of(node: fx.Node) -> torch.dtype | None:
    value = example_value(node)
    return value.dtype if isinstance(value, torch.Tensor) else None


def module_name(parameter: str) -> str:
    """`layers.0.q_a_proj.weight` -> `layers.0.q_a_proj`, through the wrapping of an adapter."""
    return parameter.removesuffix(".weight").removesuffix(".base_layer")


def _is_model_code(stack_trace: str) -> bool:
    """Whether the model's file, or the code of transformers around some model, is on the stack."""
    if "modeling_glm_moe_dsa" in stack_trace:
        return True
    return "/transformers/" in stack_trace and "modeling_" not in stack_trace


def _class_name(module_class: Any) -> str:
    name = module_class if isinstance(module_class, str) else module_class.__qualname__
    return str(name).rpartition(".")[2]
