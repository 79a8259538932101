"""Tiny checkpoints in the release's format: a tensor per expert, shards, an index, an MTP layer."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers import GlmMoeDsaForCausalLM

from glm_compile.mtp import GlmMoeDsaMtp
from tests.tiny_models import randomize

Tensors = dict[str, torch.Tensor]

INDEX = "model.safetensors.index.json"


def random_mtp(model: GlmMoeDsaForCausalLM, *, seed: int = 1, std: float = 0.1) -> GlmMoeDsaMtp:
    """MTP layer of `model` with random weights, in the model's dtype."""
    torch.manual_seed(seed)
    mtp = GlmMoeDsaMtp(model)
    randomize(mtp, std)
    return mtp


def release_tensors(model: GlmMoeDsaForCausalLM, mtp: GlmMoeDsaMtp | None = None) -> Tensors:
    """Tensors by the names of the published files."""
    tensors = dict(model.state_dict())
    if mtp is not None:
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        for name, tensor in mtp.state_dict().items():
            tensors[prefix + name.removeprefix("layer.")] = tensor
    split: Tensors = {}
    for name, tensor in tensors.items():
        prefix, is_expert, leaf = name.partition(".experts.")
        if not is_expert:
            split[name] = tensor.contiguous().clone()
            continue
        for expert, weight in enumerate(tensor):
            parts = {"down_proj": weight}
            if leaf == "gate_up_proj":
                gate, up = weight.chunk(2)
                parts = {"gate_proj": gate, "up_proj": up}
            for part, part_weight in parts.items():
                key = f"{prefix}.experts.{expert}.{part}.weight"
                split[key] = part_weight.contiguous().clone()
    return split


def write_checkpoint(
    path: Path,
    model: GlmMoeDsaForCausalLM,
    mtp: GlmMoeDsaMtp | None = None,
    *,
    num_shards: int = 3,
    mtp_file: str | None = None,
    edit: Callable[[Tensors], None] | None = None,
    edit_config: Callable[[dict], None] | None = None,
) -> Path:
    """Write config.json, shards and index.

    Args:
        mtp_file: put the MTP layer into this file, which the index does not name.
        edit: changes the tensors before they are written.
        edit_config: changes config.json's contents.
    """
    path.mkdir(parents=True, exist_ok=True)
    config = json.loads(model.config.to_json_string())
    config["architectures"] = ["GlmMoeDsaForCausalLM"]
    config["dtype"] = str(model.model.embed_tokens.weight.dtype).removeprefix("torch.")
    if edit_config:
        edit_config(config)
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    tensors = release_tensors(model, mtp)
    if edit:
        edit(tensors)
    if mtp_file:
        prefix = f"model.layers.{model.config.num_hidden_layers}."
        apart = {name: tensors.pop(name) for name in list(tensors) if name.startswith(prefix)}
        save_file(apart, path / mtp_file, metadata={"format": "pt"})
    names = list(tensors)
    weight_map = {}
    for number in range(num_shards):
        file = f"model-{number + 1:05d}-of-{num_shards:05d}.safetensors"
        shard = {name: tensors[name] for name in names[number::num_shards]}
        save_file(shard, path / file, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(shard, file)
    index = {
        "metadata": {"total_size": sum(tensor.nbytes for tensor in tensors.values())},
        "weight_map": weight_map,
    }
    (path / INDEX).write_text(json.dumps(index), encoding="utf-8")
    return path


def release_config() -> dict:
    """config.json of the released GLM-5.2, as far as this project reads it."""
    types = ["full"] * 3 + (["shared"] * 3 + ["full"]) * 18 + ["shared"] * 3
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "model_type": "glm_moe_dsa",
        "dtype": "bfloat16",
        "vocab_size": 154880,
        "hidden_size": 6144,
        "intermediate_size": 12288,
        "moe_intermediate_size": 2048,
        "num_hidden_layers": 78,
        "num_attention_heads": 64,
        "num_key_value_heads": 64,
        "head_dim": 192,
        "q_lora_rank": 2048,
        "kv_lora_rank": 512,
        "qk_nope_head_dim": 192,
        "qk_rope_head_dim": 64,
        "qk_head_dim": 256,
        "v_head_dim": 256,
        "n_routed_experts": 256,
        "num_experts_per_tok": 8,
        "n_shared_experts": 1,
        "first_k_dense_replace": 3,
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 1048576,
        "rope_parameters": {"rope_theta": 8000000, "rope_type": "default"},
        "rope_interleave": True,
        "indexer_rope_interleave": True,
        "index_n_heads": 32,
        "index_head_dim": 128,
        "index_topk": 2048,
        "index_topk_freq": 4,
        "index_skip_topk_offset": 3,
        "index_topk_pattern": None,
        "index_share_for_mtp_iteration": True,
        "indexer_types": types,
        "mlp_layer_types": ["dense"] * 3 + ["sparse"] * 75,
        "num_nextn_predict_layers": 1,
        "eos_token_id": [154820, 154827, 154829],
        "pad_token_id": 154820,
        "tie_word_embeddings": False,
    }
