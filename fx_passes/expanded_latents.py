"""Canonical reading of keys and values that were expanded from a cache of latents.

The model expands each cached latent to every head's key and value, and copies the rotated key of
the token behind each head's key. Which columns come from where is followed through whatever splits,
slices, copies and concatenates along the last dimension; rows are followed as layouts.

Shape legend: B batch, T cached tokens, H heads, N nope dim, P rope dim, V value dim, L rank of the
latents, X columns of whatever is looked at.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.canonical import Linear, is_cast, is_view, linear
from glm_compile.fx_passes.layouts import (
    PERMUTES,
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
    permutation,
    regroup,
    shape_of,
    strip_repeats,
)

aten = torch.ops.aten
_SPLITS = frozenset((aten.split_with_sizes.default, aten.split.Tensor))


@dataclass(frozen=True)
class Columns:
    """Columns `start` to `start + size` of the last dimension of `source`.

    Attributes:
        path: what lies between, from the source's user to the node that was asked about.
    """

    source: fx.Node
    start: int
    size: int
    path: tuple[fx.Node, ...]

    @property
    def is_whole(self) -> bool:
        """Whether these are all columns of the source."""
        return self.start == 0 and is_same(shape_of(self.source)[-1], self.size)


@dataclass(frozen=True)
class ExpandedLatents:
    """Keys and values of one attention call, and what they were made of.

    Attributes:
        kv_b: the linear that expands the latents; its weight is [H * (N + V), L].
        latents, ropes: columns of nodes that hold B * T rows in this order.
        num_nope, num_rope, num_values, rank: N, P, V, L.
    """

    kv_b: Linear
    latents: Columns
    ropes: Columns
    num_nope: int
    num_rope: int
    num_values: int
    rank: int


def columns(node: fx.Node, start: int, size: int) -> Columns:
    """Where `size` columns of a node's last dimension come from, as far up as they lie together."""
    path: list[fx.Node] = []
    while (above := _above(node, start, start + size)) is not None:
        path.append(node)
        node, start = above
    return Columns(node, start, size, tuple(reversed(path)))


def expanded_latents(k: fx.Node, v: fx.Node) -> ExpandedLatents:
    """Read keys [B, H, T, N + P] and values [B, H, T, V] as expanded latents.

    Raises:
        No: with the first thing that is not as in the model.
    """
    batch, num_heads, num_keys, key_dim = shape_of(k)
    num_values = shape_of(v)[-1]
    sizes = {"B": batch, "H": num_heads, "T": num_keys}
    if not all(isinstance(size, int) for size in (num_heads, key_dim, num_values)):
        raise No(f"{num_heads} heads of {key_dim} and {num_values} columns: expected constants")
    kv_b, num_nope = _of_linear(v, 0, num_values, "values", sizes)
    rank, per_head = shape_of(kv_b.weight)[1], kv_b.num_out // num_heads
    if num_nope + num_values != per_head or not 0 < num_nope < key_dim:
        raise No(
            f"values are columns {num_nope} to {num_nope + num_values} of the {per_head} that "
            f"{kv_b.weight.name} gives each head, expected the last ones, behind the keys'"
        )
    of_keys, first = _of_linear(k, 0, num_nope, "keys", sizes)
    if of_keys.node is not kv_b.node or first != 0:
        raise No(
            f"keys are columns {first} to {first + num_nope} of {describe(of_keys.node)}, expected "
            f"the first {num_nope} of {describe(kv_b.node)}, whose others are the values"
        )
    latents = columns(kv_b.x, 0, rank)
    layout = rows_along(latents, sizes)
    if layout is None or [a.name for dim in strip_repeats(layout) for a in dim] != [
        a.name for dim in axes(B=batch, T=num_keys, X=rank) for a in dim
    ]:
        raise No(f"views between {describe(latents.source)} and kv_b mix up tokens")
    ropes = columns(k, num_nope, key_dim - num_nope)
    layout = rows_along(ropes, sizes)
    wanted = axes(B=batch, H=1, T=num_keys, X=ropes.size)
    if layout is None or names(strip_repeats(layout)) != names(wanted):
        raise No(
            f"the rotated part of the keys ({describe(ropes.source)}) is not one row a token, "
            "repeated for every head"
        )
    return ExpandedLatents(kv_b, latents, ropes, num_nope, key_dim - num_nope, num_values, rank)


def steps_of(node: fx.Node) -> tuple[int, int] | None:
    """(first, step) where each row of a node counts up by a constant, else None."""
    size = shape_of(node)[-1]
    while True:
        source = columns(node, 0, size).source if isinstance(size, int) else node
        if not is_cast(source):
            break
        node = args(source)[0]
    if len(shape_of(source)) != 1:
        return None
    if is_call(source, torch.ops.prims.iota.default):
        first, step = source.kwargs.get("start"), source.kwargs.get("step")
    elif is_call(source, aten.arange.default):
        first, step = 0, 1
    elif is_call(source, aten.arange.start, aten.arange.start_step):
        arguments = named_args(source)
        first, step = arguments["start"], arguments.get("step", 1)
    else:
        return None
    return (first, step) if isinstance(first, int) and isinstance(step, int) else None


