"""Scores of the sparse-attention indexer: how much each query row wants each cached key.

Shape legend: B batch, S query tokens of the step, R = B * S rows, T cached tokens, H index heads,
D index head dim.
"""

from __future__ import annotations

from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._bounds import (
    INDEX_DTYPES,
    check_key_mask,
    check_lengths,
    check_rows,
    expand_key_mask,
)
from glm_compile.ops._cute import why_no_cute
from glm_compile.ops._library import register_op
from glm_compile.ops.indexer_scores.reference import (
    indexer_scores_paged_reference,
    indexer_scores_reference,
)
from glm_compile.ops.paged_cache import PAGE_SIZE, check_key_pages
from glm_compile.ops.paged_cache.reference import split_key_pages

__all__ = ["indexer_scores", "indexer_scores_paged"]

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_MAX_GRID = 65535
_CUTE_HEADS = (16, 32, 64)
_CUTE_HEAD_DIM = 128
_CUTE_ALIGNMENT = 16
# The dtypes of q that `cute` was measured with on a GPU.
_CUTE_FIRST = (torch.float8_e4m3fn, torch.bfloat16)


def indexer_scores(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    k_BTD: torch.Tensor,
    lengths_BS: torch.Tensor,
    *,
    starts_BS: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    softmax_scale: float | None = None,
    backend: str | None = None,
) -> torch.Tensor:
    """Score contiguous keys: sum over heads of weights * relu((q . k) * softmax_scale), in fp32.

    The order of the operations is transformers' own: products of the given dtype summed in fp32,
    then the scale, relu, and the head weights, which hold H^-0.5 already. NaN stays NaN. Scores of
    positions outside start <= p < length may be anything; those that `key_mask` forbids are -inf.
    Deterministic; B, S and T may be symbolic or 0; the windows may change in a CUDA graph's replay.

    Args:
        q_BSHD: float32, bfloat16 or float16, any strides.
        weights_BSH: floating, any strides; read as fp32.
        k_BTD: q's dtype, any strides.
        lengths_BS: int32 or int64; beyond T counts as T.
        starts_BS: int32 or int64; None = 0.
        key_mask: bool, broadcastable to [B, S, T]; its last axis may be longer than T.
        softmax_scale: None = D^-0.5.
        backend: `reference`, `triton` or `cute` to force one; None takes the first that can.

    Returns:
        float32 [B, S, T], contiguous.

    Raises:
        ValueError: a dtype or shape outside the above, or a forced backend that cannot run.
    """
    op = "indexer_scores"
    if q_BSHD.dim() != 4 or k_BTD.dim() != 3:
        raise ValueError(
            f"{op}: expected q [B, S, H, D] and k [B, T, D], got {tuple(q_BSHD.shape)} and "
            f"{tuple(k_BTD.shape)}"
        )
    num_batch, num_queries, num_heads, head_dim = q_BSHD.shape
    if q_BSHD.dtype not in _DTYPES or k_BTD.dtype != q_BSHD.dtype:
        raise ValueError(
            f"{op}: q and k must share float32, bfloat16 or float16, got {q_BSHD.dtype} and "
            f"{k_BTD.dtype}"
        )
    if k_BTD.shape[0] != num_batch or k_BTD.shape[2] != head_dim:
        raise ValueError(f"{op}: k must be [{num_batch}, T, {head_dim}], got {tuple(k_BTD.shape)}")
    if tuple(weights_BSH.shape) != (num_batch, num_queries, num_heads):
        raise ValueError(
            f"{op}: weights must be [{num_batch}, {num_queries}, {num_heads}], got "
            f"{tuple(weights_BSH.shape)}"
        )
    check_rows(op, "lengths", lengths_BS, (num_batch, num_queries))
    check_rows(op, "starts", starts_BS, (num_batch, num_queries))
    check_key_mask(op, key_mask, num_batch, num_queries, k_BTD.shape[1])
    return _op(
        q_BSHD,
        weights_BSH,
        k_BTD,
        lengths_BS,
        starts_BS,
        key_mask,
        head_dim**-0.5 if softmax_scale is None else softmax_scale,
        backend or "",
    )


