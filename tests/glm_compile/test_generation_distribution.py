"""Sampled texts against their exact distribution: every text of four tokens of a small vocabulary.

The target is the eager model in float64 under transformers' own processors. With two drafts, the
first of the four tokens comes from the prompt's logits, the others from all places of a block: an
accepted draft, the residual behind a rejected one, and the bonus token.

B batch, V vocabulary, W prompt width.
"""

from __future__ import annotations

import copy
import functools
import warnings
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from transformers import WatermarkingConfig

import glm_compile
from glm_compile.ops.rejection_sampling import draw_token, rejection_sample
from glm_compile.ops.rejection_sampling.random_numbers import Purpose
from tests.glm_compile.generation.drafts import random_mtp
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers

VOCAB = 5
DEPTH = 4
SAMPLES = 2048
# Below this, a deviation is a fault: some hundred values are looked at.
LEAST_P = 1e-4
PROMPT = torch.tensor([[3, 1, 4, 2, 0]])
EOS = 4


class LevelMtp:
    """An MTP layer whose drafts lean to the tokens that the target likes on average.

    A random one alone would rarely be accepted where the target is narrow.
    """

    def __init__(self, inner: Any, level_V: torch.Tensor) -> None:
        self.inner = inner
        self.level_V = level_V
        self.is_index_shared = inner.is_index_shared
        self.extend, self.draft = inner.extend, inner.draft
        self.gather_seed, self.embed_positions = inner.gather_seed, inner.embed_positions

    def compute_logits(self, hidden: torch.Tensor) -> torch.Tensor:
        return 0.5 * self.inner.compute_logits(hidden) + self.level_V


@dataclass(frozen=True)
class Models:
    target: Any
    exact: Any
    mtp: LevelMtp


@pytest.fixture(scope="module")
def models() -> Models:
    config = tiny_config(
        vocab_size=VOCAB, num_hidden_layers=1, indexer_types=["full"], first_k_dense_replace=1,
        hidden_size=32, intermediate_size=32, moe_intermediate_size=16, n_routed_experts=2,
        num_experts_per_tok=1, num_attention_heads=2, num_key_value_heads=2, q_lora_rank=16,
        kv_lora_rank=16, qk_nope_head_dim=16, qk_rope_head_dim=16, v_head_dim=16, head_dim=16,
        # Selects everything: two heads make ties, and this is about the draws.
        index_topk=64, index_n_heads=2, index_head_dim=32,
        pad_token_id=0, eos_token_id=None,
    )  # fmt: skip
    target = tiny_model(config, std=0.25)
    exact = copy.deepcopy(target).double()
    texts = torch.cat([PROMPT.expand(VOCAB, -1), torch.arange(VOCAB)[:, None]], dim=1)
    level_V = _next_logits(exact, texts).mean(dim=0).float()
    return Models(target, exact, LevelMtp(random_mtp(target), level_V))


def _next_logits(model: Any, texts_BW: torch.Tensor) -> torch.Tensor:
    return model(texts_BW, attention_mask=torch.ones_like(texts_BW), use_cache=False).logits[:, -1]


def _processors(model: Any, ids_BW: torch.Tensor, mask_BW: torch.Tensor, **fields: Any) -> Any:
    """The list that transformers prepares for these prompts."""
    prepared = []

    # transformers looks at the names of the parameters.
    def note(
        model: Any, input_ids: Any, logits_processor: Any, stopping_criteria: Any,
        generation_config: Any, **kwargs: Any,
    ) -> torch.Tensor:  # fmt: skip
        prepared.append(logits_processor)
        return input_ids

    model.generate(
        ids_BW, attention_mask=mask_BW, custom_generate=note, max_new_tokens=DEPTH, **fields
    )
    return prepared[0]


