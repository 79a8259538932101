"""What lies between the indexer's projections and its scores, as one op.

Targets `GlmMoeDsaIndexer.forward` and `apply_rotary_pos_emb_interleave` of transformers
(models/glm_moe_dsa/modeling_glm_moe_dsa.py; checked with 5.20 and 5.24). Exact tier:

    wq_b -> view -> rope, cat ------------------------------------> q
    wk -> LayerNorm -> rope, cat -> (cache store) ----------------> k
    weights_proj -> float -> * H^-0.5 ----------------------------> weights

    q, k, weights = glm.indexer_prologue(wq_b's view, wk, weights_proj, norm, cos, sin)

Where k is stored in pages, or in consecutive rows of a graph input from a counter on (StaticCache),
the store goes in as well; of other caches it stays what it was. FP8 tier, once `indexer_topk` reads
FP8 pages: so do the quantisation of q and the folding of q's scale. The cache is mutated in place:

    q, weights, keys' = glm.indexer_prologue_rows(..., keys, first)
    q, weights, pages' = glm.indexer_prologue_paged(..., pages, block_table, lengths)
    q8, weights, pages' = glm.indexer_prologue_fp8(..., pages, block_table, lengths)

What attention caches of the same tokens may join these later: see `latent_write`.

Where weights_proj is kept in fp32 and reads a cast of the layer's input, the projection is an op
too, since the library takes a launch for the cast and two for the product:

    glm.indexer_gates(x, weights_proj) -> (as above)

Declines where the norm is not a LayerNorm with weight and bias, a cast or another op lies inside, q
and k are rotated by different tables or in different ways, the gates are scaled below fp32, or
something else reads a value that would vanish.

Shape legend: B batch, S query tokens, R = B * S, H index heads, D index head dim, P rope dim.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes import canonical, index_scores, layouts, rotations
from glm_compile.fx_passes.base import Declined, No, PassOptions, PassResult, where
from glm_compile.fx_passes.canonical import LayerNorm
from glm_compile.fx_passes.editing import Builder, erase_dead, first_user, hoist, refresh
from glm_compile.fx_passes.index_scores import KeyStore
from glm_compile.fx_passes.indexer_topk import NEEDS_FP8_CACHE, check_tier
from glm_compile.fx_passes.layouts import describe
from glm_compile.fx_passes.rotations import Rope

glm = torch.ops.glm
_SCALE_REASON = "head weights: weights_proj's output is scaled in {}, expected float32 (IDX-2)"


@dataclass(frozen=True)
class Prologue:
    """One region, as the walk found it.

    Attributes:
        q, k: the rotations; `norm` the key's LayerNorm.
        q_out, weights_out: what the scores read: q [B, S, H, D] (or its quantised form), weights.
        gates: weights_proj's output, [B, S, H] up to a view.
        gate_scale: constant that the gates are multiplied by.
        store: how the new key is kept; `k_out` is the value that goes in.
    """

    q: Rope
    k: Rope
    norm: LayerNorm
    q_out: fx.Node
    k_out: fx.Node
    weights_out: fx.Node
    gates: fx.Node
    gate_scale: float
    store: KeyStore


@dataclass(frozen=True)
class Store:
    """A store of the new keys that the op does itself.

    Attributes:
        target: the higher-order op that functionalizes `op`.
        op: the op with the store.
        arguments: what `op` takes besides the prologue's own inputs, as `target` takes it.
        result: the cache after the store.
    """

    target: Any
    op: Any
    arguments: dict[str, Any]
    result: fx.Node

    def inputs(self) -> list[fx.Node]:
        """The nodes among the arguments."""
        values = [*self.arguments.values(), *self.arguments.get("_all_bases", ())]
        return [value for value in values if isinstance(value, fx.Node)]


class IndexerPrologue:
    """Replace each indexer's norm, rotations and head weights by one op; see the module."""

    name = "indexer_prologue"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        result = PassResult(self.name)
        graph = graph_module.graph
        for anchor in _anchors(graph):
            place = where(anchor)
            try:
                if _is_done(anchor):
                    continue
                self._rewrite(graph, anchor)
            except No as no:
                result.declined.append(Declined(place, str(no)))
                continue
            result.matched.append(place)
            result.num_matches += 1
        if result.num_matches:
            graph_module.recompile()
        return result

    def _rewrite(self, graph: fx.Graph, anchor: fx.Node) -> None:
        if anchor.target is glm.masked_topk.default:
            scores = index_scores.index_scores(layouts.args(anchor)[0])
            read = index_scores.key_read(scores.k)
            check_tier(self.options, read.kind, layouts.dtype_of(scores.q))
            if read.kind == "paged_fp8":
                raise No("the scores do not read the FP8 pages: indexer_topk did not match here")
            found = _walk(scores.q, scores.weights, read.keys)
        elif anchor.target is glm.indexer_scores.default:
            q, weights, keys = layouts.args(anchor)[:3]
            found = _walk(q, weights, keys)
        else:
            q, weights, pages = layouts.args(anchor)[:3]
            quantised = canonical.peel(q).source
            if _is_item(quantised, glm.fp8_quant.default, 0):
                self._rewrite_fp8(graph, anchor, quantised)
                return
            found = _walk(q, weights, pages)
        if self.options.indexer_dtype == "fp8":
            raise No(NEEDS_FP8_CACHE)
        stored = _exact_store(found)
        if stored is not None:
            outputs = [found.q_out, found.weights_out, stored.result]
            self._rewrite_with_store(graph, anchor, found, outputs, stored)
            return
        outputs = [found.q_out, found.k_out, found.weights_out]
        _check_no_other_users(found, outputs)
        point = _make_room(graph, found, outputs, [])
        build = Builder(graph, point, anchor)
        call = build.call(glm.indexer_prologue.default, *_arguments(build, found), "")
        _hand_over(build, call, outputs)
        erase_dead(graph, outputs)

    def _rewrite_fp8(self, graph: fx.Graph, anchor: fx.Node, quantised: fx.Node) -> None:
        """The region with q's quantisation and the store of k inside."""
        _, weights, pages = layouts.args(anchor)[:3]
        quant: Any = layouts.args(quantised)[0]
        found = _walk(layouts.args(quant)[0], weights, pages, quant)
        if found.store.kind != "paged_write_fp8":
            raise No(NEEDS_FP8_CACHE)
        outputs = [quantised, found.weights_out, pages]
        stored = _paged_store(found, glm.indexer_prologue_fp8.default, pages)
        # The op multiplies by D^-0.5 itself, so that part of the graph's factor is left out here.
        factor = layouts.shape_of(found.norm.x)[-1] ** 0.5
        self._rewrite_with_store(graph, anchor, found, outputs, stored, factor)

    def _rewrite_with_store(
        self,
        graph: fx.Graph,
        anchor: fx.Node,
        found: Prologue,
        outputs: list[fx.Node],
        stored: Store,
        factor: float = 1.0,
    ) -> None:
        """An op that mutates the cache, as AOTAutograd would have functionalized it."""
        _check_no_other_users(found, outputs)
        point = _make_room(graph, found, outputs, stored.inputs())
        build = Builder(graph, point, anchor)
        names = [argument.name for argument in stored.op._schema.arguments]
        call = build.call(
            stored.target,
            stored.op,
            **dict(zip(names, _arguments(build, found, factor))),
            backend="",
            **stored.arguments,
        )
        _hand_over(build, call, outputs)
        erase_dead(graph, [*outputs, found.store.node])