def _above(node: fx.Node, start: int, stop: int) -> tuple[fx.Node, int] | None:
    """(input, first column there) of columns `start` to `stop` of a node, or None."""
    if is_view(node):
        source: fx.Node = args(node)[0]
        old, new = shape_of(source), shape_of(node)
        if not old or not new or not is_same(old[-1], new[-1]):
            return None
        if node.target in PERMUTES and permutation(node)[-1] != len(new) - 1:
            return None
        return source, start
    if is_call(node, aten.slice.Tensor):
        arguments = named_args(node)
        source = arguments["self"]
        if arguments["step"] != 1:
            return None
        if _is_last(node, arguments["dim"]):
            first = arguments["start"] or 0
            return (source, start + first) if isinstance(first, int) and first >= 0 else None
        is_all = all(is_same(a, b) for a, b in zip(shape_of(source), shape_of(node)))
        return (source, start) if is_all else None
    if is_call(node, operator.getitem) and is_call(args(node)[0], *_SPLITS):
        return _above_split(node, start)
    if is_call(node, aten.slice_scatter.default):
        return _above_scatter(node, start, stop)
    if is_call(node, aten.copy.default):
        source = args(node)[1]
        is_plain = dtype_of(source) == dtype_of(node) and len(shape_of(source)) == len(
            shape_of(node)
        )
        is_plain = is_plain and all(is_same(a, b) for a, b in zip(shape_of(source), shape_of(node)))
        return (source, start) if is_plain else None
    if is_call(node, aten.cat.default):
        arguments = named_args(node)
        if not _is_last(node, arguments["dim"]):
            return None
        first = 0
        for member in arguments["tensors"]:
            size = shape_of(member)[-1]
            if not isinstance(size, int):
                return None
            if first <= start and stop <= first + size:
                return member, start - first
            first += size
    return None


def _above_split(node: fx.Node, start: int) -> tuple[fx.Node, int] | None:
    split, index = args(node)
    source, sizes = args(split)[:2]
    if not _is_last(source, named_args(split)["dim"]):
        return None
    before = sizes[:index] if isinstance(sizes, Sequence) else [sizes] * index
    if not all(isinstance(size, int) for size in before):
        return None
    return source, start + sum(before)


def _above_scatter(node: fx.Node, start: int, stop: int) -> tuple[fx.Node, int] | None:
    arguments = named_args(node)
    first = arguments["start"] or 0
    size = shape_of(arguments["src"])[-1]
    if not _is_last(node, arguments["dim"]) or arguments["step"] != 1:
        return None
    if not isinstance(first, int) or first < 0 or not isinstance(size, int):
        return None
    if first <= start and stop <= first + size:
        return arguments["src"], start - first
    if stop <= first or first + size <= start:
        return arguments["self"], start
    return None


def _is_last(node: fx.Node, dim: int) -> bool:
    num_dims = len(shape_of(node))
    return dim % num_dims == num_dims - 1


def _of_linear(
    node: fx.Node, start: int, size: int, what: str, sizes: dict[str, Any]
) -> tuple[Linear, int]:
    """(linear, first column within each head) that made columns of a node [B, H, T, X]."""
    found_columns = columns(node, start, size)
    views: list[fx.Node] = []
    source = found_columns.source
    while (found := linear(source)) is None and is_view(source):
        views.append(source)
        source = args(source)[0]
    if found is None:
        raise No(
            f"expected the {what} from kv_b_proj's linear over the latents, found "
            f"{describe(source)}"
        )
    num_heads = sizes["H"]
    if not all(isinstance(s, int) for s in shape_of(found.weight)) or found.num_out % num_heads:
        raise No(f"{found.weight.name} has {found.num_out} rows for {num_heads} heads")
    per_head = found.num_out // num_heads
    rows = axes(B=sizes["B"], T=sizes["T"], H=num_heads, X=per_head)
    layout = regroup(rows, shape_of(source))
    for view in reversed(views):
        layout = follow(layout, view) if layout is not None else None
    layout = _along(layout, found_columns.path)
    if layout is None or names(layout) != names(axes(**sizes, X=size)):
        raise No(f"views between {found.weight.name}'s linear and the {what} mix up heads or rows")
    return found, found_columns.start


def rows_along(found: Columns, sizes: dict[str, Any]) -> Layout | None:
    """Layout at the end of the path, where the source holds B * T rows of columns."""
    width = shape_of(found.source)[-1]
    layout = regroup(axes(B=sizes["B"], T=sizes["T"], X=width), shape_of(found.source))
    return _along(layout, found.path)


def _along(layout: Layout | None, path: Sequence[fx.Node]) -> Layout | None:
    """Layout behind a path of `columns`; None where the names get lost."""
    for node in path:
        if layout is None:
            return None
        if is_view(node):
            layout = follow(layout, node)
            continue
        if names(layout[-1:]) not in ((("X",),), ((),)):
            return None
        layout = (*layout[:-1], *axes(X=shape_of(node)[-1]))
    return layout