def indexer_scores_paged(
    q_fp8_RHD: torch.Tensor,
    weights_RH: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_R: torch.Tensor,
    max_len: int,
    *,
    starts_R: torch.Tensor | None = None,
    key_mask: torch.Tensor | None = None,
    rows_per_sequence: int = 1,
    is_causal: bool = False,
    early_windows: bool = False,
    backend: str | None = None,
) -> torch.Tensor:
    """Score the keys of pages: key scale * sum over heads of weights * relu(q . k), in fp32.

    The weights hold every other factor: gate * D^-0.5 * H^-0.5 * q scale. All rows of a sequence
    (`cute`, `triton`: each 8 of them) read a key once. NaN, windows, `key_mask`, determinism and
    sizes are as for `indexer_scores`; a position without a page (beyond the table, or a negative
    entry) scores -inf. Hopper's tensor cores add FP8 products up with about 14 bits: `cute` keeps
    that sum for all of D, `triton` for 32 products at a time.

    Args:
        q_fp8_RHD: float8_e4m3fn for FP8 pages, else the pages' dtype; any strides.
        weights_RH: floating, any strides; read as fp32.
        key_pages: uint8 [pages, 64 * (D + 4)] (64 rows of e4m3 values, then 64 fp32 scales), or
            float32, bfloat16 or float16 [pages, 64, D].
        block_table: int32 or int64 [B, P], B * rows_per_sequence = R.
        lengths_R: int32 or int64; beyond max_len counts as max_len. [B] if `is_causal`.
        max_len: T, the positions to score.
        starts_R: int32 or int64; None = 0.
        key_mask: bool, broadcastable to [B, rows_per_sequence, T]; its last axis may be longer.
        rows_per_sequence: rows that share a line of the block table.
        is_causal: lengths count the tokens cached before the step, one number a sequence: row s of
            it has the length `lengths[b] + s + 1`.
        early_windows: `cute` may read lengths, starts and block table while the kernels just
            ahead still run. These must then have been written ahead of a kernel that is launched
            ahead of this one and lets its followers start only once all before it has ended:
            `bf16_linear`'s, or one without programmatic launch, like all of torch's own.
        backend: `reference`, `triton` or `cute` to force one; None takes the first that can.

    Returns:
        float32 [R, max_len], contiguous.

    Raises:
        ValueError: a dtype or shape outside the above, or a forced backend that cannot run.
    """
    op = "indexer_scores_paged"
    if q_fp8_RHD.dim() != 3:
        raise ValueError(f"{op}: q must be [R, H, D], got shape {tuple(q_fp8_RHD.shape)}")
    num_rows, num_heads, head_dim = q_fp8_RHD.shape
    _check_pages(op, q_fp8_RHD.dtype, key_pages, head_dim)
    if block_table.dtype not in INDEX_DTYPES or block_table.dim() != 2:
        raise ValueError(
            f"{op}: block_table must be int32 or int64 [B, pages], got {block_table.dtype} "
            f"{tuple(block_table.shape)}"
        )
    if block_table.shape[0] * rows_per_sequence != num_rows:
        raise ValueError(
            f"{op}: {block_table.shape[0]} sequences of {rows_per_sequence} rows expected, got "
            f"{num_rows} rows"
        )
    if tuple(weights_RH.shape) != (num_rows, num_heads):
        raise ValueError(
            f"{op}: weights must be [{num_rows}, {num_heads}], got {tuple(weights_RH.shape)}"
        )
    check_lengths(op, lengths_R, num_rows, rows_per_sequence, is_causal)
    check_rows(op, "starts", starts_R, (num_rows,))
    check_key_mask(op, key_mask, block_table.shape[0], rows_per_sequence, max_len)
    return _paged_op(
        q_fp8_RHD,
        weights_RH,
        key_pages,
        block_table,
        lengths_R,
        max_len,
        starts_R,
        key_mask,
        rows_per_sequence,
        is_causal,
        early_windows,
        backend or "",
    )


