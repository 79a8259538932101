"""Published faults around IndexShare and the model's config, by case id."""

from __future__ import annotations

import logging

import pytest
import torch

import glm_compile
from glm_compile.cache import PagedCache
from glm_compile.checkpoint import load
from glm_compile.errors import CheckpointError, ConfigError
from glm_compile.model_facts import GlmDsaConfig
from tests.checkpoints import random_mtp, release_config, write_checkpoint
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

TOLERANCE = {"rtol": 0, "atol": 1e-4}


def test_cfg_1_a_shared_layer_has_no_indexer_and_uses_the_last_selection():
    config = tiny_config(num_hidden_layers=2, indexer_types=["full", "shared"], index_topk=4)
    model = tiny_model(config)
    assert GlmDsaConfig.from_transformers(config).full_layers == (0,)
    assert [layer.self_attn.indexer is None for layer in model.model.layers] == [False, True]
    cache = PagedCache(config, 1, 64)
    assert [layer.key_pages is None for layer in cache.layers] == [False, True]
    ids = torch.randint(0, 500, (1, 12))
    logits = model(ids, **{CACHE_ARGUMENT: cache}).logits
    torch.testing.assert_close(logits, model(ids, use_cache=False).logits, **TOLERANCE)
    assert random_mtp(model)._draft_layer.self_attn.indexer is None


class TestCfg2:
    def test_cfg_2_surplus_indexers_of_shared_layers_are_dropped_with_a_line(
        self, tmp_path, caplog
    ):
        source = tiny_model(tiny_config(indexer_types=["full"] * 4))
        types = ["full", "full", "shared", "full"]
        path = write_checkpoint(
            tmp_path,
            source,
            random_mtp(source),
            edit_config=lambda config: config.update(indexer_types=types),
        )
        with caplog.at_level(logging.INFO, logger="glm_compile"):
            model, _ = load(path)
        (record,) = caplog.records
        assert record.getMessage().startswith("ignored 5 indexer tensors")
        assert model.model.layers[2].self_attn.indexer is None
        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, source.state_dict()[name])

    def test_cfg_2_missing_indexers_of_full_layers_are_an_error(self, tmp_path):
        source = tiny_model()
        path = write_checkpoint(
            tmp_path,
            source,
            edit_config=lambda config: config.update(indexer_types=["full"] * 4),
        )
        with pytest.raises(CheckpointError) as caught:
            load(path, mtp=False)
        assert str(caught.value).count("missing tensor model.layers.2.self_attn.indexer.") == 5


@pytest.mark.parametrize(
    ("freq", "offset", "kinds"),
    [(4, 3, "FFFSSSFS"), (4, 2, "FFSSSFSS"), (1, 2, "FFFFFFFF"), (1, None, "FFFFFFFF")],
)
def test_cfg_3_the_schedule_counts_as_transformers_does(freq, offset, kinds):
    schedule = {"index_topk_freq": freq}
    if offset is not None:
        schedule["index_skip_topk_offset"] = offset
    config = tiny_config(num_hidden_layers=8, indexer_types=None, **schedule)
    facts = GlmDsaConfig.from_transformers(config)
    assert "".join(kind[0].upper() for kind in facts.indexer_types) == kinds
    assert config.indexer_types == list(facts.indexer_types)


class TestCfg3Contradictions:
    def test_cfg_3_a_schedule_that_disagrees_is_named_with_the_types(self):
        values = release_config() | {"index_skip_topk_offset": 2}
        message = (
            "indexer_types says layer 2 is 'full', but index_topk_freq 4 with "
            "index_skip_topk_offset 2 makes it 'shared'"
        )
        with pytest.raises(ConfigError, match=message):
            GlmDsaConfig.from_transformers(values)

    def test_cfg_3_a_pattern_that_disagrees_is_named_with_the_types(self):
        config = tiny_config(indexer_types=["full", "full", "shared", "full"])
        config.index_topk_pattern = "FFFF"
        with pytest.raises(ConfigError, match="layer 2 is 'shared', but index_topk_pattern 'FFFF'"):
            GlmDsaConfig.from_transformers(config)

    @pytest.mark.parametrize("pattern", ["FFSF", ["full", "full", "shared", "full"]])
    def test_cfg_3_a_pattern_decides_alone_or_agrees(self, pattern):
        types = ("full", "full", "shared", "full")
        for given in (None, list(types)):
            config = tiny_config(indexer_types=given, index_topk_pattern=pattern)
            assert GlmDsaConfig.from_transformers(config).indexer_types == types

    def test_cfg_3_a_pattern_overrides_the_frequency(self):
        # As in transformers: with a pattern, freq and offset have no say.
        values = release_config() | {"index_topk_freq": 1}
        letters = {"full": "F", "shared": "S"}
        values["index_topk_pattern"] = "".join(letters[kind] for kind in values["indexer_types"])
        assert GlmDsaConfig.from_transformers(values).num_full_layers == 21


class TestCfg5:
    def config(self, **changes):
        values = tiny_config().to_dict()
        for name in ("indexer_types", "index_share_for_mtp_iteration"):
            values.pop(name)
        return values | {"index_topk_pattern": None} | changes

    def test_cfg_5_without_the_fields_every_layer_is_full(self):
        facts = GlmDsaConfig.from_transformers(self.config())
        assert facts.indexer_types == ("full",) * 4
        assert not facts.is_mtp_index_shared
        assert (
            len([p for p in PagedCache(self.config(), 1, 8).layers if p.key_pages is not None]) == 4
        )

    def test_cfg_5_a_selection_wider_than_the_context_is_dense(self):
        ids = torch.randint(0, 500, (1, 12))
        logits = []
        for topk in (12, 500):
            model = tiny_model(tiny_config(indexer_types=None, index_topk=topk))
            cache = PagedCache(model.config, 1, 64)
            logits.append(model(ids, **{CACHE_ARGUMENT: cache}).logits)
            torch.testing.assert_close(logits[-1], model(ids, use_cache=False).logits, **TOLERANCE)
        torch.testing.assert_close(*logits, **TOLERANCE)


class TestCfg7:
    def test_cfg_7_every_eos_id_is_kept(self):
        facts = GlmDsaConfig.from_transformers(release_config())
        assert facts.eos_token_ids == (154820, 154827, 154829)
        assert facts.pad_token_id == facts.eos_token_ids[0]
        one = GlmDsaConfig.from_transformers(release_config() | {"eos_token_id": 7})
        assert one.eos_token_ids == (7,)

    def test_cfg_7_the_last_eos_id_stops_and_padding_follows(self):
        model = tiny_model()
        mtp = random_mtp(model)
        ids = torch.randint(0, 500, (2, 12))
        settings = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 509}
        settings["attention_mask"] = torch.ones_like(ids)
        free = model.generate(ids, eos_token_id=None, **settings)[0, 12:].tolist()
        stop = next(token for token in free if free.index(token) >= 2 and token not in (509, 510))
        length = 12 + free.index(stop) + 1
        settings["eos_token_id"] = [510, 511, stop]
        found = glm_compile.generate(model, ids, mtp=mtp, num_draft_tokens=3, **settings)
        assert torch.equal(found, model.generate(ids, **settings))
        assert found[0, 12:length].tolist() == free[: length - 12]
        assert found[0, length:].eq(509).all()
