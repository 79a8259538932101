"""What `generate` returns, and the record of scores behind it.

B batch, V vocabulary, N iterations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from transformers.generation.utils import GenerateDecoderOnlyOutput


@dataclass
class GenerationOutput(GenerateDecoderOnlyOutput):
    """transformers' output of a decoder-only model, with how the drafts fared.

    `sequences`, `scores` and `logits` are as in transformers; a row that ended before the others
    has zeros in its later scores. No cache is returned.

    Attributes:
        accept_lengths: int64 [N, B], tokens that each iteration added to each sequence: accepted
            drafts and the target's own token, after end-of-sequence and budget; 0 for a finished
            sequence. The prompt's iteration is not counted.
        num_iterations: N.
        timings: seconds: `prefill`, `decode`, `total`.
    """

    accept_lengths: torch.Tensor | None = None
    num_iterations: int | None = None
    timings: dict[str, float] | None = None


class ScoreRecord:
    """Scores or logits of each generated position, row by row because rows advance unevenly."""

    def __init__(self, batch_size: int) -> None:
        self._rows: list[list[torch.Tensor]] = [[] for _ in range(batch_size)]

    def append(self, scores_BSV: torch.Tensor, kept: Sequence[int]) -> None:
        """Keep the first `kept[b]` rows of the block."""
        for row, scores_SV, count in zip(self._rows, scores_BSV, kept):
            row += scores_SV[:count].clone()

    def truncate(self, counts: Sequence[int]) -> None:
        """Drop what lies beyond `counts[b]` positions."""
        for row, count in zip(self._rows, counts):
            del row[count:]

    def steps(self, num_steps: int) -> tuple[torch.Tensor, ...]:
        """The first positions as transformers lists them: one [B, V] each."""
        template = next(scores for row in self._rows for scores in row)
        nothing = torch.zeros_like(template)
        return tuple(
            torch.stack([row[step] if step < len(row) else nothing for row in self._rows])
            for step in range(num_steps)
        )


def assemble(
    text_BW: torch.Tensor, prompt_width: int, counts: Sequence[int], pad_id: int
) -> torch.Tensor:
    """Prompt as given, new tokens, and padding after the end of each row."""
    width = prompt_width + max(counts)
    ends_B = torch.tensor(counts, device=text_BW.device) + prompt_width
    columns = torch.arange(width, device=text_BW.device)
    return text_BW[:, :width].masked_fill(columns >= ends_B[:, None], pad_id)
