"""One reading of ATen graphs for all rewrites: peel what computes nothing, ask for roles.

The same model gives different nodes with and without decompositions, for other batch sizes, dtypes,
caches and versions. What differs is mostly spelling: views, casts, `mm` or `bmm` or a sum of
products, `native_layer_norm` or its parts. The questions of this module see through the spelling
and answer alike; each raises `No` with what was found when the answer is no. Passes hold no node
matching of their own.

Layouts decide whether a chain of views means what it should. An axis is a name with a size; a
tensor's layout gives, for each dimension, the axes that lie in it (`[B*S, H, D]` is `((B, S), (H,),
(D,))`). Axes of size 1 vanish, sizes may be symbolic. A chain that moves or splits an axis in a way
that the names cannot follow is not transparent.

Shape legend: B batch, S query tokens, T cached tokens, H index heads, D index head dim, P rope dim,
K in features, N out features.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.fx.experimental.symbolic_shapes import statically_known_true

from glm_compile.fx_passes.base import No

aten = torch.ops.aten
prims = torch.ops.prims

_RESHAPES = frozenset(
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
_PERMUTES = frozenset((aten.t.default, aten.transpose.int, aten.permute.default, aten.mT.default))
_VIEWS = _RESHAPES | _PERMUTES | {aten.expand.default}
_CASTS = frozenset((aten._to_copy.default, prims.convert_element_type.default, aten.to.dtype))
_RELUS = frozenset((aten.relu.default, aten.clamp_min.default, aten.maximum.default))
_SUMS = frozenset((aten.sum.dim_IntList,))
_MULS = frozenset((aten.mul.Tensor, aten.mul.Scalar))
_DIVS = frozenset((aten.div.Tensor, aten.div.Scalar))


# --- values and sizes -----------------------------------------------------------------------------


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


# --- layouts --------------------------------------------------------------------------------------


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
    if node.target in _RESHAPES:
        return regroup(layout, shape)
    if node.target in _PERMUTES:
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


# --- peeling --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Peeled:
    """Where a chain of transparent nodes begins.

    Attributes:
        source: the first node that is not transparent.
        chain: the peeled nodes, from the source's user up to the node that was asked about.
        casts: dtypes in the order of computation, source's first; one entry means no cast.
        factor: product of the constants that the chain multiplies by.
    """

    source: fx.Node
    chain: tuple[fx.Node, ...]
    casts: tuple[torch.dtype, ...]
    factor: float = 1.0


def is_view(node: Any) -> bool:
    """Whether a node only moves, repeats or copies its input's elements."""
    return (
        isinstance(node, fx.Node)
        and node.op == "call_function"
        and node.target in _VIEWS
        and isinstance(node.meta.get("val"), torch.Tensor)
    )


def is_cast(node: Any) -> bool:
    """Whether a node changes nothing but the dtype (a device move is not a cast)."""
    if not is_call(node, *_CASTS) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    source = args(node)[0]
    return isinstance(source, fx.Node) and value(source).device == value(node).device


def number(argument: Any) -> float | None:
    """The number that an argument is, also as a 0-d tensor made in the graph."""
    if isinstance(argument, int | float) and not isinstance(argument, bool):
        return float(argument)
    if is_call(argument, aten.full.default) and list(args(argument)[0]) == []:
        return number(args(argument)[1])
    if is_call(argument, aten.scalar_tensor.default):
        return number(args(argument)[0])
    return None


def multiplication(node: Any) -> tuple[fx.Node, float] | None:
    """(x, c) of x * c, c * x or x / c with a constant c."""
    if is_call(node, *_MULS):
        for x, c in (args(node)[:2], reversed(args(node)[:2])):
            if isinstance(x, fx.Node) and (factor := number(c)) is not None:
                return x, factor
    if is_call(node, *_DIVS) and (factor := number(args(node)[1])) is not None and factor != 0:
        return args(node)[0], 1.0 / factor
    return None


def peel(
    node: fx.Node,
    *,
    casts: bool = False,
    factors: bool = False,
    stop: Callable[[fx.Node], bool] = lambda _: False,
) -> Peeled:
    """Walk up through views, and on request through casts and constant factors."""
    chain: list[fx.Node] = []
    dtypes = [dtype_of(node)] if isinstance(node.meta.get("val"), torch.Tensor) else []
    product = 1.0
    while not stop(node):
        if is_view(node):
            chain.append(node)
            node = args(node)[0]
        elif casts and is_cast(node):
            chain.append(node)
            node = args(node)[0]
            if dtype_of(node) != dtypes[-1]:
                dtypes.append(dtype_of(node))
        elif factors and (scaled := multiplication(node)) is not None:
            chain.append(node)
            node = scaled[0]
            product *= scaled[1]
        else:
            break
    return Peeled(node, tuple(reversed(chain)), tuple(reversed(dtypes)), product)


