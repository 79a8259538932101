"""Edits of a functional ATen graph that keep it consistent: values, order, no dead nodes.

New nodes carry a fake value, nodes downstream of a changed layout get theirs recomputed, producers
move up only where nothing they need comes later, and a node is erased only if it has no user and no
effect.
"""

from __future__ import annotations

import contextlib
import functools
import math
import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true

from glm_compile.fx_passes.base import No

aten = torch.ops.aten


def is_pure(node: fx.Node) -> bool:
    """Whether erasing a node without users changes nothing else."""
    if node.op in ("placeholder", "output"):
        return False
    schema = getattr(node.target, "_schema", None)
    if schema is not None and schema.is_mutable:
        return False
    return not node.is_impure()


def erase_dead(graph: fx.Graph, roots: Iterable[fx.Node]) -> None:
    """Erase those of `roots`, and of what they alone needed, that have no user and no effect."""
    front = list(roots)
    erased: set[fx.Node] = set()
    while front:
        node = front.pop()
        if node in erased or node.users or not is_pure(node):
            continue
        inputs = list(node.all_input_nodes)
        graph.erase_node(node)
        erased.add(node)
        front.extend(inputs)


def positions(graph: fx.Graph) -> dict[fx.Node, int]:
    return {node: i for i, node in enumerate(graph.nodes)}


def first_user(nodes: Iterable[fx.Node]) -> fx.Node:
    """The earliest user of any of the nodes."""
    users = {user for node in nodes for user in node.users}
    assert users, "a value that is replaced has a user"
    for node in next(iter(users)).graph.nodes:
        if node in users:
            return node
    raise AssertionError


def hoist(
    graph: fx.Graph, needed: Sequence[Any], before: fx.Node, replaced: Iterable[fx.Node]
) -> None:
    """Move the producers of `needed` that come later to just before `before`.

    Raises:
        No: one of them depends on a value that is to be replaced there, or has an effect.
    """
    order = positions(graph)
    late: set[fx.Node] = set()
    front = [n for n in needed if isinstance(n, fx.Node)]
    forbidden = set(replaced)
    while front:
        node = front.pop()
        if node in forbidden:
            raise No(f"{node.name} is needed before it can be computed")
        if node in late or order[node] < order[before]:
            continue
        if node is before:
            raise No(f"{node.name} is needed before it can be computed")
        if not is_pure(node):
            raise No(f"{node.name} ({node.target}) has an effect and cannot move up")
        late.add(node)
        front.extend(node.all_input_nodes)
    for node in sorted(late, key=order.__getitem__):
        before.prepend(node)


