"""Put `glm.moe_experts` in place of transformers' routed experts in a Dynamo graph. Exact tier.

Targets, in transformers 5.20 and 5.24, what `GlmMoeDsaExperts` (models/glm_moe_dsa/
modeling_glm_moe_dsa.py) computes through `ALL_EXPERTS_FUNCTIONS` (integrations/moe.py):
`grouped_mm_experts_forward`, transformers' default, and `batched_mm_experts_forward`. The eager
loop depends on data, so no full graph holds it.

    sort the pairs by expert -> grouped product with gate_up -> silu(gate) * up
        -> grouped product with down -> * router weights -> back in order -> sum

    x, router weights, ids, gate_up, down -> glm.moe_experts

What the module computed is compared line by line with what transformers writes, so that a hook, an
adapter, another activation or expert parallelism is seen, and named. Equal up to rounding: both
weight a token's experts in fp32 and round the sum.

Declines calls that compute anything else, results that are read from within, and weights or hidden
states of unequal or other dtypes.

Shape legend: M tokens, K experts of a token, E experts, C hidden size, I intermediate size.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import fx

import glm_compile.ops  # noqa: F401  (registers the ops)
from glm_compile.fx_passes._dynamo_graph import (
    example_value,
    insert_call,
    op_name,
)
from glm_compile.fx_passes.base import Declined, No, PassResult, clean_path
from glm_compile.ops.moe import DTYPES

EXPERTS_CLASS = "GlmMoeDsaExperts"
_EXPERTS_MODULE = "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa"

# A line a node: what it is called here = the operation and what goes in. `_` is any size,
# alternatives are separated by a bar. `K`, `E`, `last` (E - 1) and
# `dtype` (x's) are constants.
_GROUPED = """
    flat_weights = reshape(weights, _)
    flat_ids = reshape(ids, _)
    sorting = sort(flat_ids)
    sorted_ids = getitem(sorting, 0)
    order = getitem(sorting, 1)
    token = floordiv(order, K)
    rows = getitem(x, token)
    row_weights = getitem(flat_weights, order)
    numbers = float|int(sorted_ids)
    counts = histc(numbers, bins=E, min=0, max=last)
    ends = cumsum(counts, dim=0, dtype=int32)
    up_weight = transpose(gate_up, -2, -1)
    up_rows = to(rows, dtype)
    gates_and_ups = grouped_mm|_grouped_mm|grouped_mm_fallback(up_rows, up_weight, offs=ends)
    halves = chunk(gates_and_ups, 2, dim=-1)
    gate = getitem(halves, 0)
    up = getitem(halves, 1)
    activation = silu(gate)
    hidden = mul(activation, up)
    down_weight = transpose(down, -2, -1)
    down_rows = to(hidden, dtype)
    products = grouped_mm|_grouped_mm|grouped_mm_fallback(down_rows, down_weight, offs=ends)
    column = unsqueeze(row_weights, -1)
    weighted = mul(products, column)
    back = empty_like(order)
    range = arange(_, device=_)
    write = setitem(back, order, range)
    ordered = getitem(weighted, back)
    by_token = view(ordered, _, K, _)
    sum = sum(by_token, dim=1)
    result = to(sum, dtype)
"""
_BATCHED = """
    rows = repeat_interleave(x, K, dim=0)
    flat_weights = reshape(weights, _)
    flat_ids = reshape(ids, _)
    up_weight = getitem(gate_up, flat_ids)
    up_rows = unsqueeze(rows, -1)
    up_columns = bmm(up_weight, up_rows)
    gates_and_ups = squeeze(up_columns, -1)
    halves = chunk(gates_and_ups, 2, dim=-1)
    gate = getitem(halves, 0)
    up = getitem(halves, 1)
    activation = silu(gate)
    hidden = mul(activation, up)
    down_weight = getitem(down, flat_ids)
    down_rows = unsqueeze(hidden, -1)
    down_columns = bmm(down_weight, down_rows)
    products = squeeze(down_columns, -1)
    column = unsqueeze(flat_weights, -1)
    weighted = mul(products, column)
    by_token = view(weighted, _, K, _)
    sum = sum(by_token, dim=1)
    result = to(sum, dtype)
