"""Acceptance of a verified block and everything that follows from it, as one launch.

Shape legend: B batch, k drafts of a block, S = 1 + k rows of it, W width of the text buffer, E ids
that end a sequence, R = 3 + k + 1 columns of a result, N results that are kept.
"""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.accept_block.reference import (
    FINISHED,
    FIRST_TOKEN,
    IS_DRAWN,
    KEPT,
    accept_block_reference,
)

__all__ = ["FINISHED", "FIRST_TOKEN", "IS_DRAWN", "KEPT", "accept_block", "can_write_to_host"]

# Rows of a block that one program holds.
_MAX_TRITON_ROWS = 64


def accept_block(
    predicted_BS: torch.Tensor,
    drafts_Bk: torch.Tensor,
    *,
    num_tokens_B: torch.Tensor | None = None,
    has_weight_B: torch.Tensor | None = None,
    eos_ids_E: torch.Tensor,
    budget: torch.Tensor,
    prompt_width: torch.Tensor,
    text_BW: torch.Tensor,
    counts_B: torch.Tensor,
    finished_B: torch.Tensor,
    kept_B: torch.Tensor,
    tokens_BS: torch.Tensor,
    bonus_B: torch.Tensor,
    row_B: torch.Tensor,
    results_NBR: torch.Tensor,
    turns_B: torch.Tensor,
    lengths_B: torch.Tensor | None = None,
    backend: str | None = None,
) -> None:
    """Decide what each row keeps of a block, append it, and note what the rest of the loop needs.

    A row keeps its accepted tokens up to the first that ends its sequence, and no more than its
    budget leaves; a finished row keeps none. Integers only, so deterministic, and the same by every
    backend. Nothing is read on the host.

    Args:
        predicted_BS: int64, the tokens of the block; that of the prompt has one row.
        drafts_Bk: int64, any strides. Draft j is compared with the token of row j.
        num_tokens_B: int64, how many tokens are accepted, 1..S. None: greedy decoding's, the drafts
            that agree and one more.
        has_weight_B: bool, whether the last accepted token could be drawn. None: it could.
        eos_ids_E: int64, ids that end a sequence; negative ones stand for none.
        budget, prompt_width: int64, 0-d: most new tokens, columns of the prompt.
        text_BW: int64; the kept tokens are written at `prompt_width + counts_B`. What stands in its
            last column is undefined afterwards.
        counts_B, finished_B: new tokens so far and bool flags, brought up to date.
        kept_B: int64, gets the number of kept tokens.
        tokens_BS: int64, its first columns get `predicted_BS`.
        bonus_B, row_B: int64, get the last kept token and its row; those of row 0 where none is
            kept. `bonus_B` may be a column of the drafts' buffer.
        results_NBR: int64, a ring: `turns_B % N` gets (kept, finished, drawn, tokens): `KEPT`,
            `FINISHED`, `IS_DRAWN`, and from `FIRST_TOKEN` on the tokens. It may be pinned memory
            of the host where `can_write_to_host` says so.
        turns_B: int64, blocks so far; one more afterwards.
        lengths_B: int32, advanced by the number of kept tokens. None: nothing is.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Raises:
        ValueError: shapes that do not belong together, or a forced backend that cannot run.
    """
    batch_size, width = predicted_BS.shape
    if drafts_Bk.shape != (batch_size, width - 1):
        raise ValueError(
            f"accept_block: {width} rows have {width - 1} drafts, got {tuple(drafts_Bk.shape)} for "
            f"tokens {tuple(predicted_BS.shape)}"
        )
    if tokens_BS.shape[1] < width or results_NBR.shape[2] < FIRST_TOKEN + width:
        raise ValueError(
            f"accept_block: no room for {width} tokens in tokens {tuple(tokens_BS.shape)} and "
            f"results {tuple(results_NBR.shape)}"
        )
    arguments = (
        predicted_BS, drafts_Bk, num_tokens_B, has_weight_B, eos_ids_E, budget, prompt_width,
        text_BW, counts_B, finished_B, kept_B, tokens_BS, bonus_B, row_B, results_NBR, turns_B,
        lengths_B,
    )  # fmt: skip
    if not backend:
        _op(*arguments)
    else:
        _dispatch.run("accept_block", _BACKENDS, backend, *arguments)


def can_write_to_host(device: torch.device, width: int) -> bool:
    """Whether results of blocks of that many rows on this device may go to pinned memory."""
    return device.type == "cuda" and _dispatch.is_installed("triton") and width <= _MAX_TRITON_ROWS


def _why_not_triton(predicted_BS: torch.Tensor, *rest: torch.Tensor | None) -> str | None:
    if predicted_BS.shape[1] > _MAX_TRITON_ROWS:
        return f"a block has more than {_MAX_TRITON_ROWS} rows: {predicted_BS.shape[1]}"
    *others, results_NBR, turns_B, lengths_B = rest
    if results_NBR is not None and results_NBR.device.type == "cpu" and results_NBR.is_pinned():
        results_NBR = None
    return _dispatch.why_no_triton(predicted_BS, *others, results_NBR, turns_B, lengths_B)


def _run_triton(*arguments: torch.Tensor) -> None:
    from glm_compile.ops.accept_block.triton_kernel import accept_block_triton

    accept_block_triton(*arguments)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, accept_block_reference),
)


def _accept_block(*arguments: torch.Tensor) -> None:
    _dispatch.run("accept_block", _BACKENDS, None, *arguments)


def _accept_block_fake(*arguments: torch.Tensor) -> None:
    return None


_op = register_op(
    "accept_block(Tensor predicted_BS, Tensor drafts_Bk, Tensor? num_tokens_B, "
    "Tensor? has_weight_B, Tensor eos_ids_E, Tensor budget, Tensor prompt_width, "
    "Tensor(a!) text_BW, Tensor(b!) counts_B, Tensor(c!) finished_B, Tensor(d!) kept_B, "
    "Tensor(e!) tokens_BS, Tensor(f!) bonus_B, Tensor(g!) row_B, Tensor(h!) results_NBR, "
    "Tensor(i!) turns_B, Tensor(j!)? lengths_B) -> ()",
    _accept_block,
    _accept_block_fake,
)
