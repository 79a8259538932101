"""Evaluate the nodes of a Dynamo graph to the formulas of `index_algebra`.

A mask is read by evaluating the nodes that make it, not by matching them: spelling, views and order
then do not matter. Each op that is understood has a handler here; a node of any other op, or in a
form that its handler does not take, becomes a leaf.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes._dynamo_graph import argument, dtype_of, is_one, op_name, shape_of
from glm_compile.fx_passes.index_algebra import (
    FALSE,
    TRUE,
    Bool,
    Entry,
    Lin,
    Number,
    Two,
    Unknown,
    Value,
    compare_eq,
    compare_ge,
    entry_of,
    leaf_of,
    negate,
    substitute,
)


class Evaluator:
    """Values of nodes. `operands` has, for every node that was looked at, what its value rests on.

    A node that is a leaf rests on nothing.
    """

    def __init__(self) -> None:
        self._values: dict[fx.Node, Value] = {}
        self.operands: dict[fx.Node, tuple[fx.Node, ...]] = {}

    def value(self, node: fx.Node) -> Value:
        """Value of `node` over its own axes."""
        if node not in self._values:
            # Iterative enough: a mask's graph is a few dozen nodes deep.
            handler = _HANDLERS.get(op_name(node))
            self.operands[node] = ()
            result: Value | None = None
            if handler is not None and (shape_of(node) is not None):
                before = dict(self.operands)
                try:
                    result = handler(self, node)
                    self.operands[node] = tuple(node.all_input_nodes)
                except (Unknown, IndexError, TypeError, AttributeError):
                    self.operands = before
            self._values[node] = result if result is not None else leaf_of(node)
        return self._values[node]

    def operand(self, argument: Any) -> Value:
        """Value of a node's argument."""
        if isinstance(argument, fx.Node):
            return self.value(argument)
        if isinstance(argument, bool):
            return TRUE if argument else FALSE
        if isinstance(argument, int):
            return Lin(argument)
        if isinstance(argument, float):
            return Number(argument)
        raise Unknown

    def aligned(self, argument: Any, rank: int) -> Value:
        """Value of an argument that is broadcast to `rank` axes."""
        own = len(shape_of(argument) or ())
        return substitute(self.operand(argument), [Entry(i + rank - own) for i in range(own)])

    def two(self, node: fx.Node) -> tuple[Value, Value]:
        """The two operands of an elementwise call, broadcast."""
        rank = len(shape_of(node) or ())
        left, right = node.args[0], argument(node, 1, "other")
        return self.aligned(left, rank), self.aligned(right, rank)

    def used(self, root: fx.Node) -> list[fx.Node]:
        """Nodes that the value of `root` rests on, `root` first."""
        self.value(root)
        seen: dict[fx.Node, None] = {}
        stack = [root]
        while stack:
            node = stack.pop()
            if node not in seen:
                seen[node] = None
                stack.extend(n for n in self.operands.get(node, ()) if n in self._values)
        return list(seen)


Handler = Callable[[Evaluator, fx.Node], Value]
_HANDLERS: dict[str, Handler] = {}


