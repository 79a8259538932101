"""The indexer of one layer with the projections around it: hidden state in, positions out.

Holds transformers' own modules and calls them in the order of GlmMoeDsaAttention.forward, up to the
selection. The attention's projections that share an input with the indexer's belong to it, because
a compiled layer merges them; what attention does with them does not.

Shape legend: B batch, S tokens of the step, T cached tokens, C hidden, K selected.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from transformers import GlmMoeDsaConfig, StaticCache
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaAttention,
    GlmMoeDsaRotaryEmbedding,
)

from glm_compile import PagedCache
from glm_compile.ops.indexer_prologue import indexer_prologue_fp8, indexer_prologue_paged
from glm_compile.ops.indexer_scores import indexer_scores_paged
from glm_compile.ops.merged_linear import merged_linear
from glm_compile.ops.rms_norm_linear import rms_norm_linear
from glm_compile.ops.topk import topk_select
from tests.tiny_models import CACHE_ARGUMENT, tiny_config

# What the indexer's work depends on, as the release has it.
RELEASE = {
    "hidden_size": 6144,
    "num_attention_heads": 64,
    "num_key_value_heads": 64,
    "q_lora_rank": 2048,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "index_n_heads": 32,
    "index_head_dim": 128,
    "index_topk": 2048,
    "max_position_embeddings": 1 << 20,
    "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
}


def one_layer_config(**overrides: Any) -> GlmMoeDsaConfig:
    """Config with one layer, which has an indexer."""
    values = {"num_hidden_layers": 1, "indexer_types": ["full"], "first_k_dense_replace": 1}
    return tiny_config(**{**values, **overrides})


class IndexerOfLayer(nn.Module):
    """q_a, kv_a, q_b and the indexer of one layer, over a cache that it writes.

    Args:
        config: of a model whose layer 0 has an indexer.
        has_fp32_gates: keep weights_proj in fp32, as some checkpoints do.
    """

    def __init__(self, config: GlmMoeDsaConfig, *, has_fp32_gates: bool = False, **where: Any):
        super().__init__()
        with torch.device("meta"):
            attention = GlmMoeDsaAttention(config, 0)
        self.q_a_proj, self.q_a_layernorm = attention.q_a_proj, attention.q_a_layernorm
        self.q_b_proj = attention.q_b_proj
        self.kv_a_proj_with_mqa = attention.kv_a_proj_with_mqa
        self.indexer = attention.indexer
        self.to_empty(device=where.get("device", "cpu")).to(where.get("dtype", torch.float32))
        if has_fp32_gates:
            self.indexer.weights_proj.float()
        self.eval().requires_grad_(False)
        for name, parameter in self.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, parameter.shape[1] ** -0.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
            else:
                parameter.uniform_(0.5, 1.5)
        self.rotary = GlmMoeDsaRotaryEmbedding(config).to(where.get("device", "cpu"))

    def tables(self, hidden_BSC: torch.Tensor, position: torch.Tensor) -> Any:
        """cos and sin of a step whose first token has `position`, once a forward for all layers."""
        steps = torch.arange(hidden_BSC.shape[1], device=hidden_BSC.device)
        return self.rotary(hidden_BSC, (steps + position)[None])

    def forward(
        self,
        hidden_BSC: torch.Tensor,
        cos: torch.Tensor,
        sin: torch.Tensor,
        mask_BST: torch.Tensor,
        cache: Any,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(positions [B, S, K], attention's queries, its latents before their norm)."""
        q_resid = self.q_a_layernorm(self.q_a_proj(hidden_BSC))
        queries = self.q_b_proj(q_resid)
        latents = self.kv_a_proj_with_mqa(hidden_BSC)
        selected = self.indexer(
            hidden_BSC, q_resid, (cos, sin), mask_BST, None, **{CACHE_ARGUMENT: cache}
        )
        return selected, queries, latents


def make_cache(config: GlmMoeDsaConfig, kind: str, max_len: int, **where: Any) -> Any:
    """A `static`, `paged` or `paged_fp8` cache that holds `max_len` tokens."""
    if kind == "static":
        return StaticCache(config, max_cache_len=max_len)
    index_dtype = torch.float8_e4m3fn if kind == "paged_fp8" else None
    cache = PagedCache(config, 1, max_len, index_dtype=index_dtype, **where)
    cache.auto_advance = False
    return cache


def paged_step(layer: IndexerOfLayer, cache: PagedCache, num_tokens: int) -> Any:
    """The step of a layer as a function of (hidden, cos, sin); its mask is made inside."""

    def step(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> Any:
        mask = cache.causal_mask(num_tokens)
        return layer(hidden, cos, sin, mask[:, 0], cache)

    return step


def static_step(layer: IndexerOfLayer, cache: StaticCache, max_len: int) -> Any:
    """The step of a layer as a function of (hidden, cos, sin, position of its first token)."""

    def step(
        hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, position: torch.Tensor
    ) -> Any:
        steps = torch.arange(hidden.shape[1], device=hidden.device) + position
        mask = torch.arange(max_len, device=hidden.device) <= steps[:, None]
        return layer(hidden, cos, sin, mask[None], cache)

    return step


def prologue_step(layer: IndexerOfLayer, cache: PagedCache) -> Any:
    """The three ops before the scores: a function of (hidden, cos, sin) that returns q, weights."""
    indexer = layer.indexer
    projections = [layer.q_a_proj, layer.kv_a_proj_with_mqa, indexer.wk, indexer.weights_proj]
    widths = [projection.weight.shape[0] for projection in projections]
    # The FP8 op multiplies by D^-0.5 itself.
    score_scale = 1.0 if cache.is_index_fp8 else indexer.softmax_scale
    arguments = {
        "gate_scale": indexer.n_heads**-0.5 * score_scale,
        "key_pages": cache.layers[0].key_pages,
        "block_table": cache.block_table,
        "lengths_B": cache.lengths,
    }
    prologue = indexer_prologue_fp8 if cache.is_index_fp8 else indexer_prologue_paged

    def step(
        hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        merged = merged_linear(hidden, [projection.weight for projection in projections])
        q_a, _, k, gates = merged.split(widths, -1)
        queries = rms_norm_linear(
            q_a,
            layer.q_a_layernorm.weight,
            [layer.q_b_proj.weight, indexer.wq_b.weight],
            eps=layer.q_a_layernorm.variance_epsilon,
        )
        q = queries[..., layer.q_b_proj.weight.shape[0] :].unflatten(-1, (indexer.n_heads, -1))
        norm = indexer.k_norm
        return prologue(q, k, gates, norm.weight, norm.bias, norm.eps, cos, sin, **arguments)

    return step


def ops_step(layer: IndexerOfLayer, cache: PagedCache, *, has_slots: bool = False) -> Any:
    """The ops of the compiled step in their order, as a function of (hidden, cos, sin).

    Args:
        has_slots: select physical slots instead of positions.
    """
    prologue = prologue_step(layer, cache)

    def step(hidden: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        q, weights = prologue(hidden, cos, sin)
        rows = {"rows_per_sequence": hidden.shape[1], "is_causal": True}
        scores = indexer_scores_paged(
            q.flatten(0, 1),
            weights.flatten(0, 1),
            cache.layers[0].key_pages,
            cache.block_table,
            cache.lengths,
            cache.max_cache_len,
            early_windows=True,
            **rows,
        )
        as_what = {"block_table": cache.block_table} if has_slots else {"repeat_last": True}
        return topk_select(scores, cache.lengths, layer.indexer.index_topk, **as_what, **rows)

    return step