def layout_after(layout: Layout, chain: Sequence[fx.Node]) -> Layout | None:
    """Layout at the end of a peeled chain that starts from `layout`."""
    current: Layout | None = layout
    for node in chain:
        if is_view(node):
            current = follow(current, node) if current is not None else None
    return current


# --- contractions ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Contraction:
    """A product summed over one dimension, however it is spelled.

    Attributes:
        node: result.
        lhs, rhs: operands as the product reads them.
        bias: added afterwards (addmm), or None.
        summed: how the layouts combine.
    """

    node: fx.Node
    lhs: fx.Node
    rhs: fx.Node
    bias: fx.Node | None
    form: str

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The node, and the elementwise product that a sum has before it."""
        return (self.node, args(self.node)[0]) if self.form == "sum" else (self.node,)

    def layout(self, lhs: Layout, rhs: Layout) -> tuple[Layout, tuple[Axis, ...]] | None:
        """(layout of the result, axes summed over), or None where the operands do not fit."""
        if self.form in ("mm", "bmm"):
            batch: tuple[tuple[Axis, ...], ...] = ()
            if self.form == "bmm":
                merged = merge_dims(lhs[0], rhs[0])
                if merged is None:
                    return None
                batch = (merged,)
            summed = lhs[-1]
            if names((summed,)) != names((rhs[-2],)):
                return None
            return (*batch, lhs[-2], rhs[-1]), summed
        return self._sum_layout(lhs, rhs)

    def _sum_layout(self, lhs: Layout, rhs: Layout) -> tuple[Layout, tuple[Axis, ...]] | None:
        num_dims = max(len(lhs), len(rhs))
        lhs = ((),) * (num_dims - len(lhs)) + lhs
        rhs = ((),) * (num_dims - len(rhs)) + rhs
        arguments = named_args(self.node)
        dims = [d % num_dims for d in arguments["dim"]]
        result: list[tuple[Axis, ...]] = []
        summed: tuple[Axis, ...] = ()
        for d in range(num_dims):
            if d in dims:
                if names((lhs[d],)) != names((rhs[d],)):
                    return None
                summed += lhs[d]
                if arguments["keepdim"]:
                    result.append(())
                continue
            merged = merge_dims(lhs[d], rhs[d])
            if merged is None:
                return None
            result.append(merged)
        return tuple(result), summed


def contraction(node: Any) -> Contraction | None:
    """The product that `node` is: mm, addmm, bmm, linear's parts, or sum(a * b)."""
    if is_call(node, aten.mm.default):
        return Contraction(node, args(node)[0], args(node)[1], None, "mm")
    if is_call(node, aten.bmm.default):
        return Contraction(node, args(node)[0], args(node)[1], None, "bmm")
    if is_call(node, aten.addmm.default):
        arguments = named_args(node)
        if arguments["beta"] == 1 and arguments["alpha"] == 1:
            return Contraction(node, args(node)[1], args(node)[2], args(node)[0], "mm")
    if is_call(node, *_SUMS):
        product = args(node)[0]
        arguments = named_args(node)
        if (
            is_call(product, aten.mul.Tensor)
            and all(isinstance(a, fx.Node) for a in args(product)[:2])
            and len(product.users) == 1
            and arguments["dim"]
            and arguments.get("dtype") in (None, dtype_of(node))
            and dtype_of(product) == dtype_of(node)
        ):
            return Contraction(node, args(product)[0], args(product)[1], None, "sum")
    return None


