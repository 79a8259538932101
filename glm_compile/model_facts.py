"""What the rest of the package needs to know about a glm_moe_dsa model, read once from its config.

Every number comes from the config; contradictions inside it are a ConfigError that names both
values. The family: GLM-5 and 5.1 (every layer has its own indexer), 5.2 and 5.3 (IndexShare).
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaAttention

from glm_compile.arguments import describe
from glm_compile.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedConfig

MODEL_TYPE = "glm_moe_dsa"

# Names of the cache argument in the versions of transformers that are supported.
CACHE_ARGUMENTS = ("cache", "past_key_values")

FULL = "full"
SHARED = "shared"

# transformers' defaults when a config gives no schedule: every layer runs its own indexer.
_DEFAULT_TOPK_FREQ = 1
_DEFAULT_SKIP_TOPK_OFFSET = 2


@dataclass(frozen=True)
class GlmDsaConfig:
    """Facts about one model.

    Attributes:
        indexer_types: `full` or `shared` for each of the `num_hidden_layers` decoder layers.
        num_mtp_layers: MTP layers that the config declares (the checkpoint holds them behind the
            decoder layers); each has an indexer of its own.
        is_mtp_index_shared: draft steps reuse the selection and the cache of the first one.
        eos_token_ids: every id that ends a sequence; the pad id may be one of them.
        dtype: dtype the config was saved with, if it says so.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_mtp_layers: int
    num_attention_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    index_num_heads: int
    index_head_dim: int
    index_topk: int
    indexer_types: tuple[str, ...]
    mlp_layer_types: tuple[str, ...]
    num_experts: int
    num_experts_per_token: int
    moe_intermediate_size: int
    intermediate_size: int
    is_indexer_rope_interleaved: bool
    is_mtp_index_shared: bool
    has_tied_embeddings: bool
    eos_token_ids: tuple[int, ...]
    pad_token_id: int | None
    max_position_embeddings: int
    dtype: torch.dtype | None

    @classmethod
    def from_transformers(
        cls, config: PreTrainedConfig | Mapping[str, Any] | GlmDsaConfig
    ) -> GlmDsaConfig:
        """Read the facts from a transformers config or from the contents of a config.json.

        Raises:
            ConfigError: another model type, or values that contradict each other.
        """
        if isinstance(config, GlmDsaConfig):
            return config
        is_file = isinstance(config, Mapping)
        if not is_file and (isinstance(config, type) or not hasattr(config, "to_dict")):
            hint = "; pass its .config" if hasattr(config, "config") else ""
            raise ConfigError(
                "expected a GlmMoeDsaConfig or the contents of a config.json, got "
                f"{describe(config)}{hint}"
            )
        raw: Mapping[str, Any] = config if isinstance(config, Mapping) else config.to_dict()
        if (found := raw.get("model_type")) != MODEL_TYPE:
            raise ConfigError(
                f"expected a config with model_type {MODEL_TYPE!r} (GLM-5 family), found "
                f"{found!r}; glm_compile serves GlmMoeDsaForCausalLM only"
            )
        _check_indexer_types(raw)
        if is_file:
            config = make_config(raw)
        assert not isinstance(config, Mapping)
        _check_head_dims(config, raw)
        num_layers = config.num_hidden_layers
        dtype = getattr(config, "dtype", None)
        if isinstance(dtype, str):
            dtype = getattr(torch, name := dtype.removeprefix("torch."), None)
            if not isinstance(dtype, torch.dtype):
                raise ConfigError(f"dtype {name!r} is none that torch knows")
        return cls(
            vocab_size=config.vocab_size,
            hidden_size=config.hidden_size,
            num_hidden_layers=num_layers,
            num_mtp_layers=_num_mtp_layers(raw),
            num_attention_heads=config.num_attention_heads,
            q_lora_rank=config.q_lora_rank,
            kv_lora_rank=config.kv_lora_rank,
            qk_nope_head_dim=config.qk_nope_head_dim,
            qk_rope_head_dim=config.qk_rope_head_dim,
            v_head_dim=config.v_head_dim,
            index_num_heads=config.index_n_heads,
            index_head_dim=config.index_head_dim,
            index_topk=config.index_topk,
            indexer_types=tuple(config.indexer_types[:num_layers]),
            mlp_layer_types=tuple(config.mlp_layer_types[:num_layers]),
            num_experts=config.n_routed_experts,
            num_experts_per_token=config.num_experts_per_tok,
            moe_intermediate_size=config.moe_intermediate_size,
            intermediate_size=config.intermediate_size,
            is_indexer_rope_interleaved=bool(raw.get("indexer_rope_interleave", True)),
            is_mtp_index_shared=bool(raw.get("index_share_for_mtp_iteration")),
            has_tied_embeddings=bool(config.tie_word_embeddings),
            eos_token_ids=token_ids(config.eos_token_id),
            pad_token_id=config.pad_token_id,
            max_position_embeddings=config.max_position_embeddings,
            dtype=dtype,
        )

    @property
    def qk_head_dim(self) -> int:
        """Width of a query head of the attention: the unrotated part and the rotated one."""
        return self.qk_nope_head_dim + self.qk_rope_head_dim

    @property
    def latent_dim(self) -> int:
        """Width of a row of the latent cache: the compressed part, then the rotated key."""
        return self.kv_lora_rank + self.qk_rope_head_dim

    @property
    def full_layers(self) -> tuple[int, ...]:
        """Numbers of the decoder layers that run an indexer."""
        return tuple(i for i, kind in enumerate(self.indexer_types) if kind == FULL)

    @property
    def num_full_layers(self) -> int:
        """How many decoder layers run an indexer."""
        return len(self.full_layers)


