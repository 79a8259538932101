"""Tokens that would repeat an n-gram get no chance.

Shape legend: B batch, S rows of a block, V vocabulary, W width of the text buffer, N n-grams of a
sequence, G tokens of an n-gram.
"""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.forbid_ngrams.reference import forbid_ngrams_reference

__all__ = ["forbid_ngrams"]

# Rows are on the second axis of a grid.
_MAX_GRID = 65535


def forbid_ngrams(
    scores_BSV: torch.Tensor,
    ngrams_BNG: torch.Tensor,
    text_BW: torch.Tensor,
    starts_B: torch.Tensor,
    num_drafts: int,
    *,
    is_text: bool,
    backend: str | None = None,
) -> torch.Tensor:
    """Scores with minus infinity at the last token of each n-gram whose others end the prefix.

    Row s follows the text and `num_drafts` + s drafts, which stand behind it. As transformers'
    NoRepeatNGramLogitsProcessor and EncoderNoRepeatNGramLogitsProcessor. Deterministic; nothing is
    read on the host. The time grows with N, however long the text is.

    Args:
        scores_BSV: float32.
        ngrams_BNG: int64, any strides; a token outside the vocabulary is never the last of one that
            holds.
        text_BW: int64, tokens, with the drafts behind them.
        starts_B: int64, columns of each text without drafts.
        num_drafts: drafts before row 0.
        is_text: whether they are the text's own, `text_BW.unfold(1, G, 1)`: those count that lie in
            the prefix. Else all do.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        float32 [B,S,V], contiguous.

    Raises:
        ValueError: shapes or dtypes outside the above, or a forced backend that cannot run.
    """
    batch_size = scores_BSV.shape[0]
    sizes = {batch_size, len(ngrams_BNG), len(text_BW), len(starts_B)}
    if scores_BSV.dim() != 3 or ngrams_BNG.dim() != 3 or len(sizes) > 1:
        raise ValueError(
            "forbid_ngrams: expected scores [B, S, V], n-grams [B, N, G], text [B, W] and starts "
            f"[B], got {tuple(scores_BSV.shape)}, {tuple(ngrams_BNG.shape)}, "
            f"{tuple(text_BW.shape)} and {tuple(starts_B.shape)}"
        )
    for name, tensor in (("n-grams", ngrams_BNG), ("text", text_BW), ("starts", starts_B)):
        if tensor.dtype != torch.int64:
            raise ValueError(f"forbid_ngrams: {name} must be int64, got {tensor.dtype}")
    if scores_BSV.dtype != torch.float32 or ngrams_BNG.shape[2] < 1:
        raise ValueError(
            "forbid_ngrams: expected scores in float32 and n-grams of a token or more, got "
            f"{scores_BSV.dtype} and {ngrams_BNG.shape[2]}"
        )
    arguments = (scores_BSV, ngrams_BNG, text_BW, starts_B, num_drafts, is_text)
    if not backend:
        return _op(*arguments)
    return _dispatch.run("forbid_ngrams", _BACKENDS, backend, *arguments)


def _why_not_triton(
    scores_BSV: torch.Tensor,
    ngrams_BNG: torch.Tensor,
    text_BW: torch.Tensor,
    starts_B: torch.Tensor,
    num_drafts: int,
    is_text: bool,
) -> str | None:
    if (num_rows := scores_BSV.shape[0] * scores_BSV.shape[1]) > _MAX_GRID:
        return f"more than {_MAX_GRID} rows: {num_rows}"
    return _dispatch.why_no_triton(scores_BSV, ngrams_BNG, text_BW, starts_B)


def _run_triton(*arguments: object) -> torch.Tensor:
    from glm_compile.ops.forbid_ngrams.triton_kernel import forbid_ngrams_triton

    return forbid_ngrams_triton(*arguments)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, forbid_ngrams_reference),
)


def _forbid_ngrams(*arguments: object) -> torch.Tensor:
    return _dispatch.run("forbid_ngrams", _BACKENDS, None, *arguments)


def _forbid_ngrams_fake(scores_BSV: torch.Tensor, *_rest: object) -> torch.Tensor:
    return scores_BSV.new_empty(scores_BSV.shape)


_op = register_op(
    "forbid_ngrams(Tensor scores_BSV, Tensor ngrams_BNG, Tensor text_BW, Tensor starts_B, "
    "int num_drafts, bool is_text) -> Tensor",
    _forbid_ngrams,
    _forbid_ngrams_fake,
)
