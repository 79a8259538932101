"""Index scores and the selection of the top keys, as two ops.

Targets `GlmMoeDsaIndexer.forward` of transformers (models/glm_moe_dsa/modeling_glm_moe_dsa.py;
checked with 5.20 and 5.24), after the Dynamo stage has replaced mask, topk and cast by
`glm.masked_topk`. Exact tier, keys in a contiguous cache or none:

    q.float() @ k.float()^T -> * D^-0.5 -> relu -> weights @ . -> masked_topk

    glm.indexer_scores(q, weights, k, lengths, ...) -> glm.topk_select

Exact tier, PagedCache in the model's dtype: `paged_gather` goes too, the scores read the pages:

    pages' = paged_write(pages, k) -> paged_gather(pages') -> (as above)

    pages' = paged_write(pages, k) -> glm.indexer_scores_paged(q, weights * D^-0.5, pages', ...)

FP8 tier (`indexer_dtype="fp8"`, PagedCache with FP8 keys): the same with q through `glm.fp8_quant`
and its scale in the weights. Here q and keys lose precision; nothing else does so.

The selection gets no plan: `topk_plan` holds a row's window, which the kernels take from the
lengths as cheaply, while to make one is a launch more. Lengths are made once a forward already;
where they are made in the same graph, as one layer's, the paged kernels add up the tokens cached
before the step and the row by themselves, which leaves no launch between them and the prologue.
Where windows and block table are the graph's inputs and a linear of the graph lies before the
scores, they are read while the prologue still runs (`early_windows`).

Declines where an operand is not in the dtype or the order that the ops assume, where something
else reads the scores, and where the tier and the cache do not fit each other.

Shape legend: B batch, S query tokens, R = B * S, H index heads, D index head dim, T cached tokens,
K selected tokens.
"""

from __future__ import annotations

import torch
from torch import fx

from glm_compile.fx_passes import index_scores, layouts
from glm_compile.fx_passes.base import Declined, No, PassOptions, PassResult, where
from glm_compile.fx_passes.editing import Builder, erase_dead
from glm_compile.fx_passes.index_lengths import cached_lengths
from glm_compile.fx_passes.index_scores import IndexScores, KeyRead

aten = torch.ops.aten

NEEDS_FP8_CACHE = "indexer_dtype='fp8' needs PagedCache(index_dtype=torch.float8_e4m3fn)"
NEEDS_EXACT_CACHE = (
    "the cache holds FP8 index keys and indexer_dtype={!r} is the exact tier, which needs them in "
    "the model's dtype: pass indexer_dtype='fp8', or a PagedCache without index_dtype"
)
_EXACT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def check_tier(options: PassOptions, kind: str, dtype: torch.dtype) -> None:
    """Raise No if the option and the cache's index keys (`KeyRead.kind`) do not fit."""
    if options.indexer_dtype == "fp8":
        if kind != "paged_fp8":
            raise No(NEEDS_FP8_CACHE)
        return
    if kind == "paged_fp8":
        raise No(NEEDS_EXACT_CACHE.format(options.indexer_dtype))
    wanted = _EXACT_DTYPES.get(options.indexer_dtype, dtype)
    if dtype != wanted:
        raise No(
            f"indexer_dtype={options.indexer_dtype!r} asks for {wanted} index keys, the model's "
            f"are {dtype}: load the model in {wanted} or use 'auto'"
        )


