"""Acceptance, end-of-sequence and budget on small integer tensors."""

from __future__ import annotations

import itertools

import pytest
import torch

from glm_compile.ops.accept_block.reference import (
    accept_greedy,
    append_block,
    clip_block,
    last_kept,
    last_row,
)


def test_greedy_counts_agreeing_drafts_and_the_targets_own_token() -> None:
    predicted = torch.tensor([[5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8], [5, 6, 7, 8]])
    drafts = torch.tensor([[5, 6, 7], [5, 6, 0], [0, 6, 7], [5, 0, 7]])
    assert accept_greedy(predicted, drafts).tolist() == [4, 3, 1, 2]


def test_greedy_compares_the_first_draft() -> None:
    assert accept_greedy(torch.tensor([[1, 2]]), torch.tensor([[2]])).tolist() == [1]


def test_greedy_without_drafts_takes_one_token() -> None:
    assert accept_greedy(torch.tensor([[3]]), torch.zeros(1, 0, dtype=torch.long)).tolist() == [1]


def _clip_by_hand(
    tokens: list[int], count: int, remaining: int, finished: bool, eos: set[int]
) -> tuple[int, bool]:
    """One token after the other, as plain decoding would."""
    kept = 0
    for token in tokens[:count]:
        if finished:
            break
        kept += 1
        finished = token in eos or kept == remaining
    return kept, finished


def test_clip_equals_one_token_at_a_time() -> None:
    eos = torch.tensor([7, 9])
    cases = list(
        itertools.product(
            itertools.product([1, 7, 9], repeat=3), [1, 2, 3], [1, 2, 3, 4], [False, True]
        )
    )
    tokens = torch.tensor([c[0] for c in cases])
    kept, finished = clip_block(
        tokens,
        torch.tensor([c[1] for c in cases]),
        torch.tensor([c[2] for c in cases]),
        torch.tensor([c[3] for c in cases]),
        eos,
    )
    expected = [_clip_by_hand(list(t), n, r, f, {7, 9}) for t, n, r, f in cases]
    assert list(zip(kept.tolist(), finished.tolist())) == expected


@pytest.mark.parametrize("eos", [None, torch.tensor([], dtype=torch.long)])
def test_clip_without_an_end_of_sequence_id(eos: torch.Tensor | None) -> None:
    kept, finished = clip_block(
        torch.tensor([[1, 2, 3]]), torch.tensor([3]), torch.tensor([5]), torch.tensor([False]), eos
    )
    assert (kept.tolist(), finished.tolist()) == ([3], [False])


def test_clip_ignores_an_end_of_sequence_id_behind_the_accepted_tokens() -> None:
    kept, finished = clip_block(
        torch.tensor([[1, 9, 9]]),
        torch.tensor([1]),
        torch.tensor([5]),
        torch.tensor([False]),
        torch.tensor([9]),
    )
    assert (kept.tolist(), finished.tolist()) == ([1], [False])


def test_append_writes_kept_tokens_only() -> None:
    text = torch.full((3, 7), -1)
    append_block(
        text,
        torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]),
        torch.tensor([3, 1, 0]),
        torch.tensor([0, 2, 1]),
    )
    assert text[:, :6].tolist() == [
        [1, 2, 3, -1, -1, -1],
        [-1, -1, 4, -1, -1, -1],
        [-1, -1, -1, -1, -1, -1],
    ]


def test_last_row_of_a_frozen_sequence_is_a_valid_row() -> None:
    kept = torch.tensor([3, 1, 0])
    assert last_row(kept).tolist() == [2, 0, 0]
    assert last_kept(torch.tensor([[1, 2, 3], [4, 5, 6], [7, 8, 9]]), kept).tolist() == [3, 4, 7]
