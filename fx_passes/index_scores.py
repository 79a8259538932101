"""Canonical reading of the indexer: its scores, and the cache that keeps its keys.

Shape legend: B batch, S query tokens, T cached tokens, H index heads, D index head dim.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.canonical import (
    Contraction,
    Peeled,
    contraction,
    is_cast,
    is_view,
    multiplication,
    number,
    pair,
    peel,
)
from glm_compile.fx_passes.layouts import (
    Layout,
    args,
    axes,
    describe,
    dtype_of,
    follow,
    is_call,
    is_same,
    named_args,
    names,
    regroup,
    shape_of,
    strip_repeats,
)

aten = torch.ops.aten
_RELUS = frozenset((aten.relu.default, aten.clamp_min.default, aten.maximum.default))


@dataclass(frozen=True)
class KeyRead:
    """Where the scores take their keys from.

    Attributes:
        kind: `contiguous`, `paged` or `paged_fp8`.
        keys: the [B, T, D] node (contiguous), or the pages.
        block_table, max_len: of a paged cache.
    """

    kind: str
    keys: fx.Node
    block_table: fx.Node | None = None
    max_len: Any = None


def key_read(node: fx.Node) -> KeyRead:
    """How the index keys [B, T, D] in `node` are read."""
    glm = torch.ops.glm
    for kind, op in (("paged", glm.paged_gather), ("paged_fp8", glm.paged_gather_fp8)):
        if is_call(node, op.default):
            pages, block_table, max_len = args(node)[:3]
            return KeyRead(kind, pages, block_table, max_len)
    return KeyRead("contiguous", node)


@dataclass(frozen=True)
class KeyStore:
    """The write of the step's new keys.

    Attributes:
        kind: `index_copy`, `cat`, `paged_write`, `paged_write_fp8` or `none`.
        node: the node that stores; for `none` the keys themselves.
        new: the new keys as they are handed over, [B, S, D].
    """

    kind: str
    node: fx.Node
    new: fx.Node


def key_store(keys: fx.Node) -> KeyStore:
    """The store behind keys or pages that are read; a node that stores nothing is the new keys."""
    if is_call(keys, aten.index_copy.default):
        return KeyStore("index_copy", keys, args(keys)[3])
    if is_call(keys, aten.index_put.default, aten._unsafe_index_put.default):
        if named_args(keys).get("accumulate"):
            raise No(f"the index keys are added into the cache by {describe(keys)}, not stored")
        return KeyStore("index_copy", keys, args(keys)[2])
    if is_call(keys, aten.slice_scatter.default):
        return KeyStore("index_copy", keys, args(keys)[1])
    if is_call(keys, aten.cat.default):
        tensors = named_args(keys)["tensors"]
        if named_args(keys)["dim"] % len(shape_of(keys)) == 1 and len(tensors) == 2:
            return KeyStore("cat", keys, tensors[1])
    if is_call(keys, operator.getitem):
        write = functionalized_write(keys)
        if write is not None:
            op, arguments = write
            name = op._schema.name.removeprefix("glm::")
            if name in ("paged_write", "paged_write_fp8"):
                new = arguments["new_BSX" if name == "paged_write" else "new_BSD"]
                return KeyStore(name, args(keys)[0], new)
    if keys.op == "placeholder":
        raise No(f"the index keys are read from {keys.name} and this step stores none")
    return KeyStore("none", keys, keys)


def row_store(store: KeyStore) -> tuple[fx.Node, fx.Node] | None:
    """(cache [B, T, D], position of the step's first key) of a store of consecutive rows.

    The position is an integer tensor of one element. None for every other way to store.
    """
    node = store.node
    if is_call(node, aten.index_copy.default) and args(node)[1] == 1:
        index = args(node)[2]
    elif is_call(node, aten.index_put.default, aten._unsafe_index_put.default):
        indices = args(node)[1]
        if len(indices) != 2 or indices[0] is not None:
            return None
        index = indices[1]
    else:
        return None
    for steps, first in pair(index, aten.add.Tensor):
        is_steps = _is_range(steps, shape_of(store.new)[1])
        if is_steps and isinstance(first, fx.Node) and shape_of(first) in ((), (1,)):
            return args(node)[0], first
    return None


def _is_range(node: Any, length: Any) -> bool:
    """Whether a node is 0, 1, ..., length - 1."""
    if is_call(node, torch.ops.prims.iota.default):
        start_and_step = (node.kwargs.get("start"), node.kwargs.get("step"))
    elif is_call(node, aten.arange.default):
        start_and_step = (0, 1)
    elif is_call(node, aten.arange.start, aten.arange.start_step):
        arguments = named_args(node)
        start_and_step = (arguments["start"], arguments.get("step", 1))
    else:
        return False
    return start_and_step == (0, 1) and is_same(shape_of(node)[0], length)


def functionalized_write(node: fx.Node) -> tuple[Any, dict[str, Any]] | None:
    """(op, arguments) of the functionalized op whose first mutated buffer `node` is."""
    if not is_call(node, operator.getitem):
        return None
    call, index = args(node)
    higher_order = torch.ops.higher_order
    if not is_call(call, higher_order.auto_functionalized_v2, higher_order.auto_functionalized):
        return None
    op = args(call)[0]
    num_returns = len(op._schema.returns)
    if index != max(num_returns, 1):
        return None
    return op, dict(call.kwargs)


@dataclass(frozen=True)
class IndexScores:
    """sum over heads of weights * relu(q . k * scale), [B, S, T] fp32.

    Attributes:
        node: the scores.
        q: [B, S, H, D] in the model's dtype, `k` [B, T, D] in the same, `weights` [B, S, H] fp32;
            each possibly as a view of another shape with the axes in this order.
        scale: of q . k.
        interior: the nodes in between that hold scores.
        sizes: of B, S, H, D, T.
    """

    node: fx.Node
    q: fx.Node
    k: fx.Node
    weights: fx.Node
    scale: float
    interior: tuple[fx.Node, ...]
    sizes: dict[str, Any]


def index_scores(node: fx.Node) -> IndexScores:
    """Read the index scores that end in `node` [B, S, T].

    Raises:
        No: with the first thing that is not as in the exact tier.
    """
    batch, tokens, num_keys = _three(node)
    outer = peel(node, casts=True, factors=True)
    if len(outer.casts) > 1:
        raise No(f"index scores are rounded to {outer.casts[-1]} before the selection")
    heads = contraction(outer.source)
    if heads is None:
        raise No(f"expected the sum over index heads, found {describe(outer.source)}")
    weights_node, relu_node, after = _relu_operand(heads)
    relu_source = args(relu_node)[0]
    before = peel(relu_source, casts=True, factors=True)
    products = contraction(before.source)
    if products is None:
        raise No(f"expected relu(q . k * scale), found relu of {describe(before.source)}")
    scale = before.factor * after.factor * outer.factor
    if before.factor <= 0:
        raise No(
            f"q . k is multiplied by {before.factor} before the ReLU, expected a positive scale"
        )
    if after.factor * outer.factor <= 0:
        raise No(f"index scores are multiplied by {after.factor * outer.factor} after the ReLU")
    for name, stage in (("products q . k", before), ("ReLU output", after)):
        if set(stage.casts) != {torch.float32}:
            raise No(f"index scores: {name} in {stage.casts[0]}, expected float32")

    weights = peel(weights_node)
    if dtype_of(weights.source) != torch.float32:
        raise No(f"head weights are {dtype_of(weights.source)}, expected float32 (IDX-2)")
    found = None
    reasons = []
    for q_node, k_node in ((products.lhs, products.rhs), (products.rhs, products.lhs)):
        try:
            found = _score_operands(
                node, q_node, k_node, weights, (batch, tokens, num_keys), heads, products
            )
            break
        except No as no:
            reasons.append(str(no))
    if found is None:
        raise No(reasons[0])
    q, k, sizes = found
    chain = (*outer.chain, *heads.nodes, *after.chain, relu_node, *before.chain, *products.nodes)
    interior = tuple(n for n in chain if n is not node)
    ends = (torch.ops.glm.masked_topk.default, aten.sym_size.int)
    for inner in (*interior, node):
        for user in inner.users:
            is_end = inner is node and is_call(user, *ends)
            if user is not node and user not in interior and not is_end:
                raise No(f"index scores ({inner.name}) are also read by {describe(user)}")
    return IndexScores(node, q, k, weights.source, scale, interior, sizes)


def _three(node: fx.Node) -> tuple[Any, Any, Any]:
    shape = shape_of(node)
    if len(shape) != 3:
        raise No(f"index scores have shape {list(shape)}, expected [batch, tokens, keys]")
    return shape[0], shape[1], shape[2]


def _relu_operand(heads: Contraction) -> tuple[fx.Node, fx.Node, Peeled]:
    """(the other operand, relu node, what lies between the relu and the sum over heads)."""
    for scores, weights in ((heads.rhs, heads.lhs), (heads.lhs, heads.rhs)):
        peeled = peel(scores, casts=True, factors=True)
        source = peeled.source
        if not is_call(source, *_RELUS):
            continue
        if source.target is not aten.relu.default and number(args(source)[1]) != 0:
            continue
        return weights, source, peeled
    raise No("no ReLU between the products q . k and the head weights")


def _score_operands(
    node: fx.Node,
    q_node: fx.Node,
    k_node: fx.Node,
    weights: Peeled,
    outer_sizes: tuple[Any, Any, Any],
    heads: Contraction,
    products: Contraction,
) -> tuple[fx.Node, fx.Node, dict[str, Any]]:
    """(q, k, sizes) if the three sources' axes come out as [B, S, T]; checks the casts."""
    batch, tokens, num_keys = outer_sizes
    q, k = _cast_source(q_node, "q"), _cast_source(k_node, "k")
    head_dim, num_heads = shape_of(k.source)[-1], shape_of(weights.source)[-1]
    if dtype_of(q.source) != dtype_of(k.source):
        raise No(
            f"index keys are {dtype_of(k.source)} and queries {dtype_of(q.source)}, "
            "expected one dtype"
        )
    sizes = {"B": batch, "S": tokens, "H": num_heads, "D": head_dim, "T": num_keys}
    known: dict[fx.Node, Layout] = {}
    for name, source, letters in (
        ("q", q.source, "BSHD"),
        ("k", k.source, "BTD"),
        ("head weights", weights.source, "BSH"),
    ):
        layout = regroup(axes(**{a: sizes[a] for a in letters}), shape_of(source))
        if layout is None:
            wanted = [sizes[a] for a in letters]
            raise No(f"index {name} has shape {list(shape_of(source))}, expected {wanted}")
        known[source] = layout
    layout = _propagate(node, known, {heads.node: heads, products.node: products})
    if layout is None or names(strip_repeats(layout)) != names(axes(B=batch, S=tokens, T=num_keys)):
        raise No("index scores: views between q, k and the selection mix up rows, heads or keys")
    return q.source, k.source, sizes


def _cast_source(node: fx.Node, what: str) -> Peeled:
    """Peel views and the cast to fp32; stop there, so that roundings stay in the graph."""
    if dtype_of(node) != torch.float32:
        raise No(f"q . k is computed in {dtype_of(node)}, expected float32 ({what}.float())")
    seen = 0

    def stop(current: fx.Node) -> bool:
        nonlocal seen
        if is_cast(current) and dtype_of(current) != dtype_of(args(current)[0]):
            seen += 1
            return seen > 1
        return False

    return peel(node, casts=True, stop=stop)


def _propagate(
    node: fx.Node, known: dict[fx.Node, Layout], products: dict[fx.Node, Contraction]
) -> Layout | None:
    if node in known:
        return known[node]
    if node in products:
        product = products[node]
        lhs = _propagate(product.lhs, known, products)
        rhs = _propagate(product.rhs, known, products)
        if lhs is None or rhs is None:
            return None
        combined = product.layout(lhs, rhs)
        return combined[0] if combined is not None else None
    if not isinstance(node, fx.Node) or node.op != "call_function":
        return None
    scaled = multiplication(node)
    source = scaled[0] if scaled is not None else args(node)[0]
    layout = _propagate(source, known, products)
    if layout is None:
        return None
    return follow(layout, node) if is_view(node) else layout
