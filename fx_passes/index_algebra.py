"""Formulas for the values of index and mask tensors, over their own axes.

Every value is one of

    Lin    integers   const + sum(coefficient * index along axis) + sum(coefficient * leaf[entries])
    Bool   booleans   a conjunction of atoms: Lin >= 0, Lin == 0, leaf[entries], not leaf[entries]
    Two    floats     one number where a Bool holds, another elsewhere
    Number a float constant
    Opaque floats of which nothing is known

A *leaf* is a node whose numbers are unknown but whose value at an index is all that counts: inputs,
`lengths.max()`, `F.pad(...)`, any op that is not understood and gives integers or booleans. An
unknown float is never a leaf, since it may hold biases.

Indexing, views, expansion and gathering by an index tensor are one operation: substitute each axis
of the source by an axis of the result plus an offset, or by a constant. Axes of size 1 vanish.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from glm_compile.fx_passes._dynamo_graph import example_value, is_one


@dataclass(frozen=True)
class Entry:
    """Index into one axis: `offset` alone, or the result's index along `axis` plus `offset`."""

    axis: int | None
    offset: int = 0


Entries = tuple[Entry, ...]
Leaf = tuple[fx.Node, Entries]


@dataclass(frozen=True)
class Lin:
    """An integer, linear in the indices and in leaves."""

    const: int = 0
    axes: tuple[tuple[int, int], ...] = ()
    leaves: tuple[tuple[Leaf, int], ...] = ()

    def __add__(self, other: Lin) -> Lin:
        axes = dict(self.axes)
        for axis, factor in other.axes:
            axes[axis] = axes.get(axis, 0) + factor
        leaves = dict(self.leaves)
        for leaf, factor in other.leaves:
            leaves[leaf] = leaves.get(leaf, 0) + factor
        return Lin(
            self.const + other.const,
            tuple(sorted((a, f) for a, f in axes.items() if f)),
            tuple((leaf, f) for leaf, f in leaves.items() if f),
        )

    def __mul__(self, factor: int) -> Lin:
        if not factor:
            return Lin()
        return Lin(
            self.const * factor,
            tuple((a, f * factor) for a, f in self.axes),
            tuple((leaf, f * factor) for leaf, f in self.leaves),
        )

    def __sub__(self, other: Lin) -> Lin:
        return self + other * -1

    @property
    def is_const(self) -> bool:
        return not self.axes and not self.leaves

    def factor(self, axis: int) -> int:
        """Coefficient of the index along `axis`, leaves aside."""
        return dict(self.axes).get(axis, 0)

    def leaves_along(self, axis: int) -> list[Leaf]:
        """Leaves that are read at an index that moves along `axis`."""
        return [leaf for leaf, _f in self.leaves if any(e.axis == axis for e in leaf[1])]

    def without(self, axis: int) -> Lin:
        """Drop the index along `axis`."""
        return replace(self, axes=tuple((a, f) for a, f in self.axes if a != axis))


@dataclass(frozen=True)
class Atom:
    """`ge`: lin >= 0; `eq`: lin == 0; `leaf`: leaf[entries] (or its negation); `false`."""

    kind: str
    lin: Lin = Lin()
    leaf: Leaf | None = None
    positive: bool = True


@dataclass(frozen=True)
class Bool:
    """All atoms hold; none: true."""

    atoms: tuple[Atom, ...] = ()

    def __and__(self, other: Bool) -> Bool:
        return Bool(tuple(dict.fromkeys(self.atoms + other.atoms)))

    @property
    def is_false(self) -> bool:
        return any(atom.kind == "false" for atom in self.atoms)


TRUE = Bool()
FALSE = Bool((Atom("false"),))


@dataclass(frozen=True)
class Number:
    """A float constant."""

    value: float


@dataclass(frozen=True)
class Two:
    """`yes` where `cond` holds, `no` elsewhere."""

    cond: Bool
    yes: float
    no: float


@dataclass(frozen=True)
class Opaque:
    """A float tensor of which nothing is known; `node` is where that begins."""

    node: fx.Node


