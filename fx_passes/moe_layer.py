"""Norm, router, routed experts, shared expert, their sum and the residual, as one op. Exact tier.

Targets `GlmMoeDsaMoE.forward` and the addition behind it in the decoder layer
(models/glm_moe_dsa/modeling_glm_moe_dsa.py; 5.20 and 5.24 write the same), after `moe_router`,
`moe_experts`, `merge_linears` and `bf16_linear` have found their parts:

    RMSNorm -> x -> glm.moe_router -> glm.moe_experts ------------------------+
               x -> glm.merged_linear(gate, up) -> silu * -> glm.bf16_linear -+ -> + residual

    normed value, weights of all, residual -> glm.moe_layer

The norm comes along if nothing else reads its output and the number of tokens is known: for many
tokens the op would compute it by itself, where Inductor fuses it.

For few tokens the op streams the shared expert's weights with those of the others. Only calls of
bf16 that may have so few tokens are looked at; what else there is stays as those passes left it.
They report what they matched whether or not this pass goes on from there, so it has no key of its
own in reports and options: it is disabled with `moe_experts`, expects nothing, and notes what it
declines, with the reason, under that key. Such a call works as before.

Declines a shared expert that computes anything else (hooks, adapters, another activation), linears
that the other passes did not take, and sums that are read from within.

Shape legend: M tokens, C hidden size, J intermediate size of the shared expert.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes import canonical, layouts
from glm_compile.fx_passes.base import Declined, No, PassOptions, PassResult, where
from glm_compile.fx_passes.canonical import in_order
from glm_compile.fx_passes.editing import Builder, erase_dead, is_pure, refresh
from glm_compile.fx_passes.layouts import RESHAPES, args, describe, is_call, is_same
from glm_compile.fx_passes.rotations import last_dim_slice
from glm_compile.ops.moe.config import MAX_CUTE_TOKENS

aten = torch.ops.aten
glm = torch.ops.glm


@dataclass(frozen=True)
class _Layer:
    """What one call is made of.

    Attributes:
        x: the experts' tokens [M, C].
        norm: what made them, if that goes, too.
        router: arguments of the router behind x.
        experts: gate_up and down.
        shared: gate, up and down of the shared expert.
        residual: what is added at the end, or None.
        routed: what the experts give, as the sum reads it.
        last: the node whose value is replaced.
    """

    x: fx.Node
    norm: canonical.RmsNorm | None
    router: tuple[Any, ...]
    experts: tuple[fx.Node, fx.Node]
    shared: tuple[fx.Node, fx.Node, fx.Node]
    residual: fx.Node | None
    routed: fx.Node
    last: fx.Node


class MoeLayer:
    """Replace what the other passes left of an MoE layer by one op; see the module."""

    name = "moe_layer"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        result = PassResult(self.name)
        graph = graph_module.graph
        for experts in graph.find_nodes(op="call_function", target=glm.moe_experts.default):
            if not _may_be_few(experts):
                continue
            try:
                layer = _match(experts)
            except No as no:
                reason = f"the shared expert stays apart: {no}"
                result.declined.append(Declined(where(experts), reason))
                continue
            _replace(graph, layer)
            result.matched.append(where(experts))
            result.num_matches += 1
        if result.num_matches:
            graph_module.recompile()
        return result


def _may_be_few(experts: fx.Node) -> bool:
    x = args(experts)[0]
    num_tokens = layouts.shape_of(x)[0]
    is_few = not isinstance(num_tokens, int) or num_tokens <= MAX_CUTE_TOKENS
    return is_few and layouts.dtype_of(x) == torch.bfloat16


def _match(experts: fx.Node) -> _Layer:
    x, weights, ids, gate_up, down = args(experts)[:5]
    source = in_order(x)
    router = _router_of(weights, ids)
    if in_order(args(router)[0]) is not source:
        raise No("the router reads other tokens than the experts")
    total = _reader(experts)
    shared_down = total if is_call(total, glm.bf16_linear.default) else _other(total, experts)
    hidden, down_weight, bias, added, deterministic = args(shared_down)[:5]
    if bias is not None or (added is None) == (shared_down is total):
        raise No(f"{describe(shared_down)} adds something to its product")
    if shared_down is total and in_order(added) is not experts:
        raise No(f"{describe(shared_down)} multiplies what the experts give")
    if deterministic:
        raise No("deterministic linears do not depend on the number of tokens")
    merged = _swiglu_input(hidden)
    x_of_shared, gates = args(merged)[:2]
    if len(gates) != 2 or not is_same(layouts.shape_of(gates[0])[0], layouts.shape_of(gates[1])[0]):
        raise No(f"gate and up are expected in {describe(merged)}, found {len(gates)} weights")
    if in_order(x_of_shared) is not source:
        raise No("the shared expert reads other tokens than the router")
    shared = (gates[0], gates[1], down_weight)
    (routed,) = (a for a in total.all_input_nodes if in_order(a) is experts)
    last, kept = total, None
    if (found := _residual_of(total)) is not None:
        last, kept = found
    norm = canonical.rms_norm(source)
    has_others = not _readers(source) <= {router, experts, merged}
    if has_others or not isinstance(layouts.shape_of(x)[0], int):
        norm = None
    return _Layer(x, norm, args(router)[1:6], (gate_up, down), shared, kept, routed, last)


def _users(node: fx.Node) -> list[fx.Node]:
    """Users, without those whose value nobody wants: sizes that a rewrite has left."""
    return [user for user in node.users if user.users or not is_pure(user)]


def _readers(node: fx.Node) -> set[fx.Node]:
    """Who reads a value, also through views."""
    found: set[fx.Node] = set()
    for user in _users(node):
        found |= _readers(user) if is_call(user, *RESHAPES) else {user}
    return found


def _router_of(weights: fx.Node, ids: fx.Node) -> fx.Node:
    if not all(layouts.is_getitem(node) for node in (weights, ids)):
        raise No(f"router weights are made by {describe(weights)}: is moe_router disabled?")
    router, other = args(weights)[0], args(ids)[0]
    if router is not other or not is_call(router, glm.moe_router.default):
        raise No(f"router weights are made by {describe(router)}: is moe_router disabled?")
    if (args(weights)[1], args(ids)[1]) != (0, 1):
        raise No("router weights and ids are swapped")
    if len(_users(weights)) > 1 or len(_users(ids)) > 1:
        raise No("the router's choice is read elsewhere, too")
    return router


def _reader(node: fx.Node) -> fx.Node:
    """Who reads a value, also through views: one."""
    while True:
        users = _users(node)
        if len(users) != 1:
            raise No(f"{describe(node)} is read by {len(users)} nodes, expected one")
        (user,) = users
        if not is_call(user, *RESHAPES):
            return user
        node = user


def _other(total: fx.Node, experts: fx.Node) -> fx.Node:
    """The linear that is added to the experts."""
    if not _is_addition(total):
        raise No(f"what the experts give is read by {describe(total)}, expected an addition")
    others = [in_order(a) for a in args(total) if in_order(a) is not experts]
    if len(others) != 1 or not is_call(others[0], glm.bf16_linear.default):
        raise No(f"a linear is expected beside the experts, found {describe(args(total)[1])}")
    if (reader := _reader(others[0])) is not total:
        raise No(f"{describe(others[0])} is read by {describe(reader)}")
    return others[0]


def _is_addition(node: fx.Node) -> bool:
    """Whether a node adds two bf16 tensors of one shape."""
    if not is_call(node, aten.add.Tensor) or node.kwargs or len(args(node)) != 2:
        return False
    if not all(isinstance(a, fx.Node) for a in args(node)):
        return False
    return all(_is_alike(a, node) and layouts.dtype_of(a) == torch.bfloat16 for a in args(node))


def _is_alike(node: fx.Node, other: fx.Node) -> bool:
    """Whether two values have one shape."""
    shape, other_shape = layouts.shape_of(node), layouts.shape_of(other)
    return len(shape) == len(other_shape) and all(map(is_same, shape, other_shape))


def _swiglu_input(hidden: fx.Node) -> fx.Node:
    """The merged linear of silu(first half) * second half."""
    product = in_order(hidden)
    if (found := canonical.swiglu(product)) is None:
        raise No(f"silu(gate) * up is expected, found {describe(product)}")
    gate, up = (last_dim_slice(part) for part in found)
    merged, width = gate.source, gate.length
    if not is_call(merged, glm.merged_linear.default) or up.source is not merged:
        raise No("gate and up are not one linear: is merge_linears disabled?")
    is_halves = (gate.start, gate.step, up.start, up.step) == (0, 1, width, 1)
    if not is_halves or layouts.shape_of(merged)[-1] != 2 * width:
        raise No("silu is expected of the gate, the first half")
    return merged


def _residual_of(total: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """(the addition behind a sum, what it adds), if that alone reads the sum, in its own shape."""
    try:
        reader = _reader(total)
    except No:
        return None
    if not _is_addition(reader) or not _is_alike(reader, total):
        return None
    others = [a for a in args(reader) if in_order(a) is not total]
    return (reader, others[0]) if len(others) == 1 else None


def _replace(graph: fx.Graph, layer: _Layer) -> None:
    build = Builder(graph, layer.last, layer.last)
    residual = layer.residual
    if residual is not None:
        residual = build.view(residual, [-1, layouts.shape_of(layer.shared[2])[0]])
    x, norm_weight, eps = layer.x, None, 0.0
    if layer.norm is not None:
        x = build.view(layer.norm.x, [-1, layouts.shape_of(layer.shared[2])[0]])
        norm_weight, eps = layer.norm.weight, layer.norm.eps
    weight, bias, top_k, normalize, scale = layer.router
    call = build.call(
        glm.moe_layer.default,
        x,
        weight,
        bias,
        top_k,
        normalize,
        scale,
        *layer.experts,
        *layer.shared,
        norm_weight,
        eps,
        residual,
        "",
    )
    # In the shape of the sum: sizes may be symbolic, and the views of the experts have them.
    for step in canonical.peel(layer.routed).chain:
        call = build.call(step.target, call, *args(step)[1:], **step.kwargs)
    layer.last.replace_all_uses_with(call)
    refresh(graph, build.made)
    erase_dead(graph, [layer.last])
