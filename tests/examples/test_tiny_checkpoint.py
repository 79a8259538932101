"""The trained tiny GLM-5.2: the release's format, transformers can load it, and drafts agree."""

from __future__ import annotations

import json
import math
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

_EXAMPLES = Path(__file__).parents[2] / "examples"
_FOLDER = _EXAMPLES / "tiny_glm52"
_MAX_BYTES = 13_000_000

RELEASE_FIELDS = """
architectures attention_bias attention_dropout dtype eos_token_id ep_size first_k_dense_replace
head_dim hidden_act hidden_size index_head_dim index_n_heads index_share_for_mtp_iteration
index_skip_topk_offset index_topk index_topk_freq index_topk_pattern indexer_rope_interleave
indexer_types initializer_range intermediate_size kv_lora_rank max_position_embeddings
mlp_layer_types model_type moe_intermediate_size moe_layer_freq moe_router_dtype n_group
n_routed_experts n_shared_experts norm_topk_prob num_attention_heads num_experts_per_tok
num_hidden_layers num_key_value_heads num_nextn_predict_layers pad_token_id pretraining_tp
q_lora_rank qk_head_dim qk_nope_head_dim qk_rope_head_dim rms_norm_eps rope_interleave
rope_parameters routed_scaling_factor scoring_func tie_word_embeddings topk_group topk_method
v_head_dim vocab_size
"""


@pytest.fixture(scope="module")
def config() -> dict:
    return json.loads((_FOLDER / "config.json").read_text())


@pytest.fixture(scope="module")
def stored() -> dict[str, tuple[list[int], str]]:
    """Shape and dtype of every stored tensor, read from the shards that the index names."""
    index = json.loads((_FOLDER / "model.safetensors.index.json").read_text())
    found = {}
    for file_name in sorted(set(index["weight_map"].values())):
        with safe_open(_FOLDER / file_name, "pt") as shard:
            for name in shard.keys():  # noqa: SIM118 (safe_open is no mapping)
                assert index["weight_map"][name] == file_name
                piece = shard.get_slice(name)
                found[name] = (piece.get_shape(), piece.get_dtype())
    assert found.keys() == index["weight_map"].keys()
    return found


def _layer_shapes(c: dict, layer: int, is_full: bool, is_dense: bool) -> dict[str, list[int]]:
    """Names and shapes of one decoder layer, as the release names them."""
    hidden, heads = c["hidden_size"], c["num_attention_heads"]
    nope, rope, v = c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
    q_rank, kv_rank = c["q_lora_rank"], c["kv_lora_rank"]
    shapes = {
        "input_layernorm.weight": [hidden],
        "post_attention_layernorm.weight": [hidden],
        "self_attn.q_a_proj.weight": [q_rank, hidden],
        "self_attn.q_a_layernorm.weight": [q_rank],
        "self_attn.q_b_proj.weight": [heads * (nope + rope), q_rank],
        "self_attn.kv_a_proj_with_mqa.weight": [kv_rank + rope, hidden],
        "self_attn.kv_a_layernorm.weight": [kv_rank],
        "self_attn.kv_b_proj.weight": [heads * (nope + v), kv_rank],
        "self_attn.o_proj.weight": [hidden, heads * v],
    }
    if is_full:
        index_heads, dim = c["index_n_heads"], c["index_head_dim"]
        shapes |= {
            "self_attn.indexer.wq_b.weight": [index_heads * dim, q_rank],
            "self_attn.indexer.wk.weight": [dim, hidden],
            "self_attn.indexer.weights_proj.weight": [index_heads, hidden],
            "self_attn.indexer.k_norm.weight": [dim],
            "self_attn.indexer.k_norm.bias": [dim],
        }
    widths = {"mlp": c["intermediate_size"]}
    if not is_dense:
        experts = c["n_routed_experts"]
        shapes["mlp.gate.weight"] = [experts, hidden]
        shapes["mlp.gate.e_score_correction_bias"] = [experts]
        names = [f"mlp.experts.{e}" for e in range(experts)] + ["mlp.shared_experts"]
        widths = dict.fromkeys(names, c["moe_intermediate_size"])
    for name, width in widths.items():
        shapes[f"{name}.gate_proj.weight"] = [width, hidden]
        shapes[f"{name}.up_proj.weight"] = [width, hidden]
        shapes[f"{name}.down_proj.weight"] = [hidden, width]
    return {f"model.layers.{layer}.{name}": shape for name, shape in shapes.items()}