def _exact_store(found: Prologue) -> Store | None:
    """The store of the exact tier's keys if the op can do it: consecutive rows, or pages."""
    k_dtype = layouts.dtype_of(found.norm.x)
    if found.store.kind == "paged_write":
        pages = _result_of(found.store.node)
        if pages is None or layouts.dtype_of(pages) != k_dtype:
            return None
        return _paged_store(found, glm.indexer_prologue_paged.default, pages)
    rows = index_scores.row_store(found.store)
    if rows is None or rows[0].op != "placeholder" or layouts.dtype_of(rows[0]) != k_dtype:
        return None
    return Store(
        torch.ops.higher_order.auto_functionalized_v2,
        glm.indexer_prologue_rows.default,
        {"first": rows[1], "_keys_BTD_base_index": 0, "_all_bases": [rows[0]]},
        found.store.node,
    )


def _paged_store(found: Prologue, op: Any, pages: fx.Node) -> Store:
    """The store of a functionalized write into pages, whose arguments the op takes over."""
    write = found.store.node
    arguments = {
        name.replace("_pages_", "_key_pages_", 1) if name.startswith("_pages_") else name: value
        for name, value in write.kwargs.items()
        if name not in ("new_BSX", "new_BSD")
    }
    return Store(write.target, op, arguments, pages)