@cache
def cache_argument() -> str:
    """Name of the cache argument of the model's forward (transformers renamed it)."""
    names = inspect.signature(GlmMoeDsaForCausalLM.forward).parameters
    return "cache" if "cache" in names else "past_key_values"


def attentions_of(model: Any) -> list[GlmMoeDsaAttention]:
    """The attentions that a forward of the model or its decoder runs, as far as transformers' own.

    A model may have been cut to some of its layers, and its config left as it was, or the reverse.
    """
    layers = getattr(model, "model", model).layers[: model.config.num_hidden_layers]
    attentions = [getattr(layer, "self_attn", None) for layer in layers]
    return [attention for attention in attentions if type(attention) is GlmMoeDsaAttention]


def mask_dtype(config: PreTrainedConfig, dtype: torch.dtype) -> torch.dtype:
    """Dtype of a 4D mask: bool for sdpa; the model's for eager attention, which adds it."""
    return dtype if config._attn_implementation == "eager" else torch.bool


def token_ids(ids: int | Sequence[int] | None) -> tuple[int, ...]:
    """One id, several or none, as a tuple."""
    if ids is None:
        return ()
    return (ids,) if isinstance(ids, int) else tuple(ids)


def _num_mtp_layers(raw: Mapping[str, Any]) -> int:
    count = raw.get("num_nextn_predict_layers") or 0
    if not isinstance(count, int) or count < 0:
        raise ConfigError(f"num_nextn_predict_layers must be a count of layers, found {count!r}")
    return count


def make_config(raw: Mapping[str, Any]) -> GlmMoeDsaConfig:
    """transformers' config of a config.json's contents.

    Raises:
        ConfigError: what transformers has against a value, or a value of another kind.
    """
    declared = raw.get("quantization_config")
    if declared is not None and not isinstance(declared, Mapping):
        raise ConfigError(f"quantization_config is no object: {declared!r}")
    try:
        return GlmMoeDsaConfig.from_dict(dict(raw))
    except Exception as error:
        raise ConfigError(f"transformers refuses the config: {error}") from error


def _check_indexer_types(raw: Mapping[str, Any]) -> None:
    """`indexer_types` decides; a schedule that is given beside it must say the same."""
    num_layers = raw.get("num_hidden_layers")
    types = raw.get("indexer_types")
    pattern = _expand_pattern(raw.get("index_topk_pattern"))
    for name, given in (("indexer_types", types), ("index_topk_pattern", pattern)):
        if given is None:
            continue
        if unknown := sorted(set(given) - {FULL, SHARED}):
            raise ConfigError(f"{name} may hold 'full' and 'shared', found {unknown}")
        if num_layers is not None:
            allowed = range(num_layers, num_layers + _num_mtp_layers(raw) + 1)
            if len(given) not in allowed:
                raise ConfigError(
                    f"{name} has {len(given)} entries but num_hidden_layers is {num_layers}"
                )
        if given and given[0] == SHARED:
            raise ConfigError(
                f"{name}[0] is 'shared', but no layer before layer 0 has a selection to reuse"
            )
    if types is None:
        return
    if pattern is not None:
        _compare_schedules(types, pattern, f"index_topk_pattern {raw['index_topk_pattern']!r}")
    elif raw.get("index_topk_freq") is not None or raw.get("index_skip_topk_offset") is not None:
        freq = raw.get("index_topk_freq") or _DEFAULT_TOPK_FREQ
        offset = raw.get("index_skip_topk_offset")
        offset = _DEFAULT_SKIP_TOPK_OFFSET if offset is None else offset
        schedule = [
            FULL if max(layer - offset + 1, 0) % freq == 0 else SHARED
            for layer in range(len(types))
        ]
        _compare_schedules(
            types, schedule, f"index_topk_freq {freq} with index_skip_topk_offset {offset}"
        )


def _expand_pattern(pattern: str | Sequence[str] | None) -> list[str] | None:
    if pattern is None:
        return None
    if not isinstance(pattern, str):
        return list(pattern)
    if unknown := sorted(set(pattern) - {"F", "S"}):
        raise ConfigError(f"index_topk_pattern may hold 'F' and 'S', found {unknown}")
    return [FULL if letter == "F" else SHARED for letter in pattern]


def _compare_schedules(types: Sequence[str], schedule: Sequence[str], source: str) -> None:
    for layer, (given, derived) in enumerate(zip(types, schedule)):
        if given != derived:
            raise ConfigError(
                f"indexer_types says layer {layer} is {given!r}, but {source} makes it "
                f"{derived!r}; remove the one that is wrong from the config"
            )


def _check_head_dims(config: PreTrainedConfig, raw: Mapping[str, Any]) -> None:
    """`head_dim` in a config.json may be anything: transformers replaces it by the rotary width."""
    nope, rope = config.qk_nope_head_dim, config.qk_rope_head_dim
    if (given := raw.get("qk_head_dim")) is not None and given != nope + rope:
        raise ConfigError(
            f"qk_head_dim is {given} but qk_nope_head_dim + qk_rope_head_dim is {nope} + {rope}"
        )
    if config.head_dim != rope:
        raise ConfigError(
            f"the config object's head_dim is {config.head_dim} but qk_rope_head_dim is {rope}; "
            "transformers reads head_dim as the rotary width: leave it as the constructor set it"
        )
    if config.index_head_dim < rope:
        raise ConfigError(
            f"index_head_dim {config.index_head_dim} is smaller than qk_rope_head_dim {rope}"
        )
    if config.index_topk < 1:
        raise ConfigError(f"index_topk must be at least 1, found {config.index_topk}")
