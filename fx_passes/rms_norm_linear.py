"""RMSNorm between two linears, as part of the second.

Targets `q_a_layernorm`, which reads q_a_proj's output and is read by q_b_proj and the indexer's
wq_b (GlmMoeDsaAttention.forward of transformers). Exact tier (the norm's own roundings):

    y = weight * cast(x32 * rsqrt(mean(x32^2) + eps)); glm.merged_linear(y, [q_b, wq_b])

    glm.rms_norm_linear(x, weight, [q_b, wq_b], None, eps)

A linear that was left alone, or that `bf16_linear` took, is a reader like a merged one; of several
readers each norms x itself. Norms of sums or of what something else reads too (input_layernorm and
its like, whose input is the residual) are no candidates: the inner compiler fuses those with the
addition before them, so nothing would be saved. fp32 models have none either, as the op is for
bf16.

Declines where the normed value is read by anything but bf16 linears.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import fx

from glm_compile.fx_passes import canonical, layouts, rotations
from glm_compile.fx_passes.base import Declined, No, PassOptions, PassResult, where
from glm_compile.fx_passes.canonical import RmsNorm
from glm_compile.fx_passes.editing import Builder, erase_dead, refresh
from glm_compile.fx_passes.layouts import describe

glm = torch.ops.glm


@dataclass(frozen=True)
class Reader:
    """A bf16 linear, or several as one.

    Attributes:
        node: result.
        x: the input [..., K].
        weights: [N, K] each.
        bias: of a lone linear, or None.
    """

    node: fx.Node
    x: fx.Node
    weights: list[fx.Node]
    bias: fx.Node | None


class RmsNormLinear:
    """Replace each norm between linears, and its readers, by the op; see the module."""

    name = "rms_norm_linear"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        result = PassResult(self.name)
        graph = graph_module.graph
        norms: dict[fx.Node, tuple[RmsNorm, list[Reader]]] = {}
        for node in graph.nodes:
            reader = _reader(node)
            norm = canonical.rms_norm(reader.x) if reader is not None else None
            if reader is not None and norm is not None and _is_of_linear(norm.x):
                norms.setdefault(norm.node, (norm, []))[1].append(reader)
        for norm, readers in norms.values():
            place = where(norm.node)
            if (other := _other_user(norm.node, {reader.node for reader in readers})) is not None:
                reason = f"the normed value is also read by {describe(other)}, not a bf16 linear"
                result.declined.append(Declined(place, reason))
                continue
            for reader in readers:
                self._replace(graph, norm, reader)
            result.matched.append(place)
            result.num_matches += 1
        if result.num_matches:
            graph_module.recompile()
        return result

    def _replace(self, graph: fx.Graph, norm: RmsNorm, reader: Reader) -> None:
        build = Builder(graph, reader.node, reader.node)
        call = build.call(
            glm.rms_norm_linear.default,
            norm.x,
            norm.weight,
            reader.weights,
            reader.bias,
            norm.eps,
            self.options.deterministic,
            "",
        )
        reader.node.replace_all_uses_with(build.view_like(call, reader.node))
        refresh(graph, build.made)
        erase_dead(graph, [reader.node])


def _reader(node: fx.Node) -> Reader | None:
    if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
        return None
    if layouts.dtype_of(node) != torch.bfloat16:
        return None
    arguments = layouts.args(node)
    if layouts.is_call(node, glm.merged_linear.default):
        return Reader(node, arguments[0], list(arguments[1]), None)
    if layouts.is_call(node, glm.bf16_linear.default):
        x, weight, bias, residual = arguments[:4]
        return Reader(node, x, [weight], bias) if residual is None else None
    found = canonical.linear(node)
    if found is None or len(found.weight_casts) > 1:
        return None
    if found.bias is not None and layouts.dtype_of(found.bias) != torch.bfloat16:
        return None
    return Reader(node, found.x, [found.weight], found.bias)


def _is_of_linear(node: fx.Node) -> bool:
    """Whether a value that one node reads is a linear's output, or a slice of one."""
    if any(len(step.users) > 1 for step in (node, *canonical.peel(node).chain)):
        return False
    ops = (glm.merged_linear.default, glm.bf16_linear.default, glm.rms_norm_linear.default)
    while True:
        source = canonical.peel(node).source
        try:
            source = rotations.last_dim_slice(source).source
        except No:
            return False
        if layouts.is_call(source, *ops) or canonical.linear(source) is not None:
            return True
        if source is node:
            return False
        node = source


def _other_user(node: fx.Node, readers: set[fx.Node]) -> fx.Node | None:
    """The first user, also of a view, that is none of the readers."""
    for user in node.users:
        if user in readers:
            continue
        if not canonical.is_view(user):
            return user
        if (other := _other_user(user, readers)) is not None:
            return other
    return None
