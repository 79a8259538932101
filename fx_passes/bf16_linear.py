"""Remaining linears with bf16 weights, as `glm.bf16_linear`.

Targets every `nn.Linear` of the model in bf16 that `sparse_mla` and `merge_linears` have left:
o_proj, down_proj, lm_head, a lone q_b_proj. Exact tier (fp32 accumulation, one rounding):

    mm(x, W^T) or addmm(b, x, W^T) -> glm.bf16_linear(x, W, b)

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
        build = Builder(graph, found.node, found.node)
        call = build.call(
            torch.ops.glm.bf16_linear.default,
            found.x,
            found.weight,
            found.bias,
            None,
            self.options.deterministic,
            "",
        )
        found.node.replace_all_uses_with(build.view_like(call, found.node))
        refresh(graph, build.made)
        erase_dead(graph, [found.node])


def _why_not(found: Linear) -> str | None:
    if len(found.weight_casts) > 1:
        return f"the weight is cast from {found.weight_casts[0]} in the graph"
    if found.bias is not None and layouts.dtype_of(found.bias) != torch.bfloat16:
        return f"the bias is {layouts.dtype_of(found.bias)}, expected torch.bfloat16"
    return None