def _result_of(write: fx.Node) -> fx.Node | None:
    """The buffer after a functionalized write."""
    results = [user for user in write.users if layouts.is_getitem(user)]
    return results[0] if len(results) == 1 else None


def _hand_over(build: Builder, call: fx.Node, outputs: list[fx.Node]) -> None:
    """Let each result of the op take the place of what it replaces."""
    for i, old in enumerate(outputs):
        old.replace_all_uses_with(build.view_like(build.item(call, i), old))
    refresh(build.graph, build.made)


def _anchors(graph: fx.Graph) -> list[fx.Node]:
    targets = (
        glm.masked_topk.default,
        glm.indexer_scores.default,
        glm.indexer_scores_paged.default,
    )
    return [n for n in graph.nodes if n.op == "call_function" and n.target in targets]


def _is_item(node: Any, target: Any, index: int) -> bool:
    return (
        layouts.is_getitem(node)
        and layouts.args(node)[1] == index
        and layouts.is_call(layouts.args(node)[0], target)
    )


def _is_done(anchor: fx.Node) -> bool:
    """Whether the queries come from the op already."""
    if anchor.target is glm.masked_topk.default:
        try:
            q = index_scores.index_scores(layouts.args(anchor)[0]).q
        except No:
            return False
    else:
        q = layouts.args(anchor)[0]
    source = canonical.peel(q).source
    if not layouts.is_getitem(source):
        return False
    call: Any = layouts.args(source)[0]
    op = layouts.args(call)[0] if "auto_functionalized" in str(call.target) else call.target
    return op in (
        glm.indexer_prologue.default,
        glm.indexer_prologue_rows.default,
        glm.indexer_prologue_paged.default,
        glm.indexer_prologue_fp8.default,
        glm.attention_prologue_paged.default,
        glm.attention_prologue_fp8.default,
    )


def _walk(q: fx.Node, weights: fx.Node, keys: fx.Node, quant: fx.Node | None = None) -> Prologue:
    """Find the region's inputs from the operands of the scores."""
    q_out = canonical.peel(q).source
    if canonical.is_cast(q_out):
        raise No(f"queries are cast to {layouts.dtype_of(q_out)} after the rotation")
    q_rope = rotations.rope(q_out, "rope of q")
    store = index_scores.key_store(keys)
    k_out = canonical.peel(store.new).source
    if canonical.is_cast(k_out):
        raise No(
            f"index keys are cast to {layouts.dtype_of(k_out)} before they are stored, expected "
            f"{layouts.dtype_of(layouts.args(k_out)[0])}"
        )
    k_rope = rotations.rope(k_out, "rope of k")
    for label, a, b in (("cos", q_rope.cos, k_rope.cos), ("sin", q_rope.sin, k_rope.sin)):
        if a is not b:
            raise No(f"rope: different {label} for q ({describe(a)}) and k ({describe(b)})")
    if q_rope.interleaved != k_rope.interleaved:
        kinds = {True: "interleaved", False: "half-split"}
        raise No(
            f"rope: q is rotated {kinds[q_rope.interleaved]} and k {kinds[k_rope.interleaved]}"
        )
    normed = canonical.peel(k_rope.x).source
    norm = canonical.layer_norm(normed, "k_norm")
    _no_cast(norm.x, "wk and k_norm")
    _no_cast(q_rope.x, "wq_b and the rotation")
    gates, gate_scale, weights_out = _gates(weights, quant)
    q_dtype, k_dtype = layouts.dtype_of(q_rope.x), layouts.dtype_of(norm.x)
    if q_dtype != k_dtype:
        raise No(f"q is {q_dtype} and k {k_dtype}, expected one dtype")
    found = Prologue(q_rope, k_rope, norm, q_out, k_out, weights_out, gates, gate_scale, store)
    if weights_out is gates or weights_out not in _after(gates):
        raise No("head weights are weights_proj's output as it is, expected a cast or a factor")
    _check_shapes(found, weights)
    return found