def _check_pages(op: str, q_dtype: torch.dtype, key_pages: torch.Tensor, head_dim: int) -> None:
    if key_pages.shape[0] == 0:
        raise ValueError(f"{op}: key_pages must hold at least one page")
    if key_pages.dtype == torch.uint8:
        if q_dtype != torch.float8_e4m3fn:
            raise ValueError(f"{op}: FP8 key pages need a float8_e4m3fn q, got {q_dtype}")
        check_key_pages(op, key_pages, head_dim)
        return
    if key_pages.dtype not in _DTYPES or key_pages.dtype != q_dtype:
        raise ValueError(
            f"{op}: key_pages must be uint8, or float32, bfloat16 or float16 as q, got "
            f"{key_pages.dtype} pages and a {q_dtype} q"
        )
    if tuple(key_pages.shape[1:]) != (PAGE_SIZE, head_dim):
        raise ValueError(
            f"{op}: key_pages must be [pages, {PAGE_SIZE}, {head_dim}], got "
            f"{tuple(key_pages.shape)}"
        )


def _why_not_triton(q: torch.Tensor, num_batch: int, num_queries: int, num_keys: int) -> str | None:
    if max(num_batch, num_queries) > _MAX_GRID:
        return f"more than {_MAX_GRID} sequences or rows of one: {num_batch}, {num_queries}"
    if num_keys >= 2**31 - 2**14:
        return f"positions do not fit 32 bits: {num_keys}"
    if q.dtype == torch.float8_e4m3fn and (reason := _dispatch.why_no_fp8(q)) is not None:
        return reason
    return _dispatch.why_no_triton(q)


def _why_not_cute(
    q: torch.Tensor,
    weights: torch.Tensor,
    keys: torch.Tensor,
    num_keys: int,
    *others: torch.Tensor | None,
) -> str | None:
    if (reason := why_no_cute(q, weights, keys, *others)) is not None:
        return reason
    if q.dtype == torch.float32:
        return "float32 products do not run on tensor cores"
    if q.shape[-1] != _CUTE_HEAD_DIM or q.shape[-2] not in _CUTE_HEADS:
        return (
            f"written for {', '.join(map(str, _CUTE_HEADS))} heads of {_CUTE_HEAD_DIM}, got "
            f"{q.shape[-2]} of {q.shape[-1]}"
        )
    if weights.dtype not in _DTYPES:
        return f"weights must be float32, bfloat16 or float16, got {weights.dtype}"
    if num_keys >= 2**31 - 2**14:
        return f"positions do not fit 32 bits: {num_keys}"
    # Of axes of size 1 too: the copy engine is told their strides as well.
    strides = [stride * keys.element_size() for stride in keys.stride()[:-1]]
    is_dense = keys.stride(-1) == 1 and all(
        stride > 0 and stride % _CUTE_ALIGNMENT == 0 for stride in strides
    )
    if not is_dense or keys.data_ptr() % _CUTE_ALIGNMENT:
        return (
            f"bulk copies need keys whose last axis is contiguous and whose rows start at "
            f"multiples of {_CUTE_ALIGNMENT} bytes, got strides {keys.stride()}"
        )
    return None


def _why_no_contiguous_cute(
    q_BSHD: torch.Tensor,
    weights: torch.Tensor,
    k_BTD: torch.Tensor,
    lengths: torch.Tensor,
    starts: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    *_rest: Any,
) -> str | None:
    return _why_not_cute(q_BSHD, weights, k_BTD, k_BTD.shape[1], lengths, starts, key_mask)


def _why_no_paged_cute(
    q_RHD: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    max_len: int,
    starts: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    *_rest: Any,
) -> str | None:
    others = (block_table, lengths, starts, key_mask)
    return _why_not_cute(q_RHD, weights, key_pages, max_len, *others)