# --- linear ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Linear:
    """x @ weight^T (+ bias), weight a graph input.

    Attributes:
        node: result, in any shape that keeps rows and columns in order.
        x: the input [..., K], as near to its producer as views allow.
        weight: placeholder [N, K].
        weight_casts: dtypes of the weight, the parameter's first; more than one is a cast.
        bias: node or None.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    weight_casts: tuple[torch.dtype, ...]
    bias: fx.Node | None

    @property
    def num_out(self) -> Any:
        return shape_of(self.weight)[0]


def linear(node: Any) -> Linear | None:
    """The linear that `node` is, or None. Both operand orders and every contraction are seen."""
    if is_call(node, aten.linear.default):
        arguments = named_args(node)
        weight = peel(arguments["weight"], casts=True)
        if weight.source.op != "placeholder" or any(is_view(n) for n in weight.chain):
            return None
        x = _linear_input(arguments["input"])
        return Linear(node, x[0], weight.source, weight.casts, arguments.get("bias"))
    product = contraction(node)
    if product is None:
        return None
    for x_node, weight_node in ((product.lhs, product.rhs), (product.rhs, product.lhs)):
        weight = peel(weight_node, casts=True)
        if weight.source.op != "placeholder" or not isinstance(
            weight.source.meta.get("val"), torch.Tensor
        ):
            continue
        shape = shape_of(weight.source)
        if len(shape) != 2 or not value(weight.source).is_floating_point():
            continue
        weight_layout = layout_after(axes(N=shape[0], K=shape[1]), weight.chain)
        if weight_layout is None:
            continue
        source, x_layout = _linear_input(x_node, shape[1])
        if x_layout is None:
            continue
        is_lhs = x_node is product.lhs
        operands = (x_layout, weight_layout) if is_lhs else (weight_layout, x_layout)
        combined = product.layout(*operands)
        if combined is None or names((combined[1],)) not in ((("K",),), ((),)):
            continue
        if not is_same(shape[1], 1) and not combined[1]:
            continue
        # Rows in order, then columns: what a linear over the rows gives, up to a view.
        flat = [axis.name for dim in combined[0] for axis in dim]
        rows = [axis.name for dim in x_layout for axis in dim if axis.name != "K"]
        columns = [] if is_same(shape[0], 1) else ["N"]
        if flat != rows + columns:
            continue
        if product.bias is not None and not _is_column_bias(product.bias, shape[0]):
            continue
        return Linear(node, source, weight.source, weight.casts, product.bias)
    return None


def _is_column_bias(bias: fx.Node, num_out: Any) -> bool:
    shape = shape_of(bias)
    return len(shape) == 1 and is_same(shape[0], num_out)


def _linear_input(node: fx.Node, num_in: Any = None) -> tuple[fx.Node, Layout | None]:
    """(nearest producer whose last dimension is the linear's, the operand's layout in its axes)."""
    best: tuple[fx.Node, Layout | None] = (node, None)
    chain: list[fx.Node] = []
    current = node
    while True:
        shape = shape_of(current)
        if shape and (num_in is None or is_same(shape[-1], num_in)):
            own = axes(**{f"M{i}": s for i, s in enumerate(shape[:-1])}, K=shape[-1])
            layout = layout_after(own, list(reversed(chain)))
            if layout is not None and _keeps_rows(own, layout):
                best = (current, layout)
        if not is_view(current) or current.target is aten.expand.default:
            return best
        chain.append(current)
        current = args(current)[0]


def _keeps_rows(own: Layout, layout: Layout) -> bool:
    """Whether an operand still holds the rows of `own` in order (its K may have moved)."""

    def rows(some: Layout) -> list[str]:
        return [axis.name for dim in some for axis in dim if axis.name != "K"]

    return rows(own) == rows(layout)


# --- norms ----------------------------------------------------------------------------------------


@dataclass(frozen=True)
class LayerNorm:
    """LayerNorm over the last dimension, in x's dtype."""

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    bias: fx.Node
    eps: float


def layer_norm(node: fx.Node, what: str = "norm") -> LayerNorm:
    """The LayerNorm with weight and bias that made `node`; says what else was found.

    Raises:
        No: RMSNorm, no bias, other dimensions, or no norm at all.
    """
    found = _native_layer_norm(node, what) or _decomposed_layer_norm(node)
    if found is not None:
        return found
    if looks_like_rms_norm(node):
        raise No(f"{what} is an RMSNorm, expected LayerNorm with bias")
    raise No(f"{what}: expected LayerNorm with bias, found {describe(node)}")


def _native_layer_norm(node: fx.Node, what: str) -> LayerNorm | None:
    norm = peel(node, casts=True, stop=is_view).source
    if is_call(norm, operator.getitem) and args(norm)[1] == 0:
        norm = args(norm)[0]
    if not is_call(norm, aten.native_layer_norm.default, aten.layer_norm.default):
        return None
    arguments = named_args(norm)
    x, weight, bias = arguments["input"], arguments.get("weight"), arguments.get("bias")
    if is_cast(x) and dtype_of(x) == torch.float32 and dtype_of(args(x)[0]) == dtype_of(node):
        x = args(x)[0]
    if len(arguments["normalized_shape"]) != 1:
        raise No(f"{what}: LayerNorm over {len(arguments['normalized_shape'])} dimensions, not 1")
    if weight is None or bias is None:
        missing = "weight" if weight is None else "bias"
        raise No(f"{what}: LayerNorm without {missing}, expected weight and bias")
    return LayerNorm(node, x, weight, bias, float(arguments["eps"]))