class IndexerTopk:
    """Replace each indexer's scores and masked top-k by ops; see the module."""

    name = "indexer_topk"

    def __init__(self, options: PassOptions) -> None:
        self.options = options

    def __call__(self, graph_module: fx.GraphModule) -> PassResult:
        result = PassResult(self.name)
        graph = graph_module.graph
        for anchor in graph.find_nodes(
            op="call_function", target=torch.ops.glm.masked_topk.default
        ):
            place = where(anchor)
            try:
                scores = index_scores.index_scores(layouts.args(anchor)[0])
                read = index_scores.key_read(scores.k)
                check_tier(self.options, read.kind, layouts.dtype_of(scores.q))
                self._check_pages(scores, read)
            except No as no:
                result.declined.append(Declined(place, str(no)))
                continue
            self._replace(graph, anchor, scores, read)
            result.matched.append(place)
            result.num_matches += 1
        if result.num_matches:
            graph_module.recompile()
        return result

    def _check_pages(self, scores: IndexScores, read: KeyRead) -> None:
        if read.kind == "paged" and layouts.dtype_of(read.keys) != layouts.dtype_of(scores.q):
            raise No(
                f"index keys are stored in {layouts.dtype_of(read.keys)}, queries are "
                f"{layouts.dtype_of(scores.q)}"
            )

    def _replace(
        self, graph: fx.Graph, anchor: fx.Node, scores: IndexScores, read: KeyRead
    ) -> None:
        _, lengths, starts, key_mask, k, repeats_last = layouts.named_args(anchor).values()
        glm = torch.ops.glm
        build = Builder(graph, anchor, anchor)
        sizes = scores.sizes
        head_dim, num_heads = sizes["D"], sizes["H"]
        # Sizes are read from what stays: the marker and the old scores go away.
        batch, tokens = build.size(lengths, 0), build.size(lengths, 1)
        cached = cached_lengths(lengths) if read.kind != "contiguous" else None
        is_causal = cached is not None
        lengths_R = build.view(lengths if cached is None else cached, [-1])
        starts_R = None if starts is None else build.view(starts, [-1])
        if read.kind == "contiguous":
            k_BTD = build.view(scores.k, [batch, -1, head_dim])
            num_keys = build.size(k_BTD, 1)
            # The exact order of operations: scale, relu, weights, in fp32.
            scores_BST = build.call(
                glm.indexer_scores.default,
                build.view(scores.q, [batch, tokens, num_heads, head_dim]),
                build.view(scores.weights, [batch, tokens, num_heads]),
                k_BTD,
                lengths,
                starts,
                key_mask,
                scores.scale,
                "",
            )
            scores_RT = build.view(scores_BST, [-1, num_keys])
        else:
            num_keys = read.max_len
            q_RHD = build.view(scores.q, [-1, num_heads, head_dim])
            weights_RH = build.view(scores.weights, [-1, num_heads])
            # In fp32, so that a factor which is no power of two costs no bits of bf16 (IDX-7).
            weights_RH = build.call(aten.mul.Tensor, weights_RH, scores.scale)
            if read.kind == "paged_fp8":
                quantised = build.call(glm.fp8_quant.default, q_RHD, False)
                q_RHD = build.item(quantised, 0)
                weights_RH = build.call(aten.mul.Tensor, weights_RH, build.item(quantised, 1))
            scores_RT = build.call(
                glm.indexer_scores_paged.default,
                q_RHD,
                weights_RH,
                read.keys,
                read.block_table,
                lengths_R,
                read.max_len,
                starts_R,
                key_mask,
                tokens,
                is_causal,
                _are_windows_early(scores.q, [read.block_table, lengths_R, starts_R]),
                "",
            )
        width = layouts.shape_of(anchor)[-1]
        if not isinstance(width, int):
            width = build.call(torch.sym_min, k, num_keys)
        selected = build.call(
            glm.topk_select.default,
            *(scores_RT, lengths_R, width, starts_R, None, None, tokens if is_causal else 1, 64),
            *(is_causal, repeats_last, ""),
        )
        selected = build.view(selected, [batch, tokens, width])
        anchor.replace_all_uses_with(selected)
        erase_dead(graph, [anchor])


def _are_windows_early(q: fx.Node, windows: list[fx.Node | None]) -> bool:
    """Whether tensors were there before the graph ran, and a linear lies ahead of the scores.

    A linear's kernel waits for all kernels ahead of it before it lets others start, and one without
    programmatic launch begins when all before it have ended. So whatever is launched between it and
    the scores, what they read was written before the linear ran.
    """
    aten, glm = torch.ops.aten, torch.ops.glm
    products = (aten.mm.default, aten.addmm.default, aten.linear.default)
    ours = (glm.bf16_linear.default, glm.merged_linear.default, glm.rms_norm_linear.default)
    if any(_without_views(node).op != "placeholder" for node in windows if node is not None):
        return False
    front, seen = [q], {q}
    while front:
        node = front.pop()
        if layouts.is_call(node, *products, *ours):
            return True
        new = [source for source in node.all_input_nodes if source not in seen]
        seen.update(new)
        front.extend(new)
    return False


def _without_views(node: fx.Node) -> fx.Node:
    """The node behind views of it, of the kinds that never copy."""
    aten = torch.ops.aten
    views = (aten.view.default, aten._unsafe_view.default, aten.unsqueeze.default)
    others = (aten.squeeze.dim, aten.squeeze.dims, aten.expand.default, aten.alias.default)
    while layouts.is_call(node, *views, *others):
        node = layouts.args(node)[0]
    return node
