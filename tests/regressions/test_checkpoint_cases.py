"""Published faults of checkpoints and their loaders, by case id."""

from __future__ import annotations

import json

import pytest
import torch
from transformers import GlmMoeDsaConfig, GlmMoeDsaForCausalLM

from glm_compile.cache import PagedCache
from glm_compile.checkpoint import load
from glm_compile.errors import CheckpointError, UnsupportedError
from glm_compile.model_facts import GlmDsaConfig
from tests.checkpoints import INDEX, random_mtp, release_config, write_checkpoint
from tests.tiny_models import tiny_model

MODELOPT = {
    "quant_method": "modelopt",
    "quant_algo": "NVFP4",
    "ignore": ["model.layers.0.self_attn.indexers_proj", "lm_head"],
}


@pytest.fixture(scope="module")
def saved():
    model = tiny_model()
    return model, random_mtp(model)


def assert_same(expected, found):
    assert expected.state_dict().keys() == found.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


@pytest.mark.parametrize("head_dim", [192, 64, 256])
def test_ckpt_1_widths_do_not_depend_on_head_dim(head_dim):
    values = release_config() | {"head_dim": head_dim}
    for config in (values, GlmMoeDsaConfig(**values)):
        facts = GlmDsaConfig.from_transformers(config)
        assert facts.qk_rope_head_dim == 64 and facts.qk_nope_head_dim == 192
        assert facts.qk_head_dim == facts.v_head_dim == 256
        assert facts.latent_dim == 576 and facts.q_lora_rank + facts.latent_dim == 2624
    cache = PagedCache(values, 1, 64, device="meta")
    assert cache.layers[0].latent_pages.shape == (1, 64, 576)


class TestCkpt2:
    def test_ckpt_2_an_mtp_file_that_the_index_lacks_is_found(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved, mtp_file="mtp.safetensors")
        weight_map = json.loads((path / INDEX).read_text())["weight_map"]
        assert not any(".layers.4." in name for name in weight_map)
        _, mtp = load(path)
        assert_same(saved[1], mtp)

    def test_ckpt_2_names_that_the_index_lacks_in_its_own_shards_are_found(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved)
        index = json.loads((path / INDEX).read_text())
        weight_map = index["weight_map"]
        index["weight_map"] = {n: f for n, f in weight_map.items() if ".layers.4." not in n}
        (path / INDEX).write_text(json.dumps(index))
        assert_same(saved[1], load(path)[1])

    def test_ckpt_2_a_lost_mtp_file_is_an_error(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved, mtp_file="mtp.safetensors")
        (path / "mtp.safetensors").unlink()
        with pytest.raises(CheckpointError, match=r"no file holds model\.layers\.4\.\*"):
            load(path)
        assert load(path, mtp=False)[1] is None


class TestCkpt4:
    def test_ckpt_4_absent_head_and_embedding_are_the_models(self, saved, tmp_path):
        model, mtp = load(write_checkpoint(tmp_path, *saved))
        assert mtp.embed_tokens is None and mtp.shared_head.head is None
        hidden = torch.randn(1, 1, 128)
        assert torch.equal(mtp.compute_logits(hidden), model.lm_head(hidden))

    @pytest.mark.parametrize("is_equal", [True, False])
    def test_ckpt_4_present_ones_are_used_and_not_doubled(self, saved, tmp_path, is_equal):
        head = saved[0].lm_head.weight * (1.0 if is_equal else 2.0)

        def add(tensors):
            tensors["model.layers.4.shared_head.head.weight"] = head.clone()
            tensors["model.layers.4.embed_tokens.weight"] = saved[
                0
            ].model.embed_tokens.weight.clone()

        _, mtp = load(write_checkpoint(tmp_path, *saved, edit=add))
        assert (mtp.shared_head.head is None) == is_equal
        assert mtp.embed_tokens is None
        hidden = torch.randn(1, 1, 128)
        torch.testing.assert_close(mtp.compute_logits(hidden), hidden @ head.T)


