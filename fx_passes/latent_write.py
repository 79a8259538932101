"""What lies between kv_a's output and the cache of latents, as one op or as a part of one.

Targets `GlmMoeDsaAttention.forward` and `PagedCache.update` (transformers'
models/glm_moe_dsa/modeling_glm_moe_dsa.py, checked with 5.20 and 5.24). A part of `sparse_mla`,
which knows the pages that its attention reads. Exact tier (the norm's and the rotation's own
roundings):

    kv_a -> split -> RMSNorm; rope -> cat -> paged_write(pages)

    pages' = glm.latent_write(latents, ropes, norm, cos, sin, pages, block_table, lengths)

Where the layer's indexer writes its keys through the same table between that store and the
attention, both are one launch:

    q, weights, key_pages', pages' = glm.attention_prologue_paged / _fp8(indexer's, latents')

The values in between stay for whoever else reads them.

Declines (the store stays what it was) where the rows are not a norm's output with rotated columns
behind it, or mix up tokens.

Shape legend: B batch, S tokens of the step, L rank of the latent, P rope dim, X = L + P.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes import canonical, layouts, rotations
from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.canonical import RmsNorm
from glm_compile.fx_passes.editing import Builder, erase_dead, first_user, hoist, refresh
from glm_compile.fx_passes.expanded_latents import Columns, columns, rows_along
from glm_compile.fx_passes.layouts import describe
from glm_compile.fx_passes.rotations import Rope

aten = torch.ops.aten
glm = torch.ops.glm
_FUNCTIONALIZED = torch.ops.higher_order.auto_functionalized_v2


@dataclass(frozen=True)
class LatentStore:
    """One store, as the walk found it.

    Attributes:
        write: the functionalized `paged_write`.
        norm: of the latents.
        rope: of the key behind them.
        num_rope: P.
    """

    write: fx.Node
    norm: RmsNorm
    rope: Rope
    num_rope: int


def is_write(pages: fx.Node) -> bool:
    """Whether pages are what a `paged_write` of this graph has left."""
    return (
        layouts.is_getitem(pages)
        and layouts.is_call(layouts.args(pages)[0], _FUNCTIONALIZED)
        and layouts.args(layouts.args(pages)[0])[0] is glm.paged_write.default
    )


def find_store(pages: fx.Node, rank: int) -> LatentStore:
    """Read the store that made `pages`; see `is_write`.

    Raises:
        No: with the first thing that is not as in the model.
    """
    write: fx.Node = layouts.args(pages)[0]
    new: Any = write.kwargs["new_BSX"]
    batch, tokens, width = layouts.shape_of(new)
    sizes = {"B": batch, "T": tokens}
    latents, ropes = columns(new, 0, rank), columns(new, rank, width - rank)
    _check_rows(latents, sizes, "latents")
    _check_rows(ropes, sizes, "rotated keys")
    norm = canonical.rms_norm(latents.source)
    if norm is None:
        raise No(f"latents: expected RMSNorm, found {describe(latents.source)}")
    source = ropes.source
    # [B, S, P] or, as the model has it, [B, 1, S, P].
    token_dim = len(layouts.shape_of(source)) - 2
    rope = rotations.rope(source, "rope of the key", token_dim=token_dim, is_part=True)
    for name, x, out in (("latents", norm.x, latents.source), ("rope", rope.x, source)):
        shapes = [layouts.shape_of(node)[:-1] for node in (x, out)]
        is_same = len(shapes[0]) == len(shapes[1]) and all(map(layouts.is_same, *shapes))
        if not is_same or layouts.dtype_of(x) != layouts.dtype_of(pages):
            raise No(
                f"{name}: made of {describe(x)} {layouts.dtype_of(x)} {list(shapes[0])}, stored as "
                f"{layouts.dtype_of(pages)} {list(shapes[1])}"
            )
    return LatentStore(write, norm, rope, width - rank)


def _check_rows(found: Columns, sizes: dict[str, Any], what: str) -> None:
    layout = rows_along(found, sizes)
    wanted = layouts.axes(**sizes, X=found.size)
    if not found.is_whole or layout is None or layouts.names(layout) != layouts.names(wanted):
        raise No(f"{what}: {describe(found.source)} is not stored as one row a token")


def replace_store(graph: fx.Graph, found: LatentStore, attention: fx.Node) -> list[str]:
    """Let one op norm, rotate and store; return why it is not the indexer's, if there is one.

    Args:
        attention: the call that reads the pages.
    """
    prologue = _prologue_between(graph, found.write, attention)
    reasons: list[str] = []
    if prologue is not None:
        try:
            _join(graph, found, prologue)
            return []
        except No as no:
            reasons.append(f"latents are stored apart from the index keys: {no}")
    build = Builder(graph, found.write, found.norm.node)
    kwargs = _store_arguments(found.write, "pages", 0)
    call = build.call(
        _FUNCTIONALIZED,
        glm.latent_write.default,
        **_latent_arguments(build, found, ""),
        cos_BSP=found.rope.cos,
        sin_BSP=found.rope.sin,
        backend="",
        **kwargs,
    )
    _hand_over(build, {found.write: (call, 0)})
    return reasons


def _prologue_between(graph: fx.Graph, write: fx.Node, attention: fx.Node) -> fx.Node | None:
    """The indexer's prologue with a paged store that lies between two nodes."""
    is_between = False
    for node in graph.nodes:
        if node is write:
            is_between = True
        if node is attention:
            return None
        if is_between and layouts.is_call(node, _FUNCTIONALIZED) and _joined_op(node) is not None:
            return node
    return None


