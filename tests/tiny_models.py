"""Small random GLM-5.2-shaped models for tests.

16 index heads of 128: with 4, relu's exact zeros tie at the selection boundary in 3-12 % of the
rows and transformers then disagrees with itself between cache types. Contexts in model-level tests
must exceed `index_topk` (8 here), otherwise sparse equals dense and most faults are invisible.
"""

from __future__ import annotations

import inspect
from typing import Any

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

# The name of the cache argument changed between transformers 5.20 and 5.24.
CACHE_ARGUMENT = next(
    name
    for name in ("cache", "past_key_values")
    if name in inspect.signature(GlmMoeDsaForCausalLM.forward).parameters
)


def tiny_config(**overrides: Any) -> GlmMoeDsaConfig:
    """Config with dense and MoE layers, full and shared indexers and the release's flags."""
    values: dict[str, Any] = {
        "vocab_size": 512,
        "hidden_size": 128,
        "intermediate_size": 256,
        "moe_intermediate_size": 64,
        "num_hidden_layers": 4,
        "first_k_dense_replace": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "q_lora_rank": 96,
        "kv_lora_rank": 64,
        "qk_nope_head_dim": 32,
        "qk_rope_head_dim": 64,
        "v_head_dim": 96,
        "head_dim": 32,
        "index_topk": 8,
        "index_n_heads": 16,
        "index_head_dim": 128,
        "indexer_types": ["full", "full", "shared", "full"],
        "index_share_for_mtp_iteration": True,
        "indexer_rope_interleave": True,
        "rope_interleave": True,
        "num_nextn_predict_layers": 1,
        "rope_parameters": {"rope_theta": 1e5, "rope_type": "default"},
        "max_position_embeddings": 4096,
        "bos_token_id": None,
        "eos_token_id": [509, 510, 511],
        "pad_token_id": 509,
    }
    values.update(overrides)
    return GlmMoeDsaConfig(**values)


def tiny_model(
    config: GlmMoeDsaConfig | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    attention: str = "sdpa",
    seed: int = 0,
    std: float = 0.1,
) -> GlmMoeDsaForCausalLM:
    """Random model in eval mode without gradients; weights wide enough that selection matters."""
    torch.manual_seed(seed)
    config = config or tiny_config()
    config._attn_implementation = attention
    model = GlmMoeDsaForCausalLM(config).eval().requires_grad_(False)
    randomize(model, std)
    if dtype != torch.float32:
        # As from_pretrained does: the router's correction bias stays in float32.
        biases = {n: b.clone() for n, b in model.named_buffers() if n.endswith("correction_bias")}
        inv_freq = model.model.rotary_emb.inv_freq.clone()
        model.to(dtype)
        for name, bias in biases.items():
            owner, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(owner), leaf, bias)
        model.model.rotary_emb.inv_freq = inv_freq
    return model


def randomize(module: torch.nn.Module, std: float) -> None:
    """Give a model or an MTP layer random weights, norms near one and a router's bias."""
    with torch.no_grad():
        for name, parameter in module.named_parameters():
            if parameter.dim() > 1:
                parameter.normal_(0.0, std)
            elif "norm" in name and name.endswith("weight"):
                parameter.uniform_(0.5, 1.5)
            elif name.endswith("bias"):
                parameter.normal_(0.0, 0.1)
        for name, buffer in module.named_buffers():
            if name.endswith("e_score_correction_bias"):
                buffer.normal_(0.0, 0.05)
