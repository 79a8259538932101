"""Processors, criteria and the ends of texts, with drafts: what they see, and what is an error.

B batch, V vocabulary, W prompt width.
"""

from __future__ import annotations

import random
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import (
    GenerationConfig,
    RepetitionPenaltyLogitsProcessor,
    StoppingCriteria,
    WatermarkingConfig,
)

import glm_compile
from glm_compile.generation.request import build_request
from tests.glm_compile.generation.drafts import (
    ScriptedMtp,
    always,
    greedy_reference,
    prompt_of,
    random_mtp,
)
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers

VOCAB = 10
NEW = 8


@pytest.fixture(scope="module")
def model() -> Any:
    """A small vocabulary, in which n-grams and biased sequences come up; selects everything."""
    config = tiny_config(vocab_size=VOCAB, pad_token_id=0, eos_token_id=None, index_topk=64)
    return tiny_model(config)


@pytest.fixture(autouse=True)
def _without_transformers_warnings() -> Any:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="transformers")
        yield


# -- greedy, any combination --------------------------------------------------------------------


def random_fields(rng: random.Random) -> dict[str, Any]:
    """A few fields that change scores or ends, with random values."""

    def token() -> int:
        return rng.randrange(VOCAB)

    def sequence() -> list[int]:
        return [token() for _ in range(rng.randint(1, 3))]

    a, b, c = token(), token(), token()
    fields: dict[str, Callable[[], Any]] = {
        "repetition_penalty": lambda: rng.choice([0.5, 1.2, 2.0]),
        "encoder_repetition_penalty": lambda: rng.choice([0.5, 1.2, 2.0]),
        "no_repeat_ngram_size": lambda: rng.choice([1, 2, 3, 4]),
        "bad_words_ids": lambda: [sequence() for _ in range(rng.randint(1, 4))],
        "sequence_bias": lambda: [[sequence(), rng.uniform(-4, 4)] for _ in range(3)],
        # Not what is forced: transformers refuses both together.
        "suppress_tokens": lambda: [rng.randrange(5, VOCAB), rng.randrange(5, VOCAB)],
        "begin_suppress_tokens": lambda: [token(), token(), token()],
        "min_new_tokens": lambda: rng.randint(1, 6),
        "min_length": lambda: rng.randint(1, 14),
        "forced_eos_token_id": lambda: rng.choice([rng.randrange(5), [0, rng.randrange(5)]]),
        "forced_bos_token_id": token,
        "exponential_decay_length_penalty": lambda: (rng.randint(0, 4), rng.uniform(1.0, 2.0)),
        "remove_invalid_values": lambda: True,
        "renormalize_logits": lambda: True,
        "watermarking_config": lambda: WatermarkingConfig(bias=rng.uniform(0.5, 3)),
        "prefix_allowed_tokens_fn": lambda: (
            lambda number, text: [(int(text[-1]) * a + b + number) % VOCAB, c]
        ),
        "stopping_criteria": lambda: [lambda text, scores, **_: text[:, -1] == a],
    }
    return {name: fields[name]() for name in rng.sample(list(fields), rng.randint(1, 4))}


