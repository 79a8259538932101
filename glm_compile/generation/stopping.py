"""When a sequence ends: device-side rules (end-of-sequence ids, length) and the caller's own
criteria.

B batch, S tokens of a block, W width of the text buffer, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers.generation.stopping_criteria import EosTokenCriteria, MaxLengthCriteria

from glm_compile.arguments import name_of
from glm_compile.generation.processors import prefix_groups, visible_prefixes

# Scores of each generated position so far, one [B, V] each, up to a number of positions.
ScoreHistory = Callable[[int], "tuple[torch.Tensor, ...] | None"]


@dataclass(frozen=True)
class StopRules:
    """Stopping criteria, split by who evaluates them.

    Attributes:
        eos_ids: every id that ends a sequence.
        max_length: tokens of a row in the output, padding of the prompt included; None without a
            limit.
        criteria: the rest, called on the host with every prefix.
    """

    eos_ids: tuple[int, ...]
    max_length: int | None
    criteria: tuple[Any, ...]

    @classmethod
    def from_criteria(cls, stopping_criteria: Iterable[Any]) -> StopRules:
        """Take out the criteria that are plain rules on ids and lengths."""
        eos_ids: list[int] = []
        max_lengths: list[int] = []
        rest = []
        for criterion in stopping_criteria:
            if type(criterion) is EosTokenCriteria:
                eos_ids += criterion.eos_token_id.flatten().tolist()
            elif type(criterion) is MaxLengthCriteria:
                max_lengths.append(criterion.max_length)
            else:
                rest.append(criterion)
        return cls(tuple(dict.fromkeys(eos_ids)), min(max_lengths, default=None), tuple(rest))


def cut_by_criteria(
    criteria: Sequence[Any],
    text_BW: torch.Tensor,
    first_ends: Sequence[int],
    kept: Sequence[int],
    history: ScoreHistory,
    prompt_width: int,
    fill_id: int = 0,
) -> tuple[list[int], list[bool]]:
    """Ask the criteria about each prefix that plain decoding would have shown them, in its order.

    Args:
        criteria: callables `(input_ids [B, length], scores) -> bool [B]`.
        text_BW: text with the block already in place.
        first_ends: length of each row's prefix that ends with the first token of the block.
        kept: tokens of the block that each row keeps so far; 0 for a finished row.
        history: scores for a criterion that reads them.
        prompt_width: columns of the prompt.
        fill_id: stands behind a row that is shorter than the prefix of a call.

    Returns:
        kept tokens of each row, and whether a criterion ended it.
    """
    kept = list(kept)
    ends = [first_end - 1 + n for first_end, n in zip(first_ends, kept)]
    stopped = [False] * len(kept)
    for length, rows in prefix_groups(first_ends, [n > 0 for n in kept], kept):
        waiting = [row is not None and not stopped[b] for b, row in enumerate(rows)]
        if not any(waiting):
            continue
        scores = history(length - prompt_width)
        shown = visible_prefixes(text_BW, length, ends, fill_id)
        for criterion in criteria:
            ended = _answers(criterion, criterion(shown, scores), len(kept))
            for b, row in enumerate(rows):
                if waiting[b] and ended[b]:
                    assert row is not None
                    kept[b], stopped[b], ends[b] = row + 1, True, length
    return kept, stopped


def _answers(criterion: Any, answer: Any, num_sequences: int) -> list[bool]:
    """What a criterion says of each sequence; one answer is one for all of them."""
    found = repr(answer)
    try:
        ended = torch.as_tensor(answer).flatten().tolist()
    except (TypeError, ValueError, RuntimeError):
        ended = []
    else:
        found = str(len(ended))
    if len(ended) not in (1, num_sequences):
        raise ValueError(
            f"generate: stopping criterion {name_of(criterion)} must return one bool for each of "
            f"{num_sequences} sequences, got {found}"
        )
    return ended * num_sequences if len(ended) == 1 else ended
