"""Logits processors on ragged blocks see what plain decoding would show them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList
from transformers.generation.logits_process import (
    NoBadWordsLogitsProcessor,
    PrefixConstrainedLogitsProcessor,
    SynthIDTextWatermarkLogitsProcessor,
    TemperatureLogitsWarper,
)

from glm_compile.generation.processors import (
    HostProcessors,
    make_processors,
    prefix_groups,
)

VOCAB = 12


def make(processors: Any) -> Any:
    return make_processors(processors, prompt_BW=torch.zeros(1, 2).long(), vocab_size=VOCAB)


class SumOfPrefix(LogitsProcessor):
    """Adds to each row a number that depends on its whole prefix; notes what it was called with."""

    def __init__(self) -> None:
        self.prefixes: list[list[int]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.prefixes += input_ids.tolist()
        weights = torch.arange(1, input_ids.shape[1] + 1)
        return scores + (input_ids * weights).sum(dim=1, keepdim=True)


def test_prefix_groups_are_in_order_of_length() -> None:
    assert prefix_groups([5, 6, 9], [True, True, False], 2) == [
        (5, [0, None, None]),
        (6, [1, 0, None]),
        (7, [None, 1, None]),
    ]


def test_prefix_groups_with_a_count_per_row() -> None:
    assert prefix_groups([5, 5], [True, True], [1, 2]) == [(5, [0, 0]), (6, [None, 1])]


def test_each_row_gets_its_own_prefix() -> None:
    processor = SumOfPrefix()
    text = torch.randint(0, VOCAB, (2, 10))
    logits = torch.randn(2, 3, VOCAB, dtype=torch.bfloat16)
    scores = HostProcessors([processor])(logits, text, [4, 6], [True, True])
    expected = logits.float()
    for b, first in enumerate((4, 6)):
        for s in range(3):
            prefix = text[b, : first + s]
            expected[b, s] += (prefix * torch.arange(1, len(prefix) + 1)).sum()
    assert torch.equal(scores, expected)


def test_one_sequence_is_asked_as_plain_decoding_would() -> None:
    processor = SumOfPrefix()
    text = torch.arange(8)[None]
    HostProcessors([processor])(torch.randn(1, 3, VOCAB), text, [2], [True])
    assert processor.prefixes == [[0, 1], [0, 1, 2], [0, 1, 2, 3]]


def test_the_logits_are_left_alone() -> None:
    class InPlace(LogitsProcessor):
        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores.fill_(0)

    logits = torch.randn(1, 2, VOCAB)
    before = logits.clone()
    assert (HostProcessors([InPlace()])(logits, torch.zeros(1, 5).long(), [2], [True]) == 0).all()
    assert torch.equal(logits, before)


def test_an_entry_per_sequence_keeps_its_sequence() -> None:
    class Bias(LogitsProcessor):
        bias_BV = torch.randn(2, VOCAB)

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            return scores + self.bias_BV

    logits = torch.randn(2, 3, VOCAB)
    scores = HostProcessors([Bias()])(logits, torch.zeros(2, 9).long(), [3, 4], [True, True])
    assert torch.equal(scores, logits + Bias.bias_BV[:, None])


def test_a_prefix_callback_sees_only_generated_prefixes() -> None:
    seen: list[tuple[int, list[int]]] = []

    def allowed(prompt: int, prefix: torch.Tensor) -> list[int]:
        seen.append((prompt, prefix.tolist()))
        return [5]

    constraint = PrefixConstrainedLogitsProcessor(allowed, 1)
    text = torch.tensor([[1, 2, 3, 4], [6, 7, 8, 9], [0, 0, 0, 0]])
    scores = HostProcessors([constraint])(
        torch.zeros(3, 1, VOCAB), text, [2, 3, 1], [True, True, False]
    )
    assert seen == [(0, [1, 2]), (1, [6, 7, 8])]
    assert torch.isfinite(scores[:2]).nonzero()[:, 2].tolist() == [5, 5]


def test_a_prefix_callback_that_allows_nothing_is_an_error_where_a_token_is_kept() -> None:
    constraint = PrefixConstrainedLogitsProcessor(lambda b, p: [] if len(p) > b else [3], 1)
    processor = HostProcessors([constraint])
    scores = processor(torch.zeros(2, 2, VOCAB), torch.zeros(2, 4).long(), [1, 1], [True, True])
    assert scores.isfinite().sum(dim=-1).tolist() == [[0, 0], [1, 0]]
    processor.check_kept([0, 1])
    for kept, row in (([1, 0], 0), ([0, 2], 1)):
        with pytest.raises(ValueError, match=rf"allows no token for row {row}"):
            processor.check_kept(kept)


@pytest.mark.parametrize("allowed", [[VOCAB], {3, 4}, "ab"])
def test_a_prefix_callback_that_returns_no_ids_is_an_error(allowed: Any) -> None:
    constraint = PrefixConstrainedLogitsProcessor(lambda prompt, prefix: allowed, 1)
    with pytest.raises(ValueError, match=r"prefix_allowed_tokens_fn must return .* 0\.\.11"):
        HostProcessors([constraint])(
            torch.zeros(1, 1, VOCAB), torch.zeros(1, 3).long(), [2], [True]
        )


def test_a_constraint_holds_even_if_its_tokens_are_forbidden_otherwise() -> None:
    processors = [
        NoBadWordsLogitsProcessor([[7]]),
        PrefixConstrainedLogitsProcessor(lambda b, prefix: [7 - b], 1),
    ]
    text, logits = torch.zeros(2, 4).long(), torch.randn(2, VOCAB)
    scores = HostProcessors(processors)(logits[:, None], text, [4, 4], [True, True])[:, 0]
    assert torch.equal(scores, LogitsProcessorList(processors)(text, logits))
    assert scores[0, 7] == 0


class Notes(LogitsProcessor):
    """Notes each text that it is shown."""

    def __init__(self) -> None:
        self.texts: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.texts.append(input_ids.tolist())
        input_ids.fill_(0)
        return scores + 1


def test_rows_behind_the_end_are_not_shown() -> None:
    """Behind a drafted end of the sequence, or behind the budget, plain decoding shows nothing."""
    text = torch.tensor([[4, 5, 9, 6, 7, 8]])
    before = text.clone()
    shown = Notes()
    processor = HostProcessors([shown], eos_ids=[9], max_length=20)
    scores = processor(torch.zeros(1, 4, VOCAB), text, [2], [True])
    assert shown.texts == [[[4, 5]]]
    assert torch.equal(text, before)
    assert scores[0, :, 0].tolist() == [1, 0, 0, 0]


@pytest.mark.parametrize(
    ("num_drafts", "expected"), [(0, [1, 1, 0]), (1, [1, 0, 0]), (2, [0, 0, 0])]
)
def test_a_draft_that_ends_the_sequence_counts_in_the_prefix(
    num_drafts: int, expected: list[int]
) -> None:
    text = torch.tensor([[9, 5, 6, 9, 7, 8]])
    # The id is the token at index 3; the prompt's own does not count.
    first_end = 2 + num_drafts
    processor = HostProcessors([Notes()], eos_ids=[9])
    scores = processor(torch.zeros(1, 3, VOCAB), text, [first_end], [True], num_drafts)
    assert scores[0, :, 0].tolist() == expected


def test_rows_behind_the_budget_are_left_alone() -> None:
    processor = HostProcessors([Notes()], max_length=5)
    text = torch.zeros(2, 9).long()
    scores = processor(torch.zeros(2, 3, VOCAB), text, [3, 5], [True, True])
    assert scores[:, :, 0].tolist() == [[1, 1, 0], [0, 0, 0]]


def test_a_sequence_without_a_row_is_shown_as_finished() -> None:
    """Neither old drafts nor later tokens stand behind what it has."""
    shown = Notes()
    text = torch.tensor([[1, 2, 3, 8, 8, 8], [4, 5, 6, 7, 1, 8]])
    processor = HostProcessors([shown], fill_id=11)
    processor(torch.zeros(2, 1, VOCAB), text, [2, 5], [True, True])
    assert shown.texts == [[[1, 2], [4, 5]], [[1, 2, 11, 11, 11], [4, 5, 6, 7, 1]]]


def test_nested_lists_are_looked_into() -> None:
    nested = LogitsProcessorList([LogitsProcessorList([TemperatureLogitsWarper(0.5)])])
    processors = make(nested)
    assert not processors.needs_host and not processors.needs_text
    text = torch.zeros(1, 2).long()
    doubled = processors(torch.ones(1, 1, VOCAB), text, torch.tensor([1]))
    assert torch.equal(doubled, torch.full((1, 1, VOCAB), 2.0))


def test_scores_of_another_shape_are_an_error() -> None:
    def broken(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores[:, :-1]

    with pytest.raises(ValueError, match="must return scores of shape"):
        HostProcessors([broken])(torch.zeros(1, 1, VOCAB), torch.zeros(1, 3).long(), [2], [True])


class OwnSynthID(SynthIDTextWatermarkLogitsProcessor):
    pass


@pytest.mark.parametrize("kind", [SynthIDTextWatermarkLogitsProcessor, OwnSynthID])
@pytest.mark.parametrize("wrap", [list, lambda p: [LogitsProcessorList(p)]])
def test_a_processor_with_a_memory_is_refused(kind: Any, wrap: Any) -> None:
    stateful = kind(
        ngram_len=3, keys=[1, 2], sampling_table_size=64, sampling_table_seed=0,
        context_history_size=8, device=torch.device("cpu"),
    )  # fmt: skip
    with pytest.raises(ValueError, match="watermarking_config"):
        make(wrap([stateful]))


@pytest.mark.parametrize("processor", [3, lambda ids, scores, step: scores])
def test_what_cannot_be_called_with_text_and_scores_is_refused(processor: Any) -> None:
    with pytest.raises(ValueError, match="generate: logits"):
        make([processor])
