"""The decoding loop on a tiny model: the result is plain decoding's, whatever the drafts."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import glm_compile
from glm_compile.generation import loop as loop_module
from tests.glm_compile.generation.drafts import (
    NEW,
    VOCAB,
    ScriptedMtp,
    always,
    cached_rows,
    capture_loop,
    greedy_reference,
    padded,
    prompt_of,
    random_mtp,
    run,
    unequal,
)
from tests.tiny_models import tiny_config, tiny_model


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


# index_topk is 8: prompts and texts on both sides of it.
@pytest.mark.parametrize("length", [1, 2, 7, 8, 9, 21])
def test_plain_decoding_equals_transformers(model: Any, length: int) -> None:
    ids = prompt_of(length)
    result = run(model, ids)
    assert torch.equal(result.sequences, greedy_reference(model, ids, NEW))
    assert result.accept_lengths.tolist() == [[1]] * (NEW - 1)


@pytest.mark.parametrize("index_share", [None, True, False])
@pytest.mark.parametrize(("length", "num_drafts"), [(1, 3), (5, 5), (21, 2), (9, 1)])
def test_random_drafts_do_not_change_the_tokens(
    model: Any, length: int, num_drafts: int, index_share: bool | None
) -> None:
    ids = prompt_of(length)
    result = run(
        model, ids, random_mtp(model), num_draft_tokens=num_drafts, index_share=index_share
    )
    assert torch.equal(result.sequences, greedy_reference(model, ids, NEW))
    assert int(result.accept_lengths.sum()) == NEW - 1


@pytest.mark.parametrize("num_right", [0, 1, 2, 3])
@pytest.mark.parametrize("length", [1, 12])
def test_right_and_wrong_drafts_do_not_change_the_tokens(
    model: Any, length: int, num_right: int
) -> None:
    ids = prompt_of(length)
    expected = greedy_reference(model, ids, NEW)
    mtp = ScriptedMtp(expected.tolist(), always(num_right), VOCAB, inner=random_mtp(model))
    result = run(model, ids, mtp, num_draft_tokens=3)
    assert torch.equal(result.sequences, expected)
    lengths = result.accept_lengths.flatten().tolist()
    assert lengths[:-1] == [num_right + 1] * (len(lengths) - 1)
    assert sum(lengths) == NEW - 1
    assert result.num_iterations == -(-(NEW - 1) // (num_right + 1))


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_attention_implementations(attention: str) -> None:
    model = tiny_model(attention=attention)
    ids = prompt_of(11)
    result = run(model, ids, random_mtp(model), num_draft_tokens=2)
    assert torch.equal(result.sequences, greedy_reference(model, ids, NEW))


def test_a_model_without_index_sharing() -> None:
    config = tiny_config(
        index_share_for_mtp_iteration=False, indexer_types=["full", "full", "full", "full"]
    )
    model = tiny_model(config)
    ids = prompt_of(11)
    result = run(model, ids, random_mtp(model))
    assert torch.equal(result.sequences, greedy_reference(model, ids, NEW))


@pytest.mark.parametrize("budget", [1, 2, 3, 4, 5, 8])
def test_the_budget_is_exact(model: Any, budget: int) -> None:
    ids = prompt_of(10)
    expected = greedy_reference(model, ids, 20)
    mtp = ScriptedMtp(expected.tolist(), always(3), VOCAB)
    result = run(model, ids, mtp, num_draft_tokens=3, max_new_tokens=budget)
    assert torch.equal(result.sequences, expected[:, : 10 + budget])
    assert int(result.accept_lengths.sum()) == budget - 1


def test_max_length_counts_the_prompt_as_given(model: Any) -> None:
    ids, mask = padded([prompt_of(4), prompt_of(9, 1)], "left")
    result = run(model, ids, attention_mask=mask, max_new_tokens=None, max_length=13)
    assert result.sequences.shape == (2, 13)


@pytest.mark.parametrize("position", range(6))
def test_an_end_of_sequence_id_anywhere_in_a_block_ends_there(model: Any, position: int) -> None:
    ids = prompt_of(10)
    text = greedy_reference(model, ids, NEW)
    eos = [int(text[0, 10 + position]), 510]
    expected = greedy_reference(model, ids, NEW, eos_token_id=eos)
    mtp = ScriptedMtp(text.tolist(), always(3), VOCAB)
    result = run(model, ids, mtp, num_draft_tokens=3, eos_token_id=eos)
    assert torch.equal(result.sequences, expected)
    assert result.sequences.shape[1] <= 10 + position + 1


@pytest.mark.parametrize("side", ["left", "right", "holes"])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_padded_rows_equal_their_own_runs(model: Any, side: str, num_drafts: int) -> None:
    rows = [prompt_of(3), prompt_of(15, 1), prompt_of(8, 2)]
    ids, mask = padded(rows, side)
    mtp = random_mtp(model) if num_drafts else None
    result = run(model, ids, mtp, num_draft_tokens=num_drafts, attention_mask=mask)
    assert torch.equal(result.sequences[:, : ids.shape[1]], ids)
    for b, row in enumerate(rows):
        expected = greedy_reference(model, row, NEW)[0, row.shape[1] :]
        assert torch.equal(result.sequences[b, ids.shape[1] :], expected), b


def test_rows_end_at_different_tokens_and_are_padded(model: Any) -> None:
    rows = [prompt_of(12), prompt_of(5, 1), prompt_of(6, 2)]
    ids, mask = padded(rows, "left")
    texts = [greedy_reference(model, row, NEW)[0, row.shape[1] :].tolist() for row in rows]
    eos = [texts[0][2], texts[1][6]]
    sequences = [row[0].tolist() + text for row, text in zip(rows, texts)]
    mtp = ScriptedMtp(sequences, unequal, VOCAB, inner=random_mtp(model))
    result = run(
        model, ids, mtp, num_draft_tokens=3, attention_mask=mask, eos_token_id=eos, pad_token_id=77
    )
    for b, text in enumerate(texts):
        length = next((i + 1 for i, token in enumerate(text) if token in eos), NEW)
        new = result.sequences[b, ids.shape[1] :].tolist()
        assert new == text[:length] + [77] * (len(new) - length), b
    assert result.accept_lengths[:, 0].tolist()[-1] == 0


def test_prompts_in_chunks(model: Any) -> None:
    rows = [prompt_of(3), prompt_of(17, 1)]
    ids, mask = padded(rows, "left")
    whole = run(model, ids, random_mtp(model), attention_mask=mask, num_draft_tokens=2)
    for size in (1, 5, 64):
        chunked = run(
            model,
            ids,
            random_mtp(model),
            attention_mask=mask,
            num_draft_tokens=2,
            prefill_chunk_size=size,
        )
        assert torch.equal(chunked.sequences, whole.sequences)
        assert torch.equal(chunked.accept_lengths, whole.accept_lengths)


@pytest.mark.parametrize("max_rows", [2 * 4, 2 * 7])
def test_long_prompts_are_run_in_parts(
    model: Any, monkeypatch: pytest.MonkeyPatch, max_rows: int
) -> None:
    """The same text and the same cache, MTP rows included; no part is one column wide."""
    monkeypatch.setattr(loop_module, "MIN_CHUNK", 1)
    rows = [prompt_of(14), prompt_of(29, 1)]
    ids, mask = padded(rows, "left")
    mtp, widths = random_mtp(model), []
    call: dict[str, Any] = {"attention_mask": mask, "num_draft_tokens": 2}
    whole = run(model, ids, mtp, **call)
    caches = []
    for limit in (1 << 20, max_rows):
        monkeypatch.setattr(loop_module, "MAX_PROMPT_ROWS", limit)
        loop = capture_loop(monkeypatch, model, ids, mtp, **call)
        monkeypatch.setattr(loop_module, "MIN_CHUNK", 1)
        monkeypatch.setattr(loop_module, "MAX_PROMPT_ROWS", limit)
        prompt = loop.target.prompt

        def noted(ids_BS: torch.Tensor, *rest: Any, prompt: Any = prompt) -> Any:
            widths.append(ids_BS.shape[1])
            return prompt(ids_BS, *rest)

        loop.target.prompt = noted
        loop._prefill()
        caches.append([cached_rows(loop.cache, layer, b) for layer in (0, -1) for b in (0, 1)])
    assert widths[0] == 29 and sum(widths[1:]) == 29 and len(widths) > 4 and min(widths) > 1
    for ours, theirs in zip(caches[1], caches[0]):
        torch.testing.assert_close(ours, theirs)
    assert torch.equal(run(model, ids, mtp, **call).sequences, whole.sequences)


def test_the_scores_of_a_part_are_bounded(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    loop = capture_loop(monkeypatch, model, prompt_of(50), max_cache_len=1024)
    monkeypatch.setattr(loop_module, "MIN_CHUNK", 1)
    monkeypatch.setattr(loop_module, "MAX_PROMPT_SCORES", 12 * loop.cache.max_cache_len)
    assert [stop - start for start, stop in loop._chunks()] == [12, 12, 12, 12, 2]
    monkeypatch.setattr(loop_module, "MAX_PROMPT_SCORES", 7 * loop.cache.max_cache_len)
    assert [stop - start for start, stop in loop._chunks()] == [7, 7, 7, 7, 7, 7, 6, 2]


# -- the caches behind it ----------------------------------------------------------------------


def test_the_drafts_equal_ones_made_from_scratch(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Hidden states, positions and seed of the draft steps, against the layer on the whole text."""
    ids = prompt_of(13)
    mtp = random_mtp(model)
    loop = capture_loop(monkeypatch, model, ids, mtp, num_draft_tokens=4)
    loop._prefill()
    for _ in range(3):
        loop._iterate()
    length = int(loop.cache.lengths[0])
    drafts_Bk = loop.state.block_BS[:, 1:]
    text = torch.cat([loop.text_BW[:, :length], loop.state.block_BS[:, :1]], dim=1)
    fresh = glm_compile.PagedCache(model.config, 1, 64, num_mtp_layers=1)
    fresh.auto_advance = False
    hidden, _ = loop.target.prompt(text[:, :-1], torch.zeros(1, dtype=torch.long), fresh)
    hidden, topk = mtp.extend(text[:, 1:], hidden, torch.arange(length)[None], None, fresh)
    fresh.set_lengths(length)
    hidden, seed = hidden[:, -1:], mtp.gather_seed(topk[:, -1:], fresh)
    for step in range(4):
        draft = mtp.compute_logits(hidden).argmax(-1)
        assert torch.equal(draft, drafts_Bk[:, step : step + 1]), step
        position = torch.tensor([[length + step]])
        hidden = mtp.draft(draft, hidden, position, seed)