@pytest.mark.parametrize("seed", range(40))
def test_greedy_combinations_equal_transformers(model: Any, seed: int) -> None:
    """Padding on the left for transformers, anywhere for us; drafts right and wrong at random."""
    rng = random.Random(seed)
    batch_size, width = rng.choice([1, 2, 3]), rng.randint(1, 8)
    rows = [[rng.randrange(VOCAB) for _ in range(rng.randint(1, width))] for _ in range(batch_size)]
    # An id that ends texts: without one, transformers goes on behind a criterion's end.
    fields = {"eos_token_id": rng.choice([[7], [7, 8], 3])} | random_fields(rng)
    fields |= {"pad_token_id": 0, "max_new_tokens": rng.randint(1, 10), "do_sample": False}

    def arranged(columns_of: Callable[[int], list[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        ids = torch.zeros(batch_size, width, dtype=torch.long)
        mask = torch.zeros_like(ids)
        for b, row in enumerate(rows):
            columns = columns_of(len(row))
            ids[b, columns], mask[b, columns] = torch.tensor(row), 1
        return ids, mask

    ids, mask = arranged(lambda length: list(range(width - length, width)))
    expected = model.generate(ids, attention_mask=mask, **fields)
    new = expected[:, width:]
    plan = [[rng.randint(0, 4) for _ in range(20)] for _ in rows]
    texts = [row + new[b].tolist() for b, row in enumerate(rows)]
    mtp = ScriptedMtp(texts, lambda iteration, b: plan[b][iteration], VOCAB)
    ids, mask = arranged(lambda length: sorted(rng.sample(range(width), length)))
    got = glm_compile.generate(
        model, ids, mask, mtp=mtp, num_draft_tokens=rng.choice([1, 2, 3, 5]), **fields
    )
    assert torch.equal(got[:, :width], ids)
    assert torch.equal(got[:, width:], new), fields


@pytest.mark.parametrize("side", ["right", "holes"])
def test_a_repetition_penalty_leaves_padding_out_wherever_it_is(model: Any, side: str) -> None:
    columns = {"right": [0, 1, 2], "holes": [0, 2, 4]}[side]
    ids, mask = torch.zeros(1, 6, dtype=torch.long), torch.zeros(1, 6, dtype=torch.long)
    ids[0, columns], mask[0, columns] = torch.tensor([3, 1, 4]), 1
    config = GenerationConfig(max_new_tokens=2)
    config.max_length = 8

    def request_of(ignored: torch.Tensor | int | None) -> Any:
        penalty = RepetitionPenaltyLogitsProcessor(1.5, prompt_ignore_length=ignored)  # type: ignore[arg-type]
        request = build_request(
            input_ids=ids, attention_mask=mask, config=config, logits_processor=[penalty],
            stopping_criteria=[], streamer=None, is_prompt_streamed=False, num_drafts=0,
            is_index_shared=False, returns_dict=False, vocab_size=VOCAB,
        )  # fmt: skip
        [rule] = request.processor.rules
        return rule.tensors["first_B"]

    try:
        prepared = request_of((mask != 0).int().argmax(dim=1))
    except ValueError:
        pytest.skip("this transformers counts padding as text")
    assert prepared.tolist() == [3]
    # One that the caller made for something else stays.
    assert request_of(torch.tensor([2])).tolist() == [2]
    assert request_of(5).tolist() == [5] and request_of(None).tolist() == [0]


# -- behind the end --------------------------------------------------------------------------------


def script(model: Any, ids: torch.Tensor) -> tuple[list[int], ScriptedMtp]:
    """What plain greedy decoding says, and an MTP layer that drafts all of it."""
    text = greedy_reference(model, ids, NEW + 4)
    return text[0, ids.shape[1] :].tolist(), ScriptedMtp(text.tolist(), always(3), VOCAB)


class Follow:
    """Allows the next token of a known text, and nothing behind its first tokens."""

    def __init__(self, width: int, text: list[int], length: int) -> None:
        self.width, self.text, self.length = width, text, length

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        place = input_ids.shape[1] - self.width
        if place >= self.length:
            return torch.full_like(scores, -torch.inf)
        forbidden = torch.ones(VOCAB, dtype=torch.bool)
        forbidden[self.text[place]] = False
        return scores.masked_fill(forbidden, -torch.inf)

    def allowed(self, number: int, text: torch.Tensor) -> list[int]:
        place = len(text) - self.width
        return [self.text[place]] if place < self.length else []


class HasLength(StoppingCriteria):
    def __init__(self, length: int) -> None:
        self.length = length

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("kind", ["logits_processor", "prefix_allowed_tokens_fn"])
@pytest.mark.parametrize("end", ["eos", "budget", "criterion"])
@pytest.mark.parametrize("length", [1, 2, 3, 4, 5])
def test_nothing_needs_to_be_allowed_behind_the_end(
    model: Any, end: str, kind: str, do_sample: bool, length: int
) -> None:
    """The drafts go on behind the end of the text; what is said about them does not matter."""
    ids = prompt_of(6) % VOCAB
    text, mtp = script(model, ids)
    # Each token is another one, so that the end is where it should be.
    text = [(text[0] + i) % VOCAB for i in range(len(text))]
    mtp.sequences = [ids[0].tolist() + text]
    follow = Follow(6, text, length)
    ends: dict[str, dict[str, Any]] = {
        "eos": {"eos_token_id": text[length - 1], "max_new_tokens": NEW},
        "budget": {"eos_token_id": None, "max_new_tokens": length},
        "criterion": {
            "eos_token_id": None,
            "max_new_tokens": NEW,
            "stopping_criteria": [HasLength(6 + length)],
        },
    }
    rules = {"logits_processor": [follow], "prefix_allowed_tokens_fn": follow.allowed}
    got = glm_compile.generate(
        model, ids, mtp=mtp, num_draft_tokens=3, do_sample=do_sample, top_k=0, pad_token_id=0,
        attention_mask=torch.ones_like(ids), **{kind: rules[kind]}, **ends[end],
    )  # fmt: skip
    assert got[0, 6:].tolist() == text[:length]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("length", [0, 1, 2, 3, 4])
def test_a_token_must_be_allowed_before_the_end(
    model: Any, num_drafts: int, do_sample: bool, length: int
) -> None:
    ids = prompt_of(6) % VOCAB
    text, mtp = script(model, ids)
    with pytest.raises(ValueError, match="prefix_allowed_tokens_fn allows no token for row 0"):
        glm_compile.generate(
            model, ids, mtp=mtp, num_draft_tokens=num_drafts, do_sample=do_sample,
            eos_token_id=None, pad_token_id=0, max_new_tokens=NEW,
            prefix_allowed_tokens_fn=Follow(6, text, length).allowed,
        )  # fmt: skip


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("do_sample", [False, True])
def test_a_constraint_beats_what_forbids_its_tokens(
    model: Any, num_drafts: int, do_sample: bool
) -> None:
    fields = {
        "bad_words_ids": [[7]], "do_sample": do_sample, "eos_token_id": None, "pad_token_id": 0,
        "prefix_allowed_tokens_fn": lambda number, text: [7], "max_new_tokens": NEW,
    }  # fmt: skip
    ids = prompt_of(6) % VOCAB
    got = glm_compile.generate(
        model, ids, mtp=random_mtp(model), num_draft_tokens=num_drafts, **fields
    )
    assert torch.equal(got, model.generate(ids, **fields))
    assert (got[0, 6:] == 7).all()


def test_the_callers_code_sees_no_text_that_plain_decoding_would_not(model: Any) -> None:
    """Rows of unequal progress: prefixes, then padding where a row has nothing yet."""
    ids = torch.cat([prompt_of(6), prompt_of(6, 1), prompt_of(6, 2)]) % VOCAB
    text = torch.cat([greedy_reference(model, row[None], NEW) for row in ids])
    eos = int(text[1, 9])
    seen: list[torch.Tensor] = []
    told: list[torch.Tensor] = []

    def watch(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        seen.append(input_ids.clone())
        return scores

    def listen(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        told.append(input_ids.clone())
        return torch.zeros(len(input_ids), dtype=torch.bool)

    # Right drafts everywhere, different numbers; wrong ones behind.
    mtp = ScriptedMtp(text.tolist(), lambda iteration, b: (iteration + b) % 4, VOCAB)
    got = glm_compile.generate(
        model, ids, mtp=mtp, num_draft_tokens=3, max_new_tokens=NEW, eos_token_id=eos,
        pad_token_id=0, logits_processor=[watch], stopping_criteria=[listen], do_sample=False,
        attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    full = torch.nn.functional.pad(got, (0, 1))
    for shown in told:
        for row, final in zip(shown, full):
            known = int((row == final[: len(row)]).cumprod(0).sum())
            assert (row[known:] == 0).all(), (row, final)
    for shown in seen:
        # Drafts may be wrong here, but nothing follows an end of the text except padding.
        for row in shown:
            ended = (row[6:] == eos).nonzero().flatten()
            assert len(ended) == 0 or (row[6:][ended[0] + 1 :] == 0).all(), row


def test_a_criterion_that_remembers_is_not_misled_by_rejected_drafts(model: Any) -> None:
    ids = torch.cat([prompt_of(6), prompt_of(6, 1)]) % VOCAB
    text = torch.cat([greedy_reference(model, row[None], NEW) for row in ids])
    # Wrong drafts are the right token plus one.
    unwanted = next(t for t in range(VOCAB) if (text[1, 6:] != t).all())

    class Remembers(StoppingCriteria):
        has_seen = torch.zeros(2, dtype=torch.bool)

        def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
            self.has_seen = self.has_seen | (input_ids[:, 6:] == unwanted).any(dim=1)
            return self.has_seen & False

    class Drafts(ScriptedMtp):
        def _answer(self, positions_BS: Any, like: Any, index: int) -> torch.Tensor:
            answer = super()._answer(positions_BS, like, index)
            answer[1, :, 0] = unwanted
            return answer

    criterion = Remembers()
    mtp = Drafts(text.tolist(), always(3), VOCAB)
    # A processor that reads the text has the drafts written into it.
    got = glm_compile.generate(
        model, ids, mtp=mtp, num_draft_tokens=3, max_new_tokens=NEW, eos_token_id=None,
        pad_token_id=0, stopping_criteria=[criterion], do_sample=False,
        logits_processor=[lambda text, scores: scores], attention_mask=torch.ones_like(ids),
    )  # fmt: skip
    assert torch.equal(got, text)
    assert not criterion.has_seen[1]


# -- values that make no sense --------------------------------------------------------------------

MISFITS: list[tuple[str, dict[str, Any]]] = [
    ("forced_eos_token_id must hold ids in 0..9, got .10.", {"forced_eos_token_id": 10}),
    ("forced_eos_token_id must hold ids in 0..9, got .12.", {"forced_eos_token_id": [2, 12]}),
    ("bad_words_ids must hold ids in 0..9, got .11.", {"bad_words_ids": [[1], [2, 11]]}),
    ("sequence_bias must hold ids in 0..9, got .11.", {"sequence_bias": [[[1, 11], 0.5]]}),
    ("sequence_bias must hold ids in 0..9, got .11.", {"sequence_bias": {(1, 11): 0.5}}),
    (
        "eos_token_id, which exponential_decay_length_penalty favours",
        {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": [2, 10]},
    ),
    (
        "exponential_decay_length_penalty=.* needs an eos_token_id",
        {"exponential_decay_length_penalty": (1, 1.5), "eos_token_id": None},
    ),
    (
        "exponential_decay_length_penalty must be .start, factor.",
        {"exponential_decay_length_penalty": (1,), "eos_token_id": 2},
    ),
    ("suppress_tokens must be a list of token ids, got 5", {"suppress_tokens": 5}),
    ("begin_suppress_tokens must be a list of token ids", {"begin_suppress_tokens": ["a"]}),
    ("temperature", {"do_sample": True, "temperature": -1.0}),
    ("top_k", {"do_sample": True, "top_k": -1}),
    ("min_p", {"do_sample": True, "min_p": 1.5}),
    ("top_h", {"do_sample": True, "top_h": 2.0}),
    ("typical_p", {"do_sample": True, "typical_p": 0.0}),
    ("penalty", {"repetition_penalty": 0.0}),
    ("penalty", {"encoder_repetition_penalty": -1.0}),
]


@pytest.mark.parametrize("is_config", [False, True])
@pytest.mark.parametrize(
    ("message", "fields"), MISFITS, ids=[f"{i}-{'-'.join(f)}" for i, (_m, f) in enumerate(MISFITS)]
)
def test_a_value_that_fits_no_text_is_refused_before_any_work(
    model: Any, monkeypatch: pytest.MonkeyPatch, message: str, fields: dict, is_config: bool
) -> None:
    monkeypatch.setattr(type(model.model), "forward", lambda *a, **k: pytest.fail("ran"))
    fields = {"max_new_tokens": 4, "pad_token_id": 0} | fields
    if is_config:
        config = GenerationConfig()
        for name, value in fields.items():
            setattr(config, name, value)
        fields = {"generation_config": config}
    with pytest.raises(ValueError, match=message):
        glm_compile.generate(model, torch.tensor([[1, 2, 3]]), **fields)


def test_a_forced_first_token_matters_behind_one_token_only(model: Any) -> None:
    fields = {"forced_bos_token_id": 10, "max_new_tokens": 2, "do_sample": False}
    with pytest.raises(ValueError, match=r"forced_bos_token_id must hold ids in 0\.\.9"):
        glm_compile.generate(model, torch.tensor([[1]]), **fields)
    assert glm_compile.generate(model, torch.tensor([[1, 2]]), **fields).shape == (1, 4)