def _pair(node: Any, *targets: Any) -> Iterator[tuple[Any, Any]]:
    """Both orders of a commutative node's operands."""
    if is_call(node, *targets) and len(args(node)) >= 2 and not node.kwargs:
        yield args(node)[0], args(node)[1]
        yield args(node)[1], args(node)[0]


def _is_vector(node: Any) -> bool:
    if not isinstance(node, fx.Node) or not isinstance(node.meta.get("val"), torch.Tensor):
        return False
    return len(shape_of(peel(node, casts=True).source)) == 1


def _decomposed_layer_norm(node: fx.Node) -> LayerNorm | None:
    """cast(((x - mean) * rsqrt(var + eps)) * weight + bias), x perhaps cast to fp32 before."""
    outer = peel(node, casts=True, stop=is_view)
    for scaled, bias in _pair(outer.source, aten.add.Tensor):
        if not _is_vector(bias):
            continue
        for normed, weight in _pair(scaled, aten.mul.Tensor):
            if not _is_vector(weight):
                continue
            for centred, inverse in _pair(normed, aten.mul.Tensor):
                if not (is_call(centred, aten.sub.Tensor) and is_call(inverse, aten.rsqrt.default)):
                    continue
                statistics = _variance_of(inverse)
                if statistics is None:
                    continue
                eps, var_mean = statistics
                x, mean = args(centred)[:2]
                if args(var_mean)[0] is not x or not (
                    is_call(mean, operator.getitem) and args(mean) == (var_mean, 1)
                ):
                    continue
                if is_cast(x) and dtype_of(args(x)[0]) == dtype_of(node):
                    # A cast up before and the same down after are how a norm in fp32 is spelled.
                    x = args(x)[0]
                return LayerNorm(
                    node,
                    x,
                    peel(weight, casts=True).source,
                    peel(bias, casts=True).source,
                    eps,
                )
    return None


def _variance_of(inverse: fx.Node) -> tuple[float, fx.Node] | None:
    """(eps, var_mean node) of rsqrt(var + eps) over the last dimension, biased."""
    for variance, eps in _pair(args(inverse)[0], aten.add.Tensor, aten.add.Scalar):
        eps_value = number(eps)
        if eps_value is None or not is_call(variance, operator.getitem) or args(variance)[1] != 0:
            continue
        var_mean = args(variance)[0]
        if not is_call(var_mean, aten.var_mean.correction):
            continue
        arguments = named_args(var_mean)
        num_dims = len(shape_of(arguments["self"]))
        dims = [d % num_dims for d in arguments["dim"] or ()]
        if dims == [num_dims - 1] and arguments["correction"] == 0 and arguments["keepdim"]:
            return eps_value, var_mean
    return None


def looks_like_rms_norm(node: fx.Node, depth: int = 8) -> bool:
    """Whether x * rsqrt(mean(x^2) + eps) lies just above `node`."""
    front = [node]
    for _ in range(depth):
        above: list[fx.Node] = []
        for current in front:
            if is_call(current, aten.rsqrt.default):
                source = args(current)[0]
                operand = (
                    args(source)[0] if is_call(source, aten.add.Tensor, aten.add.Scalar) else 0
                )
                return is_call(operand, aten.mean.dim)
            if is_call(current, *_MULS) or is_cast(current) or is_view(current):
                above += [a for a in args(current)[:2] if isinstance(a, fx.Node)]
        front = above
    return False


# --- slices and rope ------------------------------------------------------------------------------


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
    """cat(rope(x[..., :P]), x[..., P:]).

    Attributes:
        node: result.
        x: the whole input, rotated part first.
        cos, sin: [B or 1, S, P], as given to the layer.
        interleaved: pairs are (0, 1), (2, 3), ... and come out evens first; else (0, P/2), ...
        rope_dim: P.
    """

    node: fx.Node
    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    interleaved: bool
    rope_dim: int


def rope(node: fx.Node, what: str = "rope") -> Rope:
    """The partial rotation that made `node`.

    Raises:
        No: anything else, with the first thing that differs.
    """
    if not is_call(node, aten.cat.default) and not is_call(node, aten.add.Tensor):
        raise No(f"{what}: expected cat(rotated, passed), found {describe(node)}")
    parts = _cat_parts(node)
    if len(parts) >= 3:
        return _pairwise_rope(node, parts[:2], parts[2:], what)
    if len(parts) == 2 and is_call(parts[0], aten.add.Tensor):
        return _half_rope(node, parts[0], parts[1:], what)
    if len(parts) == 2:
        return _pairwise_rope(node, parts, [], what)
    return _half_rope(node, node, [], what)


