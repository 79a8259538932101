from __future__ import annotations

import json
import logging

import pytest
import torch
from safetensors.torch import save_file
from transformers import GlmMoeDsaForCausalLM

from glm_compile.checkpoint import load, load_structure, read_facts
from glm_compile.errors import CheckpointError, ConfigError, UnsupportedError
from tests.checkpoints import INDEX, random_mtp, write_checkpoint
from tests.tiny_models import tiny_config, tiny_model

SHARD = "model-00002-of-00003.safetensors"


@pytest.fixture(scope="module")
def saved():
    """A model and its MTP layer in float32."""
    model = tiny_model()
    return model, random_mtp(model)


@pytest.fixture
def no_loading(monkeypatch):
    """Fail if any weight is read."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were read although the checkpoint has faults")

    monkeypatch.setattr(GlmMoeDsaForCausalLM, "from_pretrained", refuse)


def faults(path, **kwargs):
    with pytest.raises(CheckpointError) as caught:
        load(path, **kwargs)
    first, *lines = str(caught.value).splitlines()
    assert first == f"{path} cannot be loaded:"
    return [line.removeprefix("  - ") for line in lines]


def assert_same(expected, found):
    assert expected.state_dict().keys() == found.state_dict().keys()
    for name, tensor in expected.state_dict().items():
        assert torch.equal(found.state_dict()[name], tensor), name


class TestLoading:
    @pytest.mark.parametrize("num_shards", [1, 3])
    def test_every_tensor_arrives(self, saved, tmp_path, num_shards):
        path = write_checkpoint(tmp_path, *saved, num_shards=num_shards)
        model, mtp = load(path)
        assert_same(saved[0], model)
        assert_same(saved[1], mtp)
        assert not model.training and not mtp.training
        assert not any(p.requires_grad for p in [*model.parameters(), *mtp.parameters()])
        assert not any(p.is_meta for p in [*mtp._draft_layer.parameters(), *mtp.buffers()])
        assert model.config._attn_implementation == "sdpa"

    def test_a_single_file_needs_no_index(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved, num_shards=1)
        (path / INDEX).unlink()
        (path / "model-00001-of-00001.safetensors").rename(path / "model.safetensors")
        model, mtp = load(path)
        assert_same(saved[0], model)
        assert_same(saved[1], mtp)

    def test_without_mtp_its_tensors_do_not_matter(self, saved, tmp_path):
        for number, mtp in enumerate((None, saved[1])):
            model, layer = load(write_checkpoint(tmp_path / str(number), saved[0], mtp), mtp=False)
            assert layer is None
            assert_same(saved[0], model)

    @pytest.mark.parametrize("dtype", [None, torch.float32, torch.float16])
    def test_dtype_is_the_checkpoints_or_the_given_one(self, tmp_path, dtype):
        model = tiny_model(dtype=torch.bfloat16)
        path = write_checkpoint(tmp_path, model, random_mtp(model))
        loaded, mtp = load(path, dtype=dtype)
        expected = dtype or torch.bfloat16
        for module in (loaded, mtp):
            for name, tensor in module.state_dict().items():
                if name.endswith("e_score_correction_bias"):
                    assert tensor.dtype == torch.float32
                elif "mlp.gate.weight" in name or "weights_proj" in name:
                    assert tensor.dtype in (torch.float32, expected)
                else:
                    assert tensor.dtype == expected, name
        # The MTP layer keeps in float32 exactly what transformers keeps in the model.
        of_model = {n: p.dtype for n, p in loaded.model.layers[-1].named_parameters()}
        of_mtp = {n: p.dtype for n, p in mtp.layer.named_parameters()}
        assert of_mtp == of_model
        if dtype == torch.float16:
            assert of_mtp["self_attn.indexer.weights_proj.weight"] == torch.float32

    def test_the_correction_bias_keeps_its_bits(self, tmp_path):
        model = tiny_model(dtype=torch.bfloat16)
        mtp = random_mtp(model)
        for gate in (model.model.layers[2].mlp.gate, mtp.layer.mlp.gate):
            gate.e_score_correction_bias.copy_(torch.linspace(6.817, 7.063, 8))
        loaded, layer = load(write_checkpoint(tmp_path, model, mtp))
        for gate in (loaded.model.layers[2].mlp.gate, layer.layer.mlp.gate):
            assert torch.equal(gate.e_score_correction_bias, torch.linspace(6.817, 7.063, 8))

    def test_merged_experts_are_taken(self, saved, tmp_path):
        def merge(tensors):
            for name in [n for n in tensors if ".experts." in n]:
                del tensors[name]
            for name, tensor in saved[0].state_dict().items():
                if ".experts." in name:
                    tensors[name] = tensor
            for name in ("gate_up_proj", "down_proj"):
                own = saved[1].state_dict()[f"layer.mlp.experts.{name}"]
                tensors[f"model.layers.4.mlp.experts.{name}"] = own

        model, mtp = load(write_checkpoint(tmp_path, *saved, edit=merge))
        assert_same(saved[0], model)
        assert_same(saved[1], mtp)

    def test_a_tied_head_may_be_absent(self, tmp_path):
        model = tiny_model(tiny_config(tie_word_embeddings=True))
        path = write_checkpoint(tmp_path, model, edit=lambda tensors: tensors.pop("lm_head.weight"))
        loaded, _ = load(path, mtp=False)
        assert loaded.lm_head.weight is loaded.model.embed_tokens.weight

    def test_transformers_says_nothing_and_keeps_its_verbosity(self, saved, tmp_path, caplog):
        from transformers.utils import logging as transformers_logging

        level = transformers_logging.get_verbosity()
        path = write_checkpoint(tmp_path, *saved)
        with caplog.at_level(logging.WARNING):
            load(path)
        assert not caplog.records
        assert transformers_logging.get_verbosity() == level

    def test_mtp_tensors_that_the_config_does_not_declare_are_loaded(self, saved, tmp_path):
        def undeclare(config):
            del config["num_nextn_predict_layers"]

        path = write_checkpoint(tmp_path, *saved, edit_config=undeclare)
        assert read_facts(path).num_mtp_layers == 0
        assert_same(saved[1], load(path)[1])

    def test_the_structure_needs_config_json_alone(self, tmp_path):
        path = write_checkpoint(tmp_path, tiny_model(dtype=torch.bfloat16))
        for file in path.glob("*safetensors*"):
            file.unlink()
        model, mtp = load_structure(path)
        for module in (model, mtp):
            assert all(parameter.is_meta for parameter in module.parameters())
        assert model.lm_head.weight.dtype == mtp.eh_proj.weight.dtype == torch.bfloat16
        assert load_structure(path, dtype=torch.float16)[0].lm_head.weight.dtype == torch.float16


@pytest.mark.usefixtures("no_loading")
class TestFaults:
    def test_a_missing_shard_is_one_fault(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved)
        count = sum(
            file == SHARD for file in json.loads((path / INDEX).read_text())["weight_map"].values()
        )
        (path / SHARD).unlink()
        assert faults(path) == [f"shard {SHARD} is missing; the index places {count} tensors in it"]

    @pytest.mark.parametrize("size", [-1, 100, 4, 0])
    def test_a_truncated_shard_is_one_fault(self, saved, tmp_path, size):
        path = write_checkpoint(tmp_path, *saved)
        content = (path / SHARD).read_bytes()
        (path / SHARD).write_bytes(content[:size])
        (fault,) = faults(path)
        assert fault.startswith(f"file {SHARD} is truncated or damaged (")

    def test_missing_unexpected_and_misshapen_tensors_are_listed_together(self, saved, tmp_path):
        def edit(tensors):
            del tensors["model.norm.weight"]
            del tensors["model.layers.1.self_attn.indexer.wk.weight"]
            for expert in range(8):
                del tensors[f"model.layers.3.mlp.experts.{expert}.up_proj.weight"]
            del tensors["model.layers.4.hnorm.weight"]
            tensors["model.surprise"] = torch.zeros(1)
            tensors["model.layers.4.surprise"] = torch.zeros(1)
            tensors["model.layers.5.enorm.weight"] = torch.zeros(128)
            tensors["lm_head.weight"] = torch.zeros(512, 64)
            tensors["model.layers.4.mlp.experts.2.down_proj.weight"] = torch.zeros(64, 128)

        path = write_checkpoint(tmp_path, *saved, edit=edit)
        assert set(faults(path)) == {
            "missing tensor model.norm.weight",
            "missing tensor model.layers.1.self_attn.indexer.wk.weight",
            "missing tensor model.layers.3.mlp.experts.*.up_proj.weight (8 experts)",
            "missing tensor model.layers.4.hnorm.weight",
            "unexpected tensor model.surprise",
            "unexpected tensor model.layers.4.surprise",
            "unexpected tensor model.layers.5.enorm.weight",
            "tensor lm_head.weight has shape [512, 64], the config makes it [512, 128]",
            "tensor model.layers.4.mlp.experts.*.down_proj.weight has shape [64, 128], the config "
            "makes it [128, 64]",
        }
        assert len(faults(path, mtp=False)) == 5

    def test_index_and_files_must_agree(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved)
        index = json.loads((path / INDEX).read_text())
        weight_map = index["weight_map"]
        weight_map["model.norm.weight"] = next(
            file for file in set(weight_map.values()) if file != weight_map["model.norm.weight"]
        )
        home = weight_map.pop("model.embed_tokens.weight")
        (path / INDEX).write_text(json.dumps(index))
        found = faults(path)
        moved = weight_map["model.norm.weight"]
        assert (
            f"{moved} does not hold tensor model.norm.weight, which the index places in it" in found
        )
        assert (
            f"{home} holds tensor model.embed_tokens.weight, but the index does not name it"
            in found
        )
        assert any("but the index places it in" in fault for fault in found) and len(found) == 3

    def test_extra_files_with_model_tensors_are_faults(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved)
        save_file({"model.norm.weight": torch.zeros(128)}, path / "copy.safetensors")
        (fault,) = faults(path)
        assert fault.startswith("extra file copy.safetensors") and "model.norm.weight" in fault

    def test_a_tensor_in_two_files_is_a_fault(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved)
        tensor = {"model.layers.4.enorm.weight": torch.zeros(128)}
        save_file(tensor, path / "mtp.safetensors")
        (fault,) = faults(path)
        assert fault.startswith("tensor model.layers.4.enorm.weight is in two files: ")

    def test_an_mtp_layer_that_is_asked_for_must_be_there(self, saved, tmp_path):
        (fault,) = faults(write_checkpoint(tmp_path, saved[0]))
        assert "mtp=True" in fault and "model.layers.4.*" in fault and "use mtp=False" in fault

    def test_an_index_must_be_one(self, saved, tmp_path):
        path = write_checkpoint(tmp_path, *saved)
        (path / INDEX).write_text("{}")
        found = faults(path)
        assert f"{INDEX} has no 'metadata' object" in found
        assert f"{INDEX} has no 'weight_map' object" in found
        (path / INDEX).write_text("{")
        with pytest.raises(CheckpointError, match="is not valid JSON"):
            load(path)
        (path / INDEX).write_text("[]")
        with pytest.raises(CheckpointError, match="holds a JSON list, expected an object"):
            load(path)

    def test_what_is_no_checkpoint_is_named(self, saved, tmp_path):
        with pytest.raises(CheckpointError, match="is not a directory"):
            load(tmp_path / "nowhere")
        with pytest.raises(CheckpointError, match=r"has no config\.json"):
            load(tmp_path)
        path = write_checkpoint(tmp_path, *saved)
        (path / INDEX).unlink()
        assert faults(path)[0].startswith(
            f"expected {INDEX} or model.safetensors, found model-00001"
        )
        for file in path.glob("*.safetensors"):
            file.unlink()
        assert faults(path)[0].endswith("found no safetensors file")

    def test_other_models_and_dtypes_are_refused(self, saved, tmp_path):
        path = write_checkpoint(
            tmp_path, saved[0], edit_config=lambda config: config.update(model_type="llama")
        )
        with pytest.raises(ConfigError, match="found 'llama'"):
            load(path)
        with pytest.raises(UnsupportedError, match=r"got torch\.float8_e4m3fn"):
            load(path, dtype=torch.float8_e4m3fn)


@pytest.mark.parametrize("place", [3, None, ["a"], "", ".", "../model.safetensors", "/dev/null"])
def test_an_index_that_places_a_tensor_nowhere(saved, tmp_path, place):
    path = write_checkpoint(tmp_path, *saved)
    index = json.loads((path / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = place
    (path / INDEX).write_text(json.dumps(index))
    assert any("places tensor lm_head.weight in" in fault for fault in faults(path))


@pytest.mark.parametrize("name", ["config.json", INDEX])
def test_files_that_are_no_text(saved, tmp_path, name):
    path = write_checkpoint(tmp_path, *saved)
    (path / name).write_text("[" * 100_000)
    with pytest.raises(CheckpointError, match="is not valid JSON"):
        load(path)
    (path / name).unlink()
    (path / name).mkdir()
    with pytest.raises(CheckpointError, match="cannot be read"):
        load(path)


@pytest.mark.parametrize(
    "edits",
    [
        {"num_hidden_layers": 3, "indexer_types": ["full"] * 3},
        {"mlp_layer_types": ["x"] * 4},
        {"rms_norm_eps": "x"},
        {"kv_lora_rank": None},
        {"eos_token_id": "x"},
        {"dtype": "nonsense"},
    ],
    ids=lambda edits: next(iter(edits)),
)
def test_what_transformers_says_against_a_config_is_a_config_error(saved, tmp_path, edits):
    path = write_checkpoint(tmp_path, *saved, edit_config=lambda config: config.update(edits))
    with pytest.raises(ConfigError):
        load(path)


@pytest.mark.parametrize("declared", ["fp8", [1]])
def test_a_quantization_config_that_is_no_object(saved, tmp_path, declared):
    path = write_checkpoint(
        tmp_path, *saved, edit_config=lambda config: config.update(quantization_config=declared)
    )
    with pytest.raises(ConfigError, match="quantization_config is no object"):
        load(path)


@pytest.mark.parametrize("device", ["nonsense", "", "cuda:99", {"": "cpu"}])
def test_a_device_that_is_not_there_is_named_before_files_are_read(tmp_path, device):
    with pytest.raises(UnsupportedError, match="device="):
        load(tmp_path / "nowhere", device=device)
