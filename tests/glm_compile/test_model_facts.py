from __future__ import annotations

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from glm_compile.errors import ConfigError, GlmCompileError
from glm_compile.model_facts import GlmDsaConfig, cache_argument, mask_dtype, token_ids
from tests.checkpoints import release_config
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model


def test_facts_of_the_release_are_read():
    facts = GlmDsaConfig.from_transformers(release_config())
    assert facts.full_layers == (0, 1, 2, *range(6, 78, 4))
    assert facts.num_full_layers == 21
    assert facts.indexer_types.count("shared") == 57
    assert facts.num_mtp_layers == 1 and facts.is_mtp_index_shared
    assert facts.latent_dim == 576 and facts.index_num_heads == 32 and facts.index_topk == 2048
    assert facts.dtype == torch.bfloat16
    assert facts.mlp_layer_types.count("dense") == 3


def test_a_config_object_and_its_json_give_the_same_facts():
    values = release_config()
    from_object = GlmDsaConfig.from_transformers(GlmMoeDsaConfig(**values))
    assert from_object == GlmDsaConfig.from_transformers(values)
    assert GlmDsaConfig.from_transformers(from_object) is from_object
    tiny = tiny_config()
    assert GlmDsaConfig.from_transformers(tiny) == GlmDsaConfig.from_transformers(tiny.to_dict())


@pytest.mark.parametrize("model_type", ["llama", None])
def test_another_family_is_refused_by_name(model_type):
    values = release_config() | {"model_type": model_type}
    with pytest.raises(ConfigError, match=f"found {model_type!r}") as caught:
        GlmDsaConfig.from_transformers(values)
    assert isinstance(caught.value, ValueError) and isinstance(caught.value, GlmCompileError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"indexer_types": ["full"] * 77}, "77 entries but num_hidden_layers is 78"),
        ({"indexer_types": ["full"] * 80}, "80 entries but num_hidden_layers is 78"),
        ({"indexer_types": ["full"] * 77 + ["half"]}, r"found \['half'\]"),
        ({"indexer_types": ["shared"] + ["full"] * 77}, r"indexer_types\[0\] is 'shared'"),
        ({"index_topk_pattern": "FX" * 39}, r"found \['X'\]"),
        ({"index_topk_pattern": "F" * 4}, "index_topk_pattern has 4 entries"),
        ({"qk_head_dim": 192}, r"qk_head_dim is 192 but .* is 192 \+ 64"),
        ({"index_head_dim": 32}, "index_head_dim 32 is smaller than qk_rope_head_dim 64"),
        ({"index_topk": 0}, "index_topk must be at least 1, found 0"),
        ({"num_nextn_predict_layers": -1}, "found -1"),
    ],
)
def test_contradictions_are_named(change, message):
    with pytest.raises(ConfigError, match=message):
        GlmDsaConfig.from_transformers(release_config() | change)


def test_types_that_also_list_the_mtp_layer_are_taken():
    values = release_config()
    values["indexer_types"] = [*values["indexer_types"], "full"]
    assert len(GlmDsaConfig.from_transformers(values).indexer_types) == 78


def test_a_config_object_with_a_changed_head_dim_is_refused():
    config = tiny_config()
    config.head_dim = 192
    with pytest.raises(ConfigError, match="head_dim is 192 but qk_rope_head_dim is 64"):
        GlmDsaConfig.from_transformers(config)


def test_the_cache_argument_is_the_forwards_own():
    assert cache_argument() == CACHE_ARGUMENT


def test_mask_dtype_follows_the_attention():
    assert mask_dtype(tiny_model().config, torch.bfloat16) == torch.bool
    assert mask_dtype(tiny_model(attention="eager").config, torch.bfloat16) == torch.bfloat16


def test_token_ids_are_a_tuple():
    assert token_ids(None) == ()
    assert token_ids(3) == (3,)
    assert token_ids([3, 4]) == (3, 4)


def test_facts_fit_the_model_that_transformers_builds():
    config = tiny_config()
    facts = GlmDsaConfig.from_transformers(config)
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM(config)
    for number, layer in enumerate(model.model.layers):
        attention = layer.self_attn
        assert (attention.indexer is not None) == (number in facts.full_layers)
        assert attention.kv_a_proj_with_mqa.out_features == facts.latent_dim
        assert hasattr(layer.mlp, "experts") == (facts.mlp_layer_types[number] == "sparse")
