"""Attention as one node: markers that the Dynamo stage puts in place of transformers' attention
calls.

`F.scaled_dot_product_attention` is decomposed by dispatch into whatever its inputs allow, and eager
attention is a chain of ops; neither can be recognised in an ATen graph of every device. As an op of
its own the call keeps its meaning, and stays correct where no later pass replaces it.

Shape legend: B batch, A attention heads, S query tokens, T keys, K selected keys, D head dim.
"""

from __future__ import annotations

import torch

from glm_compile.ops._bounds import INDEX_DTYPES, check_key_mask, check_rows
from glm_compile.ops._library import register_op
from glm_compile.ops.attention.reference import (
    attention_reference,
    indexed_attention_reference,
)

__all__ = ["attention", "indexed_attention"]


def attention(
    q_BASD: torch.Tensor,
    k_BATD: torch.Tensor,
    v_BATD: torch.Tensor,
    mask: torch.Tensor | None = None,
    *,
    scale: float,
    eager: bool = False,
) -> torch.Tensor:
    """Attend with a mask whose form is not known.

    Numbers are those of transformers' code: `eager=False` is `F.scaled_dot_product_attention` with
    this mask (bool or additive; a row without a key gives zeros), `eager=True` is matmul, scale,
    add the mask, softmax in fp32, cast back, matmul (a row whose mask is all minimum attends
    evenly, as there).

    Args:
        q_BASD: any strides. k_BATD, v_BATD: the same number of heads; v may have its own head dim.
        mask: broadcastable to [B, A, S, T], or None for no mask at all.

    Returns:
        [B, A, S, Dv] in q's dtype, contiguous.
    """
    _check("attention", q_BASD, k_BATD, v_BATD)
    return _attention_op(q_BASD, k_BATD, v_BATD, mask, scale, eager)


def indexed_attention(
    q_BASD: torch.Tensor,
    k_BATD: torch.Tensor,
    v_BATD: torch.Tensor,
    topk_BSK: torch.Tensor,
    lengths_BS: torch.Tensor | None,
    starts_BS: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    *,
    scale: float,
    eager: bool = False,
) -> torch.Tensor:
    """Attend to selected keys only.

    A key p takes part iff it is selected, `start <= p < length`, and `key_mask` holds. Numbers are
    those of `attention` with that mask, and memory is no more than the masked model's. A row
    without such a key gives zeros, in both orders of operations.

    Args:
        topk_BSK: positions, int32 or int64; -1 (and any other value outside [0, T)) is ignored,
            repeated positions count once.
        lengths_BS, starts_BS: int32 or int64, bounds per query token; None for none.
        key_mask: bool, broadcastable to [B, S, T]; its last axis may be longer than T.

    Returns:
        [B, A, S, Dv] in q's dtype, contiguous.
    """
    _check("indexed_attention", q_BASD, k_BATD, v_BATD)
    op, (batch_size, _, num_queries, _) = "indexed_attention", q_BASD.shape
    check_key_mask(op, key_mask, batch_size, num_queries, k_BATD.shape[2])
    check_rows(op, "lengths", lengths_BS, (batch_size, num_queries))
    check_rows(op, "starts", starts_BS, (batch_size, num_queries))
    if topk_BSK.shape[:-1] != (batch_size, num_queries) or topk_BSK.dtype not in INDEX_DTYPES:
        raise ValueError(
            f"{op}: topk must be int32 or int64 [{batch_size}, {num_queries}, K], got "
            f"{topk_BSK.dtype} {tuple(topk_BSK.shape)}"
        )
    return _indexed_attention_op(
        q_BASD, k_BATD, v_BATD, topk_BSK, lengths_BS, starts_BS, key_mask, scale, eager
    )


def _check(op: str, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    if q.dim() != 4 or k.dim() != 4 or v.dim() != 4:
        raise ValueError(
            f"{op}: q, k and v must be [batch, heads, tokens, dim], got {q.dim()}, {k.dim()} and "
            f"{v.dim()} axes"
        )
    if q.shape[:2] != k.shape[:2] or q.shape[3] != k.shape[3] or k.shape[:3] != v.shape[:3]:
        raise ValueError(
            f"{op}: q, k and v must have the same batch and heads, q and k the same dim, k and v "
            f"the same keys, got {tuple(q.shape)}, {tuple(k.shape)} and {tuple(v.shape)}"
        )


def _attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float,
    eager: bool,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


def _indexed_attention_fake(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    topk: torch.Tensor,
    lengths: torch.Tensor | None,
    starts: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    scale: float,
    eager: bool,
) -> torch.Tensor:
    return q.new_empty((*q.shape[:3], v.shape[3]))


_attention_op = register_op(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, float scale, bool eager) -> Tensor",
    attention_reference,
    _attention_fake,
)
_indexed_attention_op = register_op(
    "indexed_attention(Tensor q, Tensor k, Tensor v, Tensor topk_BSK, Tensor? lengths_BS, "
    "Tensor? starts_BS, Tensor? key_mask, float scale, bool eager) -> Tensor",
    indexed_attention_reference,
    _indexed_attention_fake,
)