def _after(node: fx.Node) -> set[fx.Node]:
    """All that depends on a node."""
    seen: set[fx.Node] = set()
    front = list(node.users)
    while front:
        current = front.pop()
        if current not in seen:
            seen.add(current)
            front.extend(current.users)
    return seen


def _no_cast(node: fx.Node, between: str) -> None:
    source = canonical.peel(node).source
    if canonical.is_cast(source):
        chain = canonical.peel(source, casts=True).casts
        route = " -> ".join(str(dtype).removeprefix("torch.") for dtype in chain)
        raise No(f"extra cast between {between} ({route})")


def _gates(weights: fx.Node, quant: fx.Node | None) -> tuple[fx.Node, float, fx.Node]:
    """(weights_proj's output, its constant factor, the value that the op's weights replace)."""
    node = weights
    if quant is not None:
        # weights * q scale, the scale as fp32 [R, H].
        node = canonical.peel(weights).source
        if not layouts.is_call(node, torch.ops.aten.mul.Tensor):
            raise No(f"head weights of the FP8 scores come from {describe(node)}")
        operands = list(layouts.args(node)[:2])
        others = [
            o
            for o in operands
            if not (
                isinstance(o, fx.Node)
                and _is_item(canonical.peel(o).source, glm.fp8_quant.default, 1)
                and layouts.args(canonical.peel(o).source)[0] is quant
            )
        ]
        if len(others) != 1 or not isinstance(others[0], fx.Node):
            raise No("head weights of the FP8 scores do not carry the scale of q")
        node = others[0]
    peeled = canonical.peel(node, casts=True, factors=True)
    for step in peeled.chain:
        if canonical.multiplication(step) is not None and layouts.dtype_of(step) != torch.float32:
            raise No(_SCALE_REASON.format(layouts.dtype_of(step)))
    if len(peeled.casts) > 2 or peeled.casts[-1] != torch.float32:
        route = " -> ".join(str(dtype).removeprefix("torch.") for dtype in peeled.casts)
        raise No(f"head weights are cast {route}, expected one cast to float32 (IDX-2)")
    # The last view before any arithmetic is the value as the model has it.
    gates = peeled.source
    for step in peeled.chain:
        if not canonical.is_view(step):
            break
        gates = step
        if len(layouts.shape_of(step)) == 3:
            break
    if layouts.is_call(peeled.source, torch.ops.aten.mul.Tensor):
        raise No(
            "head weights are multiplied by a tensor, expected a constant (with dynamic=True the "
            "module's floats become inputs: mark the dynamic dimensions instead)"
        )
    return gates, peeled.factor, weights


