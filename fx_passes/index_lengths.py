"""How many keys the indexer's rows see, read from the nodes that compute it.

Shape legend: B batch, S query tokens of the step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.canonical import is_cast
from glm_compile.fx_passes.layouts import (
    PERMUTES,
    RESHAPES,
    Axis,
    Layout,
    args,
    axes,
    dtype_of,
    follow,
    is_call,
    is_same,
    named_args,
    shape_of,
    strip_repeats,
)

aten = torch.ops.aten
_INTEGERS = (torch.int32, torch.int64)


@dataclass(frozen=True)
class _Sum:
    """Integers that are a constant plus tensors, each with the axes that it varies along."""

    constant: int
    terms: tuple[tuple[fx.Node, Layout], ...]


def cached_lengths(lengths: fx.Node) -> fx.Node | None:
    """The tokens cached before the step, one number a sequence, behind a causal step's lengths.

    Args:
        lengths: [B, S].

    Returns:
        The node `cached`, of B elements, with lengths[b, s] = cached[b] + s + 1; None for every
        other form.
    """
    try:
        found = _sum(lengths)
    except No:
        return None
    batch, tokens = shape_of(lengths)
    cached: list[fx.Node] = []
    num_ranges = 0
    for node, layout in found.terms:
        layout = strip_repeats(layout)
        if _is_range(node) and _is_along(layout, axes(B=1, S=tokens)):
            num_ranges += 1
        elif _is_along(layout, axes(B=batch, S=1)):
            cached.append(node)
        else:
            return None
    is_step = num_ranges == 1 or is_same(tokens, 1)
    return cached[0] if found.constant == 1 and len(cached) == 1 and is_step else None


def _is_along(layout: Layout, wanted: Layout) -> bool:
    """Whether the axes lie in the same dimensions with the same sizes, whatever their names."""
    return len(layout) == len(wanted) and all(
        len(a) == len(b) and all(is_same(x.size, y.size) for x, y in zip(a, b))
        for a, b in zip(layout, wanted)
    )


def _sum(node: fx.Node) -> _Sum:
    if dtype_of(node) not in _INTEGERS:
        raise No("not integers")
    if is_call(node, aten.add.Tensor):
        return _added(node)
    if is_call(node, torch.ops.prims.iota.default, aten.arange.default):
        return _Sum(0, ((node, axes(S=shape_of(node)[0])),))
    # What is left of the steps of one token.
    if is_call(node, aten.zeros.default):
        return _Sum(0, ())
    is_view = is_call(node, *RESHAPES, *PERMUTES, aten.expand.default)
    if is_view or is_cast(node):
        inner = _sum(args(node)[0])
        if not is_view:
            return inner
        return _Sum(inner.constant, tuple((n, _known(follow(a, node))) for n, a in inner.terms))
    if is_call(node, aten.select.int):
        source, dim = args(node)[:2]
        if not is_same(shape_of(source)[dim], 1):
            raise No("one of several")
        inner = _sum(source)
        dim %= len(shape_of(source))
        return _Sum(inner.constant, tuple((n, a[:dim] + a[dim + 1 :]) for n, a in inner.terms))
    shape = shape_of(node)
    if len(shape) > 1:
        raise No("not a number a sequence")
    return _Sum(0, ((node, axes(B=shape[0]) if shape else ()),))


def _added(node: fx.Node) -> _Sum:
    operands = named_args(node)
    if operands["alpha"] != 1:
        raise No("a multiple")
    constant = 0
    terms: list[tuple[fx.Node, Layout]] = []
    for operand in (operands["self"], operands["other"]):
        if isinstance(operand, int):
            constant += operand
            continue
        if not isinstance(operand, fx.Node):
            raise No("not integers")
        inner = _sum(operand)
        constant += inner.constant
        terms += [(n, _broadcast(a, shape_of(node))) for n, a in inner.terms]
    return _Sum(constant, tuple(terms))


def _broadcast(layout: Layout, shape: tuple[Any, ...]) -> Layout:
    """Layout of an operand in the shape of the result."""
    missing = len(shape) - len(layout)
    padded = ((),) * missing + layout
    return tuple(
        dim if dim or is_same(size, 1) else (Axis("*", size),) for dim, size in zip(padded, shape)
    )


def _known(layout: Layout | None) -> Layout:
    if layout is None:
        raise No("axes are mixed up")
    return layout


def _is_range(node: fx.Node) -> bool:
    """Whether a node is 0, 1, 2, ..."""
    if is_call(node, torch.ops.prims.iota.default):
        return (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)
    return is_call(node, aten.arange.default)
