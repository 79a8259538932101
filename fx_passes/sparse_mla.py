"""Attention over the selected latents, instead of over all of them expanded to every head.

Targets `GlmMoeDsaAttention.forward` of transformers (models/glm_moe_dsa/modeling_glm_moe_dsa.py,
with its `expand_kv`; checked with 5.20 and 5.24), after the Dynamo stage has made one op of the
attention call and of its mask. Exact tier (equal up to rounding): with k = W_UK c and v = W_UV c of
a latent c, q . k is (q W_UK) . c, and a sum of v is W_UV of the sum of c.

    c -> kv_b -> view, split -> k_nope, v;  q, cat(k_nope, k_rot), v, selection
        -> glm.indexed_attention

    q -> glm.mla_absorb_query(q_nope, q_rot, W, cos, sin)
      -> glm.sparse_mla_contiguous(q, c, k_rot, selection) -> glm.mla_project_values(., W)

Over a PagedCache `paged_gather` goes too: `glm.sparse_mla(q, pages, selection, block_table)`. What
is left reads the selected tokens only, so that the time of a step does not depend on how many the
cache has room for. W is kv_b's weight as it is: both products read their part of it in place. The
query's rotation is part of the first product, with the model's roundings; what makes and stores a
step's latents becomes one op too, see `latent_write`. Where either is not as in the model, it stays
what it was, with the reason.

A selection that was made with the call's own bounds is taken as it is. From any other (of a caller,
of another graph) positions outside the bounds are removed in the graph, and it is sorted, because
the op knows a repeated position by its neighbour.

Declines attention whose mask the Dynamo stage could not read, keys and values that are not kv_b of
a latent (a hook, an adapter, a bias), and operands of unequal or other dtypes.

Shape legend: B batch, S query tokens, R = B * S, H heads, T cached tokens, K selected tokens,
N nope dim, P rope dim, V value dim, L rank of the latents.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes import canonical, latent_write, layouts, rotations
from glm_compile.fx_passes.base import Declined, No, PassOptions, PassResult, where
from glm_compile.fx_passes.canonical import is_view
from glm_compile.fx_passes.editing import Builder, erase_dead, refresh
from glm_compile.fx_passes.expanded_latents import (
    Columns,
    ExpandedLatents,
    expanded_latents,
    steps_of,
)
from glm_compile.fx_passes.rotations import Rope

aten = torch.ops.aten
_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class _Call:
    """Arguments of one `glm.indexed_attention`."""

    node: fx.Node
    q: fx.Node
    k: fx.Node
    v: fx.Node
    selection: fx.Node
    lengths: fx.Node | None
    starts: fx.Node | None
    key_mask: fx.Node | None
    scale: float
    eager: bool


class SparseMla:
    """Replace attention over expanded latents by ops; see the module."""

    name = "sparse_mla"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        result = PassResult(self.name)
        graph = graph_module.graph
        glm = torch.ops.glm
        for node in graph.find_nodes(op="call_function", target=glm.attention.default):
            result.declined.append(
                Declined(where(node), "what its mask means is not known: see the reasons of 'mask'")
            )
        for node in graph.find_nodes(op="call_function", target=glm.indexed_attention.default):
            call, place = _Call(node, *layouts.args(node)), where(node)
            try:
                latents = expanded_latents(call.k, call.v)
                _check(call, latents)
            except No as no:
                result.declined.append(Declined(place, str(no)))
                continue
            for reason in _replace(graph, call, latents):
                result.declined.append(Declined(place, reason))
            result.matched.append(place)
            result.num_matches += 1
        if result.num_matches:
            graph_module.recompile()
        return result


def _check(call: _Call, latents: ExpandedLatents) -> None:
    kv_b = latents.kv_b
    if kv_b.bias is not None:
        raise No("kv_b_proj adds a bias, which the absorbed products have no place for")
    if len(kv_b.weight_casts) > 1:
        raise No(f"kv_b_proj's weight is cast from {kv_b.weight_casts[0]} in the graph")
    dtypes = {
        "queries": layouts.dtype_of(call.q),
        "latents": layouts.dtype_of(latents.latents.source),
        "rotated keys": layouts.dtype_of(latents.ropes.source),
        "kv_b_proj's weight": layouts.dtype_of(kv_b.weight),
    }
    if len(set(dtypes.values())) > 1 or dtypes["queries"] not in _DTYPES:
        found = ", ".join(f"{name} {dtype}" for name, dtype in dtypes.items())
        raise No(f"expected one dtype of float32, bfloat16 and float16, found {found}")


def _replace(graph: fx.Graph, call: _Call, found: ExpandedLatents) -> list[str]:
    """Replace one call; return why parts of its surroundings stay what they were."""
    glm = torch.ops.glm
    reasons: list[str] = []
    build = Builder(graph, call.node, call.node)
    num_heads = layouts.shape_of(call.q)[1]
    weight = found.kv_b.weight
    q_nope, q_rot = _parts(build, call.q, found.num_nope)
    # Of what stays: a size keeps what it is read from.
    batch, tokens = build.size(q_nope, 0), build.size(q_nope, 2)
    tables: tuple[Any, ...] = (None, None, True)
    try:
        rope = rotations.rope(q_rot, "rope of q", token_dim=2, is_part=True)
        q_rot = _unrotated(build, rope, q_rot)
        tables = (rope.cos, rope.sin, rope.interleaved)
    except No as no:
        reasons.append(f"queries are rotated in a launch of their own: {no}")
    q_nope, q_rot = (
        build.call(aten.permute.default, part, [0, 2, 1, 3]) for part in (q_nope, q_rot)
    )
    # Behind top-k: the weight streams while that leaves the memory idle.
    is_made_here = layouts.is_call(canonical.peel(call.selection).source, glm.topk_select.default)
    after = call.selection if is_made_here else None
    q_BSHC = build.call(
        glm.mla_absorb_query.default,
        *(q_nope, q_rot, weight, *tables, after, ""),
    )
    q_RHC = build.view(q_BSHC, [-1, num_heads, found.rank + found.num_rope])
    gather = found.latents.source
    is_paged = (
        layouts.is_call(gather, glm.paged_gather.default)
        and found.ropes.source is gather
        and (found.latents.start, found.ropes.start) == (0, found.rank)
        and layouts.is_same(layouts.shape_of(gather)[-1], found.rank + found.num_rope)
    )
    indices_BSK = _allowed(build, call, batch, tokens)
    indices_RK = build.view(indices_BSK, [-1, build.size(indices_BSK, 2)])
    if is_paged:
        pages, block_table, _max_len = layouts.args(gather)
        attended = build.call(
            glm.sparse_mla.default,
            *(q_RHC, pages, indices_RK, call.scale, found.rank, block_table, tokens, ""),
        )
    else:
        latents, ropes = (_rows(build, part, batch, found) for part in (found.latents, found.ropes))
        attended = build.call(
            glm.sparse_mla_contiguous.default,
            *(q_RHC, latents, ropes, indices_RK, call.scale, tokens, ""),
        )
    values = build.call(glm.mla_project_values.default, attended, weight, found.num_values, "")
    values_BSHV = build.view(values, [batch, tokens, num_heads, found.num_values])
    values_BHSV = build.call(aten.permute.default, values_BSHV, [0, 2, 1, 3])
    call.node.replace_all_uses_with(values_BHSV)
    undone = _undo_permutes(values_BHSV, values_BSHV)
    refresh(graph, build.made)
    erase_dead(graph, [*undone, values_BHSV, call.node])
    pages = layouts.args(attended)[1]
    if is_paged and latent_write.is_write(pages):
        try:
            store = latent_write.find_store(pages, found.rank)
        except No as no:
            reasons.append(f"latents are made and stored in launches of their own: {no}")
        else:
            reasons += latent_write.replace_store(graph, store, attended)
    return reasons


def _unrotated(build: Builder, rope: Rope, rotated: fx.Node) -> fx.Node:
    """What a rotation of queries [B, H, S, P] reads, in this shape."""
    shapes = [layouts.shape_of(node)[:-1] for node in (rope.x, rotated)]
    if len(shapes[0]) != 3 or not all(map(layouts.is_same, *shapes)):
        raise No(f"rope of q: turns {list(shapes[0])} rows to {list(shapes[1])}")
    if layouts.is_same(layouts.shape_of(rope.x)[-1], rope.rope_dim):
        return rope.x
    return build.call(aten.slice.Tensor, rope.x, 3, rope.start, rope.start + rope.rope_dim)


def _parts(build: Builder, q: fx.Node, num_nope: int) -> tuple[fx.Node, fx.Node]:
    """q's two parts, from before they were put together where that can be seen."""
    if layouts.is_call(q, aten.cat.default):
        arguments = layouts.named_args(q)
        parts = arguments["tensors"]
        is_last = arguments["dim"] % 4 == 3
        if (
            is_last
            and len(parts) == 2
            and layouts.is_same(layouts.shape_of(parts[0])[-1], num_nope)
        ):
            return parts[0], parts[1]
    key_dim = layouts.shape_of(q)[-1]
    return (
        build.call(aten.slice.Tensor, q, 3, 0, num_nope),
        build.call(aten.slice.Tensor, q, 3, num_nope, key_dim),
    )