def _cat_parts(node: fx.Node) -> list[fx.Node]:
    """Parts of nested cats over the last dimension."""
    if not is_call(node, aten.cat.default):
        return [node]
    arguments = named_args(node)
    num_dims = len(shape_of(node))
    if arguments["dim"] % num_dims != num_dims - 1:
        return [node]
    return [part for tensor in arguments["tensors"] for part in _cat_parts(tensor)]


def _check_passed(x: Slice, passed: list[fx.Node], rope_dim: int, what: str) -> None:
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
    for a, b in _pair(node, aten.mul.Tensor):
        if isinstance(a, fx.Node) and isinstance(b, fx.Node):
            yield last_dim_slice(a), b


def _is_table(node: fx.Node, x: Slice) -> bool:
    return last_dim_slice(peel(node).source).source is not x.source


def _pairwise_rope(node: fx.Node, rotated: list[fx.Node], passed: list[fx.Node], what: str) -> Rope:
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
            for sum_a, sum_b in _pair(second, aten.add.Tensor):
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
    what: str,
) -> Rope:
    half = x1.length
    rope_dim = 2 * half
    if (x1.start, x1.step, x2.start, x2.step) == (0, 2, 1, 2):
        interleaved = True
    elif (x1.start, x1.step, x2.start, x2.step) == (0, 1, half, 1):
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
        source = rope_table(a, x1.source, half, rope_dim, f"{what}: {label}")
        if rope_table(b, x1.source, half, rope_dim, f"{what}: {label}") is not source:
            raise No(f"{what}: two different {label} tables in one rotation")
        tables.append(source)
    return Rope(node, x1.source, tables[0], tables[1], interleaved, rope_dim)


def _half_rope(node: fx.Node, rotated: fx.Node, passed: list[fx.Node], what: str) -> Rope:
    """x cos + cat(-x2, x1) sin, as transformers' `apply_rotary_pos_emb`."""
    for direct, turned in _pair(rotated, aten.add.Tensor):
        for x, cos in _product(direct):
            for part, sin in _pair(turned, aten.mul.Tensor):
                halves = _cat_parts(part) if isinstance(part, fx.Node) else []
                if len(halves) != 2 or not is_call(halves[0], aten.neg.default):
                    continue
                if not isinstance(sin, fx.Node) or x.start != 0 or x.step != 1:
                    continue
                x2, x1 = last_dim_slice(args(halves[0])[0]), last_dim_slice(halves[1])
                half = x.length // 2
                if x1 != Slice(x.source, 0, 1, half) or x2 != Slice(x.source, half, 1, half):
                    continue
                _check_passed(x, passed, x.length, what)
                cos_source = rope_table(cos, x.source, x.length, x.length, f"{what}: cos")
                sin_source = rope_table(sin, x.source, x.length, x.length, f"{what}: sin")
                return Rope(node, x.source, cos_source, sin_source, False, x.length)
    raise No(f"{what}: expected x cos + rotate_half(x) sin, found {describe(rotated)}")


def rope_table(node: fx.Node, x: fx.Node, used: int, rope_dim: int, what: str) -> fx.Node:
    """The [B or 1, S, P] table of which `node` is the used half or whole, one row a token of x.

    Args:
        node: operand of the product with [B, S, ..., used] elements of `x`.
    """
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
    batch, tokens = shape_of(x)[:2]
    if not is_same(shape[1], tokens) or not (is_same(shape[0], 1) or is_same(shape[0], batch)):
        raise No(f"{what} has shape {list(shape)}, its input {list(shape_of(x))}")
    own = axes(B=shape[0], S=shape[1], P=used)
    # Views before the slice see the whole table, those behind it the used part.
    whole = layout_after(axes(B=shape[0], S=shape[1], P=rope_dim), inner.chain)
    layout = None
    if whole is not None and names((whole[-1],)) == names((own[-1],)):
        layout = layout_after((*whole[:-1], own[-1]), peeled.chain)
    wanted = axes(B=shape[0], S=shape[1], **{f"h{i}": 1 for i in shape_of(x)[2:-1]}, P=used)
    if layout is None or names(_strip_repeats(layout)) != names(wanted):
        raise No(f"{what} is not laid out as one row a token of {describe(x)}")
    return base


def _strip_repeats(layout: Layout) -> Layout:
    return tuple(tuple(axis for axis in dim if axis.name != "*") for dim in layout)


# --- caches ---------------------------------------------------------------------------------------


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


# --- index scores ---------------------------------------------------------------------------------


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
    if layout is None or names(_strip_repeats(layout)) != names(
        axes(B=batch, S=tokens, T=num_keys)
    ):
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
