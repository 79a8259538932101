"""RMSNorm before linears, as part of them; and the SwiGLU behind.

Targets `input_layernorm`, which q_a_proj, kv_a_proj_with_mqa and the indexer's projections read,
`q_a_layernorm`, which q_b_proj and the indexer's wq_b read (GlmMoeDsaAttention.forward of
transformers), and the `post_attention_layernorm` of dense MLPs. Exact tier (the norm's own
roundings):

    y = weight * cast(x32 * rsqrt(mean(x32^2) + eps)); glm.merged_linear(y, [q_b, wq_b])

    glm.rms_norm_linear(x, weight, [q_b, wq_b], None, eps)

A linear that was left alone, or that `bf16_linear` took, is a reader like a merged one; of several
readers each norms x itself. Where gates and ups of such a product meet in silu(gate) * up and are
read by nothing else, that becomes part of it too (`has_swiglu`): between o_proj and the next
layer's attention a dense layer is then three kernels, each of which reads its weights while the one
ahead ends. fp32 models have no candidates, as the op is for bf16.

Declines norms that something else than bf16 linears reads, and says of what gates and ups make
where that stays apart. Norms that the model itself has read by others (a router's or the experts'
op; the last one, whose output is the model's) are no candidates, unless a linear's output is
normed. A norm that is left and reads what an op or another graph left in memory becomes
`glm.rms_norm`, which no count expects: one launch as before, but the next one may start early.
Norms behind other nodes stay with the inner compiler, which makes them one with the addition before
them.

Shape legend: M rows, K in features, N out features, I = N / 2 gates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

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
            norm = canonical.rms_norm(_whole(reader.x)) if reader is not None else None
            if reader is not None and norm is not None:
                norms.setdefault(norm.node, (norm, []))[1].append(reader)
        for norm, readers in norms.values():
            place = where(norm.node)
            if (other := _other_user(norm.node, {reader.node for reader in readers})) is not None:
                if _is_of_linear(norm.x) or not _is_the_models(other):
                    reason = f"the normed value is also read by {describe(other)}"
                    result.declined.append(Declined(place, f"{reason}, not a bf16 linear"))
                continue
            for reader in readers:
                self._replace(graph, norm, reader)
            result.matched.append(place)
            result.num_matches += 1
        for node in list(graph.nodes):
            if (call := _halves_of(node)) is None:
                continue
            try:
                _check_gated_product(node, call)
            except No as no:
                reason = f"what gates and ups make stays apart: {no}"
                result.declined.append(Declined(where(node), reason))
                continue
            self._take_swiglu(graph, call, node)
        has_left = [self._take_norm(graph, node) for node in list(graph.nodes)]
        if result.num_matches or any(has_left):
            graph_module.recompile()
        return result

    def _take_norm(self, graph: fx.Graph, node: fx.Node) -> bool:
        """Make a norm of what lies in memory an op."""
        norm = canonical.rms_norm(node)
        if norm is None or layouts.dtype_of(node) != torch.bfloat16 or not _is_stored(norm.x):
            return False
        build = Builder(graph, node, node)
        call = build.call(glm.rms_norm.default, norm.x, norm.weight, norm.eps, "")
        node.replace_all_uses_with(call)
        refresh(graph, build.made)
        erase_dead(graph, [node])
        return True

    def _take_swiglu(self, graph: fx.Graph, call: fx.Node, node: fx.Node) -> None:
        build = Builder(graph, node, node)
        gated = build.call(glm.rms_norm_linear.default, *layouts.args(call)[:7], True)
        node.replace_all_uses_with(build.view_like(gated, node))
        refresh(graph, build.made)
        erase_dead(graph, [node])

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


def _halves_of(node: fx.Node) -> fx.Node | None:
    """The glm.rms_norm_linear with one half of whose features this product multiplies the other.

    Either may have gone through more, as gates do, but nothing else may have come in.
    """
    if not layouts.is_call(node, torch.ops.aten.mul.Tensor):
        return None
    parts = [_slices_behind(part) for part in layouts.args(node)[:2]]
    if any(len(part) != 1 for part in parts):
        return None
    first, second = sorted((part.pop() for part in parts), key=lambda part: part.start)
    call, length = first.source, first.length
    is_halves = (first.start, second.start, second.length) == (0, length, length)
    is_all = layouts.is_same(layouts.shape_of(call)[-1], 2 * length)
    is_one = second.source is call and first.step == second.step == 1
    return call if is_one and is_halves and is_all else None


# Of a gate's activation, in whatever spelling.
_MOST_NODES = 24


def _slices_behind(node: Any) -> set[rotations.Slice]:
    """Slices of a glm.rms_norm_linear that a value is made of; none if of anything else, too."""
    front: list[Any] = [node]
    seen: set[fx.Node] = set()
    found: set[rotations.Slice] = set()
    while front:
        node = front.pop()
        if not isinstance(node, fx.Node) or node.op != "call_function" or len(seen) > _MOST_NODES:
            return set()
        if node in seen or layouts.is_call(node, *_MADE_OF_NUMBERS):
            continue
        seen.add(node)
        if not isinstance(node.meta.get("val"), torch.Tensor) or not layouts.shape_of(node):
            return set()
        try:
            part = rotations.last_dim_slice(node)
        except No:
            return set()
        if _is_open(part.source):
            found.add(part)
        else:
            front.extend(part.source.all_input_nodes or [None])
    return found


# Constants that decompositions of activations make.
_MADE_OF_NUMBERS = (torch.ops.aten.full.default, torch.ops.aten.scalar_tensor.default)


def _is_open(node: fx.Node) -> bool:
    """Whether a node is the op, without a SwiGLU behind yet."""
    return layouts.is_call(node, glm.rms_norm_linear.default) and len(layouts.args(node)) == 7


def _check_gated_product(node: fx.Node, call: fx.Node) -> None:
    """Raise No unless a product of a call's halves is silu(gate) * up and all that reads them."""
    found = canonical.swiglu(node)
    if found is None:
        raise No(f"silu(gate) * up, all in one dtype, is expected at {describe(node)}")
    gate, up = (rotations.last_dim_slice(part) for part in found)
    if gate.source is not call or up.source is not call:
        changed = gate.source if gate.source is not call else up.source
        raise No(f"{describe(changed)} lies between the product and silu(gate) * up")
    if gate.start != 0:
        raise No("the weight's first half is expected to be the gates, found it to be the ups")
    if layouts.args(call)[3] is not None:
        raise No("gates and ups have a bias")
    if (other := _stray_user(call, node)) is not None:
        raise No(f"gates or ups are also read by {describe(other)}")


