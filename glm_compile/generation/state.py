"""What decoding keeps on the device, and how its results reach the host.

Every tensor of the state is allocated once, contiguous, and updated in place, so that a captured
iteration finds it at the same address each time.

B batch, k drafts of a block, S = 1 + k rows of a verify step, W width of the text buffer, E ids
that end a sequence, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from glm_compile.generation.request import Request
from glm_compile.ops.accept_block import (
    FINISHED,
    FIRST_TOKEN,
    IS_DRAWN,
    KEPT,
    can_write_to_host,
)
from glm_compile.ops.rejection_sampling.random_numbers import row_keys

__all__ = [
    "FINISHED",
    "FIRST_TOKEN",
    "IS_DRAWN",
    "KEPT",
    "DecodingState",
    "ResultRing",
    "needed_width",
    "padded_eos",
]

# One iteration is read while the next one runs, and one more may be on its way.
NUM_SLOTS = 4
# Ids that end a sequence are padded to a multiple of this, so that calls share their graphs.
_EOS_MULTIPLE = 8


@dataclass
class DecodingState:
    """The device's side of one `generate` call.

    Attributes:
        text_BW: prompt with its padding on the left, then each row's tokens; the last column is a
            bin. What follows a row's tokens is undefined.
        prompt_width: columns of the prompt, 0-d.
        prompt_lengths_B: real tokens of each prompt.
        budget: most new tokens of a row, 0-d.
        eos_ids_E: ids that end a sequence, and -1.
        counts_B: new tokens so far.
        finished_B: bool, rows that take nothing any more.
        block_BS: relay to the next verify step: the bonus token (the last one generated), and the
            drafts behind it.
        draft_probs_BkV: relay: distributions that the drafts were drawn from; None when greedy.
        tokens_BS: tokens of the block that was verified last.
        kept_B: how many of them each row keeps.
        row_B: row of the block of each row's last kept token; 0 where none is kept.
        row_keys_B: keys of the random numbers; None where torch's own generator is used.
        results_NBR: what the host reads of the last iterations: kept tokens, finished, whether the
            last token had a probability, the block's tokens. In the host's own memory where the
            device can write to it, which costs no copy between two iterations.
        turns_B: iterations so far: the next one's place among them.
    """

    text_BW: torch.Tensor
    prompt_width: torch.Tensor
    prompt_lengths_B: torch.Tensor
    budget: torch.Tensor
    eos_ids_E: torch.Tensor
    counts_B: torch.Tensor
    finished_B: torch.Tensor
    block_BS: torch.Tensor
    draft_probs_BkV: torch.Tensor | None
    tokens_BS: torch.Tensor
    kept_B: torch.Tensor
    row_B: torch.Tensor
    row_keys_B: torch.Tensor | None
    results_NBR: torch.Tensor
    turns_B: torch.Tensor

    @property
    def bonus_B(self) -> torch.Tensor:
        """The last kept token of each row, that of row 0 where none is: it begins the relay."""
        return self.block_BS[:, 0]

    @classmethod
    def allocate(
        cls, request: Request, vocab_size: int, device: torch.device, min_width: int = 0
    ) -> DecodingState:
        """State for calls like this one; `load` fills it."""
        batch_size, num_drafts = request.batch_size, request.num_drafts

        def integers(*shape: int) -> torch.Tensor:
            return torch.zeros(shape, dtype=torch.long, device=device)

        # Tensors made in inference mode could not be written in a later call outside of it.
        with torch.inference_mode(False):
            draws_drafts = request.do_sample and num_drafts > 0
            return cls(
                text_BW=integers(batch_size, max(needed_width(request), min_width)),
                prompt_width=integers(),
                prompt_lengths_B=integers(batch_size),
                budget=integers(),
                eos_ids_E=integers(padded_eos(request)),
                counts_B=integers(batch_size),
                finished_B=torch.zeros(batch_size, dtype=torch.bool, device=device),
                block_BS=integers(batch_size, 1 + num_drafts),
                draft_probs_BkV=torch.zeros(batch_size, num_drafts, vocab_size, device=device)
                if draws_drafts
                else None,
                tokens_BS=integers(batch_size, 1 + num_drafts),
                kept_B=integers(batch_size),
                row_B=integers(batch_size),
                row_keys_B=integers(batch_size) if draws_drafts else None,
                results_NBR=torch.zeros(
                    NUM_SLOTS,
                    batch_size,
                    FIRST_TOKEN + 1 + num_drafts,
                    dtype=torch.long,
                    **(
                        {"pin_memory": True}
                        if can_write_to_host(device, 1 + num_drafts)
                        else {"device": device}
                    ),
                ),
                turns_B=integers(batch_size),
            )

    def load(self, request: Request) -> None:
        """Start a call: nothing is generated, the prompt is the text.

        Sampling with drafts takes its seed here, one number of the device's default generator.
        """
        prompt = request.prompt
        for tensor in (
            self.text_BW,
            self.counts_B,
            self.finished_B,
            self.block_BS,
            self.kept_B,
            self.turns_B,
        ):
            tensor.zero_()
        self.finished_B[request.batch_size - request.num_padding :] = True
        self.text_BW[:, : prompt.given_width] = prompt.aligned_ids_BW
        self.prompt_width.fill_(prompt.given_width)
        self.prompt_lengths_B.copy_(prompt.lengths_B)
        self.budget.fill_(request.max_new_tokens)
        self.eos_ids_E.fill_(-1)
        eos_ids = torch.tensor(request.stop.eos_ids, dtype=torch.long)
        self.eos_ids_E[: len(eos_ids)] = eos_ids.to(self.eos_ids_E.device)
        if self.row_keys_B is not None:
            seed = torch.randint(2**63 - 1, (), device=self.row_keys_B.device)
            self.row_keys_B.copy_(row_keys(seed, request.batch_size))

    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(t.nbytes for t in vars(self).values() if isinstance(t, torch.Tensor))


def needed_width(request: Request) -> int:
    """Columns of the text: room for drafts behind the last token, and one for what is not kept."""
    return request.prompt.given_width + request.max_new_tokens + request.num_drafts + 1


def padded_eos(request: Request) -> int:
    """Places for the ids that end a sequence."""
    return -(-len(request.stop.eos_ids) // _EOS_MULTIPLE) * _EOS_MULTIPLE


class ResultRing:
    """Results of the last iterations on the host.

    Reading one waits for its iteration and nothing else: an event follows each. Where the device
    does not write to the host's memory they are copied there, on a CUDA device behind each
    iteration.
    """

    def __init__(self, results_NBR: torch.Tensor, device: torch.device) -> None:
        self._results_NBR = results_NBR
        self._device = device
        is_cuda = device.type == "cuda"
        self._is_copied = results_NBR.is_cuda
        self._host_NBR = (
            torch.zeros(results_NBR.shape, dtype=results_NBR.dtype, pin_memory=True)
            if self._is_copied
            else results_NBR
        )
        self._events = [torch.cuda.Event() if is_cuda else None for _ in range(NUM_SLOTS)]
        self._num_published = 0

    def publish(self) -> int:
        """Note the iteration that was launched last; returns its slot."""
        slot = self._num_published % NUM_SLOTS
        self._num_published += 1
        if self._is_copied:
            self._host_NBR[slot].copy_(self._results_NBR[slot], non_blocking=True)
        if (event := self._events[slot]) is not None:
            event.record(torch.cuda.current_stream(self._device))
        return slot

    def read(self, slot: int) -> list[list[int]]:
        """The results of a slot, when they are there."""
        if (event := self._events[slot]) is not None:
            event.synchronize()
        return self._host_NBR[slot].tolist()

    def end(self) -> None:
        """Keep the host's memory until what was launched has ended, whoever gives it up before.

        A copy from it tells torch's allocator that the stream uses it.
        """
        if self._device.type == "cuda" and not self._is_copied:
            self._results_NBR[0, 0, :1].to(self._device, non_blocking=True)