def test_draft_steps_share_latents_that_are_read_once(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once a block, at its draft-extend; the steps behind it get by without the cache."""
    loop = capture_loop(monkeypatch, model, prompt_of(13), random_mtp(model), num_draft_tokens=4)
    assert loop.mtp is not None
    seeds: list[list[torch.Tensor]] = []
    pages = loop.cache.layers[-1].latent_pages
    gather_rows, draft = loop.cache.gather_rows, loop.mtp.draft

    def gather(*args: Any) -> Any:
        seeds.append([])
        return gather_rows(*args)

    def draft_without_cache(*args: Any) -> Any:
        seeds[-1].append(args[2])
        held = pages.clone()
        pages.fill_(torch.nan)
        try:
            return draft(*args)
        finally:
            pages.copy_(held)

    monkeypatch.setattr(loop.cache, "gather_rows", gather)
    monkeypatch.setattr(loop.mtp, "draft", draft_without_cache)
    loop._prefill()
    for _ in range(2):
        loop._iterate()
    assert [len(steps) for steps in seeds] == [3, 3, 3]
    assert all(step is steps[0] for steps in seeds for step in steps)
    assert seeds[0][0].shape == (1, model.config.index_topk, 128)


def test_a_finished_row_writes_behind_its_frozen_length_only(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [prompt_of(12), prompt_of(6, 2)]
    ids, mask = padded(rows, "left")
    texts = [greedy_reference(model, row, NEW)[0, row.shape[1] :].tolist() for row in rows]
    loop = capture_loop(
        monkeypatch, model, ids, random_mtp(model), num_draft_tokens=2, attention_mask=mask,
        eos_token_id=[texts[0][1]],
    )  # fmt: skip
    loop._prefill()
    loop._iterate()
    assert loop.finished == [True, False]
    before = [[r.clone() for r in cached_rows(loop.cache, layer, 0)] for layer in range(5)]
    length = int(loop.cache.lengths[0])
    for _ in range(3):
        loop._iterate()
    assert int(loop.cache.lengths[0]) == length and loop.counts[0] == 2
    for layer in range(5):
        for old, new in zip(before[layer], cached_rows(loop.cache, layer, 0)):
            assert torch.equal(old, new)


def test_the_cache_has_room_for_the_last_block(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    ids = prompt_of(10)
    loop = capture_loop(monkeypatch, model, ids, random_mtp(model), num_draft_tokens=5)
    assert loop.cache.max_cache_len >= 10 + NEW + 5
    loop = capture_loop(monkeypatch, model, ids, max_cache_len=500)
    assert loop.cache.max_cache_len == 500


class CountReads(TorchDispatchMode):
    """Counts operations that wait for a device."""

    count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func in (
            torch.ops.aten._local_scalar_dense.default,
            torch.ops.aten.nonzero.default,
        )
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("do_sample", [False, True])
def test_an_iteration_reads_the_device_in_one_place(
    model: Any, monkeypatch: pytest.MonkeyPatch, do_sample: bool
) -> None:
    """Lengths, counts and flags stay in tensors; only `_read_block` looks at them."""
    ids, mask = padded([prompt_of(12), prompt_of(5, 1)], "left")
    loop = capture_loop(
        monkeypatch, model, ids, random_mtp(model), num_draft_tokens=2, attention_mask=mask,
        do_sample=do_sample, eos_token_id=7,
    )  # fmt: skip
    loop._prefill()
    # The layers' own code is not the loop's.
    hidden = torch.zeros(2, 3, 128)
    logits = torch.randn(2, 1, VOCAB)
    seed = torch.zeros(2, 8, 128), torch.ones(2, 8, dtype=torch.bool)
    monkeypatch.setattr(loop.target, "verify", lambda *a: (hidden, torch.randn(2, 3, VOCAB)))
    assert loop.mtp is not None
    monkeypatch.setattr(loop.mtp, "extend", lambda *a: (hidden[:, :1], logits, *seed))
    monkeypatch.setattr(loop.mtp, "draft", lambda *a: (hidden[:, :1], logits))
    reads = []
    read_block = loop._read_block
    monkeypatch.setattr(loop, "_read_block", lambda *a: reads.append(1) or read_block(*a))
    with CountReads() as counter:
        for _ in range(3):
            loop._iterate()
    assert (counter.count, len(reads)) == (0, 3)