def test_the_config_has_every_field_of_the_release(config: dict) -> None:
    assert set(RELEASE_FIELDS.split()) <= config.keys()
    full = [i for i, kind in enumerate(config["indexer_types"]) if kind == "full"]
    assert full == [0, 1, 2, 6]
    assert config["mlp_layer_types"] == ["dense"] * 3 + ["sparse"] * 7
    assert len(config["eos_token_id"]) == 3
    assert config["pad_token_id"] == config["eos_token_id"][0]
    assert config["head_dim"] == config["qk_nope_head_dim"]
    assert config["index_topk_pattern"] is None
    generation = json.loads((_FOLDER / "generation_config.json").read_text())
    assert (generation["temperature"], generation["top_p"]) == (1.0, 0.95)
    assert generation["eos_token_id"] == config["eos_token_id"]


def test_names_shapes_and_dtypes_follow_the_config(config: dict, stored: dict) -> None:
    hidden, num_layers = config["hidden_size"], config["num_hidden_layers"]
    expected = {
        "model.embed_tokens.weight": [config["vocab_size"], hidden],
        "model.norm.weight": [hidden],
        "lm_head.weight": [config["vocab_size"], hidden],
    }
    kinds = zip(config["indexer_types"], config["mlp_layer_types"])
    for layer, (indexer, mlp) in enumerate(kinds):
        expected |= _layer_shapes(config, layer, indexer == "full", mlp == "dense")
    mtp = f"model.layers.{num_layers}"
    expected |= _layer_shapes(config, num_layers, True, False)
    expected |= {
        f"{mtp}.eh_proj.weight": [hidden, 2 * hidden],
        f"{mtp}.enorm.weight": [hidden],
        f"{mtp}.hnorm.weight": [hidden],
        f"{mtp}.shared_head.norm.weight": [hidden],
    }
    assert {name: shape for name, (shape, _) in stored.items()} == expected
    for name, (_, dtype) in stored.items():
        assert dtype == ("F32" if name.endswith("e_score_correction_bias") else "BF16"), name


def test_the_folder_is_small_and_sharded(stored: dict) -> None:
    assert sum(path.stat().st_size for path in _FOLDER.rglob("*")) <= _MAX_BYTES
    assert len(list(_FOLDER.glob("model-*-of-*.safetensors"))) == 3
    inner = [shape[1] for shape, _ in stored.values() if len(shape) == 2]
    assert all(size % 64 == 0 for size in inner)


@pytest.fixture(scope="module")
def model():
    from transformers import AutoModelForCausalLM

    loaded, info = AutoModelForCausalLM.from_pretrained(
        _FOLDER, dtype=torch.float32, output_loading_info=True
    )
    assert not info["missing_keys"] and not info["mismatched_keys"]
    assert all(re.match(r"model\.layers\.10\.", key) for key in info["unexpected_keys"])
    return loaded.eval()


@pytest.fixture(scope="module")
def prompt_BS() -> torch.Tensor:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(_FOLDER)
    text = (_EXAMPLES / "demo_prompt.txt").read_text()
    ids_BS = tokenizer(text, return_tensors="pt").input_ids
    assert tokenizer.decode(ids_BS[0]) == text
    return ids_BS


@pytest.fixture(scope="module")
def training_code() -> Iterator[None]:
    sys.path.insert(0, str(_EXAMPLES))
    yield
    sys.path.remove(str(_EXAMPLES))


def test_transformers_predicts_the_demo_prompt_and_continues_it(model, prompt_BS) -> None:
    assert prompt_BS.shape[1] > 3 * model.config.index_topk
    loss = float(model(prompt_BS, labels=prompt_BS).loss)
    assert loss < 0.4 * math.log(model.config.vocab_size)
    new = model.generate(prompt_BS, do_sample=False, max_new_tokens=8)[0, prompt_BS.shape[1] :]
    assert len(set(new.tolist())) > 2


