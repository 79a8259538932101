"""The checkpoint on disk, in the release's own format: names, shards, config, tokenizer files."""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor

from .corpus import EOS_IDS, SPECIAL_TOKENS
from .model import TinyConfig, TinyGlm

_NUM_SHARDS = 3
_INDEX_NAME = "model.safetensors.index.json"
# Keys that the stored model selects. It is trained with fewer (`TinyConfig.index_topk`), which
# makes its indexers choose well; with 64 the held-out loss would be 3.8 % above dense attention.
STORED_INDEX_TOPK = 96
_EXPERT_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def release_config(config: TinyConfig) -> dict:
    """Every field that GLM-5.2's config.json has, with the tiny model's values."""
    layers = range(config.num_hidden_layers)
    return {
        "architectures": ["GlmMoeDsaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "dtype": "bfloat16",
        "eos_token_id": list(EOS_IDS),
        "ep_size": 1,
        "first_k_dense_replace": config.first_k_dense_replace,
        # As in the release, this is the width without rotation; readers must not use it for RoPE.
        "head_dim": config.qk_nope_head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "index_head_dim": config.index_head_dim,
        "index_n_heads": config.index_n_heads,
        "index_share_for_mtp_iteration": True,
        "index_skip_topk_offset": config.index_skip_topk_offset,
        "index_topk": STORED_INDEX_TOPK,
        "index_topk_freq": config.index_topk_freq,
        "index_topk_pattern": None,
        "indexer_rope_interleave": True,
        "indexer_types": ["full" if config.is_full(i) else "shared" for i in layers],
        "initializer_range": 0.02,
        "intermediate_size": config.intermediate_size,
        "kv_lora_rank": config.kv_lora_rank,
        "max_position_embeddings": 32768,
        "mlp_layer_types": ["dense" if config.is_dense(i) else "sparse" for i in layers],
        "model_type": "glm_moe_dsa",
        "moe_intermediate_size": config.moe_intermediate_size,
        "moe_layer_freq": 1,
        "moe_router_dtype": "float32",
        "n_group": 1,
        "n_routed_experts": config.n_routed_experts,
        "n_shared_experts": 1,
        "norm_topk_prob": True,
        "num_attention_heads": config.num_attention_heads,
        "num_experts_per_tok": config.num_experts_per_tok,
        "num_hidden_layers": config.num_hidden_layers,
        "num_key_value_heads": config.num_attention_heads,
        "num_nextn_predict_layers": 1,
        "pad_token_id": EOS_IDS[0],
        "pretraining_tp": 1,
        "q_lora_rank": config.q_lora_rank,
        "qk_head_dim": config.qk_head_dim,
        "qk_nope_head_dim": config.qk_nope_head_dim,
        "qk_rope_head_dim": config.qk_rope_head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_interleave": True,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "routed_scaling_factor": config.routed_scaling_factor,
        "scoring_func": "sigmoid",
        "tie_word_embeddings": False,
        "topk_group": 1,
        "topk_method": "noaux_tc",
        "transformers_version": "5.24.0",
        "use_cache": True,
        "v_head_dim": config.v_head_dim,
        "vocab_size": config.vocab_size,
    }


def generation_config() -> dict:
    return {
        "_from_model_config": False,
        "do_sample": True,
        "eos_token_id": list(EOS_IDS),
        "pad_token_id": EOS_IDS[0],
        "temperature": 1.0,
        "top_p": 0.95,
        "transformers_version": "5.24.0",
    }


def tokenizer_config() -> dict:
    return {
        "clean_up_tokenization_spaces": False,
        "eos_token": SPECIAL_TOKENS[0],
        "extra_special_tokens": list(SPECIAL_TOKENS),
        "model_max_length": 32768,
        "pad_token": SPECIAL_TOKENS[0],
        "padding_side": "left",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def special_tokens_map() -> dict:
    return {
        "additional_special_tokens": list(SPECIAL_TOKENS),
        "eos_token": SPECIAL_TOKENS[0],
        "pad_token": SPECIAL_TOKENS[0],
    }


def release_name(name: str, config: TinyConfig) -> str:
    """Translate a name of `TinyGlm`'s state to the release's."""
    mtp_prefix = f"model.layers.{config.num_hidden_layers}."
    if name.startswith("mtp.layer."):
        return mtp_prefix + name.removeprefix("mtp.layer.")
    if name.startswith("mtp.norm."):
        return mtp_prefix + "shared_head." + name.removeprefix("mtp.")
    if name.startswith("mtp."):
        return mtp_prefix + name.removeprefix("mtp.")
    return name if name.startswith("lm_head.") else "model." + name


def _expert_entries(name: str, config: TinyConfig) -> list[tuple[str, int]] | None:
    """The per-expert names of a stacked tensor, or None when `name` is no stack of experts."""
    stem, _, projection = name.rpartition(".")
    if not stem.endswith(".experts") or projection not in _EXPERT_PROJECTIONS:
        return None
    prefix = release_name(stem, config)
    return [(f"{prefix}.{e}.{projection}.weight", e) for e in range(config.n_routed_experts)]


def export_tensors(model: TinyGlm) -> Iterator[tuple[str, Tensor]]:
    """Yield the release's names and tensors: bfloat16, and float32 for the router's bias."""
    for name, tensor in model.state_dict().items():
        is_bias = name.endswith("e_score_correction_bias")
        tensor = tensor.detach().cpu().to(torch.float32 if is_bias else torch.bfloat16)
        entries = _expert_entries(name, model.config)
        if entries is None:
            yield release_name(name, model.config), tensor.contiguous()
        else:
            for expert_name, expert in entries:
                yield expert_name, tensor[expert].clone()


def _layer_order(name: str) -> tuple[int, str]:
    parts = name.split(".")
    if parts[0] == "lm_head" or name == "model.norm.weight":
        return 1000, name
    return (int(parts[2]) if parts[1] == "layers" else -1), name


def _write_shards(folder: Path, tensors: dict[str, Tensor]) -> None:
    """Write shards of about equal size, in layer order, and their index."""
    from safetensors.torch import save_file

    names = sorted(tensors, key=_layer_order)
    total = sum(tensor.nbytes for tensor in tensors.values())
    shards: list[dict[str, Tensor]] = [{} for _ in range(_NUM_SHARDS)]
    seen = 0
    for name in names:
        shards[min(seen * _NUM_SHARDS // total, _NUM_SHARDS - 1)][name] = tensors[name]
        seen += tensors[name].nbytes
    weight_map = {}
    for number, shard in enumerate(shards, start=1):
        file_name = f"model-{number:05d}-of-{_NUM_SHARDS:05d}.safetensors"
        save_file(shard, folder / file_name, metadata={"format": "pt"})
        (folder / file_name).chmod(0o644)
        weight_map.update(dict.fromkeys(shard, file_name))
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    _write_json(folder / _INDEX_NAME, index)


def _write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def save_checkpoint(model: TinyGlm, tokenizer_json: str, folder: Path) -> None:
    """Write the checkpoint to a temporary folder beside `folder`, then put it in place.

    An interrupted run leaves either the old checkpoint or the new one. Files in `folder` that are
    not part of a checkpoint (a README, say) are kept.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
    try:
        staging.chmod(0o755)
        _write_shards(staging, dict(export_tensors(model)))
        _write_json(staging / "config.json", release_config(model.config))
        _write_json(staging / "generation_config.json", generation_config())
        _write_json(staging / "tokenizer_config.json", tokenizer_config())
        _write_json(staging / "special_tokens_map.json", special_tokens_map())
        (staging / "tokenizer.json").write_text(tokenizer_json, encoding="utf-8")
        if folder.exists():
            for other in folder.iterdir():
                if other.is_file() and not (staging / other.name).exists():
                    shutil.copy2(other, staging / other.name)
            old = staging.with_name(staging.name + ".old")
            os.rename(folder, old)
            os.rename(staging, folder)
            shutil.rmtree(old)
        else:
            os.rename(staging, folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def read_tensors(folder: Path) -> dict[str, Tensor]:
    """Read all shards that the index names."""
    from safetensors.torch import load_file

    index = json.loads((folder / _INDEX_NAME).read_text(encoding="utf-8"))
    tensors: dict[str, Tensor] = {}
    for file_name in sorted(set(index["weight_map"].values())):
        tensors.update(load_file(folder / file_name))
    return tensors


def load_checkpoint(
    folder: Path, device: str | torch.device = "cpu", *, index_topk: int | None = None
) -> TinyGlm:
    """Load a checkpoint into the training model, float32 copies of the stored weights.

    `index_topk` replaces the stored number of selected keys.
    """
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    stored.update(rope_theta=stored["rope_parameters"]["rope_theta"])
    if index_topk is not None:
        stored["index_topk"] = index_topk
    config = TinyConfig(**{name: stored[name] for name in TinyConfig.__dataclass_fields__})
    model = TinyGlm(config)
    tensors = read_tensors(folder)
    state = {}
    for name in model.state_dict():
        entries = _expert_entries(name, config)
        if entries is None:
            state[name] = tensors.pop(release_name(name, config)).float()
        else:
            state[name] = torch.stack([tensors.pop(n) for n, _ in entries]).float()
    if tensors:
        raise ValueError(f"{folder}: tensors that the model does not have: {sorted(tensors)}")
    model.load_state_dict(state)
    return model.to(device).eval()
