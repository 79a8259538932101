"""Canonical reading of slices of the last dimension and of the rotary embedding over them.

Shape legend: B batch, S query tokens, P rope dim.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.canonical import is_cast, layout_after, pair, peel
from glm_compile.fx_passes.layouts import (
    Layout,
    args,
    axes,
    describe,
    dtype_of,
    is_call,
    is_same,
    named_args,
    names,
    shape_of,
    strip_repeats,
)

aten = torch.ops.aten


@dataclass(frozen=True)
class Slice:
    """Elements start, start + step, ... (length of them) of a node's last dimension."""

    source: fx.Node
    start: int
    step: int
    length: int


def last_dim_slice(node: fx.Node) -> Slice:
    """Compose slices and splits of the last dimension; a node that is none is its own slice."""
    size = shape_of(node)[-1]
    if not isinstance(size, int):
        raise No(f"the last dimension of {describe(node)} is symbolic")
    found = Slice(node, 0, 1, size)
    while (step := _one_slice(found.source)) is not None:
        found = Slice(
            step.source, step.start + found.start * step.step, step.step * found.step, found.length
        )
    return found


def _one_slice(node: fx.Node) -> Slice | None:
    if is_call(node, aten.alias.default):
        return Slice(args(node)[0], 0, 1, shape_of(node)[-1])
    if is_call(node, aten.slice.Tensor):
        arguments = named_args(node)
        source, dim = arguments["self"], arguments["dim"]
        size, length = shape_of(source)[-1], shape_of(node)[-1]
        if dim % len(shape_of(source)) != len(shape_of(source)) - 1:
            return None
        start = arguments["start"] or 0
        if not all(isinstance(v, int) for v in (size, start, arguments["step"], length)):
            return None
        start = min(start + size if start < 0 else start, size)
        return Slice(source, start, arguments["step"], length)
    if is_call(node, operator.getitem):
        split, index = args(node)
        if not is_call(split, aten.split_with_sizes.default, aten.split.Tensor):
            return None
        arguments = named_args(split)
        source = arguments["self"]
        if arguments["dim"] % len(shape_of(source)) != len(shape_of(source)) - 1:
            return None
        parts = split.meta["val"][:index]
        start = sum(part.shape[-1] for part in parts)
        return Slice(source, start, 1, shape_of(node)[-1])
    return None


@dataclass(frozen=True)
class Rope:
    """cat(rope(x[..., :P]), x[..., P:]), or the rotation of some columns of x.

    Attributes:
        node: result.
        x: the whole input.
        cos, sin: [B or 1, S, P], as given to the layer.
        interleaved: pairs are (0, 1), (2, 3), ... and come out evens first; else (0, P/2), ...
        rope_dim: P.
        start: first column of x that is rotated; 0 unless these columns are all there is.
    """

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    interleaved: bool
    rope_dim: int
    start: int = 0


@dataclass(frozen=True)
class _Asked:
    """What is looked for: its name, the axis of tokens, whether x may have other columns."""

    what: str
    token_dim: int
    is_part: bool

    def __str__(self) -> str:
        return self.what


def rope(node: fx.Node, what: str = "rope", *, token_dim: int = 1, is_part: bool = False) -> Rope:
    """The rotation that made `node`.

    Args:
        what: for reasons.
        token_dim: axis of tokens; the first one is of sequences, the last one of columns.
        is_part: look for the rotation of all columns of `node`, which may be any of its input's;
            else for one of the first columns of an input whose others are passed on.

    Raises:
        No: anything else, with the first thing that differs.
    """
    asked = _Asked(what, token_dim, is_part)
    if not is_call(node, aten.cat.default) and not is_call(node, aten.add.Tensor):
        raise No(f"{what}: expected cat(rotated, passed), found {describe(node)}")
    parts = _cat_parts(node)
    if len(parts) >= 3:
        return _pairwise_rope(node, parts[:2], parts[2:], asked)
    if len(parts) == 2 and is_call(parts[0], aten.add.Tensor):
        return _half_rope(node, parts[0], parts[1:], asked)
    if len(parts) == 2:
        return _pairwise_rope(node, parts, [], asked)
    return _half_rope(node, node, [], asked)