def exact_distribution(
    models: Models, fields: dict[str, Any], ids: torch.Tensor = PROMPT, num_padding: int = 0
) -> torch.Tensor:
    """Probability of each continuation [V] * DEPTH; 0 stands behind the end of a text."""
    eos = fields.get("eos_token_id")
    eos_ids = torch.tensor([] if eos is None else eos).flatten()
    mass = torch.ones(1, dtype=torch.float64)
    is_ended = torch.zeros(1, dtype=torch.bool)
    texts = ids
    only_padding = torch.zeros(VOCAB, dtype=torch.float64)
    only_padding[0] = 1
    for _ in range(DEPTH):
        padding = texts.new_zeros(len(texts), num_padding)
        prompts = torch.cat([padding, ids.expand(len(texts), -1)], dim=1)
        mask = torch.ones_like(prompts)
        mask[:, :num_padding] = 0
        processors = _processors(models.target, prompts, mask, **fields)
        logits = _next_logits(models.exact, texts)
        probs = processors(torch.cat([padding, texts], dim=1), logits).softmax(dim=-1)
        probs = torch.where(is_ended[:, None], only_padding, probs)
        # A prefix that cannot occur may leave nothing to draw.
        mass = torch.where(mass[:, None] > 0, mass[:, None] * probs, 0.0).flatten()
        assert mass.isfinite().all()
        tokens = torch.arange(VOCAB).repeat(len(texts))
        texts = torch.cat([texts.repeat_interleave(VOCAB, dim=0), tokens[:, None]], dim=1)
        is_ended = is_ended.repeat_interleave(VOCAB) | torch.isin(tokens, eos_ids)
    torch.testing.assert_close(mass.sum(), torch.ones((), dtype=torch.float64))
    return mass.view([VOCAB] * DEPTH)