def _joined_op(prologue: fx.Node) -> Any:
    """The op that does what a functionalized prologue does, and stores latents; or None."""
    ops = {
        glm.indexer_prologue_paged.default: glm.attention_prologue_paged.default,
        glm.indexer_prologue_fp8.default: glm.attention_prologue_fp8.default,
    }
    return ops.get(layouts.args(prologue)[0])


def _join(graph: fx.Graph, found: LatentStore, prologue: fx.Node) -> None:
    """Make the indexer's prologue and the store of latents one op."""
    for name in ("block_table", "lengths_B"):
        if prologue.kwargs[name] is not found.write.kwargs[name]:
            raise No(f"another {name.removesuffix('_B')} tells where they go")
    for name, table in (("cos", found.rope.cos), ("sin", found.rope.sin)):
        if prologue.kwargs[f"{name}_BSP"] is not table:
            raise No(f"another {name} rotates them")
    results = [*_results(found.write), *_results(prologue)]
    point = first_user(results)
    inputs = (found.norm.x, found.norm.weight, found.rope.x, *prologue.all_input_nodes)
    hoist(graph, [*inputs, *found.write.all_input_nodes], point, results)
    build = Builder(graph, point, prologue)
    num_bases = len(_bases(prologue))
    given: dict[str, Any] = dict(prologue.kwargs)
    kwargs = given | _store_arguments(found.write, "latent_pages", num_bases)
    kwargs |= _latent_arguments(build, found, "latent_")
    kwargs["_all_bases"] = [*_bases(prologue), *_bases(found.write)]
    call = build.call(_FUNCTIONALIZED, _joined_op(prologue), **kwargs)
    _hand_over(build, {prologue: (call, 0), found.write: (call, 2 + num_bases - 1)})


def _bases(write: fx.Node) -> list[Any]:
    bases: Any = write.kwargs["_all_bases"]
    return list(bases)


def _latent_arguments(build: Builder, found: LatentStore, prefix: str) -> dict[str, Any]:
    """What both ops take of the latents, by the names of their schemas."""
    norm, rope = found.norm, found.rope
    ropes = rope.x
    if not layouts.is_same(layouts.shape_of(ropes)[-1], found.num_rope):
        last = len(layouts.shape_of(ropes)) - 1
        stop = rope.start + found.num_rope
        ropes = build.call(aten.slice.Tensor, ropes, last, rope.start, stop)
    names = {"": ("norm_weight_L", "norm_eps", "interleaved")}.get(
        prefix, ("latent_weight_L", "latent_eps", "latents_interleaved")
    )
    lengths: Any = found.write.kwargs["lengths_B"]
    rows = [build.size(lengths, 0), build.size(rope.cos, 1)]
    return {
        "latents_BSL": build.view(norm.x, [*rows, layouts.shape_of(norm.x)[-1]]),
        "ropes_BSP": build.view(ropes, [*rows, found.num_rope]),
        **dict(zip(names, (norm.weight, norm.eps, rope.interleaved))),
    }


def _store_arguments(write: fx.Node, name: str, num_before: int) -> dict[str, Any]:
    """Where the rows go, as `paged_write` had it; `num_before` other buffers come first."""
    kwargs: dict[str, Any] = {}
    given: dict[str, Any] = dict(write.kwargs)
    for key, value in given.items():
        if key in ("block_table", "lengths_B", "_all_bases"):
            kwargs[key] = value
        elif key == "_pages_base_index":
            kwargs[f"_{name}_base_index"] = value + num_before
        elif key.startswith("_pages_"):
            kwargs[f"_{name}_{key.removeprefix('_pages_')}"] = value
    return kwargs


def _results(write: fx.Node) -> list[fx.Node]:
    return [user for user in write.users if layouts.is_getitem(user)]


def _hand_over(build: Builder, replaced: dict[fx.Node, tuple[fx.Node, int]]) -> None:
    """Let results of new calls take the places of old calls', their indices moved by a number."""
    dead = []
    for old, (call, offset) in replaced.items():
        for result in _results(old):
            result.replace_all_uses_with(build.item(call, layouts.args(result)[1] + offset))
            dead.append(result)
    refresh(build.graph, build.made)
    erase_dead(build.graph, [*dead, *replaced])
