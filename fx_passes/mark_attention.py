"""Put `glm.attention` in place of transformers' attention calls in a Dynamo graph. Exact tier.

Targets, in transformers 5.20 and 5.24, the calls that `GlmMoeDsaAttention.forward` makes through
`ALL_ATTENTION_FUNCTIONS`: `sdpa_attention_forward` (integrations/sdpa_attention.py) and
`eager_attention_forward` (models/glm_moe_dsa/modeling_glm_moe_dsa.py).

    scaled_dot_product_attention(q, k, v, mask, scale)                   -> glm.attention

    matmul(q, k^T) -> * scale -> + mask -> softmax(fp32) -> to -> dropout
        -> matmul(., v)                                                  -> glm.attention(eager)

ATen has neither: the first is decomposed by dispatch, differently by device and head size, and the
second is a dozen nodes. As one opaque op the call survives until `mask.prove_mask` replaces it, and
computes the same numbers where it does not.

Declines when the attention weights have another user (`output_attentions=True`), with dropout,
`is_causal`, grouped heads, a scale that is no constant, another order of operations, or operands
and results of unequal dtypes (autocast).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

import glm_compile.ops  # noqa: F401  (registers the ops)
from glm_compile.fx_passes._dynamo_graph import (
    WriteLog,
    argument,
    eliminate_dead_code,
    example_value,
    insert_call,
    op_name,
    shape_of,
    specialize_module_floats,
)
from glm_compile.fx_passes.base import Declined, No, PassResult, where

_KEPT_DIMS = ((2, 3), (3, 2), (-1, -2), (-2, -1), (2, -1), (-1, 2), (3, -2), (-2, 3))


def mark_attention(graph_module: fx.GraphModule) -> PassResult:
    """Replace attention calls by `glm.attention`, in place.

    Floats of modules that `dynamic=True` made symbolic are turned back into guarded constants first
    (`specialize_module_floats`), because an op's scale is one.
    """
    result = PassResult("attention")
    graph = graph_module.graph
    specialize_module_floats(graph_module)
    writes = WriteLog(graph)
    for node in list(graph.nodes):
        is_sdpa = node.target is torch._C._nn.scaled_dot_product_attention
        if not is_sdpa and not _is_attention_softmax(node):
            continue
        place = where(node)
        try:
            last, arguments = _match_sdpa(node) if is_sdpa else _match_eager(node, writes)
            _check_dtypes(*arguments[:3], last)
        except No as no:
            result.declined.append(Declined(place, str(no)))
            continue
        with graph.inserting_before(last):
            marker = insert_call(graph, torch.ops.glm.attention.default, arguments, last)
        last.replace_all_uses_with(marker)
        graph.erase_node(last)
        result.num_matches += 1
        result.matched.append(place)
    if result.num_matches:
        eliminate_dead_code(graph)
        graph_module.recompile()
    return result


def _match_sdpa(node: fx.Node) -> tuple[fx.Node, tuple[Any, ...]]:
    q, k, v = (argument(node, i, name) for i, name in enumerate(("query", "key", "value")))
    mask = argument(node, 3, "attn_mask")
    if argument(node, 4, "dropout_p", 0.0) != 0:
        raise No("attention dropout is on: call model.eval()")
    if argument(node, 5, "is_causal", False) is not False:
        raise No("is_causal=True instead of a mask: the model builds its mask for a cache")
    if argument(node, 7, "enable_gqa", False) is not False:
        raise No("enable_gqa=True: fewer key heads than query heads")
    _check_heads(q, k, v)
    scale = argument(node, 6, "scale")
    if scale is None:
        head_dim = (shape_of(q) or (None,))[-1]
        scale = 1.0 / math.sqrt(head_dim) if isinstance(head_dim, int) else None
    return node, (q, k, v, mask, _constant_scale(scale), False)


def _is_attention_softmax(node: fx.Node) -> bool:
    """A softmax over [B, A, S, T] that two matmuls could surround."""
    return op_name(node) == "softmax" and len(shape_of(node) or ()) == 4


def _match_eager(node: fx.Node, writes: WriteLog) -> tuple[fx.Node, tuple[Any, ...]]:
    if argument(node, 1, "dim") not in (-1, 3):
        raise No(f"softmax over axis {argument(node, 1, 'dim')} instead of the keys")
    if argument(node, 3, "dtype") is not torch.float32:
        raise No(f"softmax in {argument(node, 3, 'dtype')}, expected torch.float32")
    scores = node.args[0]
    mask = None
    if op_name(_expect_node(scores)) == "add":
        scores, mask = scores.args[:2]  # type: ignore[union-attr]
        if _is_scaled_product(mask):
            scores, mask = mask, scores
        if argument(node.args[0], 2, "alpha", 1) != 1:  # type: ignore[arg-type]
            raise No("mask added with a factor")
        if not isinstance(mask, fx.Node):
            raise No("a number is added to the scores instead of a mask")
    if not _is_scaled_product(scores):
        raise No("softmax of something else than matmul(q, k^T) * scale + mask")
    product, scale = scores.args[:2]  # type: ignore[union-attr]
    if not isinstance(product, fx.Node) or op_name(product) != "matmul":
        product, scale = scale, product
    q, k_transposed = product.args[:2]  # type: ignore[union-attr]
    if (
        op_name(_expect_node(k_transposed)) != "transpose"
        or tuple(
            k_transposed.args[1:]  # type: ignore[union-attr]
        )
        not in _KEPT_DIMS
    ):
        raise No("keys of the first matmul are not transposed")
    k = k_transposed.args[0]  # type: ignore[union-attr]

    weights = node
    if (cast := _only_user(weights)) is not None and op_name(cast) in ("to", "type_as"):
        weights = cast
    if (drop := _only_user(weights)) is not None and op_name(drop) == "dropout":
        if argument(drop, 1, "p", 0.5) != 0 and argument(drop, 2, "training", True) is not False:
            raise No("attention dropout is on: call model.eval()")
        weights = drop
    last = _only_user(weights)
    if last is None:
        raise No("the attention weights have another user (output_attentions=True)")
    if op_name(last) != "matmul" or last.args[0] is not weights:
        raise No(f"the attention weights go into {op_name(last)} instead of matmul with v")
    v = last.args[1]
    _check_heads(q, k, v)
    q_value, weights_value = example_value(_expect_node(q)), example_value(weights)
    if weights_value.dtype != q_value.dtype:
        raise No(f"attention weights in {weights_value.dtype}, queries in {q_value.dtype}")
    for inner in (product, scores, node.args[0]):
        if len(inner.users) > 1:  # type: ignore[union-attr]
            raise No(f"the scores before softmax have another user ({inner})")
    first = writes.order[product]  # type: ignore[index]
    for read in (q, k, mask):
        if isinstance(read, fx.Node):
            writer = writes.writer_between(read, first, writes.order[last])
            if writer is not None:
                raise No(f"{read} is written in place by {writer} inside the attention")
    return last, (q, k, v, mask, _constant_scale(scale), True)


def _is_scaled_product(value: Any) -> bool:
    if not isinstance(value, fx.Node) or op_name(value) != "mul":
        return False
    return any(isinstance(a, fx.Node) and op_name(a) == "matmul" for a in value.args)


def _check_heads(q: Any, k: Any, v: Any) -> None:
    shapes = [shape_of(t) if isinstance(t, fx.Node) else None for t in (q, k, v)]
    if any(shape is None or len(shape) != 4 for shape in shapes):
        raise No("q, k and v are not [batch, heads, tokens, dim]")
    heads = [str(shape[1]) for shape in shapes if shape is not None]
    if len(set(heads)) != 1:
        raise No(f"heads of q, k and v differ: {', '.join(heads)}")


def _check_dtypes(*nodes: fx.Node) -> None:
    """q, k, v and the result: autocast would cast them, and does not know the op."""
    dtypes = [example_value(node).dtype for node in nodes]
    if len(set(dtypes)) > 1:
        found = ", ".join(str(dtype) for dtype in dtypes)
        raise No(f"q, k, v and the result are {found}, expected one dtype: is autocast on?")


def _constant_scale(scale: Any) -> float:
    if isinstance(scale, fx.Node) or not isinstance(scale, int | float):
        raise No(f"the scale of the attention is no constant: {scale}")
    return float(scale)


def _only_user(node: fx.Node) -> fx.Node | None:
    users = list(node.users)
    return users[0] if len(users) == 1 and users[0].op != "output" else None


def _expect_node(value: Any) -> fx.Node:
    if not isinstance(value, fx.Node):
        raise No(f"expected a tensor, got {value!r}")
    return value