def _check_shapes(found: Prologue, weights: fx.Node) -> None:
    """Rows and heads of gates, q and k must lie as the op reads them."""
    q_shape = layouts.shape_of(found.q.x)
    if len(q_shape) != 4:
        raise No(f"q has shape {list(q_shape)}, expected [batch, tokens, heads, head dim]")
    batch, tokens, num_heads, head_dim = q_shape
    k_layout = layouts.regroup(
        layouts.axes(B=batch, S=tokens, D=head_dim), layouts.shape_of(found.norm.x)
    )
    if k_layout is None:
        raise No(f"k has shape {list(layouts.shape_of(found.norm.x))}, q {list(q_shape)}")
    own = layouts.axes(B=batch, S=tokens, H=num_heads)
    layout = layouts.regroup(own, layouts.shape_of(found.gates))
    after = canonical.peel(weights, casts=True, factors=True).chain
    chain = after[after.index(found.gates) + 1 :] if found.gates in after else after
    end = canonical.layout_after(layout, chain) if layout is not None else None
    if end is None or [a.name for d in end for a in d] != [a.name for d in own for a in d]:
        raise No(
            f"head weights of shape {list(layouts.shape_of(found.gates))} do not lie as batch, "
            "tokens, heads"
        )


def _check_no_other_users(found: Prologue, outputs: Iterable[fx.Node]) -> None:
    """Values that vanish must have no reader outside the region."""
    inputs = {found.q.x, found.norm.x, found.gates}
    ends = set(outputs)
    order = list(found.norm.node.graph.nodes)
    tainted: set[fx.Node] = set()
    for node in order:
        if node in inputs or any(i in tainted or i in inputs for i in node.all_input_nodes):
            tainted.add(node)
    needed: set[fx.Node] = set()
    front = list({found.q_out, found.k_out, found.weights_out, *ends})
    while front:
        node = front.pop()
        if node in needed or node in inputs or node not in tainted:
            continue
        needed.add(node)
        front.extend(node.all_input_nodes)
    for node in order:
        if node not in needed or node in ends:
            continue
        for user in node.users:
            if user not in needed:
                raise No(f"{describe(node)}, inside the region, is also read by {describe(user)}")


def _make_room(
    graph: fx.Graph, found: Prologue, outputs: list[fx.Node], more: list[Any]
) -> fx.Node:
    """The place of the call: its inputs before it, all users of its outputs after it."""
    point = first_user(outputs)
    needed = [
        found.q.x,
        found.norm.x,
        found.gates,
        found.norm.weight,
        found.norm.bias,
        found.q.cos,
        found.q.sin,
        *more,
    ]
    hoist(graph, needed, point, outputs)
    return point


def _arguments(build: Builder, found: Prologue, factor: float = 1.0) -> list[Any]:
    """Arguments that both ops share, in the order of their schemas."""
    num_heads, head_dim = layouts.shape_of(found.q.x)[2:]
    batch, tokens = build.size(found.q.x, 0), build.size(found.q.x, 1)
    gates = found.gates
    if (projection := _fp32_projection(gates, num_heads)) is not None:
        gates = build.call(glm.indexer_gates.default, *projection, "")
    return [
        found.q.x,
        build.view(found.norm.x, [batch, tokens, head_dim]),
        build.view(gates, [batch, tokens, num_heads]),
        found.norm.weight,
        found.norm.bias,
        found.norm.eps,
        found.q.cos,
        found.q.sin,
        found.q.interleaved,
        found.gate_scale * factor,
    ]


def _fp32_projection(gates: fx.Node, num_heads: int) -> tuple[fx.Node, fx.Node] | None:
    """(x, weight) of gates that are a linear with an fp32 weight of x cast to fp32, or None."""
    peeled = canonical.peel(gates)
    found = canonical.linear(peeled.source)
    if found is None or found.bias is not None or found.weight_casts != (torch.float32,):
        return None
    if found.num_out != num_heads or any(s.target not in layouts.RESHAPES for s in peeled.chain):
        return None
    if not canonical.is_cast(found.x) or layouts.dtype_of(found.x) != torch.float32:
        return None
    x = layouts.args(found.x)[0]
    is_narrow = layouts.dtype_of(x) in (torch.bfloat16, torch.float16)
    return (x, found.weight) if is_narrow else None
