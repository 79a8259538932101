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

from typing import Any

import torch
from torch import fx

import glm_compile.ops  # noqa: F401  (registers the ops)
from glm_compile.fx_passes._dynamo_graph import example_value, insert_call, op_name
from glm_compile.fx_passes.base import Declined, No, PassResult
from glm_compile.fx_passes.moe_templates import Match, erase, is_size, module_calls
from glm_compile.ops.moe import DTYPES

EXPERTS_CLASS = "GlmMoeDsaExperts"
# `last` is E - 1, `dtype` x's; see `moe_templates`.
_GROUPED = """
    flat_weights = reshape(weights, _)
    flat_ids = reshape(ids, _)
    sorting = sort(flat_ids)
    sorted_ids = getitem(sorting, 0)
    order = getitem(sorting, 1)
    token = floordiv|floor_divide(order, K)
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
    for path, nodes in module_calls(graph, EXPERTS_CLASS):
        try:
            match = _match(nodes)
        except No as no:
            result.declined.append(Declined(path, str(no)))
            continue
        last = match.nodes["result"]
        inputs = (*(match.nodes[name] for name in _INPUTS), "")
        with graph.inserting_before(last):
            call = insert_call(graph, torch.ops.glm.moe_experts.default, inputs, last)
        last.replace_all_uses_with(call)
        erase(graph, nodes)
        result.num_matches += 1
        result.matched.append(path)
    if result.num_matches:
        graph_module.recompile()
    return result


def _match(nodes: list[fx.Node]) -> Match:
    """The call's inputs and result, if it computes what transformers writes."""
    first = next((node for node in nodes if not is_size(node)), None)
    is_batched = first is not None and op_name(first) == "repeat_interleave"
    match = Match("experts", _BATCHED if is_batched else _GROUPED, _INPUTS, ("result",), nodes)
    values: list[Any] = [example_value(match.nodes[name]) for name in _INPUTS]
    x, weights, ids, gate_up, down = values
    if x.dim() != 2 or ids.dim() != 2 or weights.dim() != 2 or gate_up.dim() != 3:
        raise No("expected tokens [M, C], router weights and ids [M, K], weights [E, 2 I, C]")
    num_experts = gate_up.shape[0]
    wanted = {"K": ids.shape[1], "E": num_experts, "last": num_experts - 1, "dtype": x.dtype}
    for name, constant in match.constants.items():
        if constant != wanted[name]:
            raise No(f"expected {name} = {wanted[name]} in the computation, found {constant}")
    if not x.dtype == gate_up.dtype == down.dtype or x.dtype not in DTYPES:
        raise No(
            f"expected one dtype of float32, float16 and bfloat16, found hidden states "
            f"{x.dtype}, gate_up_proj {gate_up.dtype}, down_proj {down.dtype}"
        )
    if (dtype := example_value(match.nodes["gates_and_ups"]).dtype) != x.dtype:
        raise No(f"products are computed in {dtype}, expected {x.dtype}: is autocast on?")
    if not weights.is_floating_point() or ids.dtype not in (torch.int32, torch.int64):
        raise No(f"router weights are {weights.dtype}, ids {ids.dtype}")
    return match
