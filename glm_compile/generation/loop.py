"""The decoding loop: the host launches iterations and reads their results, one late if it may.

The iterations themselves are the device's (`iteration`): lengths, counts, finished flags and the
budget live there, and an iteration is launched without knowing the results of the one before. Its
results come back through a ring (`state`). Three ways to run:

    overlapped  iteration i+1 is launched before the results of i are read
    waiting     the host reads i before it launches i+1
    in halves   a processor has to see the text: the host reads between verify and draft-extend

All three give the same result. What is in flight when the last sequence ends is dropped: it found
every row finished and changed nothing. A row that the caller's criterion ends is still going on in
the iteration in flight; what that one added to it is dropped and its length set back.

With an adaptive draft length the host chooses, by results that it has read, how many drafts the
next block gets.

B batch, S = 1 + k rows of a block, W width of the text buffer.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from glm_compile.generation.draft_length import AdaptiveDraftLength
from glm_compile.generation.graphs import GraphedIteration
from glm_compile.generation.iteration import Block, HostView, Iteration
from glm_compile.generation.output import ScoreRecord
from glm_compile.generation.request import Request
from glm_compile.generation.state import FINISHED, FIRST_TOKEN, IS_DRAWN, KEPT, ResultRing
from glm_compile.generation.stopping import cut_by_criteria

# Rows of prompts that are run at a time where the caller does not say, and what bounds them: the
# elements of an indexer's scores, float32.
MAX_PROMPT_ROWS = 4096
MAX_PROMPT_SCORES = 1 << 30
MIN_CHUNK = 64


@dataclass(frozen=True)
class Decoded:
    """Result of the loop.

    Attributes:
        text_BW: prompt as given, then each row's tokens; what follows them is undefined.
        counts: new tokens of each row.
        accept_lengths: tokens that each iteration added to each row.
        timings: seconds.
    """

    text_BW: torch.Tensor
    counts: list[int]
    accept_lengths: list[list[int]]
    scores: ScoreRecord | None
    logits: ScoreRecord | None
    timings: dict[str, float]


@dataclass(frozen=True)
class Launched:
    """A block whose results have not been read.

    Attributes:
        slot: where they arrive.
        block: its scores and logits, if they are asked for.
        is_prompt: whether it is the prompt's, of one token.
        random_state: torch's generator before the launch, where the iteration draws from it.
    """

    slot: int
    block: Block | None
    is_prompt: bool
    random_state: torch.Tensor | None


def needed_cache_len(request: Request) -> int:
    """Capacity such that no block reaches the end: the last verify step writes drafts as well."""
    longest = int(request.prompt.lengths_B.max())
    needed = longest + request.max_new_tokens + request.num_drafts + 1
    return max(needed, request.prompt.ids_BP.shape[1], request.min_cache_len)


def calls_the_caller(request: Request) -> bool:
    """Whether code of the caller's own runs between two tokens."""

    def is_own(callback: Any) -> bool:
        if isinstance(callback, list):  # a StoppingCriteriaList is a criterion too
            return any(map(is_own, callback))
        return not type(callback).__module__.startswith("transformers.generation.")

    return any(map(is_own, request.stop.criteria)) or (
        request.streamer is not None and is_own(request.streamer)
    )