def _cat_parts(node: fx.Node) -> list[fx.Node]:
    """Parts of nested cats over the last dimension."""
    if not is_call(node, aten.cat.default):
        return [node]
    arguments = named_args(node)
    num_dims = len(shape_of(node))
    if arguments["dim"] % num_dims != num_dims - 1:
        return [node]
    return [part for tensor in arguments["tensors"] for part in _cat_parts(tensor)]


def _check_passed(x: Slice, passed: list[fx.Node], rope_dim: int, what: _Asked) -> None:
    if what.is_part:
        if passed:
            raise No(f"{what}: {describe(passed[0])} lies behind the rotated columns")
        return
    width = shape_of(x.source)[-1]
    covered = rope_dim
    for part in passed:
        rest = last_dim_slice(part)
        if rest.source is not x.source or rest.step != 1 or rest.start != covered:
            raise No(
                f"{what}: the part after the rotated {rope_dim} dims is {describe(part)}, "
                "expected the rest of the same input"
            )
        covered += rest.length
    if covered != width:
        raise No(f"{what}: {covered} of {width} dims reach the result")


def _product(node: Any) -> Iterator[tuple[Slice, fx.Node]]:
    """(slice, table) readings of slice * table."""
    for a, b in pair(node, aten.mul.Tensor):
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            yield last_dim_slice(a), b


def _is_table(node: fx.Node, x: Slice) -> bool:
    return last_dim_slice(peel(node).source).source is not x.source


def _pairwise_rope(
    node: fx.Node, rotated: list[fx.Node], passed: list[fx.Node], what: _Asked
) -> Rope:
    """cat(x1 cos - x2 sin, x2 cos + x1 sin)."""
    first, second = rotated
    if not is_call(first, aten.sub.Tensor) or not is_call(second, aten.add.Tensor):
        raise No(
            f"{what}: expected cat(x1 cos - x2 sin, x2 cos + x1 sin), found "
            f"{describe(first)} and {describe(second)}"
        )
    products = (*args(first)[:2], *args(second)[:2])
    for product in products:
        if not is_call(product, aten.mul.Tensor):
            raise No(f"{what}: {describe(product)} where a product with cos or sin was expected")
    for x1, cos in _product(args(first)[0]):
        for x2, sin in _product(args(first)[1]):
            if x1.source is not x2.source or not _is_table(cos, x1) or not _is_table(sin, x1):
                continue
            for sum_a, sum_b in pair(second, aten.add.Tensor):
                for y2, cos2 in _product(sum_a):
                    for y1, sin2 in _product(sum_b):
                        if y1 != x1 or y2 != x2:
                            continue
                        return _checked_rope(node, x1, x2, (cos, cos2), (sin, sin2), passed, what)
    for product in products:
        for operand in args(product)[:2]:
            if is_cast(operand) and args(operand)[0] is not None:
                raise No(
                    f"{what}: computed in {dtype_of(operand)} after a cast, expected the dtype of "
                    "its input"
                )
    raise No(f"{what}: the four products are not those of one rotation")


def _checked_rope(
    node: fx.Node,
    x1: Slice,
    x2: Slice,
    cos: tuple[fx.Node, fx.Node],
    sin: tuple[fx.Node, fx.Node],
    passed: list[fx.Node],
    what: _Asked,
) -> Rope:
    half = x1.length
    rope_dim = 2 * half
    start = x1.start if what.is_part else 0
    if (x1.start, x1.step, x2.start, x2.step) == (start, 2, start + 1, 2):
        interleaved = True
    elif (x1.start, x1.step, x2.start, x2.step) == (start, 1, start + half, 1):
        interleaved = False
    else:
        raise No(
            f"{what}: pairs start at {x1.start} and {x2.start} with steps {x1.step} and {x2.step}, "
            "expected interleaved (0, 1; 2) or half split"
        )
    if x2.length != half:
        raise No(f"{what}: halves of {half} and {x2.length} dims")
    _check_passed(x1, passed, rope_dim, what)
    tables = []
    for label, (a, b) in (("cos", cos), ("sin", sin)):
        source = _table(a, x1.source, half, rope_dim, what, label)
        if _table(b, x1.source, half, rope_dim, what, label) is not source:
            raise No(f"{what}: two different {label} tables in one rotation")
        tables.append(source)
    return Rope(node, x1.source, tables[0], tables[1], interleaved, rope_dim, start)