def test_ckpt_5_what_is_not_kept_is_not_checked(saved, tmp_path):
    def spoil(tensors):
        tensors["model.layers.4.eh_proj.weight"] = torch.zeros(3)
        del tensors["model.layers.4.hnorm.weight"]

    path = write_checkpoint(tmp_path, *saved, edit=spoil)
    model, _ = load(path, mtp=False)
    assert_same(saved[0], model)
    with pytest.raises(CheckpointError, match=r"model\.layers\.4\.hnorm\.weight"):
        load(path)


class TestCkpt7:
    """What is quantised is decided by the tensors; the config's word is compared with them."""

    def test_ckpt_7_declared_and_found(self, saved, tmp_path):
        def quantise(tensors):
            name = "model.layers.3.mlp.experts.0.down_proj.weight"
            tensors[name] = torch.zeros(128, 32, dtype=torch.uint8)
            tensors[f"{name}_scale"] = torch.zeros(128, 4, dtype=torch.float8_e4m3fn)

        path = write_checkpoint(
            tmp_path,
            *saved,
            edit=quantise,
            edit_config=lambda config: config.update(quantization_config=MODELOPT),
        )
        with pytest.raises(
            UnsupportedError, match=r"declares modelopt NVFP4.*it holds model\.layers\.3"
        ):
            load(path)

    def test_ckpt_7_declared_and_not_found(self, saved, tmp_path):
        path = write_checkpoint(
            tmp_path,
            *saved,
            edit_config=lambda config: config.update(quantization_config=MODELOPT),
        )
        with pytest.raises(UnsupportedError, match=r"declares modelopt.*no quantised tensor"):
            load(path)

    def test_ckpt_7_found_and_not_declared(self, saved, tmp_path):
        def quantise(tensors):
            name = "model.layers.0.self_attn.o_proj.weight"
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)

        path = write_checkpoint(tmp_path, *saved, edit=quantise)
        with pytest.raises(UnsupportedError, match=r"does not say so; it holds .*o_proj\.weight"):
            load(path)


def test_ckpt_9_scales_of_experts_are_never_dropped(saved, tmp_path):
    def add(tensors):
        for expert in range(2):
            name = f"model.layers.3.mlp.experts.{expert}.down_proj.weight_scale_2"
            tensors[name] = torch.tensor(1.0 + 2 * expert)

    with pytest.raises(UnsupportedError, match=r"experts\.\d\.down_proj\.weight_scale_2"):
        load(write_checkpoint(tmp_path, *saved, edit=add))


class TestCkpt12:
    def test_ckpt_12_modelopt_is_refused_before_anything_is_loaded(
        self, saved, tmp_path, monkeypatch
    ):
        monkeypatch.setattr(GlmMoeDsaForCausalLM, "from_pretrained", None)
        path = write_checkpoint(
            tmp_path,
            *saved,
            edit_config=lambda config: config.update(quantization_config=MODELOPT),
        )
        with pytest.raises(
            UnsupportedError, match=r"modelopt NVFP4.*bfloat16, float16 and float32"
        ):
            load(path)

    def test_ckpt_12_its_own_file_is_read_too(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved)
        content = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
        (path / "hf_quant_config.json").write_text(json.dumps(content))
        with pytest.raises(UnsupportedError, match="declares NVFP4"):
            load(path)


def test_ckpt_13_saving_and_loading_loses_nothing(saved, tmp_path):
    model, _ = load(write_checkpoint(tmp_path / "first", *saved))
    model.save_pretrained(tmp_path / "second", max_shard_size="500KB")
    assert len(list((tmp_path / "second").glob("*.safetensors"))) > 1
    again, _ = load(tmp_path / "second", mtp=False)
    assert_same(saved[0], again)


def test_ckpt_14_scales_of_indexer_keys_are_never_dropped(saved, tmp_path):
    def quantise(tensors):
        for layer in (0, 1, 3):
            name = f"model.layers.{layer}.self_attn.indexer.wk.weight"
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = torch.ones(1, 1)

    with pytest.raises(UnsupportedError, match=r"self_attn\.indexer\.wk\.weight"):
        load(write_checkpoint(tmp_path, *saved, edit=quantise))
