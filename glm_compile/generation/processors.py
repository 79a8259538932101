"""transformers' logits processors on ragged blocks: every row gets its own prefix.

B batch, S rows of a block, V vocabulary, W width of the text buffer.

transformers calls a processor with `input_ids [B, length]` and one row of scores for each sequence.
Here sequences have different lengths and a block has several rows, so rows are grouped by the
length of their prefix and each group is one such call. The batch stays whole, because processors
may hold one entry per sequence; sequences without a row of that length take part with a row whose
result is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from transformers.generation import logits_process

# Processors that never look at the text: one call serves all rows of a block.
_TEXT_FREE = frozenset(
    {
        "EpsilonLogitsWarper",
        "EtaLogitsWarper",
        "InfNanRemoveLogitsProcessor",
        "LogitNormalization",
        "MinPLogitsWarper",
        "SuppressTokensLogitsProcessor",
        "TemperatureLogitsWarper",
        "TopHLogitsWarper",
        "TopKLogitsWarper",
        "TopPLogitsWarper",
        "TypicalLogitsWarper",
    }
)
# Processors that remember what they were called with, or run the model: a rejected draft would stay
# in them.
_REFUSED = {
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config (SynthID)",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WhisperTimeStampLogitsProcessor": "logits_processor",
    "WhisperNoSpeechDetection": "logits_processor",
}

Processor = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


class ScoreProcessor:
    """Logits to scores in float32, through a list of processors.

    Attributes:
        needs_text: whether a processor looks at the prefix; then the loop must know lengths on the
            host.
    """

    def __init__(self, processors: Iterable[Any]) -> None:
        self._processors = list(processors)
        for processor in self._processors:
            _check(processor)
        self.needs_text = any(not _is_text_free(p) for p in self._processors)
        # Rows whose result counts in the call that is running.
        self._valid: list[bool] = []
        self._processors = [self._guard_callback(p) for p in self._processors]

    def __call__(
        self,
        logits_BSV: torch.Tensor,
        text_BW: torch.Tensor | None = None,
        first_ends: Sequence[int] = (),
        active: Sequence[bool] = (),
    ) -> torch.Tensor:
        """Scores [B,S,V]. Row s of sequence b follows the prefix `text_BW[b, : first_ends[b] + s]`.

        Args:
            logits_BSV: any floating dtype.
            text_BW: tokens, drafts included; needed when `needs_text`, as are the two lists.
            first_ends: length of the prefix of row 0, per sequence.
            active: sequences whose rows count.
        """
        # A copy: processors may write into the scores, and the logits may be asked for.
        scores_BSV = logits_BSV.to(torch.float32, copy=True)
        if not self._processors:
            return scores_BSV
        if not self.needs_text:
            batch_size, num_rows, vocab_size = scores_BSV.shape
            scores_RV = scores_BSV.view(batch_size * num_rows, vocab_size)
            no_text = torch.zeros(scores_RV.shape[0], 1, dtype=torch.long, device=scores_RV.device)
            return self._apply(no_text, scores_RV).view(batch_size, num_rows, vocab_size)
        assert text_BW is not None
        return self._apply_by_length(scores_BSV, text_BW, first_ends, active)

    def _apply_by_length(
        self,
        scores_BSV: torch.Tensor,
        text_BW: torch.Tensor,
        first_ends: Sequence[int],
        active: Sequence[bool],
    ) -> torch.Tensor:
        batch_size, num_rows, _vocab_size = scores_BSV.shape
        processed_BSV = scores_BSV.clone()
        everyone = list(range(batch_size))
        for length, rows in prefix_groups(first_ends, active, num_rows):
            self._valid = [row is not None for row in rows]
            scores_BV = scores_BSV[everyone, [row or 0 for row in rows]]
            scores_BV = self._apply(text_BW[:, :length], scores_BV)
            for b, row in enumerate(rows):
                if row is not None:
                    processed_BSV[b, row] = scores_BV[b]
        return processed_BSV

    def _apply(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in self._processors:
            processed = processor(input_ids, scores)
            if processed.shape != scores.shape:
                raise ValueError(
                    f"generate: logits processor {type(processor).__name__} must return scores of "
                    f"shape {tuple(scores.shape)}, got {tuple(processed.shape)}"
                )
            scores = processed
        return scores

    def _guard_callback(self, processor: Any) -> Any:
        if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
            return _GuardedPrefixConstraint(processor, self)
        return processor

    def is_valid(self, row: int) -> bool:
        """Whether the running call's result counts for this sequence."""
        return self._valid[row]


class _GuardedPrefixConstraint:
    """A `prefix_allowed_tokens_fn` that never sees a prefix that nobody generated."""

    def __init__(self, processor: Any, owner: ScoreProcessor) -> None:
        self._allowed_tokens = processor._prefix_allowed_tokens_fn
        self._rows_per_prompt = processor._num_beams
        self._owner = owner

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        forbidden = torch.zeros_like(scores, dtype=torch.bool)
        for row, prefix in enumerate(input_ids):
            if not self._owner.is_valid(row):
                continue
            prompt = row // self._rows_per_prompt
            allowed = self._allowed_tokens(prompt, prefix)
            if len(allowed) == 0:
                raise ValueError(
                    f"generate: prefix_allowed_tokens_fn allows no token for batch ID {prompt}; it "
                    "must return at least one"
                )
            forbidden[row] = True
            forbidden[row, allowed] = False
        return scores.masked_fill(forbidden, -torch.inf)


def prefix_groups(
    first_ends: Sequence[int], active: Sequence[bool], num_rows: int | Sequence[int]
) -> list[tuple[int, list[int | None]]]:
    """Rows of a ragged block by the length of their prefix, shortest first.

    Args:
        first_ends: length of the prefix of row 0, per sequence.
        active: sequences to consider.
        num_rows: rows of the block, for all sequences or one number each.

    Returns:
        (length, row of each sequence that has it or None).
    """
    batch_size = len(first_ends)
    counts = [num_rows] * batch_size if isinstance(num_rows, int) else list(num_rows)
    groups: dict[int, list[int | None]] = {}
    for b in range(batch_size):
        for row in range(counts[b] if active[b] else 0):
            groups.setdefault(first_ends[b] + row, [None] * batch_size)[b] = row
    return sorted(groups.items())


def _is_text_free(processor: Any) -> bool:
    kind = type(processor)
    return kind.__module__ == logits_process.__name__ and kind.__name__ in _TEXT_FREE


def _check(processor: Any) -> None:
    """Raise ValueError for a processor that cannot work on drafted tokens."""
    kind = type(processor)
    if kind.__module__ == logits_process.__name__ and kind.__name__ in _REFUSED:
        raise ValueError(
            f"generate: {_REFUSED[kind.__name__]} is not supported: {kind.__name__} depends on "
            "more than the tokens before a position"
        )
    if not callable(processor):
        raise ValueError(f"generate: logits_processor holds {processor!r}, which is not callable")
    required = [
        p
        for p in inspect.signature(processor).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_OR_KEYWORD, p.POSITIONAL_ONLY)
    ]
    if len(required) > 2:
        raise ValueError(
            f"generate: logits processor {kind.__name__} takes more than (input_ids, scores): "
            f"{[p.name for p in required[2:]]}"
        )