def _stray_user(node: fx.Node, last: fx.Node) -> fx.Node | None:
    """A node that ends what is made of `node` and is not `last`, or None."""
    front, seen = [node], {node}
    while front:
        current = front.pop()
        if not current.users:
            return current
        for user in current.users:
            if user is not last and user not in seen:
                if user.op != "call_function":
                    return user
                seen.add(user)
                front.append(user)
    return None


def _is_stored(node: fx.Node) -> bool:
    """Whether a graph's input or one of our ops made a value, or what it is a view or part of."""
    while True:
        source = canonical.peel(node).source
        if layouts.is_getitem(source) or layouts.is_call(source, torch.ops.aten.slice.Tensor):
            source = layouts.args(source)[0]
        if source is node:
            return source.op == "placeholder" or getattr(source.target, "namespace", "") == "glm"
        node = source


def _is_the_models(reader: fx.Node) -> bool:
    """Whether the model itself has a normed value read so: as its output, or by an op of ours."""
    return reader.op == "output" or getattr(reader.target, "namespace", "") == "glm"


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


def _is_whole(node: fx.Node) -> bool:
    """Whether a slice leaves nothing out."""
    if not layouts.is_call(node, torch.ops.aten.slice.Tensor):
        return False
    own, whole = layouts.shape_of(node), layouts.shape_of(layouts.args(node)[0])
    return all(layouts.is_same(a, b) for a, b in zip(own, whole, strict=True))


def _whole(node: fx.Node) -> fx.Node:
    while _is_whole(node):
        node = canonical.peel(layouts.args(node)[0]).source
    return node


def _other_user(node: fx.Node, readers: set[fx.Node]) -> fx.Node | None:
    """The first user, also of a view, that is none of the readers."""
    for user in node.users:
        if user in readers:
            continue
        if not canonical.is_view(user) and not _is_whole(user):
            return user
        if (other := _other_user(user, readers)) is not None:
            return other
    return None