def _half_rope(node: fx.Node, rotated: fx.Node, passed: list[fx.Node], what: _Asked) -> Rope:
    """x cos + cat(-x2, x1) sin, as transformers' `apply_rotary_pos_emb`."""
    for direct, turned in pair(rotated, aten.add.Tensor):
        for x, cos in _product(direct):
            for part, sin in pair(turned, aten.mul.Tensor):
                halves = _cat_parts(part) if isinstance(part, fx.Node) else []
                if len(halves) != 2 or not is_call(halves[0], aten.neg.default):
                    continue
                if not isinstance(sin, fx.Node) or x.step != 1:
                    continue
                if x.start != 0 and not what.is_part:
                    continue
                x2, x1 = last_dim_slice(args(halves[0])[0]), last_dim_slice(halves[1])
                half = x.length // 2
                first, second = x.start, x.start + half
                if x1 != Slice(x.source, first, 1, half) or x2 != Slice(x.source, second, 1, half):
                    continue
                _check_passed(x, passed, x.length, what)
                cos_source = _table(cos, x.source, x.length, x.length, what, "cos")
                sin_source = _table(sin, x.source, x.length, x.length, what, "sin")
                return Rope(node, x.source, cos_source, sin_source, False, x.length, x.start)
    raise No(f"{what}: expected x cos + rotate_half(x) sin, found {describe(rotated)}")


def _table(
    node: fx.Node, x: fx.Node, used: int, rope_dim: int, asked: _Asked, label: str
) -> fx.Node:
    """The [B or 1, S, P] table of which `node` is the used half or whole, one row a token of x.

    Args:
        node: operand of the product with [B, S, ..., used] elements of `x`, its axes as in `asked`.
    """
    what, token_dim = f"{asked}: {label}", asked.token_dim
    if not 1 <= token_dim < len(shape_of(x)) - 1:
        raise No(f"{asked}: its input has shape {list(shape_of(x))}, expected more axes")
    peeled = peel(node)
    table = last_dim_slice(peeled.source)
    if (table.start, table.step, table.length) != (0, 1, used):
        raise No(f"{what} is read as {table.length} from {table.start}, expected {used} from 0")
    inner = peel(table.source)
    base = inner.source
    shape = shape_of(base)
    if len(shape) != 3 or not is_same(shape[-1], rope_dim):
        raise No(f"{what} has shape {list(shape)}, expected [batch or 1, tokens, {rope_dim}]")
    if dtype_of(base) != dtype_of(x):
        raise No(f"{what} is {dtype_of(base)}, the rotated input {dtype_of(x)}")
    batch, tokens = shape_of(x)[0], shape_of(x)[token_dim]
    if not is_same(shape[1], tokens) or not (is_same(shape[0], 1) or is_same(shape[0], batch)):
        raise No(f"{what} has shape {list(shape)}, its input {list(shape_of(x))}")
    own = axes(B=shape[0], S=shape[1], P=used)
    # Views before the slice see the whole table, those behind it the used part.
    whole = layout_after(axes(B=shape[0], S=shape[1], P=rope_dim), inner.chain)
    layout = None
    if whole is not None and names((whole[-1],)) == names((own[-1],)):
        layout = layout_after((*whole[:-1], own[-1]), peeled.chain)
    wanted: Layout = ((),) * (len(shape_of(x)) - 1)
    wanted = (own[0], *wanted[1:token_dim], own[1], *wanted[token_dim + 1 :], own[2])
    if layout is None or names(strip_repeats(layout)) != names(wanted):
        raise No(f"{what} is not laid out as one row a token of {describe(x)}")
    return base
