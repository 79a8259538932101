"""One iteration of decoding as work for the device: nothing in it reads a value on the host.

    L = tokens in the cache; the bonus token is the last one generated: its position is L, and it
    is not in the cache yet.
    verify        the model on [bonus, d1..dk], written at L..L+k; row s follows s drafts
    accept        n tokens of each row, clipped by end-of-sequence and budget
    draft-extend  the MTP layer on the same rows, with the accepted tokens; row n-1 gives the next
                  d1, its hidden state and the selected latents that the draft steps attend to
    advance       L += n; what was written beyond is never seen again and gets overwritten
    draft         k-1 more steps of the MTP layer
    relay         bonus token, drafts and their distributions, in place

Without drafts this is plain decoding. A finished row keeps n = 0: it takes part, and writes behind
its frozen length only. So an iteration more than was needed changes nothing.

B batch, S = 1 + k rows of a block, k drafts, C hidden, K selected keys, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from glm_compile.cache import PagedCache
from glm_compile.generation.device_processors import DeviceProcessors
from glm_compile.generation.request import Request
from glm_compile.generation.sampling import draw, has_weight, probabilities
from glm_compile.generation.state import DecodingState
from glm_compile.ops.accept_block import accept_block
from glm_compile.ops.rejection_sampling import Purpose, draw_token, rejection_sample
from glm_compile.ops.row_argmax import row_argmax

if TYPE_CHECKING:
    from glm_compile.generation.steps import MtpSteps, TargetSteps


@dataclass(frozen=True)
class Block:
    """Scores and logits [B,S,V] of a verified block."""

    scores_BSV: torch.Tensor
    logits_BSV: torch.Tensor


@dataclass(frozen=True)
class HostView:
    """What a processor that looks at the text has to know on the host.

    Attributes:
        ends: columns of each row's text so far.
        active: rows that are not finished.
    """

    ends: list[int]
    active: list[bool]


class Iteration:
    """The steps of one iteration on a state, a cache, and the forwards of a model and its draft.

    Args:
        request: taken from it is what is the same for each call that uses this object: processors,
            sampling, number and kind of drafts.
        mtp: None without drafts.
    """

    def __init__(
        self,
        request: Request,
        target: TargetSteps,
        mtp: MtpSteps | None,
        cache: PagedCache,
        *,
        min_text_width: int = 0,
    ) -> None:
        self.processor = request.processor
        self.do_sample = request.do_sample
        self.num_drafts = request.num_drafts
        self.is_index_shared = request.is_index_shared
        self.keeps_block = request.keeps_scores or request.keeps_logits
        self.target: TargetSteps | None = target
        self.mtp = mtp
        self.cache = cache
        device = cache.lengths.device
        self.state = DecodingState.allocate(
            request, target.model.config.vocab_size, device, min_text_width
        )
        self._first_row_B = torch.zeros(request.batch_size, dtype=torch.long, device=device)
        self._hidden_BSC: torch.Tensor | None = None

    def load(self, request: Request) -> None:
        """Start a call like the one that this object was made for."""
        self.state.load(request)
        if isinstance(self.processor, DeviceProcessors):
            assert isinstance(request.processor, DeviceProcessors)
            self.processor.take(request.processor)

    def run(
        self,
        view: HostView | None = None,
        num_verified: int | None = None,
        num_proposed: int | None = None,
    ) -> Block:
        """All of it.

        Args:
            num_verified: drafts in the relay; None: all that it has room for.
            num_proposed: drafts to put there for the next iteration.
        """
        if self.mtp is None:
            return self.verify(view, num_verified, advances=True)
        block = self.verify(view, num_verified)
        self.propose(view, num_verified, num_proposed)
        return block

    def verify(
        self,
        view: HostView | None = None,
        num_verified: int | None = None,
        advances: bool = False,
    ) -> Block:
        """Run the model on the block, accept, append, and put the results where they are read.

        Args:
            advances: whether what was kept counts as held afterwards: `propose` is not called.
        """
        assert self.target is not None
        block_BS = self._columns(self.state.block_BS, num_verified)
        self._hidden_BSC, logits_BSV = self.target.verify(block_BS, self.cache)
        return self.accept(logits_BSV, block_BS[:, 1:], view, advances)

    def accept(
        self,
        logits_BSV: torch.Tensor,
        drafts_Bk: torch.Tensor,
        view: HostView | None = None,
        advances: bool = False,
    ) -> Block:
        """Accept, clip and append a block; that of the prompt has no drafts."""
        state = self.state
        num_tokens_B, has_weight_B = None, None
        if self.do_sample:
            scores_BSV, probs_BSV = self._distribution(logits_BSV, view, 0)
            tokens_BS, num_tokens_B, has_weight_B = self._draw(probs_BSV, drafts_Bk)
        else:
            scores_BSV = self._process(logits_BSV, view, 0)
            tokens_BS = row_argmax(scores_BSV)
        rules = self.processor if isinstance(self.processor, DeviceProcessors) else None
        # Before the counts move on; without rules nobody asks for it.
        starts_B = state.prompt_width + state.counts_B if rules and rules.rules else None
        accept_block(
            tokens_BS,
            drafts_Bk,
            num_tokens_B=num_tokens_B,
            has_weight_B=has_weight_B,
            eos_ids_E=state.eos_ids_E,
            budget=state.budget,
            prompt_width=state.prompt_width,
            text_BW=state.text_BW,
            counts_B=state.counts_B,
            finished_B=state.finished_B,
            kept_B=state.kept_B,
            tokens_BS=state.tokens_BS,
            bonus_B=state.bonus_B,
            row_B=state.row_B,
            results_NBR=state.results_NBR,
            turns_B=state.turns_B,
            lengths_B=self.cache.lengths if advances else None,
        )
        if advances:
            self.cache.note_advance()
        if rules is not None and starts_B is not None:
            rules.note(tokens_BS, state.kept_B, starts_B)
        return Block(scores_BSV, logits_BSV)

    def propose(
        self,
        view: HostView | None = None,
        num_verified: int | None = None,
        num_proposed: int | None = None,
    ) -> None:
        """Advance by what was kept, and draft behind it."""
        state = self.state
        if self.mtp is None:
            self.cache.advance(state.kept_B)
            return
        assert self._hidden_BSC is not None
        tokens_BS = self._columns(state.tokens_BS, num_verified)
        row = self.mtp.extend(tokens_BS, self._hidden_BSC, state.row_B, self.cache)
        self._hidden_BSC = None
        self.cache.advance(state.kept_B)
        self.draft(view, *row, num_proposed=num_proposed)

    def draft(
        self,
        view: HostView | None,
        hidden_B1C: torch.Tensor,
        logits_B1V: torch.Tensor,
        *seed: torch.Tensor,
        num_proposed: int | None = None,
    ) -> None:
        """Propose tokens behind the bonus token; the first comes from draft-extend's logits.

        Args:
            seed: for steps with a shared index: latents [B,K,X], the rows that count [B,K], and the
                steps' cosines and sines [B,X,P].
            num_proposed: how many; None: k.
        """
        assert self.mtp is not None
        state = self.state
        held_B = None if self.is_index_shared else self.cache.lengths.clone()
        num_proposed = self.num_drafts if num_proposed is None else num_proposed
        tables = [by_step(table_BXP) for table_BXP in seed[2:]]
        drafts, probs = [], []
        for step in range(num_proposed):
            if self.do_sample:
                _, probs_B1V = self._distribution(logits_B1V, view, step, wants_scores=False)
                probs.append(probs_B1V)
                draft_B1 = self._draw_draft(probs_B1V, step)
                drafts.append(draft_B1)
            else:
                draft_B1 = row_argmax(
                    self._process(logits_B1V, view, step),
                    copy=state.block_BS[:, 1 + step : 2 + step],
                )
            if self.processor.needs_text:
                ends_B1 = (state.prompt_width + state.counts_B + step)[:, None]
                state.text_BW.scatter_(1, ends_B1, draft_B1)
            if step == num_proposed - 1:
                break
            if self.is_index_shared:
                hidden_B1C, logits_B1V = self.mtp.draft(
                    draft_B1,
                    hidden_B1C,
                    *seed[:2],
                    *(table_XB1P[step] for table_XB1P in tables),
                )
            else:
                hidden_B1C, logits_B1V = self.mtp.extend(
                    draft_B1, hidden_B1C, self._first_row_B, self.cache
                )
                self.cache.advance(1)
        if held_B is not None:
            self.cache.set_lengths(held_B)
        if not self.do_sample:
            return  # each draft is where it belongs
        state.block_BS[:, 1 : 1 + num_proposed].copy_(torch.cat(drafts, dim=1))
        if (into := state.draft_probs_BkV) is not None:
            _cat_into(into[:, :num_proposed], probs)

    @staticmethod
    def _columns(values_BS: torch.Tensor, num_drafts: int | None) -> torch.Tensor:
        """The columns of a block with that many drafts, with strides of their own.

        Also of one row, whose columns count as contiguous as they are: other strides are another
        graph.
        """
        if num_drafts is None:
            return values_BS
        return values_BS[:, : 1 + num_drafts].clone(memory_format=torch.contiguous_format)

    def _draw(
        self, probs_BSV: torch.Tensor, drafts_Bk: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Tokens [B,S], their number [B], and whether the last of them had a probability [B].

        With drafts in the call by rejection, without by a draw that equals transformers' own.
        """
        state = self.state
        if state.draft_probs_BkV is None or state.row_keys_B is None:
            tokens_B1 = draw(probs_BSV)
            has_weight_B = has_weight(probs_BSV.squeeze(1), tokens_B1.squeeze(1))
            return tokens_B1, torch.ones_like(state.counts_B), has_weight_B
        num_drafts = drafts_Bk.shape[1]
        return rejection_sample(
            probs_BSV,
            state.draft_probs_BkV[:, :num_drafts],
            drafts_Bk,
            state.row_keys_B,
            state.counts_B,
        )

    def _draw_draft(self, probs_B1V: torch.Tensor, step: int) -> torch.Tensor:
        state = self.state
        assert state.row_keys_B is not None
        draft_B = draw_token(
            probs_B1V.squeeze(1), state.row_keys_B, state.counts_B, Purpose.DRAFT, offset=step
        )
        return draft_B[:, None]

    def _distribution(
        self,
        logits_BSV: torch.Tensor,
        view: HostView | None,
        num_drafts_before: int,
        wants_scores: bool = True,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Scores, if anybody asks for them, and probabilities."""
        state, processor = self.state, self.processor
        if state.row_keys_B is None or not isinstance(processor, DeviceProcessors):
            scores_BSV = self._process(logits_BSV, view, num_drafts_before)
            return scores_BSV, probabilities(scores_BSV)
        scores_BSV = logits_BSV
        if self.keeps_block and wants_scores:
            scores_BSV = self._process(logits_BSV, view, num_drafts_before)
        probs_BSV = processor.probabilities(
            logits_BSV, state.text_BW, self._starts(processor), num_drafts_before
        )
        return scores_BSV, probs_BSV

    def _starts(self, processor: DeviceProcessors) -> torch.Tensor:
        """Columns of each row's text; anything where no processor looks at it."""
        counts_B = self.state.counts_B
        return self.state.prompt_width + counts_B if processor.needs_text else counts_B

    def _process(
        self, logits_BSV: torch.Tensor, view: HostView | None, num_drafts_before: int
    ) -> torch.Tensor:
        """Scores of rows that follow the text so far and that many drafts."""
        state, processor = self.state, self.processor
        if isinstance(processor, DeviceProcessors):
            if not processor.rules and not self.do_sample and not self.keeps_block:
                return logits_BSV  # the same argmax in any dtype
            starts_B = self._starts(processor)
            return processor(logits_BSV, state.text_BW, starts_B, num_drafts_before)
        assert view is not None
        return processor(
            logits_BSV,
            state.text_BW,
            [end + num_drafts_before for end in view.ends],
            view.active,
            num_drafts_before,
        )


def by_step(values_BXP: torch.Tensor) -> torch.Tensor:
    """As [X,B,1,P], contiguous: a step with other strides would be another graph."""
    batch_size, num_steps, width = values_BXP.shape
    return values_BXP.transpose(0, 1).contiguous().view(num_steps, batch_size, 1, width)


def _cat_into(into: torch.Tensor, parts: list[torch.Tensor]) -> None:
    """Write the parts one behind the other along axis 1."""
    if into.is_contiguous():
        torch.cat(parts, dim=1, out=into)
    else:
        into.copy_(torch.cat(parts, dim=1))