Value = Lin | Bool | Number | Two | Opaque


class Unknown(Exception):
    """A value cannot be written as a formula."""


def compare_ge(lin: Lin) -> Bool:
    """`lin >= 0`."""
    if lin.is_const:
        return TRUE if lin.const >= 0 else FALSE
    return Bool((Atom("ge", lin),))


def compare_eq(lin: Lin) -> Bool:
    """`lin == 0`."""
    if lin.is_const:
        return TRUE if lin.const == 0 else FALSE
    return Bool((Atom("eq", lin),))


def negate(value: Bool) -> Bool:
    """`not value`, where that is a conjunction again."""
    if value == TRUE:
        return FALSE
    if value.is_false:
        return TRUE
    if len(value.atoms) == 1:
        atom = value.atoms[0]
        if atom.kind == "ge":
            return compare_ge(atom.lin * -1 + Lin(-1))
        if atom.kind == "leaf":
            return Bool((replace(atom, positive=not atom.positive),))
    raise Unknown


def substitute(value: Value, mapping: Sequence[Entry]) -> Value:
    """Index a tensor: source axis i is read at `mapping[i]`."""
    if isinstance(value, Lin):
        result = Lin(value.const)
        for axis, factor in value.axes:
            entry = mapping[axis]
            result = result + Lin(entry.offset) * factor
            if entry.axis is not None:
                result = result + Lin(axes=((entry.axis, factor),))
        for leaf, factor in value.leaves:
            result = result + Lin(leaves=((_substitute_leaf(leaf, mapping), factor),))
        return result
    if isinstance(value, Bool):
        result_bool = TRUE
        for atom in value.atoms:
            if atom.kind == "leaf":
                assert atom.leaf is not None
                new = Bool((replace(atom, leaf=_substitute_leaf(atom.leaf, mapping)),))
            elif atom.kind == "false":
                new = FALSE
            else:
                lin = substitute(atom.lin, mapping)
                assert isinstance(lin, Lin)
                new = compare_ge(lin) if atom.kind == "ge" else compare_eq(lin)
            result_bool = result_bool & new
        return result_bool
    if isinstance(value, Two):
        cond = substitute(value.cond, mapping)
        assert isinstance(cond, Bool)
        return replace(value, cond=cond)
    return value


def _substitute_leaf(leaf: Leaf, mapping: Sequence[Entry]) -> Leaf:
    node, entries = leaf
    return node, tuple(
        entry
        if entry.axis is None
        else replace(mapping[entry.axis], offset=mapping[entry.axis].offset + entry.offset)
        for entry in entries
    )


def entry_of(value: Value) -> Entry:
    """The index that an index tensor holds, if it moves along one axis at most."""
    # A negative index counts from the end, which no offset can say.
    if isinstance(value, Lin) and not value.leaves and value.const >= 0:
        if not value.axes:
            return Entry(None, value.const)
        if len(value.axes) == 1 and value.axes[0][1] == 1:
            return Entry(value.axes[0][0], value.const)
    raise Unknown


def leaf_of(node: fx.Node) -> Value:
    """`node` itself as a leaf; `Opaque` if it holds floats."""
    value = example_value(node)
    if isinstance(value, torch.SymInt | int) and not isinstance(value, bool):
        return Lin(leaves=(((node, ()), 1),))
    if not isinstance(value, torch.Tensor) or value.is_floating_point() or value.is_complex():
        return Opaque(node)
    entries = tuple(
        Entry(None, 0) if is_one(size) else Entry(axis) for axis, size in enumerate(value.shape)
    )
    if value.dtype == torch.bool:
        return Bool((Atom("leaf", leaf=(node, entries)),))
    return Lin(leaves=(((node, entries), 1),))


def is_mask_pair(value: Two, dtype: torch.dtype) -> bool:
    """Whether a two-valued float is an additive mask: 0 and the dtype's minimum (or -inf)."""
    minimum = torch.finfo(dtype).min
    return value.yes == 0 and (value.no == -math.inf or value.no <= minimum)