def test_training_model_equals_transformers(model, prompt_BS, training_code) -> None:
    from tiny_training import checkpoint
    from tiny_training.model import Selection

    tokens_BS = prompt_BS[:, :160]
    tiny = checkpoint.load_checkpoint(_FOLDER)
    ours = tiny.lm_head(tiny(tokens_BS, Selection("sparse")))
    torch.testing.assert_close(ours, model(tokens_BS).logits, atol=2e-3, rtol=1e-3)


def test_draft_steps_equal_transformers_layer_with_shared_keys(
    model, prompt_BS, training_code
) -> None:
    """Steps 0 and 1, built from transformers' own decoder layer, with keys and selection shared."""
    import copy

    from tiny_training import checkpoint
    from tiny_training.model import Selection
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as glm

    class SharedKeys:
        """Keeps the first step's latents and hands them out for good."""

        kept: tuple[torch.Tensor, torch.Tensor] | None = None

        def update(self, latent, rope, layer_idx, **_):
            self.kept = self.kept or (latent, rope)
            return self.kept

        def update_indexer(self, keys, layer_idx):
            return keys

    tiny = checkpoint.load_checkpoint(_FOLDER)
    tokens_BS = prompt_BS[:, :130]
    hidden_BSC = tiny(tokens_BS, Selection("sparse"))
    drafts = tiny.draft(tokens_BS, hidden_BSC, Selection("sparse"))

    tensors = checkpoint.read_tensors(_FOLDER)
    layers = []
    for kind in ("full", "shared"):
        config = copy.deepcopy(model.config)
        config.indexer_types = [*config.indexer_types, kind]
        config.mlp_layer_types = [*config.mlp_layer_types, "sparse"]
        layer = glm.GlmMoeDsaDecoderLayer(config, 10).eval()
        state = {}
        for name in layer.state_dict():
            stem, _, last = name.rpartition(".")
            read = f"model.layers.10.{stem}".rstrip(".")
            experts = range(config.n_routed_experts)
            if last == "gate_up_proj":
                state[name] = torch.stack(
                    [
                        torch.cat([tensors[f"{read}.{e}.{p}_proj.weight"] for p in ("gate", "up")])
                        for e in experts
                    ]
                )
            elif last == "down_proj":
                down = [tensors[f"{read}.{e}.down_proj.weight"] for e in experts]
                state[name] = torch.stack(down)
            else:
                state[name] = tensors[f"model.layers.10.{name}"]
        layer.load_state_dict(state)
        layers.append(layer.float())

    rows, cache, topk, relayed = 128, SharedKeys(), None, hidden_BSC
    mask = torch.ones(rows, rows, dtype=torch.bool).tril()[None, None]
    for step, layer in enumerate(layers):
        embedded = tiny.embed_tokens(tokens_BS[:, 1 + step : 1 + step + rows])
        x = tiny.mtp.join(embedded, relayed[:, :rows])
        positions = torch.arange(rows)[None] + step
        out, topk = layer(
            x,
            attention_mask=mask,
            position_embeddings=model.model.rotary_emb(x, positions),
            cache=cache,
            prev_topk_indices=topk,
        )
        relayed = tiny.mtp.norm(out)
        logits = tiny.lm_head(relayed)
        torch.testing.assert_close(drafts[step][:, :rows], logits, atol=2e-3, rtol=1e-3)


def test_a_saved_checkpoint_loads_again_and_keeps_other_files(tmp_path, training_code) -> None:
    from tiny_training import checkpoint

    tiny = checkpoint.load_checkpoint(_FOLDER)
    tokenizer_json = (_FOLDER / "tokenizer.json").read_text()
    folder = tmp_path / "copy"
    checkpoint.save_checkpoint(tiny, tokenizer_json, folder)
    (folder / "NOTES").write_text("kept")
    checkpoint.save_checkpoint(tiny, tokenizer_json, folder)
    assert (folder / "NOTES").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["copy"]
    first, second = checkpoint.read_tensors(_FOLDER), checkpoint.read_tensors(folder)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)
