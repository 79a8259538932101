"""Remaining linears with bf16 weights, as `glm.bf16_linear`.

Targets every `nn.Linear` of the model in bf16 that `sparse_mla` and `merge_linears` have left:
o_proj, down_proj, lm_head, a lone q_b_proj. Exact tier (fp32 accumulation, one rounding):

    mm(x, W^T) or addmm(b, x, W^T) -> glm.bf16_linear(x, W, b)
    mm(x, W^T) + residual          -> glm.bf16_linear(x, W, None, residual)

The sum is taken where nothing else reads the product: the residual stream behind o_proj and
down_proj is then complete when the kernel ends, and no other kernel stands before the next one.

Linears in other dtypes stay with the library. Declines bf16 linears whose weight is made in the
graph (cast, dequantised), since the op exists to read a weight once from memory.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import torch
from torch import fx

from glm_compile.fx_passes import canonical, layouts
from glm_compile.fx_passes.base import Declined, PassOptions, PassResult, where
from glm_compile.fx_passes.canonical import Linear
from glm_compile.fx_passes.editing import Builder, erase_dead, refresh


class Bf16Linear:
    """Replace bf16 linears by the op; see the module."""

    name = "bf16_linear"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        result = PassResult(self.name)
        graph = graph_module.graph
        for node in list(graph.nodes):
            found = canonical.linear(node)
            if found is None or layouts.dtype_of(node) != torch.bfloat16:
                continue
            if (reason := _why_not(found)) is not None:
                result.declined.append(Declined(where(node), reason))
                continue
            result.matched.append(where(node))
            self._replace(graph, found)
            result.num_matches += 1
        if result.num_matches:
            graph_module.recompile()
        return result

    def _replace(self, graph: fx.Graph, found: Linear) -> None:
        added = _addition(found.node)
        last, residual = added or (found.node, None)
        build = Builder(graph, last, found.node)
        if residual is not None:
            residual = self._in_shape(build, residual, found)
        call = build.call(
            torch.ops.glm.bf16_linear.default,
            found.x,
            found.weight,
            found.bias,
            residual,
            self.options.deterministic,
            "",
        )
        last.replace_all_uses_with(build.view_like(call, last))
        refresh(graph, build.made)
        erase_dead(graph, [last])

    def _in_shape(self, build: Builder, residual: fx.Node, found: Linear) -> fx.Node:
        """The residual in the shape of the op's output: x's rows and the weight's features."""
        num_dims = len(layouts.shape_of(found.x))
        rows = [build.size(found.x, dim) for dim in range(num_dims - 1)]
        viewed = build.view(residual, [*rows, found.num_out])
        if viewed is residual:
            build.drop_sizes(rows)
        return viewed


def _addition(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(sum, residual) where views of the product lead to one sum of its dtype and shape, or None.

    A residual is added row by row: views that move elements are no case.
    """
    view = node
    while len(view.users) == 1:
        (user,) = view.users
        if canonical.is_view(user) and user.target in layouts.RESHAPES:
            view = user
            continue
        for own, residual in canonical.pair(user, torch.ops.aten.add.Tensor):
            if own is not view or residual is view or not isinstance(residual, fx.Node):
                continue
            if _is_alike(residual, view) and _is_alike(user, view):
                return user, residual
        return None
    return None


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two nodes' values have one dtype and one shape."""
    if layouts.dtype_of(node) != layouts.dtype_of(other):
        return False
    shape, other_shape = layouts.shape_of(node), layouts.shape_of(other)
    return len(shape) == len(other_shape) and all(map(layouts.is_same, shape, other_shape))


def _why_not(found: Linear) -> str | None:
    if len(found.weight_casts) > 1:
        return f"the weight is cast from {found.weight_casts[0]} in the graph"
    if found.bias is not None and layouts.dtype_of(found.bias) != torch.bfloat16:
        return f"the bias is {layouts.dtype_of(found.bias)}, expected torch.bfloat16"
    return None
