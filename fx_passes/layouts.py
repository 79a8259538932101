"""Where a tensor's axes lie, followed through views; and small questions to nodes.

An axis is a name with a size; a tensor's layout gives, for each dimension, the axes that lie in it
(`[B*S, H, D]` is `((B, S), (H,), (D,))`). Axes of size 1 vanish, sizes may be symbolic. A view that
moves or splits an axis in a way that the names cannot follow has no layout.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from glm_compile.fx_passes.base import No

aten = torch.ops.aten
# Views and copies that keep the elements in order.
RESHAPES = frozenset(
    (
        aten.view.default,
        aten._unsafe_view.default,
        aten.reshape.default,
        aten.unsqueeze.default,
        aten.squeeze.default,
        aten.squeeze.dim,
        aten.squeeze.dims,
        aten.clone.default,
        aten.alias.default,
        aten.detach.default,
        aten.contiguous.default,
        aten.flatten.using_ints,
        aten.lift_fresh_copy.default,
    )
)
PERMUTES = frozenset((aten.t.default, aten.transpose.int, aten.permute.default, aten.mT.default))


def value(node: fx.Node) -> torch.Tensor:
    """The fake tensor that a node makes."""
    val = node.meta.get("val")
    if not isinstance(val, torch.Tensor):
        raise No(f"{node.name} makes {type(val).__name__}, expected one tensor")
    return val


def shape_of(node: fx.Node) -> tuple[Any, ...]:
    return tuple(value(node).shape)


def dtype_of(node: fx.Node) -> torch.dtype:
    return value(node).dtype


def is_same(a: Any, b: Any) -> bool:
    """Whether two sizes are equal for every value of their symbols."""
    return bool(statically_known_true(a == b))


def describe(node: Any) -> str:
    """`mul.Tensor (mul_25)` for reasons."""
    if not isinstance(node, fx.Node):
        return repr(node)
    if node.op != "call_function":
        return f"{node.op} {node.name}"
    name = getattr(node.target, "__name__", str(node.target))
    return f"{name} ({node.name})"


def named_args(node: fx.Node) -> dict[str, Any]:
    """Arguments by schema name, defaults filled in."""
    target: Any = node.target
    schema = target._schema
    found: dict[str, Any] = {}
    for i, argument in enumerate(schema.arguments):
        if i < len(args(node)):
            found[argument.name] = args(node)[i]
        elif argument.name in node.kwargs:
            found[argument.name] = node.kwargs[argument.name]
        elif argument.has_default_value():
            found[argument.name] = argument.default_value
    return found


def args(node: fx.Node) -> tuple[Any, ...]:
    """Positional arguments, untyped: what they are is what the questions below ask."""
    return node.args


def is_call(node: Any, *targets: Any) -> bool:
    return isinstance(node, fx.Node) and node.op == "call_function" and node.target in targets


def is_getitem(node: Any) -> bool:
    return is_call(node, operator.getitem)


@dataclass(frozen=True)
class Axis:
    """A named axis; `*` is one that only repeats (made by expand)."""

    name: str
    size: Any

    def __repr__(self) -> str:
        return self.name


Layout = tuple[tuple[Axis, ...], ...]


def axes(**sizes: Any) -> Layout:
    """Layout with one axis a dimension; axes of size 1 vanish."""
    return tuple(() if is_same(s, 1) else (Axis(n, s),) for n, s in sizes.items())


def regroup(layout: Layout, shape: Sequence[Any]) -> Layout | None:
    """Layout after a view to `shape`, or None if an axis would be split."""
    rest = [axis for dim in layout for axis in dim]
    result: list[tuple[Axis, ...]] = []
    for size in shape:
        taken: list[Axis] = []
        product: Any = 1
        while not is_same(product, size):
            if not rest:
                return None
            taken.append(rest.pop(0))
            product = product * taken[-1].size
        result.append(tuple(taken))
    return None if rest else tuple(result)


def permutation(node: fx.Node) -> list[int]:
    """Dimension order of a permute, transpose or t node."""
    num_dims = len(shape_of(node))
    order = list(range(num_dims))
    if node.target is aten.permute.default:
        return [d % num_dims for d in args(node)[1]]
    if node.target is aten.transpose.int:
        a, b = (d % num_dims for d in args(node)[1:3])
    elif num_dims < 2:
        return order
    else:
        a, b = num_dims - 2, num_dims - 1
    order[a], order[b] = order[b], order[a]
    return order


def follow(layout: Layout, node: fx.Node) -> Layout | None:
    """Layout of a view node, given its input's; None where the axes' names get lost."""
    shape = shape_of(node)
    if node.target in RESHAPES:
        return regroup(layout, shape)
    if node.target in PERMUTES:
        return tuple(layout[d] for d in permutation(node))
    if node.target is aten.expand.default:
        result: list[tuple[Axis, ...]] = [
            () if is_same(s, 1) else (Axis("*", s),) for s in shape[: len(shape) - len(layout)]
        ]
        for dim, size in zip(layout, shape[len(shape) - len(layout) :], strict=True):
            result.append(dim if dim or is_same(size, 1) else (Axis("*", size),))
        return tuple(result)
    return None


def merge_dims(a: tuple[Axis, ...], b: tuple[Axis, ...]) -> tuple[Axis, ...] | None:
    """One dimension of a batched or elementwise product: repeated axes take the other's name."""
    if not a or not b:
        return a or b
    if len(a) != len(b):
        return None
    merged = []
    for x, y in zip(a, b):
        if not is_same(x.size, y.size) or (x.name != y.name and "*" not in (x.name, y.name)):
            return None
        merged.append(y if x.name == "*" else x)
    return tuple(merged)


def names(layout: Layout) -> tuple[tuple[str, ...], ...]:
    return tuple(tuple(axis.name for axis in dim) for dim in layout)


def strip_repeats(layout: Layout) -> Layout:
    return tuple(tuple(axis for axis in dim if axis.name != "*") for dim in layout)
