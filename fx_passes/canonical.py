"""One reading of ATen graphs for all rewrites: peel what computes nothing, ask for roles.

The same model gives different nodes with and without decompositions, for other batch sizes, dtypes,
caches and versions. What differs is mostly spelling: views, casts, `mm` or `bmm` or a sum of
products, `native_layer_norm` or its parts. The questions of this module, of `rotations` and of
`index_scores` see through the spelling and answer alike; each raises `No` with what was found when
the answer is no, or returns None where nothing was claimed. Passes hold no node matching of their
own. Layouts (see `layouts`) decide whether a chain of views means what it should.

Shape legend: K in features, N out features, M rows.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.layouts import (
    PERMUTES,
    RESHAPES,
    Axis,
    Layout,
    args,
    axes,
    describe,
    dtype_of,
    follow,
    is_call,
    is_same,
    merge_dims,
    named_args,
    names,
    shape_of,
    value,
)

aten = torch.ops.aten
prims = torch.ops.prims
_VIEWS = RESHAPES | PERMUTES | {aten.expand.default}
_CASTS = frozenset((aten._to_copy.default, prims.convert_element_type.default, aten.to.dtype))
_SUMS = frozenset((aten.sum.dim_IntList,))
_MULS = frozenset((aten.mul.Tensor, aten.mul.Scalar))
_DIVS = frozenset((aten.div.Tensor, aten.div.Scalar))


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


@dataclass(frozen=True)
class Contraction:
    """A product summed over one dimension, however it is spelled.

    Attributes:
        node: result.
        lhs, rhs: operands as the product reads them.
        bias: added afterwards (addmm), or None.
        form: `mm`, `bmm` or `sum`: how the layouts combine.
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


def pair(node: Any, *targets: Any) -> Iterator[tuple[Any, Any]]:
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
    for scaled, bias in pair(outer.source, aten.add.Tensor):
        if not _is_vector(bias):
            continue
        for normed, weight in pair(scaled, aten.mul.Tensor):
            if not _is_vector(weight):
                continue
            for centred, inverse in pair(normed, aten.mul.Tensor):
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
    for variance, eps in pair(args(inverse)[0], aten.add.Tensor, aten.add.Scalar):
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


@dataclass(frozen=True)
class RmsNorm:
    """RMSNorm over the last dimension, rounded to x's dtype before the weight comes in.

    Attributes:
        node: result.
        x: the input before the cast to fp32.
        weight: vector, in x's dtype.
        eps: added to the mean of squares.
    """

    node: fx.Node
    x: fx.Node
    weight: fx.Node
    eps: float


def rms_norm(node: Any) -> RmsNorm | None:
    """The RMSNorm of the model that made `node`, or None: weight * cast(x * rsqrt(mean(x^2) + e)).

    x is cast to fp32 before and to its own dtype after, or is fp32 itself.
    """
    for weight, rounded in pair(node, aten.mul.Tensor):
        if not isinstance(rounded, fx.Node) or not _is_vector(weight) or is_cast(weight):
            continue
        scaled = args(rounded)[0] if is_cast(rounded) else rounded
        for x_fp32, inverse in pair(scaled, aten.mul.Tensor):
            if not is_call(inverse, aten.rsqrt.default) or not isinstance(x_fp32, fx.Node):
                continue
            eps = _mean_of_squares_of(inverse, x_fp32)
            x = args(x_fp32)[0] if is_cast(x_fp32) else x_fp32
            dtypes = (dtype_of(x), dtype_of(rounded), dtype_of(weight))
            if (
                eps is not None
                and dtype_of(x_fp32) == torch.float32
                and dtypes == (dtype_of(node),) * 3
                # One element would be broadcast.
                and is_same(shape_of(weight)[0], shape_of(x)[-1])
            ):
                return RmsNorm(node, x, weight, eps)
    return None


def _mean_of_squares_of(inverse: fx.Node, x: fx.Node) -> float | None:
    """The eps of rsqrt(mean(x^2) + eps) over the last dimension, or None."""
    for mean, eps in pair(args(inverse)[0], aten.add.Tensor, aten.add.Scalar):
        eps_value = number(eps)
        if eps_value is None or not is_call(mean, aten.mean.dim):
            continue
        arguments = named_args(mean)
        num_dims = len(shape_of(x))
        dims = [d % num_dims for d in arguments["dim"] or ()]
        if dims != [num_dims - 1] or not arguments["keepdim"] or arguments["dtype"] is not None:
            continue
        squares = arguments["self"]
        is_power = is_call(squares, aten.pow.Tensor_Scalar) and args(squares)[1] == 2
        is_product = is_call(squares, aten.mul.Tensor) and args(squares)[1] is x
        if (is_power or is_product) and args(squares)[0] is x:
            return eps_value
    return None


def in_order(node: Any) -> Any:
    """What lies under views that keep the elements in order."""
    while is_call(node, *RESHAPES):
        node = args(node)[0]
    return node


def swiglu(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """(gate, up) of silu(gate) * up, below views that keep the order of their elements, or None.

    All are of one dtype, to which silu is rounded, and nothing is broadcast.
    """
    for activated, up in pair(node, aten.mul.Tensor):
        gate = _silu_input(activated)
        if gate is None or not isinstance(up, fx.Node):
            continue
        dtypes = {dtype_of(part) for part in (gate, activated, up, node)}
        shapes = [shape_of(part) for part in (activated, up, node)]
        is_alike = all(
            len(shape) == len(shapes[-1]) and all(map(is_same, shape, shapes[-1]))
            for shape in shapes[:-1]
        )
        if len(dtypes) == 1 and is_alike:
            return gate, in_order(up)
    return None


def _silu_input(node: Any) -> fx.Node | None:
    """The x of silu(x), or in fp32 of x / (exp(-x) + 1) or x * sigmoid(x); or None."""
    node = in_order(node)
    if is_call(node, aten.silu.default):
        return in_order(args(node)[0])
    wide = in_order(args(node)[0]) if is_cast(node) else node
    x = _quotient_input(wide) or _product_input(wide)
    if x is None or dtype_of(x) != torch.float32:
        return None
    return in_order(args(x)[0] if is_cast(x) else x)


def _quotient_input(node: Any) -> fx.Node | None:
    """The x of x / (exp(-x) + 1)."""
    if not is_call(node, aten.div.Tensor):
        return None
    x, divisor = args(node)[:2]
    for exponential, one in pair(divisor, aten.add.Tensor, aten.add.Scalar):
        if number(one) == 1 and is_call(exponential, aten.exp.default):
            negative = args(exponential)[0]
            if is_call(negative, aten.neg.default) and args(negative)[0] is x:
                return x
    return None


def _product_input(node: Any) -> fx.Node | None:
    """The x of x * sigmoid(x)."""
    for x, sigmoid in pair(node, aten.mul.Tensor):
        if is_call(sigmoid, aten.sigmoid.default) and args(sigmoid)[0] is x:
            return x
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
