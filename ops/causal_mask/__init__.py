"""Attention mask of a step over a cache with a length per sequence.

Shape legend: B batch, S query tokens of the step, T cached tokens.
"""

from __future__ import annotations

import torch

from glm_compile.ops._bounds import check_key_mask, check_rows
from glm_compile.ops._library import register_op
from glm_compile.ops.causal_mask.reference import causal_mask_reference

__all__ = ["causal_mask"]


def causal_mask(
    lengths_B: torch.Tensor,
    num_queries: int,
    num_keys: int,
    dtype: torch.dtype,
    *,
    starts_B: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Return the mask [B, 1, S, T] of S new tokens over a cache of T.

    Row s of sequence b sees position p iff starts[b] <= p <= lengths[b] + s and key_mask allows it.
    A row that sees nothing is fully masked, with finite values. Made on the lengths' device without
    a host sync; every size may be symbolic.

    Args:
        lengths_B: int32 or int64, tokens cached before this step.
        num_queries: S.
        num_keys: T.
        dtype: bool (True = seen), or a floating dtype (0 = seen, else its lowest finite value).
        starts_B: int32 or int64, first position that is no padding; None = 0.
        key_mask: bool, broadcastable to [B, S, T]; its last axis may be longer than T.

    Raises:
        ValueError: a dtype or shape outside the above.
    """
    if dtype != torch.bool and not dtype.is_floating_point:
        raise ValueError(f"causal_mask: dtype must be bool or floating, got {dtype}")
    if lengths_B.dim() != 1:
        raise ValueError(f"causal_mask: lengths must be [B], got shape {tuple(lengths_B.shape)}")
    check_rows("causal_mask", "lengths", lengths_B, (lengths_B.shape[0],))
    check_rows("causal_mask", "starts", starts_B, (lengths_B.shape[0],))
    check_key_mask("causal_mask", key_mask, lengths_B.shape[0], num_queries, num_keys)
    return _op(lengths_B, starts_B, key_mask, num_queries, num_keys, dtype)


def _causal_mask_fake(
    lengths_B: torch.Tensor,
    starts_B: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    S: int,
    T: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return lengths_B.new_empty((lengths_B.shape[0], 1, S, T), dtype=dtype)


_op = register_op(
    "causal_mask(Tensor lengths_B, Tensor? starts_B, Tensor? key_mask, SymInt S, SymInt T, "
    "ScalarType dtype) -> Tensor",
    causal_mask_reference,
    _causal_mask_fake,
)
