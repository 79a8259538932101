"""Reads and writes of a paged cache: pages of 64 tokens, a block table row per sequence.

The writers mutate one whole page tensor and return nothing, so that a compiled step writes in
place. Token t of sequence b lies in the page `block_table[b, t // 64]`, row `t % 64`. A write to
a negative table entry, or beyond the table, is skipped; a gather gives zeros there. Page times
page size is taken in 64 bits: with 8448 bytes a page, 32 bits end near page 254,200.

Shape legend: B batch, S tokens of the step, X row width, D head dim, P pages of a sequence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._bounds import INDEX_DTYPES
from glm_compile.ops._library import register_op
from glm_compile.ops.paged_cache.reference import (
    PAGE_SIZE,
    SCALE_BYTES,
    paged_gather_fp8_reference,
    paged_gather_reference,
    paged_write_fp8_reference,
    paged_write_reference,
)

__all__ = [
    "PAGE_SIZE",
    "advance",
    "key_page_bytes",
    "paged_gather",
    "paged_gather_fp8",
    "paged_write",
    "paged_write_fp8",
]


def key_page_bytes(head_dim: int) -> int:
    """Bytes of a page of FP8 index keys: 64 rows of e4m3 values, then 64 fp32 scales."""
    return PAGE_SIZE * (head_dim + SCALE_BYTES)


def paged_write(
    pages: torch.Tensor,
    new_BSX: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    """Store the step's rows at the positions `lengths_B[b] + s`.

    Args:
        pages: [pages, 64, X], written in place; rows are cast to its dtype.
        new_BSX: any strides. S = 0 and B = 0 store nothing.
        block_table_BP: int32 or int64. Sequences must not share a page that they write.
        lengths_B: int32 or int64, tokens already cached; a negative position is not stored.
    """
    _check_pages("paged_write", pages)
    _check_step("paged_write", new_BSX, block_table_BP, lengths_B)
    if new_BSX.shape[2] != pages.shape[2]:
        raise ValueError(
            f"paged_write: rows of {new_BSX.shape[2]} values do not fit pages of {pages.shape[2]}"
        )
    _paged_write_op(pages, new_BSX, block_table_BP, lengths_B)


def paged_gather(pages: torch.Tensor, block_table_BP: torch.Tensor, max_len: int) -> torch.Tensor:
    """Return the rows 0..max_len-1 of each sequence as [B, max_len, X], contiguous.

    Rows past a sequence's length hold whatever its pages hold; rows without a page are zeros.
    """
    _check_pages("paged_gather", pages)
    _check_read("paged_gather", block_table_BP, max_len)
    return _paged_gather_op(pages, block_table_BP, max_len)


def paged_write_fp8(
    key_pages: torch.Tensor,
    new_BSD: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    """Quantise the step's keys to e4m3, one fp32 scale each, and store them at `lengths_B[b] + s`.

    Args:
        key_pages: uint8 [pages, 64 * (D + 4)], written in place.
        new_BSD: any strides and floating dtype; D a multiple of 4. See `paged_write` for the rest,
            `fp8_quant` for the rounding.
    """
    _check_step("paged_write_fp8", new_BSD, block_table_BP, lengths_B)
    check_key_pages("paged_write_fp8", key_pages, new_BSD.shape[2])
    _paged_write_fp8_op(key_pages, new_BSD, block_table_BP, lengths_B)


def paged_gather_fp8(
    key_pages: torch.Tensor,
    block_table_BP: torch.Tensor,
    max_len: int,
    *,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the dequantised keys 0..max_len-1 of each sequence as [B, max_len, D] in `dtype`.

    value * scale is taken in fp32 and rounded once. Rows without a page are zeros.
    """
    check_key_pages("paged_gather_fp8", key_pages, head_dim)
    _check_read("paged_gather_fp8", block_table_BP, max_len)
    return _paged_gather_fp8_op(key_pages, block_table_BP, max_len, head_dim, dtype)


def advance(lengths_B: torch.Tensor, num_tokens: int) -> None:
    """Add `num_tokens` to every length, in place."""
    _advance_op(lengths_B, num_tokens)


def check_key_pages(op: str, key_pages: torch.Tensor, head_dim: int) -> None:
    """Raise ValueError unless `key_pages` is a contiguous uint8 [pages, 64 * (head_dim + 4)]."""
    if key_pages.dtype != torch.uint8 or key_pages.dim() != 2:
        raise ValueError(
            f"{op}: FP8 key pages must be uint8 [pages, 64 * (D + 4)], got {key_pages.dtype} with "
            f"{key_pages.dim()} axes"
        )
    if head_dim % 4:
        raise ValueError(f"{op}: the head dim must be a multiple of 4, got {head_dim}")
    if key_pages.shape[1] != key_page_bytes(head_dim):
        raise ValueError(
            f"{op}: a page of {head_dim}-wide keys has {key_page_bytes(head_dim)} bytes, got "
            f"{key_pages.shape[1]}"
        )
    if not key_pages.is_contiguous():
        raise ValueError(f"{op}: FP8 key pages must be contiguous")


def _check_pages(op: str, pages: torch.Tensor) -> None:
    if pages.dim() != 3 or pages.shape[1] != PAGE_SIZE:
        raise ValueError(f"{op}: pages must be [pages, {PAGE_SIZE}, X], got {tuple(pages.shape)}")