class Builder:
    """Makes nodes at one place of a graph, each with its fake value.

    Args:
        graph: the graph.
        before: new nodes come directly before this node.
        like: node whose origin (stack trace, module path) the new ones take.
    """

    def __init__(self, graph: fx.Graph, before: fx.Node, like: fx.Node) -> None:
        self.graph = graph
        self.before = before
        self.made: list[fx.Node] = []
        self.origin: dict[str, Any] = {
            key: like.meta[key]
            for key in ("nn_module_stack", "stack_trace", "source_fn_stack")
            if key in like.meta
        }

    def call(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.before):
            node = self.graph.call_function(target, args, kwargs)
        node.meta.update(self.origin)
        try:
            node.meta["val"] = compute(node)
        except Exception:
            self.graph.erase_node(node)
            raise
        self.made.append(node)
        return node

    def item(self, node: fx.Node, index: int) -> fx.Node:
        return self.call(operator.getitem, node, index)

    def size(self, node: fx.Node, dim: int) -> Any:
        """A size of a node: the int, or a node for a symbolic one."""
        size = node.meta["val"].shape[dim]
        if isinstance(size, int):
            return size
        dim %= node.meta["val"].dim()
        return self.call(aten.sym_size.int, node, dim)

    def view(self, node: fx.Node, shape: Sequence[Any]) -> fx.Node:
        """`node` in another shape; copied first only if its strides do not allow a view.

        Args:
            shape: ints, -1 for one, or nodes of symbolic sizes.
        """
        sizes = [s.meta["val"] if isinstance(s, fx.Node) else s for s in shape]
        current = node.meta["val"].shape
        if len(current) == len(sizes) and all(
            (isinstance(s, int) and s == -1) or statically_known_true(s == c)
            for s, c in zip(sizes, current)
        ):
            return node
        try:
            return self.call(aten.view.default, node, list(shape))
        except (RuntimeError, ValueError):
            copied = self.call(aten.clone.default, node, memory_format=torch.contiguous_format)
            return self.call(aten.view.default, copied, list(shape))

    def view_like(self, node: fx.Node, old: fx.Node) -> fx.Node:
        """`node` in the shape of `old`, with symbolic sizes that are read from `node`."""
        shape = old.meta["val"].shape
        symbolic = [d for d, size in enumerate(shape) if not isinstance(size, int)]
        sizes: list[Any] = list(shape)
        # Of no elements -1 could be any size.
        is_clear = len(symbolic) == 1 and not any(isinstance(s, int) and s == 0 for s in shape)
        for d in symbolic:
            sizes[d] = -1 if is_clear else self._size_like(node, shape[d])
        viewed = self.view(node, sizes)
        if viewed is node:
            # Only here: those of another caller may be for more than one view.
            self.drop_sizes(sizes)
        return viewed

    def _size_like(self, node: fx.Node, size: Any) -> Any:
        """A size of `node`, or of adjacent dimensions of it as one, that is equal to `size`; -1
        where there is none."""
        own = node.meta["val"].shape
        for length in range(1, len(own) + 1):
            for first in range(len(own) - length + 1):
                dims = range(first, first + length)
                if statically_known_true(math.prod(own[d] for d in dims) == size):
                    parts = [self.size(node, d) for d in dims]
                    return functools.reduce(lambda a, b: self.call(operator.mul, a, b), parts)
        return -1

    def drop_sizes(self, sizes: Iterable[Any]) -> None:
        """Erase sizes that were made for a view that is not needed, and are read by nothing."""
        for size in sizes:
            is_own = isinstance(size, fx.Node) and size in self.made
            if is_own and size.target in (aten.sym_size.int, operator.mul) and not size.users:
                parts = size.args
                self.graph.erase_node(size)
                self.made.remove(size)
                self.drop_sizes(parts)


def fake_mode_of(nodes: Iterable[Any]) -> Any:
    """The fake tensor mode of a graph's values."""
    for node in nodes:
        val = node.meta.get("val")
        for item in val if isinstance(val, list | tuple) else (val,):
            if isinstance(item, FakeTensor):
                return item.fake_mode
    return contextlib.nullcontext()


def compute(node: fx.Node) -> Any:
    """The fake value of a call, from those of its inputs."""
    args, kwargs = fx.node.map_arg((node.args, node.kwargs), lambda n: n.meta["val"])
    with fake_mode_of(node.graph.nodes):
        return node.target(*args, **kwargs)  # type: ignore[operator]


def refresh(graph: fx.Graph, changed: Iterable[fx.Node]) -> None:
    """Recompute the values downstream of nodes whose strides differ from those they replace.

    A view that the new strides do not allow becomes a reshape.
    """
    stale = set(changed)
    for node in graph.nodes:
        if node.op != "call_function" or stale.isdisjoint(node.all_input_nodes):
            continue
        if "val" not in node.meta or node.meta.get("unbacked_bindings"):
            continue
        try:
            val = compute(node)
        except (RuntimeError, ValueError):
            if node.target not in (aten.view.default, aten._unsafe_view.default):
                raise
            node.target = aten.reshape.default
            val = compute(node)
        if _layouts(val) != _layouts(node.meta["val"]):
            node.meta["val"] = val
            stale.add(node)


def _layouts(val: Any) -> list[Any]:
    items = val if isinstance(val, list | tuple) else (val,)
    return [
        (tuple(i.shape), i.stride(), i.storage_offset()) if isinstance(i, torch.Tensor) else None
        for i in items
    ]
