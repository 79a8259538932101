"""Multi-head latent attention of each row over the tokens selected for it, in absorbed form.

Every head attends over the same latents: the query holds q_nope W_UK and behind it the rotated
part, the key is a token's latent and its rotated part, the value is the latent itself.

Shape legend: B sequences, R rows, H heads, L kv_lora rank, P rope dim, C = L + P, K selected slots,
T tokens of a contiguous cache, X pages (or sequences), Y tokens of a page (or of a sequence).
"""

from __future__ import annotations

from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._bounds import INDEX_DTYPES
from glm_compile.ops._cute import why_no_cute
from glm_compile.ops._library import register_op
from glm_compile.ops.paged_cache import PAGE_SIZE
from glm_compile.ops.sparse_mla.config import (
    CUTE_MAX_HEADS,
    CUTE_PAGE,
    CUTE_PREFILL_ROWS,
    CUTE_RANK,
    CUTE_ROPE_DIM,
)
from glm_compile.ops.sparse_mla.reference import sparse_mla_reference

__all__ = ["sparse_mla", "sparse_mla_contiguous"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_GRID = 65535
# Values in 16 bytes.
_CUTE_ALIGNMENT = 8
# Rotated dimensions of a key where the caller does not tell the rank.
_ROPE_DIM = 64


def sparse_mla(
    q_RHC: torch.Tensor,
    latent_pages: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    *,
    kv_lora_rank: int | None = None,
    block_table: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    page_size: int = PAGE_SIZE,
    backend: str | None = None,
) -> torch.Tensor:
    """Attend over the selected tokens of a paged latent cache: softmax(q . k * sm_scale) . latent.

    - A slot counts for nothing if its index is negative, beyond the pages or the table, without a
      page (a negative entry, or one beyond the pages), or equal to the index in the slot before it:
      selections that leave a graph are filled up with a repeated valid position. What lies there
      may be anything, NaN too. Equal indices further apart count each.
    - A row with no slot that counts gives zeros, and so does K = 0.
    - Products are summed in fp32 and softmax is fp32; the result is rounded once, and in `cute` the
      probabilities and each block's share of a row are rounded to bf16 as well.
    - Deterministic: bitwise equal over repeats. R may be 0; sizes may be symbolic; the time does
      not depend on the number of pages or of table columns; indices may change in a CUDA graph.

    Args:
        q_RHC: float32, bfloat16 or float16, any strides.
        latent_pages: [pages, page_size, C], q's dtype: a token's latent, then its rotated part.
        indices_RK: int32 or int64, any strides: positions with a block table; without one physical
            slots, page * page_size + row.
        sm_scale: factor of the products.
        kv_lora_rank: L; None = C - 64.
        block_table: int32 or int64 [B, pages of a sequence], B * rows_per_sequence = R.
        rows_per_sequence: row r belongs to sequence r // rows_per_sequence.
        page_size: tokens of a page.
        backend: `reference`, `triton` or `cute` to force one; None takes the first that can.

    Returns:
        [R, H, L], q's dtype, contiguous.

    Raises:
        ValueError: a dtype or shape outside the above, or a forced backend that cannot run.
    """
    op = "sparse_mla"
    _check_rows(op, q_RHC, indices_RK)
    num_rows, _, width = q_RHC.shape
    rank = width - _ROPE_DIM if kv_lora_rank is None else kv_lora_rank
    if not 0 < rank <= width:
        raise ValueError(
            f"{op}: kv_lora_rank must be between 1 and the {width} columns of q, got {rank}"
        )
    if latent_pages.dim() != 3 or latent_pages.shape[1:] != (page_size, width):
        raise ValueError(
            f"{op}: latent_pages must be [pages, {page_size}, {width}], got "
            f"{tuple(latent_pages.shape)}"
        )
    _check_dtype(op, "latent_pages", latent_pages, q_RHC)
    if block_table is not None:
        if block_table.dtype not in INDEX_DTYPES or block_table.dim() != 2:
            raise ValueError(
                f"{op}: block_table must be int32 or int64 [B, pages], got {block_table.dtype} "
                f"{tuple(block_table.shape)}"
            )
        _check_sequences(op, block_table.shape[0], rows_per_sequence, num_rows)
    return _paged_op(
        q_RHC,
        latent_pages,
        indices_RK,
        sm_scale,
        rank,
        block_table,
        rows_per_sequence,
        backend or "",
    )


def sparse_mla_contiguous(
    q_RHC: torch.Tensor,
    latents_BTL: torch.Tensor,
    ropes_BTP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    *,
    rows_per_sequence: int = 1,
    backend: str | None = None,
) -> torch.Tensor:
    """Attend over the selected tokens of a contiguous latent cache; see `sparse_mla`.

    Args:
        q_RHC: float32, bfloat16 or float16, any strides.
        latents_BTL: q's dtype, last axis contiguous, any other strides; B * rows_per_sequence = R.
        ropes_BTP: the rotated part of the keys, likewise.
        indices_RK: int32 or int64 positions, any strides; those from T on count for nothing.
        sm_scale: factor of the products.
        rows_per_sequence: row r belongs to sequence r // rows_per_sequence.
        backend: `reference`, `triton` or `cute` to force one; None takes the first that can.

    Returns:
        [R, H, L], q's dtype, contiguous.

    Raises:
        ValueError: a dtype or shape outside the above, or a forced backend that cannot run.
    """
    op = "sparse_mla_contiguous"
    _check_rows(op, q_RHC, indices_RK)
    if latents_BTL.dim() != 3 or ropes_BTP.dim() != 3:
        raise ValueError(
            f"{op}: expected latents [B, T, L] and ropes [B, T, P], got "
            f"{tuple(latents_BTL.shape)} and {tuple(ropes_BTP.shape)}"
        )
    _check_dtype(op, "latents", latents_BTL, q_RHC)
    _check_dtype(op, "ropes", ropes_BTP, q_RHC)
    if latents_BTL.shape[:2] != ropes_BTP.shape[:2]:
        raise ValueError(
            f"{op}: latents and ropes must hold the same tokens, got {tuple(latents_BTL.shape)} "
            f"and {tuple(ropes_BTP.shape)}"
        )
    if latents_BTL.shape[2] + ropes_BTP.shape[2] != q_RHC.shape[2] or not latents_BTL.shape[2]:
        raise ValueError(
            f"{op}: a latent and its rotated part must be as wide as q, {q_RHC.shape[2]}, got "
            f"{latents_BTL.shape[2]} and {ropes_BTP.shape[2]}"
        )
    for name, tensor in (("latents", latents_BTL), ("ropes", ropes_BTP)):
        if tensor.shape[2] > 1 and tensor.stride(2) != 1:
            raise ValueError(
                f"{op}: the last axis of {name} must be contiguous, got strides {tensor.stride()}"
            )
    _check_sequences(op, latents_BTL.shape[0], rows_per_sequence, q_RHC.shape[0])
    return _contiguous_op(
        q_RHC, latents_BTL, ropes_BTP, indices_RK, sm_scale, rows_per_sequence, backend or ""
    )


def _check_rows(op: str, q_RHC: torch.Tensor, indices_RK: torch.Tensor) -> None:
    if q_RHC.dim() != 3 or q_RHC.dtype not in _DTYPES:
        raise ValueError(
            f"{op}: q must be float32, bfloat16 or float16 [R, H, C], got {q_RHC.dtype} "
            f"{tuple(q_RHC.shape)}"
        )
    if indices_RK.dtype not in INDEX_DTYPES:
        raise ValueError(f"{op}: indices must be int32 or int64, got {indices_RK.dtype}")
    if indices_RK.dim() != 2 or indices_RK.shape[0] != q_RHC.shape[0]:
        raise ValueError(
            f"{op}: indices must be [{q_RHC.shape[0]}, K], got {tuple(indices_RK.shape)}"
        )


def _check_dtype(op: str, name: str, tensor: torch.Tensor, q_RHC: torch.Tensor) -> None:
    if tensor.dtype != q_RHC.dtype:
        raise ValueError(f"{op}: {name} must have q's dtype {q_RHC.dtype}, got {tensor.dtype}")


def _check_sequences(op: str, num_sequences: int, rows_per_sequence: int, num_rows: int) -> None:
    if num_sequences * rows_per_sequence != num_rows:
        raise ValueError(
            f"{op}: {num_sequences} sequences of {rows_per_sequence} rows expected, got "
            f"{num_rows} rows"
        )


# Every backend takes (q_RHC, latents_XYL, ropes_XYP, indices_RK, sm_scale, block_table,
# rows_per_sequence, is_paged), as `sparse_mla_reference` describes them.


def _why_not_cute(
    q_RHC: torch.Tensor,
    latents_XYL: torch.Tensor,
    ropes_XYP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    block_table: torch.Tensor | None,
    rows_per_sequence: int,
    is_paged: bool,
) -> str | None:
    """What both kernels in CuTe DSL, for few rows and for many, ask of a call."""
    if (reason := why_no_cute(q_RHC, latents_XYL, ropes_XYP, indices_RK, block_table)) is not None:
        return reason
    if q_RHC.dtype != torch.bfloat16:
        return f"written for bfloat16, got {q_RHC.dtype}"
    rank, rope_dim = latents_XYL.shape[2], ropes_XYP.shape[2]
    if (rank, rope_dim) != (CUTE_RANK, CUTE_ROPE_DIM):
        return (
            f"written for {CUTE_RANK} and {CUTE_ROPE_DIM} values a token, got {rank} and {rope_dim}"
        )
    if q_RHC.shape[1] > CUTE_MAX_HEADS:
        return f"written for at most {CUTE_MAX_HEADS} heads, got {q_RHC.shape[1]}"
    if is_paged and latents_XYL.shape[1] != CUTE_PAGE:
        return f"written for pages of {CUTE_PAGE} tokens, got {latents_XYL.shape[1]}"
    if max(latents_XYL.shape[:2]) >= 2**31 or indices_RK.shape[1] >= 2**30:
        return "tokens or slots do not fit 32 bits"
    for name, tensor in (("latents", latents_XYL), ("ropes", ropes_XYP)):
        is_aligned = all(
            stride >= 0 and stride % _CUTE_ALIGNMENT == 0 for stride in tensor.stride()[:2]
        )
        if tensor.stride(2) != 1 or not is_aligned or tensor.data_ptr() % 16:
            return (
                f"{name} must be contiguous in the last axis and start each token at a multiple of "
                f"16 bytes, got strides {tensor.stride()}"
            )
    return None


def _run_cute(q_RHC: torch.Tensor, *args: Any) -> torch.Tensor:
    if q_RHC.shape[0] >= CUTE_PREFILL_ROWS:
        from glm_compile.ops.sparse_mla.cute_prefill import sparse_mla_prefill_cute

        return sparse_mla_prefill_cute(q_RHC, *args)
    from glm_compile.ops.sparse_mla.cute_decode import sparse_mla_decode_cute

    return sparse_mla_decode_cute(q_RHC, *args)


def _why_not_triton(
    q_RHC: torch.Tensor,
    latents_XYL: torch.Tensor,
    ropes_XYP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    block_table: torch.Tensor | None,
    rows_per_sequence: int,
    is_paged: bool,
) -> str | None:
    if indices_RK.shape[1] >= 2**31 - 2**14:
        return f"slots do not fit 32 bits: {indices_RK.shape[1]}"
    if q_RHC.shape[1] > _MAX_GRID:
        return f"more than {_MAX_GRID} heads: {q_RHC.shape[1]}"
    return _dispatch.why_no_triton(q_RHC, latents_XYL, ropes_XYP, indices_RK, block_table)


def _run_triton(*args: Any) -> torch.Tensor:
    from glm_compile.ops.sparse_mla.triton_kernel import sparse_mla_triton

    return sparse_mla_triton(*args)


_CUTE = _dispatch.Backend("cute", _why_not_cute, _run_cute)
_TRITON = _dispatch.Backend("triton", _why_not_triton, _run_triton)
_REFERENCE = _dispatch.Backend("reference", _dispatch.always, sparse_mla_reference)


def _sparse_mla(
    q_RHC: torch.Tensor,
    latent_pages: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    kv_lora_rank: int,
    block_table: torch.Tensor | None,
    rows_per_sequence: int,
    backend: str,
) -> torch.Tensor:
    return _run(
        "sparse_mla",
        backend,
        q_RHC,
        latent_pages[..., :kv_lora_rank],
        latent_pages[..., kv_lora_rank:],
        indices_RK,
        sm_scale,
        block_table,
        rows_per_sequence,
        True,
    )


def _sparse_mla_contiguous(
    q_RHC: torch.Tensor,
    latents_BTL: torch.Tensor,
    ropes_BTP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    rows_per_sequence: int,
    backend: str,
) -> torch.Tensor:
    return _run(
        "sparse_mla_contiguous",
        backend,
        q_RHC,
        latents_BTL,
        ropes_BTP,
        indices_RK,
        sm_scale,
        None,
        rows_per_sequence,
        False,
    )


def _run(op: str, backend: str, *args: Any) -> torch.Tensor:
    return _dispatch.run(op, (_CUTE, _TRITON, _REFERENCE), backend or None, *args)


def _sparse_mla_fake(
    q_RHC: torch.Tensor,
    latent_pages: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    kv_lora_rank: int,
    block_table: torch.Tensor | None,
    rows_per_sequence: int,
    backend: str,
) -> torch.Tensor:
    return q_RHC.new_empty((q_RHC.shape[0], q_RHC.shape[1], kv_lora_rank))


def _sparse_mla_contiguous_fake(
    q_RHC: torch.Tensor,
    latents_BTL: torch.Tensor,
    ropes_BTP: torch.Tensor,
    indices_RK: torch.Tensor,
    sm_scale: float,
    rows_per_sequence: int,
    backend: str,
) -> torch.Tensor:
    return q_RHC.new_empty((q_RHC.shape[0], q_RHC.shape[1], latents_BTL.shape[2]))


_paged_op = register_op(
    "sparse_mla(Tensor q_RHC, Tensor latent_pages, Tensor indices_RK, float sm_scale, "
    "SymInt kv_lora_rank, Tensor? block_table, SymInt rows_per_sequence, str backend) -> Tensor",
    _sparse_mla,
    _sparse_mla_fake,
)
_contiguous_op = register_op(
    "sparse_mla_contiguous(Tensor q_RHC, Tensor latents_BTL, Tensor ropes_BTP, Tensor indices_RK, "
    "float sm_scale, SymInt rows_per_sequence, str backend) -> Tensor",
    _sparse_mla_contiguous,
    _sparse_mla_contiguous_fake,
)