def _check_step(
    op: str, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> None:
    if new.dim() != 3 or block_table.dim() != 2 or lengths.dim() != 1:
        raise ValueError(
            f"{op}: expected new rows [B, S, X], a block table [B, P] and lengths [B], got "
            f"{new.dim()}, {block_table.dim()} and {lengths.dim()} axes"
        )
    if not new.shape[0] == block_table.shape[0] == lengths.shape[0]:
        raise ValueError(
            f"{op}: one batch size expected, got {new.shape[0]} rows, {block_table.shape[0]} block "
            f"table rows and {lengths.shape[0]} lengths"
        )
    _check_integers(op, "block_table", block_table)
    _check_integers(op, "lengths", lengths)


def _check_read(op: str, block_table: torch.Tensor, max_len: int) -> None:
    if block_table.dim() != 2:
        raise ValueError(
            f"{op}: the block table must be [B, P], got shape {tuple(block_table.shape)}"
        )
    _check_integers(op, "block_table", block_table)
    if max_len < 0:
        raise ValueError(f"{op}: max_len must not be negative, got {max_len}")


def _check_integers(op: str, name: str, tensor: torch.Tensor) -> None:
    if tensor.dtype not in INDEX_DTYPES:
        raise ValueError(f"{op}: {name} must be int32 or int64, got {tensor.dtype}")


# A program holds a whole row.
_MAX_TRITON_ROW = 8192


def _why_not_triton_write(
    pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> str | None:
    if new.shape[2] > _MAX_TRITON_ROW:
        return f"rows are longer than {_MAX_TRITON_ROW}: {new.shape[2]}"
    return _dispatch.why_no_triton(pages, new, block_table, lengths)


def _why_not_triton_write_fp8(
    key_pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> str | None:
    reason = _dispatch.why_no_fp8(key_pages)
    return reason or _why_not_triton_write(key_pages, new, block_table, lengths)


def _why_not_triton_gather(
    pages: torch.Tensor, block_table: torch.Tensor, max_len: int
) -> str | None:
    if pages.shape[2] > _MAX_TRITON_ROW:
        return f"rows are longer than {_MAX_TRITON_ROW}: {pages.shape[2]}"
    return _dispatch.why_no_triton(pages, block_table)


def _why_not_triton_gather_fp8(
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    head_dim: int,
    dtype: torch.dtype,
) -> str | None:
    if head_dim > _MAX_TRITON_ROW:
        return f"rows are longer than {_MAX_TRITON_ROW}: {head_dim}"
    return _dispatch.why_no_fp8(key_pages) or _dispatch.why_no_triton(key_pages, block_table)


def _lazily(name: str) -> Callable[..., Any]:
    """The kernel's launcher, whose module needs Triton."""

    def run(*args: Any) -> Any:
        from glm_compile.ops.paged_cache import triton_kernel

        return getattr(triton_kernel, name)(*args)

    return run


def _backends(
    why_not: Callable[..., str | None], launcher: str, reference: Callable[..., Any]
) -> tuple[_dispatch.Backend, ...]:
    return (
        _dispatch.Backend("triton", why_not, _lazily(launcher)),
        _dispatch.Backend("reference", _dispatch.always, reference),
    )


_WRITE = _backends(_why_not_triton_write, "paged_write_triton", paged_write_reference)
_GATHER = _backends(_why_not_triton_gather, "paged_gather_triton", paged_gather_reference)
_WRITE_FP8 = _backends(
    _why_not_triton_write_fp8, "paged_write_fp8_triton", paged_write_fp8_reference
)
_GATHER_FP8 = _backends(
    _why_not_triton_gather_fp8, "paged_gather_fp8_triton", paged_gather_fp8_reference
)


def _paged_write(
    pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> None:
    _dispatch.run("paged_write", _WRITE, None, pages, new, block_table, lengths)


def _paged_write_fake(
    pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> None:
    return None


def _paged_gather(pages: torch.Tensor, block_table: torch.Tensor, max_len: int) -> torch.Tensor:
    return _dispatch.run("paged_gather", _GATHER, None, pages, block_table, max_len)


def _paged_gather_fake(
    pages: torch.Tensor, block_table: torch.Tensor, max_len: int
) -> torch.Tensor:
    return pages.new_empty((block_table.shape[0], max_len, pages.shape[2]))


def _paged_write_fp8(
    key_pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> None:
    _dispatch.run("paged_write_fp8", _WRITE_FP8, None, key_pages, new, block_table, lengths)


def _paged_write_fp8_fake(
    key_pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> None:
    return None


def _paged_gather_fp8(
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return _dispatch.run(
        "paged_gather_fp8", _GATHER_FP8, None, key_pages, block_table, max_len, head_dim, dtype
    )


def _paged_gather_fp8_fake(
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    return key_pages.new_empty((block_table.shape[0], max_len, head_dim), dtype=dtype)


def _advance(lengths: torch.Tensor, num_tokens: int) -> None:
    lengths.add_(num_tokens)


def _advance_fake(lengths: torch.Tensor, num_tokens: int) -> None:
    return None


_paged_write_op = register_op(
    "paged_write(Tensor(a!) pages, Tensor new_BSX, Tensor block_table, Tensor lengths_B) -> ()",
    _paged_write,
    _paged_write_fake,
)
_paged_gather_op = register_op(
    "paged_gather(Tensor pages, Tensor block_table, SymInt max_len) -> Tensor",
    _paged_gather,
    _paged_gather_fake,
)
_paged_write_fp8_op = register_op(
    "paged_write_fp8(Tensor(a!) key_pages, Tensor new_BSD, Tensor block_table, Tensor lengths_B) "
    "-> ()",
    _paged_write_fp8,
    _paged_write_fp8_fake,
)
_paged_gather_fp8_op = register_op(
    "paged_gather_fp8(Tensor key_pages, Tensor block_table, SymInt max_len, int head_dim, "
    "ScalarType dtype) -> Tensor",
    _paged_gather_fp8,
    _paged_gather_fp8_fake,
)
_advance_op = register_op("advance(Tensor(a!) lengths, SymInt n) -> ()", _advance, _advance_fake)
