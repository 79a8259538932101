"""The repetition penalty on the rows of a block, and the record of tokens that it looks at.

Shape legend: B batch, S rows of a block, V vocabulary, W width of the text buffer.
"""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.repetition_penalty.reference import (
    in_bin,
    note_tokens_reference,
    repetition_penalty_reference,
)

__all__ = ["in_bin", "note_tokens", "repetition_penalty"]

# Rows and sequences are on the second and third axis of a grid.
_MAX_GRID = 65535


def repetition_penalty(
    scores_BSV: torch.Tensor,
    seen_BV: torch.Tensor,
    text_BW: torch.Tensor,
    starts_B: torch.Tensor,
    first_B: torch.Tensor,
    num_drafts: int,
    penalty: float,
    *,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores of tokens that a row's prefix has: divided by the penalty, or times it below zero.

    Row s follows the text and `num_drafts` + s drafts, which stand behind it. As transformers'
    RepetitionPenaltyLogitsProcessor (Keskar and others, "CTRL", 2019) on the same device, to the
    bit. Deterministic; nothing is read on the host.

    Args:
        scores_BSV: float32.
        seen_BV: bool [B, V + 1], tokens of each text (`note_tokens`); the last column is a bin.
        text_BW: int64, tokens, with the drafts behind them.
        starts_B: int64, columns of each text without drafts.
        first_B: int64, tokens before this column do not count.
        num_drafts: drafts before row 0.
        penalty: above 0.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        float32 [B,S,V], contiguous.

    Raises:
        ValueError: shapes or dtypes outside the above, or a forced backend that cannot run.
    """
    batch_size, _, vocab_size = scores_BSV.shape
    if scores_BSV.dtype != torch.float32 or seen_BV.shape != (batch_size, vocab_size + 1):
        raise ValueError(
            f"repetition_penalty: scores must be float32 [B, S, V] and seen [B, V + 1], got "
            f"{scores_BSV.dtype} {tuple(scores_BSV.shape)} and {tuple(seen_BV.shape)}"
        )
    _check_integers(batch_size, text=text_BW, starts=starts_B, first=first_B)
    if not penalty > 0:
        raise ValueError(f"repetition_penalty: penalty must be above 0, got {penalty}")
    arguments = (
        scores_BSV, seen_BV, text_BW, starts_B, first_B, int(num_drafts), float(penalty)
    )  # fmt: skip
    if not backend:
        return _penalty_op(*arguments)
    return _dispatch.run("repetition_penalty", _PENALTY_BACKENDS, backend, *arguments)


def note_tokens(
    seen_BV: torch.Tensor,
    tokens_BS: torch.Tensor,
    kept_B: torch.Tensor,
    starts_B: torch.Tensor,
    first_B: torch.Tensor,
    *,
    backend: str | None = None,
) -> None:
    """Mark the tokens that are appended to each text, in place.

    Args:
        seen_BV: bool [B, V + 1]. Its last column is undefined afterwards.
        tokens_BS: int64 tokens of a block; those outside the vocabulary are left out.
        kept_B: int64, how many of them are appended.
        starts_B: int64, column of each block's first token.
        first_B: int64, tokens before this column do not count.
        backend: as for `repetition_penalty`.
    """
    integers = {"tokens": tokens_BS, "kept": kept_B, "starts": starts_B, "first": first_B}
    _check_integers(len(seen_BV), **integers)
    if seen_BV.dtype != torch.bool or not seen_BV.is_contiguous():
        raise ValueError(
            f"note_tokens: seen must be contiguous bool [B, V + 1], got {seen_BV.dtype} with "
            f"strides {seen_BV.stride()}"
        )
    arguments = (seen_BV, tokens_BS, kept_B, starts_B, first_B)
    if not backend:
        _note_op(*arguments)
    else:
        _dispatch.run("note_tokens", _NOTE_BACKENDS, backend, *arguments)


def _check_integers(batch_size: int, **tensors: torch.Tensor) -> None:
    """Vectors and rows are read as contiguous."""
    for name, tensor in tensors.items():
        is_right = tensor.dtype == torch.int64 and tensor.shape[0] == batch_size
        if not is_right or (tensor.dim() == 1 and not tensor.is_contiguous()):
            raise ValueError(
                f"repetition_penalty: {name} must be int64 [{batch_size}, ...], contiguous, got "
                f"{tensor.dtype} {tuple(tensor.shape)} with strides {tensor.stride()}"
            )
    text_BW = tensors.get("text")
    if text_BW is not None and text_BW.stride(1) != 1:
        raise ValueError("repetition_penalty: rows of text must be contiguous")


def _why_not_triton(first: torch.Tensor, *rest: object) -> str | None:
    if max(first.shape[:2] if first.dim() == 3 else first.shape[:1]) > _MAX_GRID:
        return f"a grid has at most {_MAX_GRID} rows, got {tuple(first.shape)}"
    arguments = (first, *rest)
    return _dispatch.why_no_triton(*(a for a in arguments if isinstance(a, torch.Tensor)))


def _run_penalty_triton(*arguments: object) -> torch.Tensor:
    from glm_compile.ops.repetition_penalty.triton_kernel import repetition_penalty_triton

    return repetition_penalty_triton(*arguments)  # type: ignore[arg-type]


def _run_note_triton(*arguments: torch.Tensor) -> None:
    from glm_compile.ops.repetition_penalty.triton_kernel import note_tokens_triton

    note_tokens_triton(*arguments)


_PENALTY_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_penalty_triton),
    _dispatch.Backend("reference", _dispatch.always, repetition_penalty_reference),
)
_NOTE_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_note_triton),
    _dispatch.Backend("reference", _dispatch.always, note_tokens_reference),
)


def _penalty(*arguments: object) -> torch.Tensor:
    return _dispatch.run("repetition_penalty", _PENALTY_BACKENDS, None, *arguments)


def _note(*arguments: torch.Tensor) -> None:
    _dispatch.run("note_tokens", _NOTE_BACKENDS, None, *arguments)


_penalty_op = register_op(
    "repetition_penalty(Tensor scores_BSV, Tensor seen_BV, Tensor text_BW, Tensor starts_B, "
    "Tensor first_B, int num_drafts, float penalty) -> Tensor",
    _penalty,
    lambda scores_BSV, *rest: scores_BSV.new_empty(scores_BSV.shape),
)
_note_op = register_op(
    "note_tokens(Tensor(a!) seen_BV, Tensor tokens_BS, Tensor kept_B, Tensor starts_B, "
    "Tensor first_B) -> ()",
    _note,
    lambda *arguments: None,
)
