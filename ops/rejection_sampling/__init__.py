"""Draws from distributions over the vocabulary, and rejection sampling of drafts, in two launches.

Shape legend: B batch, k drafts of a block, S = 1 + k rows of a verify step, V vocabulary. p is the
target's distribution and q the draft's.
"""

from __future__ import annotations

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._library import register_op
from glm_compile.ops.rejection_sampling.random_numbers import Purpose
from glm_compile.ops.rejection_sampling.reference import rejection_sample_reference

__all__ = ["Purpose", "draw_token", "rejection_sample"]

# Drafts that one program holds.
_MAX_TRITON_DRAFTS = 64
# Sequences are on the second axis of a grid.
_MAX_GRID = 65535


def rejection_sample(
    p_BSV: torch.Tensor,
    q_BkV: torch.Tensor,
    drafts_Bk: torch.Tensor,
    row_keys_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Accept each draft with probability min(1, p/q); then one token from the target.

    The first rejected position is drawn from the residual max(p - q, 0); after k accepted drafts
    one more token is drawn from the target's next row. Every emitted position is distributed as the
    target (Leviathan, Kalman and Matias, "Fast inference from transformers via speculative
    decoding", ICML 2023). Numbers come from the counter-based generator of `random_numbers`: coins
    of the positions of the drafts, noise of the block's first position.

    Deterministic: the same bits by every backend, for equal p and q. Nothing is read on the host.

    Args:
        p_BSV: float32 target probabilities; row s follows s drafts.
        q_BkV: float32 draft probabilities that the drafts were drawn from.
        drafts_Bk: int64, the draws, any strides.
        row_keys_B: int64, a key for each sequence (`random_numbers.row_keys`).
        positions_B: int64, position of the block's first token.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        tokens int64 [B,S] (accepted drafts, then the drawn token; the rest repeats the drafts, and
        the last one is the drawn token), their number int64 [B], and whether the drawn token had a
        probability above zero, bool [B]: a row with NaN, or without any allowed token, has none.

    Raises:
        ValueError: shapes or dtypes outside the above, or a forced backend that cannot run.
    """
    batch_size, num_rows, vocab_size = p_BSV.shape
    expected = (batch_size, num_rows - 1)
    if drafts_Bk.shape != expected or q_BkV.shape != (*expected, vocab_size):
        raise ValueError(
            f"rejection_sample: p {tuple(p_BSV.shape)} belongs to drafts {expected} and q "
            f"{(*expected, vocab_size)}, got {tuple(drafts_Bk.shape)} and {tuple(q_BkV.shape)}"
        )
    if drafts_Bk.dtype != torch.int64:
        raise ValueError(f"rejection_sample: drafts must be int64, got {drafts_Bk.dtype}")
    _check("rejection_sample", p_BSV, q_BkV, row_keys_B, positions_B)
    if num_rows == 1:
        return _run(p_BSV, None, None, row_keys_B, positions_B, 0, Purpose.TOKEN, backend)
    return _run(p_BSV, q_BkV, drafts_Bk, row_keys_B, positions_B, 0, Purpose.TOKEN, backend)


def draw_token(
    p_BV: torch.Tensor,
    row_keys_B: torch.Tensor,
    positions_B: torch.Tensor,
    purpose: Purpose,
    *,
    offset: int = 0,
    backend: str | None = None,
) -> torch.Tensor:
    """One token of each row with the probabilities p, int64 [B]; they need not add up to one.

    Args:
        p_BV: float32, not negative.
        row_keys_B, positions_B, backend: as for `rejection_sample`.
        purpose: which numbers of the position are used.
        offset: is added to the positions.

    Returns:
        int64 [B]. Of a row with NaN, or without any weight, the id does not matter.

    Raises:
        ValueError: shapes or dtypes outside the above, or a forced backend that cannot run.
    """
    _check("draw_token", p_BV, None, row_keys_B, positions_B)
    tokens_B1, _, _ = _run(
        p_BV[:, None], None, None, row_keys_B, positions_B, offset, purpose, backend
    )
    return tokens_B1.squeeze(1)


def _check(
    op: str,
    p: torch.Tensor,
    q: torch.Tensor | None,
    row_keys_B: torch.Tensor,
    positions_B: torch.Tensor,
) -> None:
    for name, tensor in (("p", p), ("q", q)):
        if tensor is not None and tensor.dtype != torch.float32:
            raise ValueError(f"{op}: {name} must be float32, got {tensor.dtype}")
    for name, tensor in (("row_keys", row_keys_B), ("positions", positions_B)):
        if tensor.dtype != torch.int64 or tensor.shape != p.shape[:1]:
            raise ValueError(
                f"{op}: {name} must be int64 [{p.shape[0]}], got {tensor.dtype} "
                f"{tuple(tensor.shape)}"
            )


def _run(
    p_BSV: torch.Tensor,
    q_BkV: torch.Tensor | None,
    drafts_Bk: torch.Tensor | None,
    row_keys_B: torch.Tensor,
    positions_B: torch.Tensor,
    offset: int,
    purpose: Purpose,
    backend: str | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    arguments = (p_BSV, q_BkV, drafts_Bk, row_keys_B, positions_B, offset, int(purpose))
    if not backend:
        return _op(*arguments)
    return _dispatch.run("rejection_sample", _BACKENDS, backend, *arguments)


def _why_not_triton(
    p_BSV: torch.Tensor, q_BkV: torch.Tensor | None, drafts_Bk: torch.Tensor | None, *rest: object
) -> str | None:
    if p_BSV.shape[0] > _MAX_GRID:
        return f"a grid has at most {_MAX_GRID} sequences, got {p_BSV.shape[0]}"
    if p_BSV.shape[1] > _MAX_TRITON_DRAFTS:
        return f"a block has more than {_MAX_TRITON_DRAFTS} rows: {p_BSV.shape[1]}"
    return _dispatch.why_no_triton(p_BSV, q_BkV, drafts_Bk)


def _run_triton(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    from glm_compile.ops.rejection_sampling.triton_kernel import rejection_sample_triton

    return rejection_sample_triton(*arguments)  # type: ignore[arg-type]


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, rejection_sample_reference),
)


def _rejection_sample(*arguments: object) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return _dispatch.run("rejection_sample", _BACKENDS, None, *arguments)


def _rejection_sample_fake(
    p_BSV: torch.Tensor, *rest: object
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    batch_size, num_rows, _ = p_BSV.shape
    return (
        p_BSV.new_empty(batch_size, num_rows, dtype=torch.int64),
        p_BSV.new_empty(batch_size, dtype=torch.int64),
        p_BSV.new_empty(batch_size, dtype=torch.bool),
    )


_op = register_op(
    "rejection_sample(Tensor p_BSV, Tensor? q_BkV, Tensor? drafts_Bk, Tensor row_keys_B, "
    "Tensor positions_B, int offset, int purpose) -> (Tensor, Tensor, Tensor)",
    _rejection_sample,
    _rejection_sample_fake,
)