def _rows(build: Builder, part: Columns, batch: Any, found: ExpandedLatents) -> fx.Node:
    """Columns as [B, T, X]."""
    node = part.source
    if not part.is_whole:
        last = len(layouts.shape_of(node)) - 1
        node = build.call(aten.slice.Tensor, node, last, part.start, part.start + part.size)
    return build.view(node, [batch, -1, part.size])


def _allowed(build: Builder, call: _Call, batch: Any, tokens: Any) -> fx.Node:
    """The selection [B, S, K] with -1 for what the call's bounds exclude, repeats side by side."""
    selection = call.selection
    if call.lengths is None and call.starts is None and call.key_mask is None:
        return selection
    num_keys = build.size(call.k, 2)
    is_allowed = build.call(aten.lt.Scalar, selection, num_keys)

    def require(condition: fx.Node) -> None:
        nonlocal is_allowed
        is_allowed = build.call(aten.bitwise_and.Tensor, is_allowed, condition)

    for bounds, compare in ((call.lengths, aten.lt.Tensor), (call.starts, aten.ge.Tensor)):
        if bounds is not None:
            bounds_BS1 = build.call(aten.unsqueeze.default, bounds, -1)
            require(build.call(compare, selection, bounds_BS1))
    steps = steps_of(selection)
    if call.key_mask is not None:
        require(build.call(aten.ge.Scalar, selection, 0))
        mask = call.key_mask
        for _ in range(3 - len(layouts.shape_of(mask))):
            mask = build.call(aten.unsqueeze.default, mask, 0)
        width = num_keys if layouts.is_same(layouts.shape_of(mask)[-1], 1) else -1
        mask = build.call(aten.expand.default, mask, [batch, tokens, width])
        is_everything = steps == (0, 1) and layouts.is_same(
            layouts.shape_of(selection)[-1], layouts.shape_of(call.k)[2]
        )
        if is_everything:
            mask = build.call(aten.slice.Tensor, mask, 2, 0, num_keys)
        else:
            nothing = _constant(build, selection, 0)
            read = build.call(aten.where.self, is_allowed, selection, nothing)
            if layouts.dtype_of(read) != torch.int64:
                # One that Inductor takes behind its decompositions.
                cast = torch.ops.prims.convert_element_type.default
                read = build.call(cast, read, torch.int64)
            mask = build.call(aten.gather.default, mask, 2, read)
        require(mask)
    none = _constant(build, selection, -1)
    indices = build.call(aten.where.self, is_allowed, selection, none)
    if steps is None or steps[1] <= 0:
        indices = build.item(build.call(aten.sort.default, indices), 0)
    return indices


def _constant(build: Builder, like: fx.Node, value: int) -> fx.Node:
    val = layouts.value(like)
    return build.call(aten.full.default, [], value, dtype=val.dtype, device=val.device)


def _undo_permutes(permuted: fx.Node, original: fx.Node) -> list[fx.Node]:
    """Let users that permute back, and copies for the sake of layout, read the original."""
    undone: list[fx.Node] = []
    for user in list(permuted.users):
        if not is_view(user):
            continue
        shape = layouts.shape_of(user)
        is_same_shape = len(shape) == 4 and all(
            layouts.is_same(a, b) for a, b in zip(shape, layouts.shape_of(permuted))
        )
        if user.target in layouts.PERMUTES:
            if layouts.permutation(user) != [0, 2, 1, 3]:
                continue
            user.replace_all_uses_with(original)
            for copy in list(original.users):
                is_copy = layouts.is_call(copy, aten.clone.default)
                if is_copy and copy.kwargs.get("memory_format") == torch.contiguous_format:
                    copy.replace_all_uses_with(original)
                    undone.append(copy)
        elif is_same_shape:
            undone += _undo_permutes(user, original)
        else:
            continue
        undone.append(user)
    return undone
