"""Put `glm.moe_router` in place of transformers' router in a Dynamo graph. Exact tier.

Targets `GlmMoeDsaTopkRouter.forward` (models/glm_moe_dsa/modeling_glm_moe_dsa.py; 5.20 and 5.24
write the same) with one group of experts, as the release has it.

    fp32 linear -> sigmoid -> + bias -> group limits -> topk
                      -> gather at the chosen -> / sum -> * scale

    x, weight, bias -> glm.moe_router

Equal up to fp32 rounding. Of equal scores the lowest id is chosen, where torch's topk promises
nothing; the order of a token's experts may differ.

Declines several groups, logits or other inner results that are read elsewhere (a router loss), and
whatever departs from what transformers writes.

Shape legend: M tokens, C hidden size, E experts, K experts of a token.
"""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import fx

import glm_compile.ops  # noqa: F401  (registers the ops)
from glm_compile.fx_passes._dynamo_graph import (
    example_value,
    insert_call,
    op_name,
    specialize_module_floats,
)
from glm_compile.fx_passes.base import Declined, No, PassResult
from glm_compile.fx_passes.moe_templates import Match, erase, module_calls
from glm_compile.ops.moe import DTYPES

ROUTER_CLASS = "GlmMoeDsaTopkRouter"
_INPUTS = ("hidden", "weight", "bias")
_CHOICE = """
    x = view(hidden, -1, C)
    wide_x = type(x, float32)
    wide_weight = type(weight, float32)
    logits = linear(wide_x, wide_weight)
    scores = sigmoid(logits)
    biased = add(scores, bias)
    by_group = view(biased, -1, GROUPS, E)
    best_pairs = topk(by_group, 2, dim=-1)
    best_values = getitem(best_pairs, 0)
    group_scores = sum(best_values, dim=-1)
    best_groups = topk(group_scores, k=KEPT, dim=-1, sorted=False)
    group_ids = getitem(best_groups, 1)
    group_mask = zeros_like(group_scores)
    write = scatter_(group_mask, 1, group_ids, 1)
    column = unsqueeze(group_mask, -1)
    expanded = expand(column, -1, GROUPS, E)
    score_mask = reshape(expanded, -1, _)
    is_kept = bool(score_mask)
    is_out = invert(is_kept)
    limited = masked_fill(biased, is_out, -inf)
    chosen = topk(limited, k=K, dim=-1, sorted=False)
    ids = getitem(chosen, 1)
    weights = gather(scores, 1, ids)
"""
_NORMALIZED = """
    total = sum(weights, dim=-1, keepdim=True)
    divisor = add(total, 1e-20)
    normalized = itruediv|truediv|div_|div(weights, divisor)
    result = mul(normalized, scale)
"""
_DIVISIONS = ("itruediv", "truediv", "div_", "div")
_UNNORMALIZED = """
    result = mul(weights, scale)
"""


def moe_router(graph_module: fx.GraphModule) -> PassResult:
    """Replace the calls of routers by `glm.moe_router`, in place.

    Floats of modules that `dynamic=True` made symbolic are turned back into guarded constants first
    (`specialize_module_floats`), because the op's scale is one.
    """
    result = PassResult("moe_router")
    graph = graph_module.graph
    specialize_module_floats(graph_module)
    for path, nodes in module_calls(graph, ROUTER_CLASS):
        try:
            match = _match(nodes)
        except No as no:
            result.declined.append(Declined(path, str(no)))
            continue
        last, ids = match.nodes["result"], match.nodes["ids"]
        with graph.inserting_before(match.nodes["wide_x"]):
            call = insert_call(graph, torch.ops.glm.moe_router.default, _arguments(match), last)
            new_weights, new_ids = (
                insert_call(graph, operator.getitem, (call, i), last) for i in range(2)
            )
        last.replace_all_uses_with(new_weights)
        ids.replace_all_uses_with(new_ids)
        erase(graph, nodes)
        result.num_matches += 1
        result.matched.append(path)
    if result.num_matches:
        graph_module.recompile()
    return result


def _match(nodes: list[fx.Node]) -> Match:
    """The call's inputs and results, if it computes what transformers writes."""
    is_normalized = any(op_name(node) in _DIVISIONS for node in nodes)
    template = _CHOICE.rstrip() + (_NORMALIZED if is_normalized else _UNNORMALIZED)
    match = Match("router", template, _INPUTS, ("result", "ids"), nodes)
    constants = match.constants
    weight: Any = example_value(match.nodes["weight"])
    if constants["GROUPS"] != 1 or constants["KEPT"] != 1:
        raise No(
            f"n_group={constants['GROUPS']}, topk_group={constants['KEPT']}: experts in several "
            "groups are not supported"
        )
    if constants["E"] != weight.shape[0] or constants["C"] != weight.shape[1]:
        raise No(f"expected a weight [{constants['E']}, {constants['C']}], found {weight.shape}")
    for name in _INPUTS:
        value: Any = example_value(match.nodes[name])
        if value.dtype not in DTYPES:
            raise No(f"expected {name} in float32, float16 or bfloat16, found {value.dtype}")
    if (dtype := example_value(match.nodes["logits"]).dtype) != torch.float32:
        raise No(f"the logits are computed in {dtype}, expected torch.float32: is autocast on?")
    if isinstance(constants["scale"], fx.Node):
        raise No("the scaling factor of the weights is no constant")
    return match


def _arguments(match: Match) -> tuple[Any, ...]:
    nodes, constants = match.nodes, match.constants
    return (
        nodes["x"],
        nodes["weight"],
        nodes["bias"],
        constants["K"],
        "normalized" in nodes,
        float(constants["scale"]),
        "",
    )
