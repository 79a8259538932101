"""Stopping criteria are asked about every prefix inside a block."""

from __future__ import annotations

import pytest
import torch
from transformers import EosTokenCriteria, MaxLengthCriteria, MaxTimeCriteria, StoppingCriteria

from glm_compile.generation.stopping import StopRules, cut_by_criteria


class EndsWith(StoppingCriteria):
    """Stops a row whose last token is the given one; notes each prefix."""

    def __init__(self, token: int) -> None:
        self.token = token
        self.prefixes: list[list[list[int]]] = []

    def __call__(self, input_ids: torch.Tensor, scores: object, **kwargs: object) -> torch.Tensor:
        self.prefixes.append(input_ids.tolist())
        return input_ids[:, -1] == self.token


def _no_scores(steps: int) -> None:
    return None


def test_plain_rules_are_taken_out() -> None:
    custom = EndsWith(3)
    rules = StopRules.from_criteria(
        [
            EosTokenCriteria([5, 6]),
            MaxLengthCriteria(20),
            custom,
            EosTokenCriteria(6),
            MaxLengthCriteria(9),
        ]
    )
    assert (rules.eos_ids, rules.max_length, rules.criteria) == ((5, 6), 9, (custom,))


def test_a_subclass_is_the_callers_own() -> None:
    class Noted(EosTokenCriteria):
        pass

    assert len(StopRules.from_criteria([Noted(4)]).criteria) == 1


def test_the_first_prefix_that_ends_a_row_cuts_it() -> None:
    criterion = EndsWith(3)
    text = torch.tensor([[9, 9, 1, 3, 3, 2]])
    kept, stopped = cut_by_criteria([criterion], text, [3], [4], _no_scores, 2)
    assert (kept, stopped) == ([2], [True])
    assert criterion.prefixes == [[[9, 9, 1]], [[9, 9, 1, 3]]]


def test_rows_are_cut_apart() -> None:
    text = torch.tensor([[9, 1, 2, 3, 0], [9, 9, 3, 1, 1], [9, 9, 9, 3, 3]])
    kept, stopped = cut_by_criteria([EndsWith(3)], text, [2, 3, 4], [3, 2, 0], _no_scores, 1)
    assert (kept, stopped) == ([3, 1, 0], [True, True, False])


def test_a_criterion_may_answer_for_the_whole_batch() -> None:
    kept, stopped = cut_by_criteria(
        [MaxTimeCriteria(0.0, initial_timestamp=0.0)],
        torch.zeros(2, 5).long(),
        [2, 3],
        [2, 2],
        _no_scores,
        1,
    )
    assert (kept, stopped) == ([1, 1], [True, True])


def test_an_answer_of_another_size_is_an_error() -> None:
    with pytest.raises(ValueError, match="one bool for each of 3 sequences, got 2"):
        cut_by_criteria(
            [lambda ids, scores: torch.tensor([True, False])],
            torch.zeros(3, 5).long(),
            [2, 2, 2],
            [1, 1, 1],
            _no_scores,
            1,
        )


def test_nothing_stands_behind_what_a_row_keeps() -> None:
    """A criterion that remembers must not see the drafts that were rejected behind a row's end."""
    criterion = EndsWith(3)
    text = torch.tensor([[9, 1, 3, 8, 8, 8], [9, 9, 1, 2, 4, 8], [9, 9, 8, 8, 8, 8]])
    cut_by_criteria([criterion], text, [2, 3, 3], [3, 3, 0], _no_scores, 1, 7)
    assert criterion.prefixes == [
        [[9, 1], [9, 9], [9, 9]],
        [[9, 1, 3], [9, 9, 1], [9, 9, 7]],
        [[9, 1, 3, 7], [9, 9, 1, 2], [9, 9, 7, 7]],
        [[9, 1, 3, 7, 7], [9, 9, 1, 2, 4], [9, 9, 7, 7, 7]],
    ]