def p_value(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Probability of a chi-square at least this large; bins below 5 are merged.

    0 for a count where none can be.
    """
    counts, expected = counts.flatten().double(), expected.flatten().double()
    if (counts[expected == 0] > 0).any():
        return 0.0
    counts, expected = counts[expected > 0], expected[expected > 0]
    order = expected.argsort(descending=True)
    counts, expected = counts[order], expected[order]
    num_big = max(int((expected >= 5).sum()), 1)
    # What is left joins the smallest of the big ones unless it is big itself.
    if 0 < expected[num_big:].sum() < 5 and num_big > 1:
        num_big -= 1
    counts = torch.cat([counts[:num_big], counts[num_big:].sum()[None]])
    expected = torch.cat([expected[:num_big], expected[num_big:].sum()[None]])
    counts, expected = counts[expected > 0], expected[expected > 0]
    if len(expected) == 1:
        return 1.0
    statistic = ((counts - expected) ** 2 / expected).sum()
    half_free = torch.tensor((len(expected) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(half_free, statistic / 2))


def histogram(tokens_ND: torch.Tensor) -> torch.Tensor:
    """Counts [V] * D of rows of tokens."""
    depth = tokens_ND.shape[1]
    weights = VOCAB ** torch.arange(depth - 1, -1, -1)
    return torch.bincount(tokens_ND @ weights, minlength=VOCAB**depth).view([VOCAB] * depth)


def sampled(
    models: Models,
    fields: dict[str, Any],
    *,
    seed: int | None = 0,
    ids: torch.Tensor | None = None,
    **kwargs: Any,
) -> Any:
    """New tokens [B, DEPTH] of many rows, and how many tokens the first block of each added."""
    ids = PROMPT.expand(SAMPLES, -1) if ids is None else ids
    kwargs = {"mtp": models.mtp, "num_draft_tokens": 2, "max_new_tokens": DEPTH} | kwargs
    kwargs.setdefault("attention_mask", torch.ones_like(ids))
    if seed is not None:
        torch.manual_seed(seed)
    result = glm_compile.generate(
        models.target, ids, return_dict_in_generate=True, **kwargs, **fields
    )
    tokens = result.sequences[:, ids.shape[1] :]
    tokens = torch.nn.functional.pad(tokens, (0, DEPTH - tokens.shape[1]))
    return tokens, result.accept_lengths[:1].flatten()


def complete(fields: dict[str, Any]) -> dict[str, Any]:
    """Fields of a sampling call in which nothing is left to defaults."""
    return {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0} | fields


def assert_follows(tokens: torch.Tensor, exact: torch.Tensor) -> None:
    """Compare the joint distribution, and that of each position by itself."""
    counts, expected = histogram(tokens), exact * len(tokens)
    values = {"joint": p_value(counts, expected)}
    for position in range(DEPTH):
        others = [d for d in range(DEPTH) if d != position]
        values[f"position {position}"] = p_value(counts.sum(others), expected.sum(others))
    assert min(values.values()) > LEAST_P, values


def depends_on_all(text: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
    """A processor of the caller's: a bias that depends on each token of the prefix."""
    places = torch.arange(1, text.shape[1] + 1)
    return scores + ((text * places).sum(dim=1, keepdim=True) + torch.arange(VOCAB)) % 3


def names(fields: dict[str, Any]) -> str:
    return "-".join(fields) or "defaults"


FIELDS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.3},
    {"temperature": 0.02},
    {"temperature": 3.0},
    {"top_k": 1},
    {"top_k": 2},
    {"top_k": 50},
    {"top_p": 0.01},
    {"top_p": 0.5},
    {"top_p": 0.9},
    {"top_p": 1.0},
    {"top_h": 0.6},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"typical_p": 0.4},
    {"typical_p": 0.9},
    {"epsilon_cutoff": 0.15},
    {"eta_cutoff": 0.3},
    {"repetition_penalty": 1.6},
    {"repetition_penalty": 0.6},
    {"encoder_repetition_penalty": 2.0},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 3},
    {"encoder_no_repeat_ngram_size": 2},
    {"bad_words_ids": [[2, 3], [1, 1, 4], [0]]},
    {"suppress_tokens": [1, 3]},
    {"begin_suppress_tokens": [1, 3, 0]},
    {"sequence_bias": [[[2], 1.5], [[1, 3], -3.0], [[3, 1, 2], 4.0], [[0, 4], 2.0]]},
    {"renormalize_logits": True, "temperature": 0.8},
    {"remove_invalid_values": True, "suppress_tokens": [1]},
    {"watermarking_config": WatermarkingConfig(bias=2.0)},
    {"prefix_allowed_tokens_fn": lambda b, text: [int(text[-1]), int(text[-2] + 2) % VOCAB, 1]},
    {"logits_processor": [depends_on_all]},
    {"eos_token_id": EOS},
    {"eos_token_id": [EOS, 1], "min_new_tokens": 2},
    {"eos_token_id": EOS, "min_length": 7},
    {"eos_token_id": [EOS, 1], "forced_eos_token_id": EOS},
    {"eos_token_id": EOS, "exponential_decay_length_penalty": (1, 2.0)},
    {"eos_token_id": EOS, "bad_words_ids": [[EOS], [EOS, 2], [1, EOS]]},
    {"temperature": 0.7, "top_k": 4, "top_p": 0.9, "repetition_penalty": 1.3},
    {"temperature": 1.5, "min_p": 0.1, "no_repeat_ngram_size": 2, "renormalize_logits": True},
    {"typical_p": 0.8, "eta_cutoff": 0.05, "sequence_bias": [[[2, 3], 2.0]], "temperature": 2.0},
    {"eos_token_id": EOS, "min_new_tokens": 1, "top_p": 0.9, "repetition_penalty": 1.2,
     "exponential_decay_length_penalty": (1, 1.4)},
]  # fmt: skip


@pytest.fixture(autouse=True)
def _without_transformers_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield


@pytest.mark.parametrize("fields", FIELDS, ids=names)
def test_texts_sampled_with_drafts_follow_the_target(models: Models, fields: dict) -> None:
    fields = complete(fields)
    tokens, _accept_lengths = sampled(models, fields)
    assert_follows(tokens, exact_distribution(models, fields))


@pytest.mark.parametrize("fields", FIELDS, ids=names)
def test_a_seed_without_drafts_gives_the_texts_of_transformers(
    models: Models, fields: dict
) -> None:
    ids = torch.tensor([[0, 0, 1, 2], [3, 1, 4, 2], [0, 2, 2, 1]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 1], [0, 1, 1, 1]])
    ours = functools.partial(glm_compile.generate, models.target)
    texts = []
    for generate in (models.target.generate, ours):
        torch.manual_seed(3)
        texts.append(
            generate(ids, attention_mask=mask, max_new_tokens=DEPTH + 2, **complete(fields))
        )
    assert torch.equal(*texts)


