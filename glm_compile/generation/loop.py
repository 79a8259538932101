"""The decoding loop: verify, accept, draft-extend, draft steps, and the relay to the next
iteration.

    L = tokens in the cache; the bonus token is the last one generated: its position is L, and it
    is not in the cache yet.
    verify        the model on [bonus, d1..dk], written at L..L+k; row s follows s drafts
    accept        n tokens of each row, clipped by end-of-sequence and budget
    draft-extend  the MTP layer on the same rows, with the accepted tokens; row n-1 gives the next
    d1,
                  its hidden state and the selected latents that the draft steps attend to
    advance       L += n; what was written beyond is never seen again and gets overwritten
    draft         k-1 more steps of the MTP layer

Without drafts this is plain decoding. Lengths, counts, finished flags and the budget are tensors on
the device; the host reads once per iteration, in `_read_block`. A finished row keeps n = 0: it
takes part, and writes behind its frozen length only.

B batch, S = 1 + k rows of a block, k drafts, W width of the text buffer, C hidden, K selected keys,
V vocabulary.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest

import torch

from glm_compile.cache import PagedCache
from glm_compile.generation.accept import (
    accept_greedy,
    append_block,
    clip_block,
    last_kept,
    last_row,
)
from glm_compile.generation.output import ScoreRecord
from glm_compile.generation.request import Request
from glm_compile.generation.sampling import draw, has_weight, probabilities, reject
from glm_compile.generation.steps import MtpSteps, TargetSteps
from glm_compile.generation.stopping import cut_by_criteria


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


@dataclass
class Relay:
    """What one iteration hands to the next.

    Attributes:
        bonus_B: last token of each row.
        drafts_Bk: proposals for the tokens behind it.
        draft_probs_BkV: distributions that they were drawn from; None when greedy.
    """

    bonus_B: torch.Tensor
    drafts_Bk: torch.Tensor
    draft_probs_BkV: torch.Tensor | None


def needed_cache_len(request: Request) -> int:
    """Capacity such that no block reaches the end: the last verify step writes drafts as well."""
    longest = int(request.prompt.lengths_B.max())
    needed = longest + request.max_new_tokens + request.num_drafts + 1
    return max(needed, request.prompt.ids_BP.shape[1], request.min_cache_len)


class DecodingLoop:
    """State and steps of one `generate` call."""

    def __init__(
        self, request: Request, target: TargetSteps, mtp: MtpSteps | None, cache: PagedCache
    ) -> None:
        self.request = request
        self.target = target
        self.mtp = mtp
        self.cache = cache
        prompt = request.prompt
        batch_size, given_width = prompt.given_ids_BW.shape
        device = prompt.ids_BP.device
        # Room for the drafts behind the last token, and one column for what is not kept.
        width = given_width + request.max_new_tokens + request.num_drafts + 1
        self.text_BW = prompt.given_ids_BW.new_full((batch_size, width), 0)
        self.text_BW[:, :given_width] = prompt.aligned_ids_BW
        self.eos_ids_E = torch.tensor(request.stop.eos_ids, dtype=torch.long, device=device)
        self.counts_B = torch.zeros(batch_size, dtype=torch.long, device=device)
        self.finished_B = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self.draft_steps = torch.arange(max(request.num_drafts, 1), device=device)
        # The host's copies, as of the last read.
        self.counts = [0] * batch_size
        self.finished = [False] * batch_size
        self.accept_lengths: list[list[int]] = []
        self.scores = ScoreRecord(batch_size) if request.keeps_scores else None
        self.logits = ScoreRecord(batch_size) if request.keeps_logits else None

    def run(self) -> Decoded:
        """Decode until every row is finished."""
        request = self.request
        if request.streamer is not None and not request.is_prompt_streamed:
            request.streamer.put(request.prompt.given_ids_BW.cpu())
        start = time.perf_counter()
        relay = self._prefill()
        prefilled = time.perf_counter()
        while not all(self.finished):
            relay = self._iterate(relay)
        end = time.perf_counter()
        if request.streamer is not None:
            request.streamer.end()
        self.text_BW[:, : request.prompt.given_width] = request.prompt.given_ids_BW
        timings = {"prefill": prefilled - start, "decode": end - prefilled, "total": end - start}
        return Decoded(
            self.text_BW, self.counts, self.accept_lengths, self.scores, self.logits, timings
        )

    # -- one iteration ----------------------------------------------------------------------------

    def _iterate(self, relay: Relay) -> Relay:
        ids_BS = torch.cat([relay.bonus_B[:, None], relay.drafts_Bk], dim=1)
        hidden_BSC, logits_BSV = self.target.verify(ids_BS, self.cache)
        tokens_BS, kept_B, kept = self._take_block(
            logits_BSV, relay.drafts_Bk, relay.draft_probs_BkV
        )
        self.accept_lengths.append(kept)
        if all(self.finished):
            self.cache.advance(kept_B)
            return relay
        bonus_B = last_kept(tokens_BS, kept_B)
        if self.mtp is None:
            self.cache.advance(kept_B)
            return Relay(bonus_B, relay.drafts_Bk, relay.draft_probs_BkV)
        row = self.mtp.extend(tokens_BS, hidden_BSC, last_row(kept_B), self.cache)
        self.cache.advance(kept_B)
        return self._draft(bonus_B, *row)

    def _take_block(
        self,
        logits_BSV: torch.Tensor,
        drafts_Bk: torch.Tensor,
        draft_probs_BkV: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor, list[int]]:
        """Accept, clip and append; returns the block's tokens and how many each row keeps."""
        request = self.request
        scores_BSV = self._process(logits_BSV, 0)
        if request.do_sample:
            probs_BSV = probabilities(scores_BSV)
            if draft_probs_BkV is None:
                draft_probs_BkV = probs_BSV[:, :0]
            tokens_BS, num_tokens_B = reject(probs_BSV, draft_probs_BkV, drafts_Bk)
            has_weight_B = has_weight(probs_BSV, tokens_BS, num_tokens_B)
        else:
            tokens_BS = scores_BSV.argmax(dim=-1)
            num_tokens_B = accept_greedy(tokens_BS, drafts_Bk)
            has_weight_B = torch.ones_like(self.finished_B)
        remaining_B = request.max_new_tokens - self.counts_B
        kept_B, finished_B = clip_block(
            tokens_BS, num_tokens_B, remaining_B, self.finished_B, self.eos_ids_E
        )
        ends_B = self.counts_B + request.prompt.given_width
        append_block(self.text_BW, tokens_BS, kept_B, ends_B)
        # Only the last token of a block can lack one: a draft without is never accepted.
        is_drawn_B = has_weight_B | (kept_B < num_tokens_B)
        tokens, kept, finished, is_drawn = self._read_block(
            tokens_BS, kept_B, finished_B, is_drawn_B
        )
        if self.scores is not None:
            self.scores.append(scores_BSV, kept)
        if self.logits is not None:
            self.logits.append(logits_BSV.float(), kept)
        if request.stop.criteria:
            accepted = kept
            kept, finished = self._apply_criteria(kept, finished)
            is_drawn = [ok or n < m for ok, n, m in zip(is_drawn, kept, accepted)]
            kept_B = torch.tensor(kept, device=kept_B.device)
            finished_B = torch.tensor(finished, device=finished_B.device)
        request.processor.check_kept(kept)
        if wrong := [b for b, ok in enumerate(is_drawn) if not ok]:
            raise RuntimeError(
                f"generate: nothing can be sampled for row(s) {wrong}: the scores hold NaN or inf, "
                "or leave no token allowed (the model's weights, or a logits processor)"
            )
        self.counts_B = self.counts_B + kept_B
        self.finished_B = finished_B
        self.counts = [count + n for count, n in zip(self.counts, kept)]
        self.finished = finished
        if request.streamer is not None:
            for token in tokens[0][: kept[0]]:
                request.streamer.put(torch.tensor([token]))
        return tokens_BS, kept_B, kept

    def _read_block(
        self,
        tokens_BS: torch.Tensor,
        kept_B: torch.Tensor,
        finished_B: torch.Tensor,
        is_drawn_B: torch.Tensor,
    ) -> tuple[list[list[int]], list[int], list[bool], list[bool]]:
        """The iteration's only transfer to the host."""
        flags_B2 = torch.stack([finished_B, is_drawn_B], dim=1).long()
        rows = torch.cat([tokens_BS, kept_B[:, None], flags_B2], dim=1).cpu().tolist()
        tokens, kept = [r[:-3] for r in rows], [r[-3] for r in rows]
        return tokens, kept, [bool(r[-2]) for r in rows], [bool(r[-1]) for r in rows]

    def _apply_criteria(
        self, kept: list[int], finished: list[bool]
    ) -> tuple[list[int], list[bool]]:
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
        return cut, [f or s for f, s in zip(finished, stopped)]

    # -- drafts -----------------------------------------------------------------------------------

    def _draft(
        self,
        bonus_B: torch.Tensor,
        hidden_B1C: torch.Tensor,
        logits_B1V: torch.Tensor,
        *seed: torch.Tensor,
    ) -> Relay:
        """Propose k tokens behind the bonus token; the first comes from draft-extend's logits.

        Args:
            seed: latents [B,K,X] and which count [B,K], for steps with a shared index.
        """
        assert self.mtp is not None
        num_drafts = self.request.num_drafts
        is_shared = self.request.is_index_shared
        held_B = None if is_shared else self.cache.lengths.clone()
        drafts, probs = [], []
        for step in range(num_drafts):
            scores_B1V = self._process(logits_B1V, step)
            if self.request.do_sample:
                probs_B1V = probabilities(scores_B1V)
                probs.append(probs_B1V)
                draft_B1 = draw(probs_B1V)
            else:
                draft_B1 = scores_B1V.argmax(dim=-1)
            drafts.append(draft_B1)
            if self.request.processor.needs_text:
                ends_B1 = (self.counts_B + self.request.prompt.given_width + step)[:, None]
                self.text_BW.scatter_(1, ends_B1, draft_B1)
            if step == num_drafts - 1:
                break
            if is_shared:
                hidden_B1C, logits_B1V = self.mtp.draft(
                    draft_B1, hidden_B1C, *seed, self.draft_steps[step], self.cache.lengths
                )
            else:
                row_B = torch.zeros_like(bonus_B)
                hidden_B1C, logits_B1V = self.mtp.extend(draft_B1, hidden_B1C, row_B, self.cache)
                self.cache.advance(1)
        if held_B is not None:
            self.cache.set_lengths(held_B)
        draft_probs_BkV = torch.cat(probs, dim=1) if probs else None
        return Relay(bonus_B, torch.cat(drafts, dim=1), draft_probs_BkV)

    def _process(self, logits_BSV: torch.Tensor, num_drafts_before: int) -> torch.Tensor:
        """Scores of rows that follow the text so far and that many drafts."""
        width = self.request.prompt.given_width
        first_ends = [width + count + num_drafts_before for count in self.counts]
        active = [not finished for finished in self.finished]
        return self.request.processor(
            logits_BSV, self.text_BW, first_ends, active, num_drafts_before
        )

    # -- prompt -----------------------------------------------------------------------------------

    def _prefill(self) -> Relay:
        """Run the prompts, take each row's first token, and draft behind it."""
        prompt = self.request.prompt
        last_B = prompt.lengths_B - 1
        hidden: list[torch.Tensor] = []
        logits_BV: torch.Tensor | None = None
        for start, ids_BS in self._chunks(prompt.ids_BP):
            row_B = (last_B - start).clamp(0, ids_BS.shape[1] - 1)
            chunk_hidden_BSC, chunk_logits_BV = self.target.prompt(ids_BS, row_B, self.cache)
            hidden.append(chunk_hidden_BSC)
            # Until the chunk that holds a row's last token its choice does not count.
            logits_BV = _choose(last_B >= start, chunk_logits_BV, logits_BV)
        assert logits_BV is not None
        nothing_B0 = prompt.ids_BP[:, :0]
        tokens_B1, _kept_B, _kept = self._take_block(logits_BV[:, None], nothing_B0, None)
        bonus_B = tokens_B1[:, 0]
        if self.mtp is None or all(self.finished):
            self.cache.set_lengths(prompt.lengths_B)
            return Relay(bonus_B, nothing_B0, None)

        # Each position's MTP row is made from the token behind it; behind the last one is the
        # bonus.
        ahead_BP = prompt.ids_BP.roll(-1, dims=1).scatter(1, last_B[:, None], tokens_B1)
        row: tuple[torch.Tensor, ...] = ()
        for (start, ids_BS), hidden_BSC in zip(self._chunks(ahead_BP), hidden):
            row_B = (last_B - start).clamp(0, ids_BS.shape[1] - 1)
            chunk = self.mtp.extend_prompt(ids_BS, hidden_BSC, row_B, self.cache)
            row = tuple(_choose(last_B >= start, new, old) for new, old in zip_longest(chunk, row))
        self.cache.set_lengths(prompt.lengths_B)
        return self._draft(bonus_B, *row)

    def _chunks(self, ids_BP: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """Yield (start, ids [B,S]) with the cache's lengths at the chunk's start."""
        size = self.request.prefill_chunk_size or ids_BP.shape[1]
        for start in range(0, ids_BP.shape[1], size):
            self.cache.set_lengths(start)
            yield start, ids_BP[:, start : start + size].contiguous()


def _choose(take_new_B: torch.Tensor, new: torch.Tensor, old: torch.Tensor | None) -> torch.Tensor:
    """Rows of `new` where the flag is set, of `old` elsewhere."""
    if old is None:
        return new
    return torch.where(take_new_B.view(-1, *[1] * (new.dim() - 1)), new, old)
