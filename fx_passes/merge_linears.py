"""Linears that read the same input, as one.

Targets every attention, indexer and MLP of the model: q_a_proj, kv_a_proj_with_mqa, wk and
weights_proj read the layer's normed input; q_b_proj and wq_b read q_resid; gate_proj and up_proj
read the MLP's input. Exact tier (equal up to rounding):

    x -> view -> mm(W0^T), x -> view -> mm(W1^T), ...

    y = glm.merged_linear(x, [W0, W1, ...]); y[..., :N0], y[..., N0:N0 + N1], ...

No weight is copied or concatenated in the graph: the op finds the weights side by side in memory,
where the pipeline has put them by `MergeResult.groups`, or reads them one by one.

A linear joins its input's group if its weight is a graph input as it is, of the group's dtype and
width, and no bias is added. What reads the same input and stays out is declined with the reason:
fp32 rows are never rounded to join bf16 rows (IDX-2), unequal formats never joined (IDX-3).

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes import canonical, layouts
from glm_compile.fx_passes.base import Declined, MergeResult, PassOptions, where
from glm_compile.fx_passes.canonical import Linear
from glm_compile.fx_passes.editing import Builder, erase_dead, refresh

aten = torch.ops.aten


class MergeLinears:
    """Merge linears of one input; see the module."""

    name = "merge_linears"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> MergeResult:
        result = MergeResult(self.name)
        graph = graph_module.graph
        # A weight lies in one place, also if a run before this one has merged it.
        glm = torch.ops.glm
        taken = {
            weight
            for op, position in ((glm.merged_linear, 1), (glm.rms_norm_linear, 2))
            for call in graph.find_nodes(op="call_function", target=op.default)
            for weight in layouts.args(call)[position]
        }
        for readers in _readers_of_one_input(graph):
            for group in self._groups(readers, taken, result):
                self._merge(graph, group)
                weights = _distinct(group)
                taken.update(weights)
                result.groups.append(tuple(w.name for w in weights))
                result.matched.append(" + ".join(_label(member) for member in group))
                result.num_matches += 1
        if result.num_matches:
            graph_module.recompile()
        return result

    def _groups(
        self, readers: list[Linear], taken: set[fx.Node], result: MergeResult
    ) -> list[list[Linear]]:
        """Split the readers of one input into groups; record why a reader stays out."""
        by_format: dict[Any, list[Linear]] = {}
        reasons: list[tuple[Linear, str]] = []
        for reader in readers:
            weight = layouts.value(reader.weight)
            if len(reader.weight_casts) > 1:
                route = " to ".join(_name(dtype) for dtype in reader.weight_casts)
                reasons.append((reader, f"its weight is cast from {route} in the graph"))
            elif reader.bias is not None:
                reasons.append((reader, "it adds a bias"))
            elif _is_adapter(reader):
                reasons.append((reader, "its weight belongs to an adapter"))
            elif not weight.is_contiguous():
                reasons.append((reader, f"its weight has strides {tuple(weight.stride())}"))
            elif reader.weight in taken:
                reasons.append((reader, f"{reader.weight.name} is part of another merged linear"))
            else:
                key = (reader.x, weight.dtype, weight.device)
                by_format.setdefault(key, []).append(reader)
        groups = [g for g in by_format.values() if len(_distinct(g)) > 1]
        if groups:
            largest = max(groups, key=lambda g: len(_distinct(g)))
            dtype = _name(layouts.dtype_of(largest[0].weight))
            for group in by_format.values():
                if group not in groups:
                    other = _name(layouts.dtype_of(group[0].weight))
                    reasons += [
                        (r, f"its weight is {other}, the others' are {dtype}") for r in group
                    ]
        rest = [r for r in readers if all(r is not out for out, _ in reasons)]
        if groups or len(rest) < 2:
            for reader, reason in reasons:
                others = ", ".join(_label(r) for r in rest or readers if r is not reader)
                result.declined.append(
                    Declined(where(reader.node), f"not merged with {others}: {reason}")
                )
        return groups

    def _merge(self, graph: fx.Graph, group: list[Linear]) -> None:
        first = group[0].node
        build = Builder(graph, first, first)
        weights = _distinct(group)
        merged = build.call(
            torch.ops.glm.merged_linear.default, group[0].x, weights, self.options.deterministic
        )
        starts: dict[fx.Node, int] = {}
        num_out = 0
        for weight in weights:
            starts[weight] = num_out
            num_out += layouts.shape_of(weight)[0]
        for member in group:
            start = starts[member.weight]
            size = layouts.shape_of(member.weight)[0]
            part = build.call(aten.slice.Tensor, merged, -1, start, start + size)
            member.node.replace_all_uses_with(build.view_like(part, member.node))
        refresh(graph, build.made)
        erase_dead(graph, [member.node for member in group])


def _readers_of_one_input(graph: fx.Graph) -> list[list[Linear]]:
    """Linears by the value they read before any cast, in the order of the first of each."""
    readers: dict[fx.Node, list[Linear]] = {}
    for node in graph.nodes:
        if (found := canonical.linear(node)) is None:
            continue
        base = canonical.peel(found.x, casts=True).source
        readers.setdefault(base, []).append(found)
    return [linears for linears in readers.values() if len(linears) > 1]


def _distinct(group: list[Linear]) -> list[fx.Node]:
    return list(dict.fromkeys(member.weight for member in group))


def _is_adapter(reader: Linear) -> bool:
    return "lora_" in where(reader.node) or "lora_" in reader.weight.name


def _label(reader: Linear) -> str:
    return where(reader.node)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