"""
_INPUTS = ("x", "weights", "ids", "gate_up", "down")


def moe_experts(graph_module: fx.GraphModule) -> PassResult:
    """Replace the calls of experts modules by `glm.moe_experts`, in place."""
    result = PassResult("moe_experts")
    graph = graph_module.graph
    for path, nodes in _calls(graph):
        try:
            inputs = _match(nodes)
        except No as no:
            result.declined.append(Declined(path, str(no)))
            continue
        last = nodes[-1]
        with graph.inserting_before(last):
            call = insert_call(
                graph,
                torch.ops.glm.moe_experts.default,
                (*(inputs[name] for name in _INPUTS), ""),
                last,
            )
        last.replace_all_uses_with(call)
        # Dynamo computes a size where it is first needed, and others may read it.
        for node in reversed(nodes):
            if not node.users:
                graph.erase_node(node)
        result.num_matches += 1
        result.matched.append(path)
    if result.num_matches:
        graph_module.recompile()
    return result


def _calls(graph: fx.Graph) -> list[tuple[str, list[fx.Node]]]:
    """(module path, tensor nodes in order) of each call of an experts module."""
    calls: dict[str, tuple[str, list[fx.Node]]] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
            if _is_experts(module_class):
                calls.setdefault(key, (clean_path(path), []))[1].append(node)
                break
    return list(calls.values())


def _is_experts(module_class: Any) -> bool:
    if isinstance(module_class, str):
        return module_class == f"{_EXPERTS_MODULE}.{EXPERTS_CLASS}"
    return bool(
        module_class.__module__ == _EXPERTS_MODULE and module_class.__qualname__ == EXPERTS_CLASS
    )


def _match(nodes: Sequence[fx.Node]) -> dict[str, fx.Node]:
    """The inputs by name, of a call that computes what transformers writes."""
    tensors = [node for node in nodes if not _is_size(node)]
    if not tensors:
        raise No("no computation of the experts is in the graph")
    template = _BATCHED if op_name(tensors[0]) == "repeat_interleave" else _GROUPED
    lines = [line.strip() for line in template.strip().splitlines()]
    matcher = _Matcher()
    for node, line in zip(tensors, lines, strict=False):
        matcher.match(node, line)
    if len(tensors) != len(lines):
        extra = tensors[len(lines) :]
        found = f"{op_name(extra[0])} follows ({extra[0]})" if extra else "less is computed"
        raise No(f"not transformers' own experts: {found}. Hooks and adapters are not replaced")
    inside = set(tensors)
    for node in nodes[:-1]:
        is_free = node not in inside and not any(n in inside for n in node.all_input_nodes)
        if not is_free and any(user not in nodes for user in node.users):
            raise No(f"{node}, computed within the experts, is read outside of them")
    if nodes[-1] is not tensors[-1]:
        raise No(f"{nodes[-1]} follows what transformers' experts compute")
    matcher.check()
    return matcher.nodes


def _is_size(node: fx.Node) -> bool:
    return isinstance(example_value(node), int | torch.SymInt)


class _Matcher:
    """Compares nodes with lines of a template and remembers what each name stands for."""

    def __init__(self) -> None:
        self.nodes: dict[str, fx.Node] = {}
        self.constants: dict[str, Any] = {}

    def match(self, node: fx.Node, line: str) -> None:
        name, names_of_op, arguments = re.fullmatch(r"(\w+) = ([\w|]+)\((.*)\)", line).groups()  # type: ignore[union-attr]
        found = op_name(node).rpartition("::")[2].removesuffix("_default")
        keywords = {k: v for k, v in node.kwargs.items() if v is not None}
        wanted = [argument.partition("=")[::2] for argument in arguments.split(", ")]
        given = [("", value) for value in node.args] + list(keywords.items())
        is_same = found in names_of_op.split("|") and len(wanted) == len(given)
        if not is_same or not all(
            self._fits(value, key, *pair) for (key, value), pair in zip(given, wanted, strict=True)
        ):
            raise No(
                f"not transformers' own experts: expected {line.partition(' = ')[2]}, found "
                f"{node.format_node()}. Hooks, adapters, other activations and expert parallelism "
                "are not replaced"
            )
        self.nodes[name] = node

    def _fits(self, value: Any, key: str, first: str, second: str) -> bool:
        """Whether an argument is what the template has: `key=text`, or `text` by position."""
        wanted_key, text = (first, second) if second else ("", first)
        if key != wanted_key:
            return False
        if text == "_":
            return True
        if isinstance(value, fx.Node):
            if text in _INPUTS:
                return self.nodes.setdefault(text, value) is value
            return self.nodes.get(text) is value
        constant = self._constant(text)
        if constant is None:
            return bool(self.constants.setdefault(text, value) == value)
        return bool(value == constant)

    def _constant(self, text: str) -> Any:
        """What a word of the template stands for; None for those that the graph decides."""
        if re.fullmatch(r"-?\d+", text):
            return int(text)
        return {"int32": torch.int32}.get(text)

    def check(self) -> None:
        """Raise No unless sizes and dtypes are the op's."""
        values = {name: example_value(self.nodes[name]) for name in _INPUTS}
        if not all(isinstance(value, torch.Tensor) for value in values.values()):
            raise No("inputs of the experts are not known as tensors")
        x, weights, ids, gate_up, _ = values.values()
        if x.dim() != 2 or ids.dim() != 2 or weights.dim() != 2 or gate_up.dim() != 3:
            raise No("expected tokens [M, C], router weights and ids [M, K], weights [E, 2 I, C]")
        num_experts = gate_up.shape[0]
        wanted = {"K": ids.shape[1], "E": num_experts, "last": num_experts - 1, "dtype": x.dtype}
        for name, constant in self.constants.items():
            if constant != wanted[name]:
                raise No(f"expected {name} = {wanted[name]} in the computation, found {constant}")
        dtypes = {name: values[name].dtype for name in ("x", "gate_up", "down")}
        if len(set(dtypes.values())) > 1 or x.dtype not in DTYPES:
            found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
            raise No(f"expected one dtype of float32, float16 and bfloat16, found {found}")
        if not weights.is_floating_point() or ids.dtype not in (torch.int32, torch.int64):
            raise No(f"router weights are {weights.dtype}, ids {ids.dtype}")