def _handles(*names: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        _HANDLERS.update(dict.fromkeys(names, handler))
        return handler

    return register


def _expect(value: Value, kind: type[Any]) -> Any:
    if not isinstance(value, kind):
        raise Unknown
    return value


@_handles("arange")
def _arange(ev: Evaluator, node: fx.Node) -> Value:
    if len(node.args) >= 2:
        start, step = node.args[0], argument(node, 2, "step", 1)
    else:
        start, step = node.kwargs.get("start", 0), node.kwargs.get("step", 1)
    if not isinstance(step, int) or dtype_of(node) not in (torch.int64, torch.int32):
        raise Unknown
    result: Lin = _expect(ev.operand(start), Lin)
    if not is_one((shape_of(node) or (None,))[0]):
        result = result + Lin(axes=((0, step),))
    return result


@_handles("zeros", "new_zeros", "zeros_like")
def _zeros(_ev: Evaluator, node: fx.Node) -> Value:
    return _constant(node, 0)


@_handles("ones", "new_ones", "ones_like")
def _ones(_ev: Evaluator, node: fx.Node) -> Value:
    return _constant(node, 1)


@_handles("tensor", "scalar_tensor", "as_tensor")
def _tensor(_ev: Evaluator, node: fx.Node) -> Value:
    return _constant(node, node.args[0])


@_handles("full", "full_like", "new_full")
def _full(_ev: Evaluator, node: fx.Node) -> Value:
    return _constant(node, argument(node, 1 if op_name(node) != "new_full" else 2, "fill_value"))


def _constant(node: fx.Node, number: Any) -> Value:
    if not isinstance(number, bool | int | float):
        raise Unknown
    dtype = dtype_of(node)
    if dtype == torch.bool:
        return TRUE if number else FALSE
    if dtype is not None and dtype.is_floating_point:
        return Number(float(number))
    return Lin(int(number))


@_handles("add", "sub", "rsub")
def _add(ev: Evaluator, node: fx.Node) -> Value:
    left, right = ev.two(node)
    if argument(node, 2, "alpha", 1) != 1:
        raise Unknown
    sign = 1 if op_name(node) == "add" else -1
    if op_name(node) == "rsub":
        left, right = right, left
    if isinstance(left, Lin) and isinstance(right, Lin):
        return left + right * sign
    return _on_floats(left, right, lambda x, y: x + sign * y)


@_handles("mul", "multiply")
def _mul(ev: Evaluator, node: fx.Node) -> Value:
    left, right = ev.two(node)
    if isinstance(left, Bool) and isinstance(right, Bool):
        return left & right
    if isinstance(left, Lin) and isinstance(right, Lin):
        if left.is_const:
            left, right = right, left
        if not right.is_const:
            raise Unknown
        return left * right.const
    return _on_floats(left, right, lambda x, y: x * y)


@_handles("neg")
def _neg(ev: Evaluator, node: fx.Node) -> Value:
    value = ev.operand(node.args[0])
    return value * -1 if isinstance(value, Lin) else _on_floats(value, Number(0), lambda x, _: -x)


def _as_number(value: Value) -> Value:
    """A constant integer as a float constant; anything else as it is."""
    return Number(float(value.const)) if isinstance(value, Lin) and value.is_const else value


def _on_floats(left: Value, right: Value, apply: Callable[[float, float], float]) -> Value:
    left, right = _as_number(left), _as_number(right)
    if isinstance(left, Number) and isinstance(right, Number):
        return Number(apply(left.value, right.value))
    if isinstance(left, Two) and isinstance(right, Number):
        return Two(left.cond, apply(left.yes, right.value), apply(left.no, right.value))
    if isinstance(left, Number) and isinstance(right, Two):
        return Two(right.cond, apply(left.value, right.yes), apply(left.value, right.no))
    raise Unknown


@_handles("diff")
def _diff(ev: Evaluator, node: fx.Node) -> Value:
    if argument(node, 1, "n", 1) != 1 or node.kwargs.get("append") is not None:
        raise Unknown
    rank = len(shape_of(node) or ())
    axis = argument(node, 2, "dim", -1) % rank
    value: Lin = _expect(ev.operand(node.args[0]), Lin)
    if value.leaves_along(axis):
        raise Unknown
    prepend = argument(node, 3, "prepend")
    step = Lin(value.factor(axis))
    if prepend is not None:
        if not is_one((shape_of(prepend) or (None,) * rank)[axis]):
            raise Unknown
        first = substitute(value, [Entry(None) if i == axis else Entry(i) for i in range(rank)])
        if _expect(first, Lin) - _expect(ev.operand(prepend), Lin) != step:
            raise Unknown
    return step


@_handles("cumsum")
def _cumsum(ev: Evaluator, node: fx.Node) -> Value:
    value = ev.operand(node.args[0])
    if value in (FALSE, Lin(0)):
        return Lin(0)
    raise Unknown


@_handles("le", "lt", "ge", "gt", "less", "less_equal", "greater", "greater_equal")
def _order(ev: Evaluator, node: fx.Node) -> Value:
    left, right = (_expect(v, Lin) for v in ev.two(node))
    name = {"less": "lt", "less_equal": "le", "greater": "gt", "greater_equal": "ge"}.get(
        op_name(node), op_name(node)
    )
    lin = right - left if name in ("le", "lt") else left - right
    return compare_ge(lin + Lin(-1) if name in ("lt", "gt") else lin)


@_handles("eq", "ne", "not_equal")
def _equal(ev: Evaluator, node: fx.Node) -> Value:
    left, right = ev.two(node)
    if isinstance(left, Two):
        right = _as_number(right)
    result: Value
    if isinstance(left, Two) and isinstance(right, Number) and left.yes != left.no:
        if right.value == left.yes:
            result = left.cond
        elif right.value == left.no:
            result = negate(left.cond)
        else:
            result = FALSE
    else:
        result = compare_eq(_expect(left, Lin) - _expect(right, Lin))
    return result if op_name(node) == "eq" else negate(result)


@_handles("and_", "logical_and", "bitwise_and", "iand")
def _and(ev: Evaluator, node: fx.Node) -> Value:
    left, right = (_expect(v, Bool) for v in ev.two(node))
    return left & right  # type: ignore[no-any-return]


@_handles("or_", "logical_or", "bitwise_or")
def _or(ev: Evaluator, node: fx.Node) -> Value:
    left, right = (_expect(v, Bool) for v in ev.two(node))
    if left == TRUE or right == TRUE:
        return TRUE
    if left.is_false or right.is_false:
        return right if left.is_false else left  # type: ignore[no-any-return]
    raise Unknown


@_handles("invert", "logical_not", "bitwise_not", "not_")
def _not(ev: Evaluator, node: fx.Node) -> Value:
    return negate(_expect(ev.operand(node.args[0]), Bool))


@_handles("where")
def _where(ev: Evaluator, node: fx.Node) -> Value:
    if node.op == "call_method":
        raise Unknown
    rank = len(shape_of(node) or ())
    cond = _expect(ev.aligned(node.args[0], rank), Bool)
    yes, no = (ev.aligned(a, rank) for a in node.args[1:3])
    return _select(cond, yes, no, dtype_of(node))


@_handles("masked_fill")
def _masked_fill(ev: Evaluator, node: fx.Node) -> Value:
    rank = len(shape_of(node) or ())
    value = ev.aligned(node.args[0], rank)
    mask = _expect(ev.aligned(node.args[1], rank), Bool)
    return _select(negate(mask), value, ev.operand(node.args[2]), dtype_of(node))


def _select(cond: Bool, yes: Value, no: Value, dtype: torch.dtype | None) -> Value:
    if cond == TRUE or cond.is_false:
        return yes if cond == TRUE else no
    if dtype == torch.bool:
        if no == FALSE:
            return cond & _expect(yes, Bool)
        if yes == FALSE:
            return negate(cond) & _expect(no, Bool)
        if no == TRUE and yes == FALSE:
            return negate(cond)
        raise Unknown
    numbers = [n.value for n in map(_as_number, (yes, no)) if isinstance(n, Number)]
    if len(numbers) == 2 and dtype is not None and dtype.is_floating_point:
        return Two(cond, numbers[0], numbers[1])
    if isinstance(yes, Two) and len(numbers) == 1 and numbers[0] == yes.no:
        return replace(yes, cond=yes.cond & cond)
    raise Unknown


@_handles(
    "to",
    "type",
    "long",
    "int",
    "bool",
    "float",
    "clone",
    "contiguous",
    "detach",
    "type_as",
    "_to_copy",
)
def _cast(ev: Evaluator, node: fx.Node) -> Value:
    value = ev.operand(node.args[0])
    dtype = dtype_of(node)
    if dtype is None:
        raise Unknown
    if isinstance(value, Bool):
        if dtype == torch.bool:
            return value
        if dtype.is_floating_point:
            return Two(value, 1.0, 0.0)
        raise Unknown
    if isinstance(value, Lin):
        if dtype in (torch.int64, torch.int32):
            return value
        if value.is_const and dtype.is_floating_point:
            return Number(float(value.const))
        raise Unknown
    if isinstance(value, Two) and dtype == torch.bool and bool(value.yes) != bool(value.no):
        return value.cond if value.yes else negate(value.cond)
    if isinstance(value, Two | Number) and dtype.is_floating_point:
        return value
    raise Unknown


def _source_shape(node: fx.Node) -> tuple[Any, ...]:
    shape = shape_of(node.args[0])
    if shape is None:
        raise Unknown
    return shape


def _axis(node: fx.Node, position: int, name: str, rank: int) -> int:
    axis = argument(node, position, name)
    if not isinstance(axis, int):
        raise Unknown
    return axis % rank


@_handles("getitem")
def _getitem(ev: Evaluator, node: fx.Node) -> Value:
    source, index = node.args
    shape = _source_shape(node)
    items = list(index) if isinstance(index, tuple | list) else [index]
    consumed = sum(item is not None and item is not Ellipsis for item in items)
    if Ellipsis in [i for i in items if not isinstance(i, fx.Node)]:
        at = next(i for i, item in enumerate(items) if item is Ellipsis)
        items[at : at + 1] = [slice(None)] * (len(shape) - consumed)
    else:
        items += [slice(None)] * (len(shape) - consumed)

    gathers = [i for i, item in enumerate(items) if isinstance(item, fx.Node | int)]
    tensors = [item for item in items if isinstance(item, fx.Node)]
    if any(dtype_of(item) not in (torch.int64, torch.int32) for item in tensors):
        raise Unknown
    gathered_rank = max((len(shape_of(item) or ()) for item in tensors), default=0)
    adjacent = not gathers or gathers == list(range(gathers[0], gathers[-1] + 1))
    mapping: list[Entry] = []
    out = 0 if not tensors or adjacent else gathered_rank
    placed = None if tensors and adjacent else 0
    axis = 0
    for i, item in enumerate(items):
        if item is None:
            out += 1
            continue
        if tensors and i in gathers:
            if placed is None:
                placed = out
                out += gathered_rank
            if isinstance(item, int):
                mapping.append(_constant_entry(item, shape[axis]))
            else:
                value = ev.aligned(item, gathered_rank)
                entry = entry_of(value)
                mapping.append(
                    entry if entry.axis is None else replace(entry, axis=entry.axis + placed)
                )
        elif isinstance(item, int):
            mapping.append(_constant_entry(item, shape[axis]))
        elif isinstance(item, slice):
            start = 0 if item.start is None else item.start
            if item.step not in (None, 1) or not isinstance(start, int):
                raise Unknown
            mapping.append(Entry(out, _constant_entry(start, shape[axis]).offset))
            out += 1
        else:
            raise Unknown
        axis += 1
    return _drop_ones(substitute(ev.operand(source), mapping), shape_of(node) or ())


def _constant_entry(index: int, size: Any) -> Entry:
    if index >= 0:
        return Entry(None, index)
    if not isinstance(size, int):
        raise Unknown
    return Entry(None, index + size)


def _drop_ones(value: Value, shape: tuple[Any, ...]) -> Value:
    """Indices along axes of size 1 are 0."""
    return substitute(
        value, [Entry(None, 0) if is_one(size) else Entry(i) for i, size in enumerate(shape)]
    )


@_handles("select")
def _select_axis(ev: Evaluator, node: fx.Node) -> Value:
    shape = _source_shape(node)
    at = _axis(node, 1, "dim", len(shape))
    index = argument(node, 2, "index")
    if not isinstance(index, int):
        raise Unknown
    mapping = [Entry(i if i < at else i - 1) for i in range(len(shape))]
    mapping[at] = _constant_entry(index, shape[at])
    return substitute(ev.operand(node.args[0]), mapping)


@_handles("narrow")
def _narrow(ev: Evaluator, node: fx.Node) -> Value:
    shape = _source_shape(node)
    at = _axis(node, 1, "dim", len(shape))
    start = argument(node, 2, "start")
    if not isinstance(start, int):
        raise Unknown
    mapping = [Entry(i) for i in range(len(shape))]
    mapping[at] = Entry(at, _constant_entry(start, shape[at]).offset)
    return _drop_ones(substitute(ev.operand(node.args[0]), mapping), shape_of(node) or ())


@_handles("unsqueeze")
def _unsqueeze(ev: Evaluator, node: fx.Node) -> Value:
    shape = _source_shape(node)
    at = _axis(node, 1, "dim", len(shape) + 1)
    return substitute(
        ev.operand(node.args[0]), [Entry(i if i < at else i + 1) for i in range(len(shape))]
    )


@_handles("squeeze", "view", "reshape", "flatten", "view_as", "reshape_as", "_unsafe_view")
def _view(ev: Evaluator, node: fx.Node) -> Value:
    before, after = _source_shape(node), shape_of(node) or ()
    kept_before = [i for i, size in enumerate(before) if not is_one(size)]
    kept_after = [i for i, size in enumerate(after) if not is_one(size)]
    if [str(before[i]) for i in kept_before] != [str(after[i]) for i in kept_after]:
        raise Unknown
    moved = dict(zip(kept_before, kept_after))
    mapping = [Entry(moved[i]) if i in moved else Entry(None, 0) for i in range(len(before))]
    return substitute(ev.operand(node.args[0]), mapping)


@_handles("expand", "expand_as", "broadcast_to")
def _expand(ev: Evaluator, node: fx.Node) -> Value:
    return ev.aligned(node.args[0], len(shape_of(node) or ()))


@_handles("transpose", "swapaxes", "t", "permute")
def _permute(ev: Evaluator, node: fx.Node) -> Value:
    rank = len(_source_shape(node))
    order = list(range(rank))
    if op_name(node) == "permute":
        dims: Any = node.args[1:] if isinstance(node.args[1], int) else node.args[1]
        order = [d % rank for d in dims]
    elif op_name(node) == "t":
        order = order[::-1]
    else:
        a, b = _axis(node, 1, "dim0", rank), _axis(node, 2, "dim1", rank)
        order[a], order[b] = order[b], order[a]
    mapping = [Entry(order.index(i)) for i in range(rank)]
    return substitute(ev.operand(node.args[0]), mapping)


@_handles("glm::causal_mask")
def _causal_mask(ev: Evaluator, node: fx.Node) -> Value:
    lengths, starts, key_mask, _num_queries, _num_keys, dtype = node.args
    shape: tuple[Any, ...] = shape_of(node) or ()
    at_batch = Entry(None, 0) if is_one(shape[0]) else Entry(0)
    query = Lin(axes=() if is_one(shape[2]) else ((2, 1),))
    key = Lin(axes=() if is_one(shape[3]) else ((3, 1),))
    length = substitute(ev.operand(lengths), [at_batch])
    result = compare_ge(_expect(length, Lin) + query - key)
    if starts is not None:
        start = substitute(ev.operand(starts), [at_batch])
        result = result & compare_ge(key - _expect(start, Lin))
    if key_mask is not None:
        mask = ev.aligned(key_mask, 3)
        mask = substitute(mask, [Entry(0), Entry(2), Entry(3)])
        result = result & _expect(_drop_ones(mask, shape), Bool)
    if dtype == torch.bool:
        return result
    return Two(result, 0.0, torch.finfo(dtype).min)  # type: ignore[arg-type]
