"""Prompts without their padding."""

from __future__ import annotations

import pytest
import torch

from glm_compile.generation.prompt import compact_prompt

pytestmark = pytest.mark.newest_transformers


def test_padding_anywhere_is_removed_and_order_is_kept() -> None:
    ids = torch.tensor([[9, 9, 1, 2], [1, 2, 3, 9], [1, 9, 2, 9], [1, 2, 3, 4]])
    mask = torch.tensor([[0, 0, 1, 1], [1, 1, 1, 0], [1, 0, 1, 0], [1, 1, 1, 1]])
    prompt = compact_prompt(ids, mask)
    assert prompt.lengths_B.tolist() == [2, 3, 2, 4]
    assert prompt.ids_BP.tolist() == [[1, 2, 0, 0], [1, 2, 3, 0], [1, 2, 0, 0], [1, 2, 3, 4]]
    assert prompt.given_ids_BW is ids or torch.equal(prompt.given_ids_BW, ids)
    assert prompt.aligned_ids_BW.tolist() == [
        [9, 9, 1, 2],
        [9, 1, 2, 3],
        [9, 9, 1, 2],
        [1, 2, 3, 4],
    ]


def test_width_is_that_of_the_longest_prompt() -> None:
    prompt = compact_prompt(torch.tensor([[9, 1, 2]]), torch.tensor([[False, True, True]]))
    assert prompt.ids_BP.tolist() == [[1, 2]] and prompt.given_width == 3


@pytest.mark.parametrize(
    ("kwargs", "width"), [({"min_width": 2}, 2), ({"min_width": 4}, 4), ({}, 1)]
)
def test_width_can_be_asked_for(kwargs: dict[str, int], width: int) -> None:
    prompt = compact_prompt(torch.tensor([[5]], dtype=torch.int32), fill_id=3, **kwargs)
    assert prompt.ids_BP.tolist() == [[5] + [3] * (width - 1)]
    assert prompt.ids_BP.dtype == torch.long


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [
        (torch.zeros(1, 0, dtype=torch.long), None, "at least one token"),
        (torch.zeros(3, dtype=torch.long), None, "batch, length"),
        (torch.zeros(2, 3, dtype=torch.long), torch.ones(2, 2), "in the shape of input_ids"),
        (torch.zeros(2, 2, dtype=torch.long), torch.tensor([[1, 1], [0, 0]]), r"row\(s\) \[1\]"),
    ],
)
def test_what_is_no_prompt_is_refused(
    ids: torch.Tensor, mask: torch.Tensor | None, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        compact_prompt(ids, mask)
