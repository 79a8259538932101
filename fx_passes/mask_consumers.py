"""Recognise who reads an attention mask in transformers' code: attention calls and indexers."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes._dynamo_graph import (
    argument,
    dtype_of,
    example_value,
    is_one,
    known_shape,
    op_name,
    shape_of,
)
from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.index_algebra import TRUE, Bool, Two
from glm_compile.fx_passes.index_evaluation import Evaluator


def is_indexer_topk(node: fx.Node) -> bool:
    """Top-k over [B, S, T] of which only the indices are used; the router's differ in both."""
    if op_name(node) != "topk" or not node.args or not isinstance(node.args[0], fx.Node):
        return False
    if len(known_shape(node.args[0])) != 3 or not node.users:
        return False
    return all(op_name(user) == "getitem" and user.args[1] == 1 for user in node.users)


def split_selection(evaluator: Evaluator, mask: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(mask of the model, selected positions) of an attention call's mask."""
    name = op_name(mask)
    if name in ("and_", "logical_and", "bitwise_and", "mul"):
        for base, other in (mask.args[:2], mask.args[1::-1]):
            if isinstance(base, fx.Node) and isinstance(other, fx.Node):
                selection = _selected(evaluator, other, True)
                if selection is not None:
                    return base, selection
    elif name == "masked_fill":
        base, other, fill = mask.args[0], mask.args[1], argument(mask, 2, "value")
        if isinstance(base, fx.Node) and isinstance(other, fx.Node):
            selection = _selected(evaluator, other, False)
            minimum = torch.finfo(dtype_of(base) or torch.float32).min
            if selection is not None and isinstance(fill, float) and fill <= minimum:
                return base, selection
    raise No("the attention mask is not a mask combined with selected positions")


def _selected(evaluator: Evaluator, node: fx.Node, positive: bool) -> fx.Node | None:
    """Positions that `node` marks with `positive` and all others with the opposite, or None."""
    while True:
        name = op_name(node)
        if name in ("invert", "logical_not", "bitwise_not"):
            positive = not positive
        elif name != "unsqueeze" or node.args[1:] != (1,):
            break
        if not isinstance(node.args[0], fx.Node):
            return None
        node = node.args[0]
    if name != "scatter" or len(known_shape(node)) != 3:
        return None
    source, dim, index, fill = (
        argument(node, i, key) for i, key in enumerate(("input", "dim", "index", "value"))
    )
    if dim not in (-1, 2) or fill is not positive or not isinstance(source, fx.Node):
        return None
    background = evaluator.value(source)
    if not isinstance(background, Bool) or (background == TRUE) == positive:
        return None
    if not (background == TRUE or background.is_false):
        return None
    # The selection is what the indexer returned, int32: only the cast for scatter is peeled.
    while isinstance(index, fx.Node) and op_name(index) in ("long", "to"):
        if dtype_of(index) != torch.int64:
            break
        index = index.args[0]
    return index if isinstance(index, fx.Node) else None


def split_scores(evaluator: Evaluator, masked: fx.Node) -> tuple[fx.Node, fx.Node]:
    """(raw scores, mask) of the input of an indexer's top-k."""
    name = op_name(masked)
    if name == "masked_fill":
        scores, mask, fill = masked.args[0], masked.args[1], argument(masked, 2, "value")
        if isinstance(mask, fx.Node) and op_name(mask) in ("invert", "logical_not", "bitwise_not"):
            mask = mask.args[0]
            if isinstance(scores, fx.Node) and isinstance(mask, fx.Node) and _is_lowest(fill):
                return scores, mask
        raise No("the scores are not filled with -inf where the mask is false")
    if name == "where" and masked.op == "call_function" and _is_lowest(masked.args[2]):
        mask, scores = masked.args[:2]
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node):
            return scores, mask
    if name == "add":
        scores, mask = masked.args[:2]
        if isinstance(scores, fx.Node) and isinstance(mask, fx.Node):
            if isinstance(evaluator.value(scores), Two):
                scores, mask = mask, scores
            return scores, mask
    raise No(f"the indexer's scores go into top-k without a mask (made by {name})")


def _is_lowest(fill: Any) -> bool:
    return isinstance(fill, float) and fill <= torch.finfo(torch.float32).min


def first_head(mask: fx.Node) -> fx.Node:
    """[B, 1, S, T] of a mask that the indexer reads as [B, S, T]."""
    source = mask.args[0] if mask.args else None
    if not isinstance(source, fx.Node) or len(known_shape(source)) != 4:
        return mask
    if not is_one(known_shape(source)[1]):
        return mask
    name = op_name(mask)
    if name == "getitem":
        index = mask.args[1]
        full = slice(None)
        if (
            isinstance(index, tuple)
            and index[:2] == (full, 0)
            and all(i == full for i in index[2:])
        ):
            return source
    if name in ("select", "squeeze") and mask.args[1:] in ((1, 0), (1,)):
        return source
    return mask


def condition_of(mask: fx.Node) -> fx.Node | None:
    """The bool tensor that a float mask was made of, if it has the same shape."""
    if op_name(mask) == "where" and mask.op == "call_function":
        cond = mask.args[0]
        if isinstance(cond, fx.Node) and str(shape_of(cond)) == str(shape_of(mask)):
            return cond
    return None


def is_int32_cast(node: fx.Node) -> bool:
    return op_name(node) in ("to", "int", "type") and dtype_of(node) == torch.int32


def takes_short_rows(user: fx.Node, selection: fx.Node) -> bool:
    """Whether a user of a selection understands -1 as no position."""
    return (
        user.target is torch.ops.glm.indexed_attention.default and user.args.index(selection) == 3
    )


def constant_k(k: Any) -> int:
    """`k` as an int; a symbolic one is bounded by index_topk, which is all that matters."""
    if isinstance(k, int):
        return k
    value = example_value(k) if isinstance(k, fx.Node) else k
    if isinstance(value, int):
        return value
    if isinstance(value, torch.SymInt):
        upper = value.node.shape_env.bound_sympy(value.node.expr).upper
        if upper.is_finite and upper < math.inf:
            return int(upper)
    raise No(f"the number of selected keys is not constant: {k}")


def reads_pages(scores: fx.Node) -> bool:
    """Whether an indexer, all in one module, scores keys that it reads from pages."""
    glm, module = torch.ops.glm, _module_of(scores)
    front, seen = [scores], set[fx.Node]()
    while front:
        node = front.pop()
        if node.target in (glm.paged_gather.default, glm.paged_gather_fp8.default):
            return True
        for source in node.all_input_nodes:
            if source not in seen and _module_of(source) == module:
                seen.add(source)
                front.append(source)
    return False


def _module_of(node: fx.Node) -> str | None:
    """Key of the innermost module that a node comes from."""
    return next(reversed(node.meta.get("nn_module_stack") or {}), None)
