"""Published faults of speculative decoding and of generate, by case id."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.testing import CompileCounterWithBackend

import glm_compile
from glm_compile.generation.sampling import draw, probabilities
from glm_compile.mtp import GlmMoeDsaMtp
from glm_compile.ops.rejection_sampling.reference import reject
from tests.chi_square import chi_square_p
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


def test_spec_1_an_end_of_sequence_id_inside_an_accepted_block(model: Any) -> None:
    ids = prompt_of(10)
    text = greedy_reference(model, ids, NEW)
    eos = int(text[0, 15])
    mtp = ScriptedMtp(text.tolist(), always(3), VOCAB)
    loop_result = run(model, ids, mtp, num_draft_tokens=3, eos_token_id=eos)
    assert torch.equal(loop_result.sequences, text[:, :16])
    # One token of the prompt's step, four of the first block, one of the second.
    assert loop_result.accept_lengths.tolist() == [[4], [1]]


def test_spec_4_the_first_draft_is_verified(model: Any) -> None:
    ids = prompt_of(10)
    text = greedy_reference(model, ids, NEW)
    for num_drafts in (1, 3):
        mtp = ScriptedMtp(text.tolist(), always(0), VOCAB)
        result = run(model, ids, mtp, num_draft_tokens=num_drafts)
        assert torch.equal(result.sequences, text)
        assert (result.accept_lengths == 1).all()


def test_spec_5_unequal_accepts_equal_the_rows_own_runs(model: Any) -> None:
    rows = [prompt_of(12), prompt_of(5, 1)]
    ids, mask = padded(rows, "left")
    references = [greedy_reference(model, row, NEW) for row in rows]
    sequences = [reference[0].tolist() for reference in references]
    mtp = ScriptedMtp(sequences, unequal, VOCAB, inner=random_mtp(model))
    result = run(model, ids, mtp, num_draft_tokens=3, attention_mask=mask)
    assert result.accept_lengths[:4].tolist() == [[4, 1], [1, 4], [3, 2], [2, 4]]
    for b, (row, reference) in enumerate(zip(rows, references)):
        assert torch.equal(result.sequences[b, ids.shape[1] :], reference[0, row.shape[1] :])


@pytest.mark.parametrize("index_share", [True, False])
def test_spec_7_caches_equal_ones_rebuilt_from_scratch(
    model: Any, monkeypatch: pytest.MonkeyPatch, index_share: bool
) -> None:
    rows = [prompt_of(12), prompt_of(5, 1)]
    ids, mask = padded(rows, "left")
    sequences = [greedy_reference(model, row, 30)[0].tolist() for row in rows]
    inner = random_mtp(model)
    mtp: Any = ScriptedMtp(sequences, unequal, VOCAB, inner=inner) if index_share else inner
    loop = capture_loop(
        monkeypatch, model, ids, mtp, num_draft_tokens=3, attention_mask=mask,
        max_new_tokens=30, index_share=index_share,
    )  # fmt: skip
    loop._prefill()
    for _ in range(4):
        loop._iterate()
    cache = loop.cache
    if index_share:
        assert cache.lengths.tolist() == [12 + 10, 5 + 11]
    num_layers = len(cache.layers)
    for b, sequence in enumerate(sequences):
        length = int(cache.lengths[b])
        text = torch.tensor([sequence[: length + 1]])
        fresh = glm_compile.PagedCache(model.config, 1, 64, num_mtp_layers=1)
        fresh.auto_advance = False
        zero = torch.zeros(1, dtype=torch.long)
        hidden, _ = loop.target.prompt(text[:, :-1], zero, fresh)
        inner.extend(text[:, 1:], hidden, torch.arange(length)[None], None, fresh)
        fresh.set_lengths(length)
        for layer in range(num_layers):
            for ours, rebuilt in zip(cached_rows(cache, layer, b), cached_rows(fresh, layer, 0)):
                torch.testing.assert_close(ours, rebuilt, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("index_share", [True, False])
def test_spec_9_a_poisoned_tail_is_never_selected(
    model: Any, monkeypatch: pytest.MonkeyPatch, index_share: bool
) -> None:
    ids = prompt_of(12)
    expected = greedy_reference(model, ids, 30)
    mtp: Any = random_mtp(model)
    if index_share:
        mtp = ScriptedMtp(expected.tolist(), unequal, VOCAB, inner=mtp)
    loop = capture_loop(
        monkeypatch, model, ids, mtp, num_draft_tokens=3, max_new_tokens=20, index_share=index_share
    )

    def poison() -> None:
        for layer in loop.cache.layers:
            for pages in (layer.latent_pages, layer.key_pages):
                if pages is not None:
                    rows = pages[loop.cache.block_table[0].long()].flatten(0, 1)
                    rows[int(loop.cache.lengths[0]) :] = 1e3
                    pages[loop.cache.block_table[0].long()] = rows.view_as(pages)

    loop._prefill()
    while not all(loop.finished):
        poison()
        loop._iterate()
    assert torch.equal(loop.text_BW[:, : 12 + 20], expected[:, : 12 + 20])


# -- SPEC-6 ---------------------------------------------------------------------------------------


def counting_model(size: int) -> tuple[Any, GlmMoeDsaMtp]:
    """A model that counts, and an MTP layer that counts on from the hidden state alone.

    Layers add nothing, so the model's hidden state is w * e(x), up to scale: e orthonormal
    embeddings, w the final norm's weight. The head reads x off it and answers x + 1. The MTP layer
    maps w * e(x) to e(x + 1); its shared_head.norm has the weight w as well. A hidden state from
    before that norm, of another row or another step makes every draft wrong.
    """
    config = tiny_config(
        vocab_size=size, hidden_size=size, num_hidden_layers=1, indexer_types=["full"],
        first_k_dense_replace=0, eos_token_id=None, pad_token_id=0,
    )  # fmt: skip
    model = tiny_model(config)
    mtp = random_mtp(model)
    generator = torch.Generator().manual_seed(0)
    embeddings, _ = torch.linalg.qr(torch.randn(size, size, generator=generator))
    weight = torch.rand(size, generator=generator) + 0.5
    following = torch.roll(torch.eye(size), 1, dims=0)  # following @ onehot(x) = onehot(x + 1)
    read_off = torch.linalg.inv(weight[:, None] * embeddings.T)
    for module in (model, mtp):
        for name, parameter in module.named_parameters():
            if name.endswith(("o_proj.weight", "down_proj.weight", "down_proj")):
                parameter.zero_()
    model.model.embed_tokens.weight.copy_(embeddings)
    model.model.norm.weight.copy_(weight)
    model.lm_head.weight.copy_(following @ read_off)
    mtp.enorm.weight.fill_(1)
    mtp.hnorm.weight.fill_(1)
    mtp.shared_head.norm.weight.copy_(weight)
    mtp.eh_proj.weight.zero_()
    mtp.eh_proj.weight[:, size:] = embeddings.T @ following @ read_off
    return model, mtp


@pytest.mark.parametrize("index_share", [True, False])
def test_spec_6_a_draft_that_equals_the_target_is_always_accepted(index_share: bool) -> None:
    model, mtp = counting_model(128)
    ids, mask = padded([torch.arange(3, 15)[None], torch.arange(40, 45)[None]], "left")
    result = run(
        model, ids, mtp, attention_mask=mask, max_new_tokens=25, num_draft_tokens=5,
        index_share=index_share,
    )  # fmt: skip
    assert result.sequences[:, 12:].tolist() == [list(range(15, 40)), list(range(45, 70))]
    assert result.accept_lengths.tolist() == [[6, 6]] * 4


# -- SPEC-10 --------------------------------------------------------------------------------------


def bf16_steps_apart(first: torch.Tensor, second: torch.Tensor) -> float:
    """Distance of two values in steps of bfloat16 at the larger magnitude."""
    larger = max(abs(float(first)), abs(float(second)))
    step = 2.0 ** (torch.tensor(larger).log2().floor().item() - 7)
    return abs(float(first) - float(second)) / step


@pytest.mark.parametrize("is_sparse", [False, True])
@pytest.mark.parametrize("num_right", [0, 2])
def test_spec_10_bfloat16_differs_at_near_ties_only(num_right: int, is_sparse: bool) -> None:
    """Two steps where nothing is selected: dense layers, and index_topk above the text's length.

    With routers and index selections a rounding may select something else, and unmodified
    transformers differs from itself by more (one forward against step by step): the bound there.
    """
    overrides = {} if is_sparse else {"index_topk": 64, "first_k_dense_replace": 4}
    model = tiny_model(tiny_config(**overrides), dtype=torch.bfloat16)
    for seed in range(4):
        ids = prompt_of(11, seed)
        plain = model.generate(
            ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=0,
            return_dict_in_generate=True, output_logits=True,
        )  # fmt: skip
        text = plain.sequences
        mtp = ScriptedMtp(text.tolist(), always(num_right), VOCAB)
        got = run(model, ids, mtp, num_draft_tokens=3, max_new_tokens=16).sequences
        if torch.equal(got, text):
            continue
        # Unmodified transformers on the common prefix, both ways.
        first = int((got != text).nonzero()[0, 1])
        stepwise = torch.cat(plain.logits)[: first - 10]
        forced = model(text).logits[0, 10:first].float()
        ours, theirs = got[0, first], text[0, first]
        margin = bf16_steps_apart(stepwise[-1, ours], stepwise[-1, theirs])
        largest = stepwise.abs().max()
        own = bf16_steps_apart(largest, largest + (stepwise - forced).abs().max())
        assert margin <= (max(2, own) if is_sparse else 2), (seed, first, margin, own)


# -- SPEC-11, SPEC-12 -----------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", [0.7, 1.0, 2.0])
def test_spec_11_positions_follow_the_target_and_drafts_are_accepted(temperature: float) -> None:
    target = torch.tensor([2.0, 1.5, 1.0, 0.5]) / temperature
    p = probabilities(target).expand(4000, 3, 4)
    q = probabilities(target.flip(0)).expand(4000, 2, 4)
    noise = torch.empty(4000, 4).exponential_(1)
    tokens, counts, _ = reject(p, q, draw(q), torch.rand(4000, 2), noise)
    assert (counts > 1).float().mean() > 0.3
    for position in range(3):
        emitted = tokens[counts > position, position]
        observed = torch.bincount(emitted, minlength=4)
        assert chi_square_p(observed, probabilities(target) * len(emitted)) > 1e-3


@pytest.mark.parametrize(
    "fields",
    [
        {"num_beams": 2},
        {"penalty_alpha": 0.5},
        {"guidance_scale": 2.0},
        {"use_mtp": True},
        {"dola_layers": "high"},
        {"assistant_early_exit": 1},
        {"temprature": 2.0},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_spec_12_an_option_is_honoured_or_an_error(model: Any, fields: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(fields))):
        glm_compile.generate(model, prompt_of(5), do_sample=True, mtp=random_mtp(model), **fields)


def test_spec_12_the_temperature_has_an_effect(model: Any) -> None:
    """A temperature near zero is greedy, a high one is not."""
    ids, mtp = prompt_of(9), random_mtp(model)
    greedy = glm_compile.generate(model, ids, mtp=mtp, max_new_tokens=8)
    kwargs: dict[str, Any] = {"mtp": mtp, "max_new_tokens": 8, "do_sample": True}
    cold = glm_compile.generate(model, ids, temperature=1e-4, **kwargs)
    hot = glm_compile.generate(model, ids, temperature=50.0, top_k=0, **kwargs)
    assert torch.equal(cold, greedy) and not torch.equal(hot, greedy)


# -- CFG-7, CACHE-5, CACHE-6, CACHE-8 -------------------------------------------------------------


@pytest.mark.parametrize("which", [0, 1, 2])
def test_cfg_7_any_of_several_ids_stops_and_padding_is_not_content(model: Any, which: int) -> None:
    rows = [prompt_of(12), prompt_of(6, 2)]
    ids, mask = padded(rows, "left")
    text = greedy_reference(model, rows[0], NEW)[0, 12:].tolist()
    eos = [505, 506, 507]
    eos[which] = text[4]
    mtp = random_mtp(model)
    result = run(
        model, ids, mtp, attention_mask=mask, eos_token_id=eos, pad_token_id=eos[0],
    )  # fmt: skip
    new = result.sequences[0, 12:].tolist()
    assert new[:5] == text[:5] and set(new[5:]) <= {eos[0]}
    assert int(result.accept_lengths[:, 0].sum()) == 4


def test_cache_5_left_padded_rows_equal_their_unpadded_runs() -> None:
    model = tiny_model(tiny_config(index_topk=4))
    rows = [prompt_of(3), prompt_of(11, 1)]
    ids, mask = padded(rows, "left")
    result = run(model, ids, attention_mask=mask, output_logits=True)
    for b, row in enumerate(rows):
        alone = run(model, row, output_logits=True)
        for together, single in zip(result.logits, alone.logits):
            torch.testing.assert_close(together[b], single[0], rtol=1e-4, atol=1e-4)


def test_cache_6_positions_count_real_tokens(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[torch.Tensor] = []
    forward = type(model.model.rotary_emb).forward

    def spy(self: Any, x: torch.Tensor, position_ids: torch.Tensor) -> Any:
        seen.append(position_ids.clone())
        return forward(self, x, position_ids)

    monkeypatch.setattr(type(model.model.rotary_emb), "forward", spy)
    ids, mask = padded([prompt_of(3), prompt_of(11, 1)], "left")
    run(model, ids, attention_mask=mask, max_new_tokens=3)
    assert seen[0][0, :3].tolist() == [0, 1, 2]
    assert [positions[:, 0].tolist() for positions in seen[1:]] == [[3, 11], [4, 12]]


@pytest.fixture
def small_model() -> Iterator[Any]:
    yield tiny_model(
        tiny_config(num_hidden_layers=1, first_k_dense_replace=0, indexer_types=["full"])
    )


def test_cache_8_a_second_call_of_a_compiled_model_works(small_model: Any) -> None:
    compiled = torch.compile(small_model, backend="eager", fullgraph=True)
    ids = prompt_of(12)
    expected = greedy_reference(small_model, ids, 1)
    for _ in range(2):
        got = glm_compile.generate(compiled, ids, max_new_tokens=1, eos_token_id=None)
        assert torch.equal(got, expected)


# -- COMP-10, COMP-21 -----------------------------------------------------------------------------


def test_comp_10_a_fixed_number_of_compilations(small_model: Any) -> None:
    """64 steps, prompts of four lengths (one token among them), with and without drafts, twice."""
    counter = CompileCounterWithBackend("eager")
    compiled = torch.compile(small_model, backend=counter, fullgraph=True)
    mtp = random_mtp(small_model)
    counts = []
    for length in (5, 9, 1, 20):
        ids = prompt_of(length)
        expected = greedy_reference(small_model, ids, 24)
        for drafts in (0, 3, 0, 3):
            got = glm_compile.generate(
                compiled, ids, mtp=mtp, num_draft_tokens=drafts, max_new_tokens=24,
                eos_token_id=None,
            )  # fmt: skip
            assert torch.equal(got, expected)
        counts.append(counter.frame_count)
    # Prompt, decode; verify, the MTP layer's prompt, draft-extend, draft step.
    assert counts == [6, 6, 6, 6]


def test_comp_21_transformers_never_compiles_inside(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        type(model), "get_compiled_call", lambda *a, **k: pytest.fail("compiled a second time")
    )
    run(model, prompt_of(5), random_mtp(model), max_new_tokens=3)
    with pytest.raises(ValueError, match="cache_implementation"):
        glm_compile.generate(model, prompt_of(5), cache_implementation="static")
    from transformers import CompileConfig

    with pytest.raises(ValueError, match="compile_config"):
        glm_compile.generate(model, prompt_of(5), compile_config=CompileConfig())
