"""transformers' logits processors on ragged blocks: every row gets its own prefix.

Processors that transformers prepares from a generation config run on the device (see
`device_processors`). This module decides which list can, and calls on the host what cannot: a
caller's own processor, a `prefix_allowed_tokens_fn`, a watermark.

B batch, S rows of a block, V vocabulary, W width of the text buffer.

transformers calls a processor with `input_ids [B, length]` and one row of scores for each sequence.
Here sequences have different lengths and a block has several rows, so rows are grouped by the
length of their prefix and each group is one such call. The batch stays whole, because processors
may hold one entry per sequence; sequences without a row of that length take part with a row whose
result is dropped.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch
from transformers.generation import logits_process

from glm_compile.arguments import name_of
from glm_compile.generation.device_processors import DeviceProcessors, runs_on_device

# Processors that remember what they were called with, or run the model: a rejected draft would stay
# in them.
_REFUSED = {
    "SynthIDTextWatermarkLogitsProcessor": "watermarking_config (SynthID)",
    "UnbatchedClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "ClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
    "WhisperTimeStampLogitsProcessor": "logits_processor",
    "WhisperNoSpeechDetection": "logits_processor",
    "DiaEOSDelayPatternLogitsProcessor": "logits_processor",
    "DiaClassifierFreeGuidanceLogitsProcessor": "guidance_scale",
}


def make_processors(
    processors: Iterable[Any],
    *,
    prompt_BW: torch.Tensor,
    vocab_size: int,
    eos_ids: Iterable[int] = (),
    max_length: int | None = None,
    fill_id: int = 0,
) -> DeviceProcessors | HostProcessors:
    """The processors of a call: on the device if all of them can be there, else on the host.

    Args:
        processors: callables `(input_ids [B, length], scores [B, V]) -> scores`, or lists of them.
        prompt_BW: the prompts with their padding on the left.
        vocab_size: V.
        eos_ids, max_length, fill_id: as for `HostProcessors`.

    Raises:
        ValueError: a processor that cannot work on drafted tokens, or is none.
    """
    flat = list(_flatten(processors))
    for processor in flat:
        _check(processor)
    if all(runs_on_device(processor) for processor in flat):
        return DeviceProcessors(flat, prompt_BW=prompt_BW, vocab_size=vocab_size)
    return HostProcessors(flat, eos_ids=eos_ids, max_length=max_length, fill_id=fill_id)


class HostProcessors:
    """Logits to scores in float32, through a list of processors that the host calls.

    Processors get the prefixes that plain decoding may come to: no row behind the budget's last
    token, and none of the caller's own (a processor, a `prefix_allowed_tokens_fn`) behind a drafted
    end of the sequence.

    Args:
        processors: callables `(input_ids [B, length], scores [B, V]) -> scores`.
        eos_ids: ids that end a sequence.
        max_length: tokens of a row, prompt included.
        fill_id: stands behind a sequence that is shorter than the prefix of a call.

    Attributes:
        needs_host: always; the loop must know lengths on the host.
        needs_text: always; drafts have to stand behind the text.
        why_host: names the processors that need the host in every iteration.
    """

    needs_host = True
    needs_text = True

    def __init__(
        self,
        processors: Iterable[Any],
        *,
        eos_ids: Iterable[int] = (),
        max_length: int | None = None,
        fill_id: int = 0,
    ) -> None:
        flat = list(processors)
        waiting = [p for p in flat if not runs_on_device(p)]
        self.why_host: str | None = ", ".join(dict.fromkeys(name_of(p) for p in waiting))
        self._has_callbacks = any(_calls_the_caller(p) for p in flat)
        self._processors = [self._guard_callback(p) for p in flat]
        self._eos_ids = frozenset(eos_ids)
        self._max_length = max_length
        self._fill_id = fill_id
        # Row of each sequence whose result counts in the call that is running.
        self._rows: list[int | None] = []
        # (sequence, row) of the last block where a callback allows no token.
        self._refused: set[tuple[int, int]] = set()

    def __call__(
        self,
        logits_BSV: torch.Tensor,
        text_BW: torch.Tensor,
        first_ends: Sequence[int],
        active: Sequence[bool],
        num_drafts: int = 0,
    ) -> torch.Tensor:
        """Scores [B,S,V]. Row s of sequence b follows the prefix `text_BW[b, : first_ends[b] + s]`.

        Args:
            logits_BSV: any floating dtype.
            text_BW: tokens, drafts included.
            first_ends: length of the prefix of row 0, per sequence.
            active: sequences whose rows count.
            num_drafts: how many tokens at the end of row 0's prefix are drafts already.
        """
        # A copy: processors may write into the scores, and the logits may be asked for.
        scores_BSV = logits_BSV.to(torch.float32, copy=True)
        self._refused = set()
        counts = self._reachable(text_BW, first_ends, logits_BSV.shape[1], num_drafts)
        processed_BSV = scores_BSV.clone()
        for length, rows in prefix_groups(first_ends, active, counts):
            self._rows = rows
            shown = text_BW[:, :length]
            if self._has_callbacks:
                known = [
                    length if row is not None else end - num_drafts
                    for row, end in zip(rows, first_ends)
                ]
                shown = visible_prefixes(text_BW, length, known, self._fill_id)
            columns = torch.tensor([row or 0 for row in rows], device=scores_BSV.device)
            index_B1V = columns[:, None, None].expand(-1, 1, scores_BSV.shape[-1])
            scores_BV = self._apply(shown, scores_BSV.gather(1, index_B1V).squeeze(1))
            counted = [b for b, row in enumerate(rows) if row is not None]
            processed_BSV[counted, [rows[b] for b in counted]] = scores_BV[counted].float()
        return processed_BSV

    def check_kept(self, kept: Sequence[int]) -> None:
        """Raise ValueError if a token was kept where a callback allows none.

        Args:
            kept: tokens of the last block that each sequence keeps.
        """
        for b, row in sorted(self._refused):
            if row < kept[b]:
                raise ValueError(
                    f"generate: prefix_allowed_tokens_fn allows no token for row {b}; it must "
                    "return at least one"
                )

    def refuse(self, b: int) -> None:
        """Note that the running call leaves this sequence no token."""
        row = self._rows[b]
        assert row is not None
        self._refused.add((b, row))

    def is_valid(self, b: int) -> bool:
        """Whether the running call's result counts for this sequence."""
        return self._rows[b] is not None

    def _reachable(
        self, text_BW: torch.Tensor, first_ends: Sequence[int], num_rows: int, num_drafts: int
    ) -> list[int]:
        """How many rows of each sequence may be kept."""
        counts = [num_rows] * len(first_ends)
        if self._max_length is not None:
            counts = [min(num_rows, max(self._max_length - end, 0)) for end in first_ends]
        num_drafted = num_drafts + num_rows - 1
        if not self._has_callbacks or not self._eos_ids or num_drafted == 0:
            return counts
        device = text_BW.device
        starts_B = torch.tensor(first_ends, device=device) - num_drafts
        columns = starts_B[:, None] + torch.arange(num_drafted, device=device)
        for b, drafted in enumerate(text_BW.gather(1, columns).tolist()):
            ends = [i for i, token in enumerate(drafted) if token in self._eos_ids]
            if ends:
                counts[b] = min(counts[b], max(ends[0] + 1 - num_drafts, 0))
        return counts

    def _apply(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        for processor in self._processors:
            processed = processor(input_ids, scores)
            found = getattr(processed, "shape", None)
            if found != scores.shape:
                raise ValueError(
                    f"generate: logits processor {name_of(processor)} must return scores of shape "
                    f"{tuple(scores.shape)}, got {processed if found is None else tuple(found)}"
                )
            scores = processed
        return scores

    def _guard_callback(self, processor: Any) -> Any:
        if type(processor) is logits_process.PrefixConstrainedLogitsProcessor:
            return _GuardedPrefixConstraint(processor, self)
        return processor


class _GuardedPrefixConstraint:
    """A `prefix_allowed_tokens_fn` that never sees a prefix that nobody generated."""

    def __init__(self, processor: Any, owner: HostProcessors) -> None:
        self._allowed_tokens = processor._prefix_allowed_tokens_fn
        self._rows_per_prompt = processor._num_beams
        self._owner = owner

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        mask = torch.zeros_like(scores)
        for row, prefix in enumerate(input_ids):
            if not self._owner.is_valid(row):
                continue
            allowed = self._allowed_tokens(row // self._rows_per_prompt, prefix)
            if not hasattr(allowed, "__len__"):
                raise ValueError(
                    f"generate: prefix_allowed_tokens_fn must return a list of ids, got {allowed!r}"
                )
            mask[row] = -torch.inf
            if len(allowed) == 0:
                # A drafted prefix may lie behind the caller's own end of the sequence; whether this
                # is an error depends on what is kept.
                self._owner.refuse(row)
                continue
            try:
                mask[row, allowed] = 0
            except (IndexError, TypeError) as error:
                raise ValueError(
                    "generate: prefix_allowed_tokens_fn must return a list of ids in "
                    f"0..{scores.shape[1] - 1}, got {allowed!r}"
                ) from error
        constrained = scores + mask
        # As in transformers: the constraint holds even if something else forbids all of its tokens.
        is_impossible = constrained.amax(dim=-1, keepdim=True).isneginf()
        return torch.where(is_impossible, mask, constrained)


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


def visible_prefixes(
    text_BW: torch.Tensor, length: int, ends: Sequence[int], fill_id: int
) -> torch.Tensor:
    """The first `length` columns; what lies behind a row's end, such as rejected drafts, is filled.

    This is how transformers shows a finished sequence. The result is a copy.
    """
    columns = torch.arange(length, device=text_BW.device)
    ends_B = torch.tensor(ends, device=text_BW.device)
    return text_BW[:, :length].masked_fill(columns >= ends_B[:, None], fill_id)


def _flatten(processors: Iterable[Any]) -> Iterator[Any]:
    for processor in processors:
        if type(processor) is logits_process.LogitsProcessorList:
            yield from _flatten(processor)
        else:
            yield processor


def _is_from_transformers(processor: Any) -> bool:
    return type(processor).__module__ == logits_process.__name__


def _calls_the_caller(processor: Any) -> bool:
    is_constraint = isinstance(processor, logits_process.PrefixConstrainedLogitsProcessor)
    return is_constraint or not _is_from_transformers(processor)


def _check(processor: Any) -> None:
    """Raise ValueError for a processor that cannot work on drafted tokens."""
    kind = type(processor)
    for base in kind.__mro__:
        if base.__module__ == logits_process.__name__ and base.__name__ in _REFUSED:
            raise ValueError(
                f"generate: {_REFUSED[base.__name__]} is not supported: {kind.__name__} depends "
                "on more than the tokens before a position"
            )
    if not callable(processor):
        raise ValueError(f"generate: logits_processor holds {processor!r}, which is not callable")
    try:
        signature = inspect.signature(processor)
    except ValueError:
        return  # a function of C without one
    try:
        signature.bind(None, None)
    except TypeError as error:
        raise ValueError(
            f"generate: logits processor {name_of(processor)}{signature} must take "
            f"(input_ids, scores): {error}"
        ) from None
