"""Rules on the device give what transformers' processors give, prefix by prefix."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from transformers import GenerationMixin, LogitsProcessorList
from transformers.generation import logits_process as lp

from glm_compile.generation.device_processors import (
    _RULES,
    DeviceProcessors,
    runs_on_device,
)
from glm_compile.generation.processors import make_processors

VOCAB = 23
WIDTH = 9  # of the prompt
BUFFER = 40


def prompts() -> torch.Tensor:
    """Few different tokens, so that n-grams repeat; padding on the left of one row."""
    ids = torch.randint(0, 4, (3, WIDTH), generator=torch.Generator().manual_seed(1))
    ids[1, :4] = 22
    return ids


# Made anew for each use: some keep buffers. `ids` are the prompts that transformers would hand on.
PROCESSORS: dict[str, Callable[[torch.Tensor], Any]] = {
    "repetition": lambda ids: lp.RepetitionPenaltyLogitsProcessor(1.3),
    "repetition of what is new": lambda ids: lp.RepetitionPenaltyLogitsProcessor(0.8, WIDTH),
    "repetition from a new token on": lambda ids: lp.RepetitionPenaltyLogitsProcessor(
        1.3, WIDTH + 2
    ),
    "prompt": lambda ids: lp.EncoderRepetitionPenaltyLogitsProcessor(1.7, ids),
    "prompt of a batch": lambda ids: lp.EncoderRepetitionPenaltyLogitsProcessor(1.7, ids[:1]),
    "1-grams": lambda ids: lp.NoRepeatNGramLogitsProcessor(1),
    "2-grams": lambda ids: lp.NoRepeatNGramLogitsProcessor(2),
    "4-grams": lambda ids: lp.NoRepeatNGramLogitsProcessor(4),
    "n-grams longer than the text": lambda ids: lp.NoRepeatNGramLogitsProcessor(60),
    "1-grams of the prompt": lambda ids: lp.EncoderNoRepeatNGramLogitsProcessor(1, ids),
    "3-grams of the prompt": lambda ids: lp.EncoderNoRepeatNGramLogitsProcessor(3, ids),
    "n-grams longer than the prompt": lambda ids: lp.EncoderNoRepeatNGramLogitsProcessor(12, ids),
    "bias": lambda ids: lp.SequenceBiasLogitsProcessor(
        {(3,): 2.5, (1, 2): -1.5, (0, 2): 3.0, (1, 1, 2): 0.1, (2, 0, 2): 0.2, (3, 0): -math.inf}
    ),
    "bias of tokens": lambda ids: lp.SequenceBiasLogitsProcessor({(3,): 2.5, (7,): -1.0}),
    "bad words": lambda ids: lp.NoBadWordsLogitsProcessor([[5], [1, 2], [3, 3, 1]], 5),
    "min length": lambda ids: lp.MinLengthLogitsProcessor(WIDTH + 5, [3, 22]),
    "min new tokens": lambda ids: lp.MinNewTokensLengthLogitsProcessor(WIDTH, 4, 3),
    "forced start": lambda ids: lp.ForcedBOSTokenLogitsProcessor(4),
    "forced end": lambda ids: lp.ForcedEOSTokenLogitsProcessor(WIDTH + 6, [2, 9]),
    "decay": lambda ids: lp.ExponentialDecayLengthPenalty((2, 1.37), [1, 8], WIDTH),
    "suppress": lambda ids: lp.SuppressTokensLogitsProcessor([0, 1, 22, 900]),
    "suppress at begin": lambda ids: lp.SuppressTokensAtBeginLogitsProcessor([0, 5], WIDTH + 3),
    "temperature": lambda ids: lp.TemperatureLogitsWarper(0.7),
    "top k": lambda ids: lp.TopKLogitsWarper(4),
    "top p": lambda ids: lp.TopPLogitsWarper(0.6),
    "min p": lambda ids: lp.MinPLogitsWarper(0.2),
    "top h": lambda ids: lp.TopHLogitsWarper(0.6),
    "typical": lambda ids: lp.TypicalLogitsWarper(0.5),
    "epsilon": lambda ids: lp.EpsilonLogitsWarper(0.03),
    "eta": lambda ids: lp.EtaLogitsWarper(0.1),
    "eta with a few": lambda ids: lp.EtaLogitsWarper(0.9, min_tokens_to_keep=3),
    "valid values": lambda ids: lp.InfNanRemoveLogitsProcessor(),
    "normalized": lambda ids: lp.LogitNormalization(),
}


def device(processors: list[Any], ids: torch.Tensor) -> DeviceProcessors:
    made = make_processors(processors, prompt_BW=ids, vocab_size=VOCAB)
    assert isinstance(made, DeviceProcessors)
    return made


def logits_of(num_rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, num_rows, VOCAB, generator=generator) * 3
    logits[0, :, 6] = -torch.inf
    # Ties, as half precision has them.
    return logits.mul_(4).round_().div_(4)


def walk(rules: DeviceProcessors, ids: torch.Tensor) -> list[tuple[torch.Tensor, ...]]:
    """Blocks of a text: (scores, logits, prefixes of its rows).

    A block is seen as the loop shows it: the prompt's, drafts one by one, then all of them as a
    verify step; of which a sequence keeps some.
    """
    generator = torch.Generator().manual_seed(5)
    text = torch.full((3, BUFFER), 1)
    text[:, :WIDTH] = ids
    starts = torch.full((3,), WIDTH)
    seen = []

    def look(num_rows: int, num_drafts: int) -> None:
        logits = logits_of(num_rows, len(seen))
        scores = rules(logits, text, starts, num_drafts)
        ends = starts[:, None] + num_drafts + torch.arange(num_rows)
        seen.append((scores, logits, text.clone(), ends))

    look(1, 0)
    for kept in ([1, 1, 1], [3, 0, 1], [2, 4, 1], [1, 1, 1]):
        tokens = torch.randint(0, 4, (3, 4), generator=generator)
        kept_B = torch.tensor(kept)
        for b in range(3):
            text[b, starts[b] : starts[b] + kept[b]] = tokens[b, : kept[b]]
        rules.note(tokens, kept_B, starts)
        starts = starts + kept_B
        for draft in range(3):
            look(1, draft)
            text[torch.arange(3), starts + draft] = torch.randint(0, 4, (3,), generator=generator)
        look(4, 0)
    return seen


@pytest.mark.parametrize("name", PROCESSORS)
def test_each_row_equals_transformers(name: str) -> None:
    ids = prompts()
    if name == "forced start":
        ids = ids[:, :0]
    changed = 0
    width = ids.shape[1]
    rules = device([PROCESSORS[name](ids)], ids)
    if width == 0:  # a prefix of one token
        text, starts = torch.zeros(3, 5).long(), torch.tensor([0, 1, 2])
        logits = logits_of(3, 0)
        ends = starts[:, None] + torch.arange(3)
        seen = [(rules(logits, text, starts), logits, text, ends)]
    else:
        seen = walk(rules, ids)
    for scores, logits, text, ends in seen:
        for end in ends.unique().tolist():
            # A whole batch, as its entries may belong to sequences.
            processor = PROCESSORS[name](ids)
            for b, s in (ends == end).nonzero().tolist():
                expected = processor(text[:, :end], logits[:, s].clone())[b]
                assert torch.allclose(scores[b, s], expected, rtol=1e-6, atol=0, equal_nan=True)
                changed += not torch.equal(expected, logits[b, s])
    assert changed > 0 or "longer" in name


def test_a_list_runs_in_its_order() -> None:
    ids = prompts()
    makers = [PROCESSORS[n] for n in ("repetition", "2-grams", "temperature", "top k")]
    rules = device(
        [LogitsProcessorList([m(ids) for m in makers[:2]]), makers[2](ids), makers[3](ids)], ids
    )
    for scores, logits, text, ends in walk(rules, ids):
        processors = LogitsProcessorList([m(ids) for m in makers])
        expected = processors(text[:, : int(ends[1, 0])], logits[:, 0])[1]
        torch.testing.assert_close(scores[1, 0], expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", PROCESSORS)
def test_another_call_takes_the_rules_over(name: str) -> None:
    """As a captured iteration does: the same work, on the tensors that it was captured with."""
    first, second = prompts(), prompts().flip(1).contiguous()
    rules = device([PROCESSORS[name](first)], first)
    fresh = device([PROCESSORS[name](second)], second)
    if fresh.signature != rules.signature:
        assert "of the prompt" in name  # another number of n-grams
        return
    addresses = [t.data_ptr() for rule in rules.rules for t in rule.tensors.values()]
    walk(rules, first)
    rules.take(fresh)
    assert addresses == [t.data_ptr() for rule in rules.rules for t in rule.tensors.values()]
    expected = walk(device([PROCESSORS[name](second)], second), second)
    for (scores, *_), (other, *_) in zip(walk(rules, second), expected):
        assert torch.equal(scores, other)


def test_other_settings_have_another_signature() -> None:
    ids = prompts()
    signatures = {name: device([make(ids)], ids).signature for name, make in PROCESSORS.items()}
    for name, make in PROCESSORS.items():
        assert device([make(ids)], ids).signature == signatures[name]
    # These differ in numbers that a call may bring.
    for one, other in (
        ("min length", "min new tokens"),
        ("repetition", "repetition from a new token on"),
        ("prompt", "prompt of a batch"),
    ):
        assert signatures[one] == signatures.pop(other)
    others = list(signatures.values())
    assert len(set(others)) == len(others)
    assert device([lp.TopKLogitsWarper(5)], ids).signature != signatures["top k"]
    assert device([lp.SequenceBiasLogitsProcessor({(3,): 2.0})], ids).signature not in others


def test_only_transformers_own_classes_run_on_the_device() -> None:
    class Own(lp.TopKLogitsWarper):
        pass

    assert runs_on_device(lp.TopKLogitsWarper(3))
    assert not runs_on_device(Own(3))
    assert not runs_on_device(lambda ids, scores: scores)
    constraint = lp.PrefixConstrainedLogitsProcessor(lambda b, prefix: [1], 1)
    assert not runs_on_device(constraint)
    made = make_processors(
        [lp.TopKLogitsWarper(3), Own(3), constraint], prompt_BW=prompts(), vocab_size=VOCAB
    )
    assert made.needs_host and made.why_host == "Own, PrefixConstrainedLogitsProcessor"


def test_every_processor_of_a_generation_config_is_known() -> None:
    """A version of transformers that adds one should not fall back on the host unseen."""
    source = inspect.getsource(GenerationMixin._get_logits_processor)
    named = {name for name in re.findall(r"(\w+)\(", source) if hasattr(lp, name)}
    on_host = {
        "LogitsProcessorList",
        "PrefixConstrainedLogitsProcessor",
        "UnbatchedClassifierFreeGuidanceLogitsProcessor",
    }
    assert named - on_host == set(_RULES)


@pytest.mark.parametrize(
    ("processor", "name"),
    [
        (lp.SequenceBiasLogitsProcessor({(3, VOCAB): 1.0}), "sequence_bias"),
        (lp.NoBadWordsLogitsProcessor([[VOCAB]]), "bad_words_ids"),
        (lp.ForcedBOSTokenLogitsProcessor(VOCAB), "forced_bos_token_id"),
        (lp.ForcedEOSTokenLogitsProcessor(9, [VOCAB]), "forced_eos_token_id"),
        (lp.ExponentialDecayLengthPenalty((1, 1.1), [VOCAB], 3), "eos_token_id"),
    ],
)
def test_ids_outside_the_vocabulary_are_named(processor: Any, name: str) -> None:
    # A forced start matters behind a prompt of one token only.
    ids = prompts()[:, : 1 if name == "forced_bos_token_id" else WIDTH]
    with pytest.raises(ValueError, match=rf"{name} must hold ids in 0\.\.22, got \[23\]"):
        device([processor], ids)


def test_a_forced_start_behind_a_longer_prompt_is_nothing() -> None:
    ids = prompts()
    rules = device([lp.ForcedBOSTokenLogitsProcessor(VOCAB)], ids)
    logits = torch.randn(3, 2, VOCAB)
    assert torch.equal(rules(logits, ids, torch.full((3,), WIDTH)), logits)


def test_a_penalty_has_an_entry_for_each_sequence() -> None:
    ids = prompts()
    penalty = lp.RepetitionPenaltyLogitsProcessor(2.0, 1)
    penalty.prompt_ignore_length = torch.tensor([0, 4, 9])
    scores = device([penalty], ids)(torch.ones(3, 1, VOCAB), ids, torch.full((3,), WIDTH))
    for b, first in enumerate((0, 4, 9)):
        halved = (scores[b, 0] == 0.5).nonzero().flatten().tolist()
        assert halved == sorted(set(ids[b, first:].tolist())), b
    penalty.prompt_ignore_length = torch.tensor([0, 4])
    with pytest.raises(ValueError, match="each of 3 sequences, got 2"):
        device([penalty], ids)


@pytest.mark.parametrize(
    ("names", "num_first"),
    [
        ((), 0),
        (("temperature",), 0),
        (("repetition", "temperature", "top k", "top p"), 1),
        (("top k", "temperature"), 1),
        (("temperature", "top k", "top p", "min p"), 4),
        (("bad words", "top p"), 1),
    ],
)
def test_probabilities_are_the_softmax_of_the_scores(
    names: tuple[str, ...], num_first: int
) -> None:
    ids = prompts()
    rules = device([PROCESSORS[name](ids) for name in names], ids)
    assert rules._num_first == num_first
    text = torch.cat([ids, torch.randint(0, VOCAB, (3, 5))], dim=1)
    logits, starts = torch.randn(3, 4, VOCAB), torch.tensor([WIDTH, WIDTH - 2, WIDTH + 1])
    expected = rules(logits, text, starts, 1).softmax(-1)
    assert torch.equal(rules.probabilities(logits, text, starts, 1), expected)


def test_unusual_filters_are_left_to_transformers() -> None:
    ids = prompts()
    for unusual in (
        lp.TopKLogitsWarper(3, filter_value=-50.0),
        lp.TopPLogitsWarper(0.5, min_tokens_to_keep=4),
    ):
        assert device([unusual], ids)._num_first == 1