class DecodingLoop:
    """The host's side of one `generate` call.

    Args:
        iteration: its state is loaded here.
        is_overlapped: whether results may be read one iteration late.
        graphed: the same iteration as a graph; None runs it eagerly.
    """

    def __init__(
        self,
        request: Request,
        iteration: Iteration,
        *,
        is_overlapped: bool = True,
        graphed: GraphedIteration | None = None,
    ) -> None:
        self.request = request
        self.iteration = iteration
        self.graphed = graphed
        assert iteration.target is not None
        self.target, self.mtp, self.cache = iteration.target, iteration.mtp, iteration.cache
        self.state = iteration.state
        iteration.load(request)
        self.in_halves = request.processor.needs_host
        # Plain sampling draws what transformers draws, so it leaves its generator as it does; and
        # the caller may draw between two tokens.
        draws_as_transformers = request.do_sample and self.state.row_keys_B is None
        waits = self.in_halves or (draws_as_transformers and calls_the_caller(request))
        self.is_overlapped = is_overlapped and not waits
        self.ring = ResultRing(self.state.results_NBR, self.state.counts_B.device)
        self.in_flight: deque[Launched] = deque()
        batch_size = request.batch_size
        # The host's copies, as of the last read.
        self.counts = [0] * batch_size
        self.finished = [b >= batch_size - request.num_padding for b in range(batch_size)]
        self.accept_lengths: list[list[int]] = []
        self.scores = ScoreRecord(batch_size) if request.keeps_scores else None
        self.logits = ScoreRecord(batch_size) if request.keeps_logits else None
        device = self.state.counts_B.device
        self._generator = _default_generator(device) if draws_as_transformers else None
        self._prefilled_at = 0.0
        self.draft_length: AdaptiveDraftLength | None = None
        if request.adapts_draft_length and request.num_drafts > 1:
            self.draft_length = AdaptiveDraftLength(request.num_drafts)
        # Drafts in the relay, and of each iteration so far; how many of these have been learnt
        # from; tokens that each added to the rows that went on behind it.
        self._num_relayed = request.num_drafts
        self._num_verified: list[int] = []
        self._num_learnt = 0
        self._still_going: list[list[int]] = []

    @property
    def text_BW(self) -> torch.Tensor:
        return self.state.text_BW

    def run(self) -> Decoded:
        """Decode until every row is finished."""
        request = self.request
        if request.streamer is not None and not request.is_prompt_streamed:
            request.streamer.put(request.prompt.given_ids_BW.cpu())
        start = time.perf_counter()
        try:
            self._prefill()
            self._prefilled_at = time.perf_counter()
            while not all(self.finished):
                self._iterate()
        finally:
            self.ring.end()
            # What was launched in vain drew nothing, also where a callback has raised.
            if self.in_flight and (state := self.in_flight[0].random_state) is not None:
                assert self._generator is not None
                self._generator.set_state(state)
        end = time.perf_counter()
        if request.streamer is not None:
            request.streamer.end()
        self.text_BW[:, : request.prompt.given_width] = request.prompt.given_ids_BW
        timings = {
            "prefill": self._prefilled_at - start,
            "decode": end - self._prefilled_at,
            "total": end - start,
        }
        return Decoded(
            self.text_BW, self.counts, self.accept_lengths, self.scores, self.logits, timings
        )

    # -- launching --------------------------------------------------------------------------------

    def _iterate(self) -> None:
        """Launch an iteration, unless none can be needed, and read what is due."""
        if self.in_halves:
            lengths = self._next_lengths()
            self._launch(self.iteration.verify(self._view(), lengths[0]), self._random_state())
            self._settle()
            if all(self.finished):
                self.cache.advance(self.state.kept_B)
            else:
                self.iteration.propose(self._view(), *lengths)
            return
        if self._may_go_on():
            random_state = self._random_state()
            lengths = self._next_lengths()
            if self.graphed is None:
                block: Block | None = self.iteration.run(None, *lengths)
            else:
                block = self.graphed.run(*lengths)
            self._launch(block, random_state)
        # The first in flight is the iteration before, or with nothing behind it the last one.
        self._settle()

    def _launch(
        self, block: Block | None, random_state: torch.Tensor | None, is_prompt: bool = False
    ) -> None:
        """Have the results of what was just launched sent to the host."""
        keeps_block = self.scores is not None or self.logits is not None
        block = block if keeps_block else None
        self.in_flight.append(Launched(self.ring.publish(), block, is_prompt, random_state))

    def _may_go_on(self) -> bool:
        """Whether a row may be unfinished behind what is in flight, which adds a token at least."""
        least, budget = len(self.in_flight), self.request.max_new_tokens
        return any(
            not finished and count + least < budget
            for finished, count in zip(self.finished, self.counts)
        )

    def _next_lengths(self) -> tuple[int | None, int | None]:
        """Drafts to verify and to propose in the iteration to be launched.

        What is chosen depends on the results up to the last iteration but one, also where the last
        one has been read: so the text does not depend on the host's lead.
        """
        if self.draft_length is None:
            return None, None
        while self._num_learnt < len(self._num_verified) - 1:
            kept = self._still_going[self._num_learnt]
            self.draft_length.learn(self._num_verified[self._num_learnt], kept)
            self._num_learnt += 1
        lengths = self._num_relayed, self.draft_length.length
        self._num_verified.append(self._num_relayed)
        self._num_relayed = self.draft_length.length
        return lengths

    def _view(self) -> HostView | None:
        if not self.in_halves:
            return None
        width = self.request.prompt.given_width
        return HostView([width + n for n in self.counts], [not f for f in self.finished])

    def _random_state(self) -> torch.Tensor | None:
        return None if self._generator is None else self._generator.get_state()

    # -- results ----------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Read the oldest block in flight, and do with it what the host has to."""
        launched = self.in_flight.popleft()
        request = self.request
        rows = self._read_block(launched.slot)
        # The device did not know yet of a row that a criterion had ended.
        kept = [0 if over else row[KEPT] for row, over in zip(rows, self.finished)]
        is_drawn = [over or bool(row[IS_DRAWN]) for row, over in zip(rows, self.finished)]
        finished = [over or bool(row[FINISHED]) for row, over in zip(rows, self.finished)]
        if (block := launched.block) is not None:
            if self.scores is not None:
                self.scores.append(block.scores_BSV, kept)
            if self.logits is not None:
                self.logits.append(block.logits_BSV.float(), kept)
        if request.stop.criteria:
            accepted = kept
            kept, stopped = self._apply_criteria(kept)
            is_drawn = [ok or n < m for ok, n, m in zip(is_drawn, kept, accepted)]
            finished = [f or s for f, s in zip(finished, stopped)]
            if any(stopped):
                self._end_rows(stopped, kept)
        if not launched.is_prompt:
            self.accept_lengths.append(kept)
            if self.draft_length is not None:
                self._still_going.append([n for n, over in zip(kept, finished) if not over])
        request.processor.check_kept(kept)
        if wrong := [b for b, ok in enumerate(is_drawn) if not ok]:
            raise RuntimeError(
                f"generate: nothing can be sampled for row(s) {wrong}: the scores hold NaN or inf, "
                "or leave no token allowed (the model's weights, or a logits processor)"
            )
        self.counts = [count + n for count, n in zip(self.counts, kept)]
        self.finished = finished
        if launched.is_prompt and self.text_BW.is_cuda:
            self._prefilled_at = time.perf_counter()
        if request.streamer is not None:
            for token in rows[0][FIRST_TOKEN : FIRST_TOKEN + kept[0]]:
                request.streamer.put(torch.tensor([token]))

    def _read_block(self, slot: int) -> list[list[int]]:
        """The only place where the host waits for the device."""
        return self.ring.read(slot)

    def _apply_criteria(self, kept: list[int]) -> tuple[list[int], list[bool]]:
        width = self.request.prompt.given_width
        cut, stopped = cut_by_criteria(
            self.request.stop.criteria,
            self.text_BW,
            [width + count + 1 for count in self.counts],
            kept,
            lambda steps: None if self.scores is None else self.scores.steps(steps),
            width,
            self.request.pad_id,
        )
        counts = [count + n for count, n in zip(self.counts, cut)]
        for record in (self.scores, self.logits):
            if record is not None:
                record.truncate(counts)
        return cut, stopped

    def _end_rows(self, stopped: list[bool], kept: list[int]) -> None:
        """Tell the device which rows a criterion has ended, and where.

        Behind what is in flight; the next iteration finds the rows finished at that length.
        """
        state = self.state
        counts = [count + n for count, n in zip(self.counts, kept)]
        stopped_B, counts_B, kept_B = self._to_device([[int(s) for s in stopped], counts, kept])
        is_ended_B = stopped_B != 0
        state.counts_B.copy_(torch.where(is_ended_B, counts_B, state.counts_B))
        state.kept_B.copy_(torch.where(is_ended_B, kept_B, state.kept_B))
        state.finished_B.logical_or_(is_ended_B)
        if self.in_halves:
            return  # the lengths have not been advanced yet
        lengths_B = state.prompt_lengths_B + counts_B - 1
        self.cache.set_lengths(torch.where(is_ended_B, lengths_B, self.cache.lengths.long()))

    def _to_device(self, rows: list[list[int]]) -> torch.Tensor:
        """Small integers to the device without waiting for it."""
        device = self.state.counts_B.device
        values = torch.tensor(rows, dtype=torch.long)
        if device.type == "cuda":
            values = values.pin_memory()
        return values.to(device, non_blocking=True)

    # -- prompt -----------------------------------------------------------------------------------

    def _prefill(self) -> None:
        """Run the prompts, take each row's first token, and draft behind it."""
        prompt = self.request.prompt
        last_B = prompt.lengths_B - 1
        # Each position's MTP row is made from the token behind it; behind the last one is the
        # bonus token, which the chunks with a last token have to wait for.
        ahead_BP = prompt.ids_BP.roll(-1, dims=1)
        drafts = self.mtp is not None and self.request.max_new_tokens > 1
        num_sequences = self.request.batch_size - self.request.num_padding
        first_end = int(last_B[:num_sequences].min()) if drafts else 0
        waiting: list[tuple[int, torch.Tensor]] = []
        logits_BV: torch.Tensor | None = None
        for start, stop in self._chunks():
            row_B = (last_B - start).clamp(0, stop - start - 1)
            self.cache.set_lengths(start)
            ids_BS = _columns(prompt.ids_BP, start, stop)
            hidden_BSC, chunk_logits_BV = self.target.prompt(ids_BS, row_B, self.cache)
            # Until the chunk that holds a row's last token its choice does not count.
            logits_BV = _choose(last_B >= start, chunk_logits_BV, logits_BV)
            if drafts and stop <= first_end:
                self._extend_chunk(ahead_BP, start, hidden_BSC, row_B)
            elif drafts:
                waiting.append((start, hidden_BSC))
        assert logits_BV is not None
        self.cache.set_lengths(prompt.lengths_B)
        random_state = self._random_state()
        block = self.iteration.accept(logits_BV[:, None], prompt.ids_BP[:, :0], self._view())
        self._launch(block, random_state, is_prompt=True)
        if not self.is_overlapped:
            self._settle()
        if not drafts or not self._may_go_on():
            return

        ahead_BP.scatter_(1, last_B[:, None], self.state.bonus_B[:, None])
        row: tuple[torch.Tensor, ...] = ()
        for start, hidden_BSC in waiting:
            row_B = (last_B - start).clamp(0, hidden_BSC.shape[1] - 1)
            chunk = self._extend_chunk(ahead_BP, start, hidden_BSC, row_B)
            row = tuple(_choose(last_B >= start, new, old) for new, old in zip_longest(chunk, row))
        self.cache.set_lengths(prompt.lengths_B)
        self.iteration.draft(self._view(), *row)

    def _extend_chunk(
        self, ahead_BP: torch.Tensor, start: int, hidden_BSC: torch.Tensor, row_B: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        assert self.mtp is not None
        self.cache.set_lengths(start)
        ids_BS = _columns(ahead_BP, start, start + hidden_BSC.shape[1])
        return self.mtp.extend_prompt(ids_BS, hidden_BSC, row_B, self.cache)

    def _chunks(self) -> list[tuple[int, int]]:
        """First and last column but one of each part of the prompts that is run at a time."""
        width, size = self.request.prompt.ids_BP.shape[1], self.request.prefill_chunk_size
        if size is None:
            # The scores of a row are as wide as the cache.
            num_rows = min(MAX_PROMPT_ROWS, MAX_PROMPT_SCORES // self.cache.max_cache_len)
            size = max(num_rows // self.request.batch_size, MIN_CHUNK)
        starts = list(range(0, width, size))
        # A dynamic size of one is another graph: the last column joins one or two before it.
        if width - starts[-1] == 1 and len(starts) > 1 and size > 1:
            last = starts.pop()
            starts += [last - 1] if size > 2 else []
        return list(zip(starts, [*starts[1:], width]))


def _columns(ids_BP: torch.Tensor, start: int, stop: int) -> torch.Tensor:
    """Columns with strides of their own, also of one row: others are another graph."""
    return ids_BP[:, start:stop].clone(memory_format=torch.contiguous_format)


def _choose(take_new_B: torch.Tensor, new: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Rows of `new` where the flag is set, of `old` elsewhere."""
    if old is None:
        return new
    return torch.where(take_new_B.view(-1, *[1] * (new.dim() - 1)), new, old)


def _default_generator(device: torch.device) -> torch.Generator:
    """The generator that `torch.manual_seed` seeds for a device."""
    if device.type != "cuda":
        return torch.default_generator
    index = torch.cuda.current_device() if device.index is None else device.index
    return torch.cuda.default_generators[index]