def test_drafts_are_accepted_and_rejected_in_these_tests(models: Models) -> None:
    """Each number of tokens that a block can add is met often."""
    _tokens, accept_lengths = sampled(models, complete({}))
    counts = torch.bincount(accept_lengths, minlength=4)
    assert (counts[1:] > SAMPLES // 10).all(), counts


@pytest.mark.parametrize("num_drafts", [0, 1, 5])
@pytest.mark.parametrize(
    "fields",
    [{"top_p": 0.9, "temperature": 1.3}, {"eos_token_id": EOS, "no_repeat_ngram_size": 2}],
    ids=names,
)
def test_other_numbers_of_drafts(models: Models, fields: dict, num_drafts: int) -> None:
    fields = complete(fields)
    tokens, _ = sampled(models, fields, num_draft_tokens=num_drafts, max_new_tokens=DEPTH)
    assert_follows(tokens, exact_distribution(models, fields))


@pytest.mark.parametrize("index_share", [True, False])
def test_drafts_with_and_without_a_shared_index(models: Models, index_share: bool) -> None:
    fields = complete({"repetition_penalty": 1.4})
    tokens, _ = sampled(models, fields, index_share=index_share, seed=1)
    assert_follows(tokens, exact_distribution(models, fields))


def test_a_forced_first_token(models: Models) -> None:
    fields, prompt = complete({"forced_bos_token_id": 3}), PROMPT[:, :1]
    tokens, _ = sampled(models, fields, ids=prompt.expand(SAMPLES, -1))
    assert (tokens[:, 0] == 3).all()
    assert_follows(tokens, exact_distribution(models, fields, prompt))


def test_sequences_of_one_prompt(models: Models) -> None:
    """Processors that hold the prompt, or call back with its number, are expanded."""
    seen: set[int] = set()

    def allowed(number: int, text: torch.Tensor) -> list[int]:
        seen.add(number)
        return [int(text[-1]), 1, 3]

    fields = complete({"encoder_repetition_penalty": 1.7, "prefix_allowed_tokens_fn": allowed})
    exact = exact_distribution(models, fields)
    tokens, _ = sampled(models, fields, ids=PROMPT, num_return_sequences=SAMPLES)
    assert_follows(tokens, exact)
    seen.clear()
    mask = torch.ones_like(PROMPT)
    models.target.generate(PROMPT, attention_mask=mask, num_return_sequences=3, **fields)
    # transformers 5.20 counts sequences, later ones prompts.
    expected = set(seen)
    seen.clear()
    sampled(models, fields, ids=PROMPT, num_return_sequences=3)
    assert seen == expected


@pytest.mark.parametrize("side", ["left", "right"])
def test_unequal_prompts_in_one_batch(models: Models, side: str) -> None:
    """Each row follows its own prompt's distribution, wherever the padding is."""
    fields = complete(
        {"repetition_penalty": 1.5, "no_repeat_ngram_size": 2, "eos_token_id": EOS, "top_k": 4}
    )
    rows = [PROMPT, PROMPT[:, 1:4].flip(1)]
    ids = torch.zeros(2, 5, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for b, row in enumerate(rows):
        width = row.shape[1]
        columns = slice(5 - width, 5) if side == "left" else slice(0, width)
        ids[b, columns], mask[b, columns] = row[0], 1
    tokens, _ = sampled(
        models, fields, ids=ids.repeat(SAMPLES, 1), attention_mask=mask.repeat(SAMPLES, 1)
    )
    for b, row in enumerate(rows):
        exact = exact_distribution(models, fields, row, num_padding=5 - row.shape[1])
        assert_follows(tokens[b::2], exact)


# -- seeds ------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [0, 2])
@pytest.mark.parametrize(
    "fields", [{}, {"repetition_penalty": 1.5, "eos_token_id": EOS}], ids=names
)
def test_a_seed_gives_the_same_texts_again(models: Models, fields: dict, num_drafts: int) -> None:
    ids = PROMPT.expand(64, -1)
    texts = [
        sampled(models, complete(fields), seed=seed, ids=ids, num_draft_tokens=num_drafts)[0]
        for seed in (7, 7, 8)
    ]
    assert torch.equal(texts[0], texts[1])
    assert not torch.equal(texts[0], texts[2])


@pytest.mark.parametrize("num_drafts", [0, 2])
def test_rows_with_one_prompt_are_independent(models: Models, num_drafts: int) -> None:
    """Neighbours, and rows half a batch apart, at each pair of positions."""
    fields = complete({"temperature": 1.5})
    exact = exact_distribution(models, fields)
    tokens, _ = sampled(models, fields, seed=2, num_draft_tokens=num_drafts)
    marginals = [exact.sum([d for d in range(DEPTH) if d != i]) for i in range(DEPTH)]
    half = SAMPLES // 2
    for left, right in ((tokens[::2], tokens[1::2]), (tokens[:half], tokens[half:])):
        for i, p in enumerate(marginals):
            for j, q in enumerate(marginals):
                counts = histogram(torch.stack([left[:, i], right[:, j]], dim=1))
                assert p_value(counts, torch.outer(p, q) * half) > LEAST_P, (i, j)


def test_calls_in_a_row_are_independent(models: Models) -> None:
    """The generator goes on where the call before left it."""
    fields = complete({"temperature": 1.5})
    tokens, _ = sampled(models, fields, seed=4)
    state = torch.get_rng_state()
    again, _ = sampled(models, fields, seed=4)
    assert torch.equal(torch.get_rng_state(), state) and torch.equal(again, tokens)
    later, _ = sampled(models, fields, seed=None)
    exact = exact_distribution(models, fields)
    assert_follows(later, exact)
    for i in range(DEPTH):
        p = exact.sum([d for d in range(DEPTH) if d != i])
        counts = histogram(torch.stack([tokens[:, i], later[:, i]], dim=1))
        assert p_value(counts, torch.outer(p, p) * SAMPLES) > LEAST_P


# -- the tests' own arithmetic --------------------------------------------------------------------


def test_p_value() -> None:
    torch.manual_seed(0)
    expected = torch.tensor([500.0, 300.0, 199.0, 0.6, 0.4, 0.0])
    assert p_value(torch.tensor([500, 300, 199, 1, 0, 0]), expected) > 0.9
    assert p_value(torch.tensor([500, 300, 199, 0, 0, 1]), expected) == 0
    # One degree of freedom: 3.841 is the 5 % point.
    deviation = (3.841 * 250) ** 0.5
    counts = torch.tensor([500 + deviation, 500 - deviation])
    assert p_value(counts, torch.tensor([500.0, 500.0])) == pytest.approx(0.05, abs=1e-4)


def test_a_bias_of_the_sampler_is_found(models: Models, monkeypatch: pytest.MonkeyPatch) -> None:
    """A rejected position drawn from the target instead of the residual."""

    def biased(
        p_BSV: torch.Tensor, q_BkV: torch.Tensor, drafts_Bk: torch.Tensor, *numbers: torch.Tensor
    ) -> Any:
        tokens_BS, counts_B, is_drawn_B = rejection_sample(p_BSV, q_BkV, drafts_Bk, *numbers)
        last_B1 = counts_B[:, None] - 1
        p_BV = p_BSV[torch.arange(len(p_BSV)), last_B1[:, 0]]
        drawn_B = draw_token(p_BV, *numbers, Purpose.TOKEN, offset=1 << 20)
        return tokens_BS.scatter(1, last_B1, drawn_B[:, None]), counts_B, is_drawn_B

    monkeypatch.setattr("glm_compile.generation.iteration.rejection_sample", biased)
    fields = complete({})
    tokens, _ = sampled(models, fields)
    with pytest.raises(AssertionError, match="joint"):
        assert_follows(tokens, exact_distribution(models, fields))
