"""Public faults that the passes on Dynamo graphs could have, by case id."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import GlmMoeDsaConfig

from tests.fx_passes.dynamo_graphs import (
    PROMPT,
    Recorder,
    calls,
    compare,
    filled_cache,
    small_model,
    tokens,
)
from tests.tiny_models import tiny_config, tiny_model

GLM = torch.ops.glm


def test_CFG_1_shared_layers_take_the_last_full_layers_selection() -> None:
    """mlx-lm#1418: shared layers got an indexer of their own, or none of the indices."""
    model = small_model(
        num_hidden_layers=4, indexer_types=["full", "shared", "full", "shared"], index_topk=4
    )
    names = [name for name, _ in model.named_parameters() if ".indexer." in name]
    assert {name.split(".")[2] for name in names} == {"0", "2"}
    difference, recorder = compare(model, tokens(2, 12), lambda: {"use_cache": False})
    (graph,) = recorder.graphs
    selections = calls(graph, GLM.masked_topk.default)
    taken = [node.args[3] for node in calls(graph, GLM.indexed_attention.default)]
    assert len(selections) == 2
    assert taken == [selections[0], selections[0], selections[1], selections[1]]
    assert difference == 0.0


def test_CFG_5_config_without_indexer_types_is_all_full() -> None:
    """GLM-5.1-style configs know no IndexShare; and with few tokens sparse equals dense."""
    values = tiny_config().to_dict()
    for name in ("indexer_types", "layer_types", "index_topk_freq", "index_skip_topk_offset"):
        values.pop(name, None)
    values |= {"num_hidden_layers": 2, "mlp_layer_types": ["dense", "sparse"], "index_topk": 32}
    results = []
    for index_topk in (32, 64):
        config = GlmMoeDsaConfig(**{**values, "index_topk": index_topk})
        model = tiny_model(config)
        difference, recorder = compare(model, tokens(2, 26), lambda: {"use_cache": False})
        assert (recorder.mask.num_attention, recorder.mask.num_indexers) == (2, 2)
        assert difference == 0.0
        results.append(model(tokens(2, 26), use_cache=False).logits)
    assert torch.equal(*results)


def test_COMP_3_batch_is_not_baked_in() -> None:
    """TensorRT-LLM PR 14796: a pattern traced with B = 2 failed, or reshaped wrongly, for B = 3."""
    model = small_model()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True, dynamic=True)
    for queries in (4, 1):
        for batch in (2, 3):
            found = compiled(tokens(batch, queries), **filled_cache(model, "static", batch)).logits
            expected = model(tokens(batch, queries), **filled_cache(model, "static", batch)).logits
            assert torch.equal(found, expected)
    assert len(recorder.graphs) == 2  # one for S = 1, one for all others
    assert all(mask.num_matches == 3 for mask in recorder.masks)


def test_COMP_5_cache_writes_stay_before_the_reads() -> None:
    """pytorch#149879 and others: mutation hid the pattern, or a read moved before the write."""
    model = small_model()
    difference, recorder = compare(model, tokens(2, 6), lambda: filled_cache(model, "static", 2))
    order = {node: i for i, node in enumerate(recorder.graphs[0].graph.nodes)}
    writes = [n for n in order if n.op == "call_method" and n.target == "index_copy_"]
    index_writes = [n for n in writes if "indexer_keys" in str(n.args[0])]
    (topk,) = calls(recorder.graphs[0], GLM.masked_topk.default)
    assert len(writes) == 5 and len(index_writes) == 1
    assert order[index_writes[0]] < order[topk]
    attentions = calls(recorder.graphs[0], GLM.indexed_attention.default)
    for layer, attention in enumerate(attentions):
        own = [n for n in writes if f"layers_{layer}_" in str(n.args[0])]
        assert own and all(order[write] < order[attention] for write in own)
    assert difference == 0.0


def left_padded() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Prompts of 3 and 11 tokens: ids, mask, positions that count real tokens only."""
    ids, mask = tokens(2, 11), torch.ones(2, 11, dtype=torch.long)
    mask[0, :8] = 0
    return ids, mask, (mask.cumsum(-1) - 1).clamp(min=0)


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("cached", [False, True])
def test_CACHE_5_and_6_left_padding_equals_the_prompt_alone(attention: str, cached: bool) -> None:
    """transformers#48289, unsloth#3699: padded keys in the top-k, positions shifted by padding."""
    model = small_model(attention, index_topk=4)
    ids, mask, positions = left_padded()
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    found = compiled(ids, attention_mask=mask, position_ids=positions, use_cache=cached).logits
    assert (recorder.mask.route, recorder.mask.num_matches) == ("proven", 3)
    for row, length in enumerate((3, 11)):
        alone = model(ids[row : row + 1, 11 - length :], use_cache=False).logits
        # Scores of the same tokens differ by rounding only; no ties with 16 index heads.
        assert (found[row, 11 - length :] - alone[0]).abs().max() <= 1e-5


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_IDX_10_masked_positions_never_count_and_empty_rows_are_finite(attention: str) -> None:
    """Automodel PR 2633: minimum plus minimum is -inf, a row of -inf is NaN."""
    model = tiny_model(
        tiny_config(
            num_hidden_layers=2,
            first_k_dense_replace=1,
            indexer_types=["full", "shared"],
            index_topk=4,
        ),
        attention=attention,
        dtype=torch.bfloat16,
    )
    recorder = Recorder()
    compiled = torch.compile(model, backend=recorder, fullgraph=True)
    mask = torch.ones(1, 6, dtype=torch.long)
    mask[0, :5] = 0
    results: list[Any] = []
    for seed in (1, 2):
        ids = tokens(1, 6, seed=seed)
        ids[0, 5] = 7
        results.append(compiled(ids, attention_mask=mask, use_cache=False).logits)
    assert all(result.isfinite().all() for result in results)
    assert torch.equal(results[0][0, 5], results[1][0, 5])
    assert (recorder.mask.route, recorder.mask.num_matches) == ("proven", 3)


def test_prompt_is_longer_than_index_topk() -> None:
    """Otherwise sparse equals dense and most faults of this file are invisible."""
    assert small_model().config.index_topk < min(PROMPT, 11)
