"""Prompts as the loop wants them: no padding inside, ragged lengths, padding on the right.

B batch, W prompt width as given, P compacted prompt width.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch


@dataclass(frozen=True)
class Prompt:
    """Prompts of one batch.

    Attributes:
        given_ids_BW: the ids as the caller passed them; the output starts with these.
        aligned_ids_BW: the same with all padding on the left, so that generated tokens follow the
            real ones: what logits processors and stopping criteria see.
        ids_BP: real tokens moved to the left, in order; the rest of a row is `fill_id`.
        lengths_B: number of real tokens of each row, at least 1.
    """

    given_ids_BW: torch.Tensor
    aligned_ids_BW: torch.Tensor
    ids_BP: torch.Tensor
    lengths_B: torch.Tensor

    @property
    def given_width(self) -> int:
        """Width of the ids as the caller passed them, which is what `max_length` counts."""
        return self.given_ids_BW.shape[1]


def check_mask_shape(input_ids_BW: torch.Tensor, attention_mask_BW: torch.Tensor | None) -> None:
    """Raise ValueError unless the mask, if there is one, has a value for each id.

    Before transformers prepares the call, which drops a mask of ones whatever its shape.
    """
    if attention_mask_BW is None:
        return
    found: Any = type(attention_mask_BW).__name__
    if isinstance(attention_mask_BW, torch.Tensor):
        found = tuple(attention_mask_BW.shape)
    if found != tuple(input_ids_BW.shape):
        raise ValueError(
            "generate: attention_mask must be a tensor in the shape of input_ids "
            f"{tuple(input_ids_BW.shape)}, got {found}"
        )


def compact_prompt(
    input_ids_BW: torch.Tensor,
    attention_mask_BW: torch.Tensor | None = None,
    *,
    fill_id: int = 0,
    min_width: int = 1,
) -> Prompt:
    """Remove the padding of each row: left, right or in the middle.

    A token's position is the number of real tokens before it, so a compacted row is the prompt that
    the padded row means. A right-padded row goes on after its last real token (transformers would
    go on after the padding, and warns).

    Args:
        input_ids_BW: integer ids.
        attention_mask_BW: 0 (or False) for padding; None: every token is real.
        fill_id: a valid token id for the unused tail.
        min_width: the result is at least this wide.
    """
    if input_ids_BW.dim() != 2 or input_ids_BW.shape[1] == 0 or input_ids_BW.shape[0] == 0:
        raise ValueError(
            "generate: input_ids must be [batch, length] with at least one token, got "
            f"{tuple(input_ids_BW.shape)}"
        )
    if input_ids_BW.dtype.is_floating_point or input_ids_BW.dtype in (torch.bool, torch.complex64):
        raise ValueError(f"generate: input_ids must be integers, got {input_ids_BW.dtype}")
    batch_size, width = input_ids_BW.shape
    check_mask_shape(input_ids_BW, attention_mask_BW)
    if attention_mask_BW is None:
        real_BW = torch.ones_like(input_ids_BW, dtype=torch.bool)
    else:
        real_BW = attention_mask_BW.to(device=input_ids_BW.device) != 0
        if not bool((attention_mask_BW == real_BW.to(attention_mask_BW.device)).all()):
            raise ValueError("generate: attention_mask must hold 0 (padding) and 1 only")
    lengths_B = real_BW.sum(dim=1)
    if bool((lengths_B == 0).any()):
        rows = (lengths_B == 0).nonzero().flatten().tolist()
        raise ValueError(f"generate: attention_mask leaves no token in row(s) {rows}")
    compact_width = max(int(lengths_B.max()), min_width)
    # A stable sort keeps the order of the real tokens and moves the padding behind them.
    order_BW = torch.sort((~real_BW).to(torch.int8), dim=1, stable=True).indices
    ids_BP = input_ids_BW.new_full((batch_size, compact_width), fill_id, dtype=torch.long)
    kept = min(width, compact_width)
    ids_BP[:, :kept] = input_ids_BW.gather(1, order_BW)[:, :kept]
    columns = torch.arange(compact_width, device=ids_BP.device)
    ids_BP.masked_fill_(columns >= lengths_B[:, None], fill_id)
    given_ids_BW = input_ids_BW.to(torch.long)
    to_right_BW = torch.sort(real_BW.to(torch.int8), dim=1, stable=True).indices
    return Prompt(given_ids_BW, given_ids_BW.gather(1, to_right_BW), ids_BP, lengths_B)