def _run_contiguous_cute(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    k_BTD: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    from glm_compile.ops.indexer_scores.cute_kernel import indexer_scores_cute

    return indexer_scores_cute(
        q_BSHD,
        weights_BSH,
        k_BTD,
        lengths_BS,
        starts_BS,
        _expand(key_mask, q_BSHD.shape[0], q_BSHD.shape[1], k_BTD.shape[1]),
        softmax_scale,
        max_len=k_BTD.shape[1],
    )


def _run_paged_cute(
    q_RHD: torch.Tensor,
    weights_RH: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_R: torch.Tensor,
    max_len: int,
    starts_R: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rows_per_sequence: int,
    is_causal: bool,
    early_windows: bool,
) -> torch.Tensor:
    from glm_compile.ops.indexer_scores.cute_kernel import indexer_scores_cute

    rows = (block_table.shape[0], rows_per_sequence)
    return indexer_scores_cute(
        q_RHD.unflatten(0, rows),
        weights_RH.unflatten(0, rows),
        key_pages,
        lengths_R if is_causal else lengths_R.unflatten(0, rows),
        None if starts_R is None else starts_R.unflatten(0, rows),
        _expand(key_mask, *rows, max_len),
        1.0,
        max_len=max_len,
        block_table=block_table,
        is_causal=is_causal,
        early_windows=early_windows,
    ).flatten(0, 1)


def _why_no_contiguous_triton(
    q_BSHD: torch.Tensor, weights: torch.Tensor, k_BTD: torch.Tensor, *_rest: Any
) -> str | None:
    return _why_not_triton(q_BSHD, q_BSHD.shape[0], q_BSHD.shape[1], k_BTD.shape[1])


def _why_no_paged_triton(
    q_RHD: torch.Tensor,
    weights: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths: torch.Tensor,
    max_len: int,
    starts: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rows_per_sequence: int,
    *_rest: Any,
) -> str | None:
    return _why_not_triton(q_RHD, block_table.shape[0], rows_per_sequence, max_len)


def _run_contiguous_triton(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    k_BTD: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    softmax_scale: float,
) -> torch.Tensor:
    from glm_compile.ops.indexer_scores.triton_kernel import indexer_scores_triton

    num_keys = k_BTD.shape[1]
    return indexer_scores_triton(
        _with_contiguous_rows(q_BSHD),
        weights_BSH,
        _with_contiguous_rows(k_BTD),
        lengths_BS,
        starts_BS,
        _expand(key_mask, q_BSHD.shape[0], q_BSHD.shape[1], num_keys),
        softmax_scale,
        max_len=num_keys,
    )


def _run_paged_triton(
    q_RHD: torch.Tensor,
    weights_RH: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_R: torch.Tensor,
    max_len: int,
    starts_R: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rows_per_sequence: int,
    is_causal: bool,
    _early_windows: bool,
) -> torch.Tensor:
    from glm_compile.ops.indexer_scores.triton_kernel import indexer_scores_triton

    rows = (block_table.shape[0], rows_per_sequence)
    keys, scales = key_pages, None
    if key_pages.dtype == torch.uint8:
        keys, scales = split_key_pages(key_pages, q_RHD.shape[2])
    return indexer_scores_triton(
        _with_contiguous_rows(q_RHD).unflatten(0, rows),
        weights_RH.unflatten(0, rows),
        _with_contiguous_rows(keys),
        lengths_R[:, None] if is_causal else lengths_R.unflatten(0, rows),
        None if starts_R is None else starts_R.unflatten(0, rows),
        _expand(key_mask, *rows, max_len),
        1.0,
        max_len=max_len,
        scales=scales,
        block_table=block_table,
        is_causal=is_causal,
    ).flatten(0, 1)


def _with_contiguous_rows(tensor: torch.Tensor) -> torch.Tensor:
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


def _expand(
    key_mask: torch.Tensor | None, num_batch: int, num_queries: int, num_keys: int
) -> torch.Tensor | None:
    if key_mask is None:
        return None
    return expand_key_mask(key_mask, num_batch, num_queries, num_keys)


_TRITON = _dispatch.Backend("triton", _why_no_contiguous_triton, _run_contiguous_triton)
_CUTE = _dispatch.Backend("cute", _why_no_contiguous_cute, _run_contiguous_cute)
_REFERENCE = _dispatch.Backend("reference", _dispatch.always, indexer_scores_reference)
_PAGED_TRITON = _dispatch.Backend("triton", _why_no_paged_triton, _run_paged_triton)
_PAGED_CUTE = _dispatch.Backend("cute", _why_no_paged_cute, _run_paged_cute)
_PAGED_REFERENCE = _dispatch.Backend("reference", _dispatch.always, indexer_scores_paged_reference)


def _backends(q: torch.Tensor) -> tuple[_dispatch.Backend, ...]:
    if q.dtype in _CUTE_FIRST:
        return _CUTE, _TRITON, _REFERENCE
    return _TRITON, _CUTE, _REFERENCE


def _paged_backends(q: torch.Tensor) -> tuple[_dispatch.Backend, ...]:
    if q.dtype in _CUTE_FIRST:
        return _PAGED_CUTE, _PAGED_TRITON, _PAGED_REFERENCE
    return _PAGED_TRITON, _PAGED_CUTE, _PAGED_REFERENCE


def _indexer_scores(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    k_BTD: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    softmax_scale: float,
    backend: str,
) -> torch.Tensor:
    return _dispatch.run(
        "indexer_scores",
        _backends(q_BSHD),
        backend or None,
        q_BSHD,
        weights_BSH,
        k_BTD,
        lengths_BS,
        starts_BS,
        key_mask,
        softmax_scale,
    )


def _indexer_scores_fake(
    q_BSHD: torch.Tensor,
    weights_BSH: torch.Tensor,
    k_BTD: torch.Tensor,
    lengths_BS: torch.Tensor,
    starts_BS: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    softmax_scale: float,
    backend: str,
) -> torch.Tensor:
    shape = (q_BSHD.shape[0], q_BSHD.shape[1], k_BTD.shape[1])
    return q_BSHD.new_empty(shape, dtype=torch.float32)


def _indexer_scores_paged(
    q_RHD: torch.Tensor,
    weights_RH: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_R: torch.Tensor,
    max_len: int,
    starts_R: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rows_per_sequence: int,
    is_causal: bool,
    early_windows: bool,
    backend: str,
) -> torch.Tensor:
    return _dispatch.run(
        "indexer_scores_paged",
        _paged_backends(q_RHD),
        backend or None,
        q_RHD,
        weights_RH,
        key_pages,
        block_table,
        lengths_R,
        max_len,
        starts_R,
        key_mask,
        rows_per_sequence,
        is_causal,
        early_windows,
    )


def _indexer_scores_paged_fake(
    q_RHD: torch.Tensor,
    weights_RH: torch.Tensor,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_R: torch.Tensor,
    max_len: int,
    starts_R: torch.Tensor | None,
    key_mask: torch.Tensor | None,
    rows_per_sequence: int,
    is_causal: bool,
    early_windows: bool,
    backend: str,
) -> torch.Tensor:
    return q_RHD.new_empty((q_RHD.shape[0], max_len), dtype=torch.float32)


_op = register_op(
    "indexer_scores(Tensor q_BSHD, Tensor weights_BSH, Tensor k_BTD, Tensor lengths_BS, "
    "Tensor? starts_BS, Tensor? key_mask, float softmax_scale, str backend) -> Tensor",
    _indexer_scores,
    _indexer_scores_fake,
)
_paged_op = register_op(
    "indexer_scores_paged(Tensor q_RHD, Tensor weights_RH, Tensor key_pages, Tensor block_table, "
    "Tensor lengths_R, SymInt max_len, Tensor? starts_R, Tensor? key_mask, "
    "SymInt rows_per_sequence, bool is_causal, bool early_windows, str backend) -> Tensor",
    _indexer_scores_paged,
    _indexer_scores_paged_fake,
)
