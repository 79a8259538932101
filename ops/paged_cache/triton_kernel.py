"""Paged cache access in Triton: a program a written token, a program eight gathered rows.

Page indices are widened before they are multiplied by a page's size. Shape legend: B batch, S
tokens of the step, X row width, D head dim, P pages of a sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from glm_compile.ops._triton import finite_amax, fp8_scale, to_fp8

PAGE_SIZE = 64
# Rows that one program gathers; divides the page size, so that a program reads one table entry.
_GATHER_ROWS = 8


@triton.jit
def find_slot(block_table, stride_table, num_columns, lengths, sequence, step):
    """(page, row, is_stored) of one token of the step; page and row are safe to compute with."""
    position = tl.load(lengths + sequence).to(tl.int64) + step
    is_stored = (position >= 0) & (position < num_columns.to(tl.int64) * 64)
    position = tl.where(is_stored, position, 0)
    entry = block_table + sequence * stride_table + position // 64
    page = tl.load(entry, mask=is_stored, other=-1).to(tl.int64)
    return page, position % 64, is_stored & (page >= 0)


@triton.jit(do_not_specialize=["num_steps", "stride_new_b", "stride_table", "num_columns"])
def paged_write_kernel(
    pages,
    stride_page,
    stride_row,
    stride_value,
    new,
    stride_new_b,
    stride_new_s,
    stride_new_x,
    block_table,
    stride_table,
    num_columns,
    lengths,
    num_steps,
    X: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    sequence, step = token // num_steps, token % num_steps
    page, row, is_stored = find_slot(
        block_table, stride_table, num_columns, lengths, sequence, step
    )
    column = tl.arange(0, BLOCK_X).to(tl.int64)
    inside = (column < X) & is_stored
    source = new + sequence * stride_new_b + step * stride_new_s + column * stride_new_x
    values = tl.load(source, mask=inside, other=0.0)
    target = pages + page * stride_page + row * stride_row + column * stride_value
    tl.store(target, values.to(pages.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["stride_table", "num_columns", "max_len"])
def paged_gather_kernel(
    pages,
    stride_page,
    stride_row,
    stride_value,
    block_table,
    stride_table,
    num_columns,
    gathered,
    max_len,
    X: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_X: tl.constexpr,
):
    sequence = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    has_entry = first // 64 < num_columns
    entry = block_table + sequence * stride_table + first // 64
    page = tl.load(entry, mask=has_entry, other=-1).to(tl.int64)
    position = first + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_X).to(tl.int64)[None, :]
    inside = (position < max_len) & (column < X)
    source = pages + page * stride_page + (position % 64) * stride_row + column * stride_value
    values = tl.load(source, mask=inside & (page >= 0), other=0.0)
    tl.store(gathered + (sequence * max_len + position) * X + column, values, mask=inside)


@triton.jit
def store_key(key_pages, key_scales, page, row, values, scale, column, inside, D: tl.constexpr):
    """Store one quantised key and its scale; `inside` is False everywhere for a skipped token."""
    at = page * (64 * (D + 4)) + row * D + column
    tl.store(key_pages + at, values.to(tl.uint8, bitcast=True), mask=inside)
    at = page * (16 * (D + 4)) + 16 * D + row + column
    tl.store(key_scales + at, tl.broadcast_to(scale, column.shape), mask=inside & (column == 0))


@triton.jit(do_not_specialize=["num_steps", "stride_new_b", "stride_table", "num_columns"])
def paged_write_fp8_kernel(
    key_pages,
    key_scales,
    new,
    stride_new_b,
    stride_new_s,
    stride_new_d,
    block_table,
    stride_table,
    num_columns,
    lengths,
    num_steps,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0).to(tl.int64)
    sequence, step = token // num_steps, token % num_steps
    page, row, is_stored = find_slot(
        block_table, stride_table, num_columns, lengths, sequence, step
    )
    column = tl.arange(0, BLOCK_D).to(tl.int64)
    inside = (column < D) & is_stored
    source = new + sequence * stride_new_b + step * stride_new_s + column * stride_new_d
    key = tl.load(source, mask=inside, other=0.0).to(tl.float32)[None, :]
    scale = fp8_scale(finite_amax(key, 1), False)
    values = to_fp8(key, tl.broadcast_to(scale[:, None], key.shape))
    store_key(
        key_pages,
        key_scales,
        page,
        row,
        values,
        scale[:, None],
        column[None, :],
        inside[None, :],
        D,
    )


@triton.jit(do_not_specialize=["stride_table", "num_columns", "max_len"])
def paged_gather_fp8_kernel(
    key_pages,
    key_scales,
    block_table,
    stride_table,
    num_columns,
    gathered,
    max_len,
    D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    sequence = tl.program_id(1).to(tl.int64)
    first = tl.program_id(0).to(tl.int64) * BLOCK_ROWS
    has_entry = first // 64 < num_columns
    entry = block_table + sequence * stride_table + first // 64
    page = tl.load(entry, mask=has_entry, other=-1).to(tl.int64)
    position = first + tl.arange(0, BLOCK_ROWS)[:, None]
    column = tl.arange(0, BLOCK_D).to(tl.int64)[None, :]
    inside = (position < max_len) & (column < D)
    is_read = inside & (page >= 0)
    row = position % 64
    values = tl.load(key_pages + page * (64 * (D + 4)) + row * D + column, mask=is_read, other=0)
    scale_at = key_scales + page * (16 * (D + 4)) + 16 * D + row
    scale = tl.load(scale_at, mask=(position < max_len) & (page >= 0), other=0.0)
    keys = values.to(tl.float8e4nv, bitcast=True).to(tl.float32) * scale
    target = gathered + (sequence * max_len + position) * D + column
    tl.store(target, keys.to(gathered.dtype.element_ty), mask=inside)


def table_arguments(block_table: torch.Tensor) -> tuple[torch.Tensor, int, int]:
    """A block table with contiguous rows, their stride and length."""
    table = block_table if block_table.stride(1) == 1 else block_table.contiguous()
    return table, table.stride(0), table.shape[1]


def paged_write_triton(
    pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Launch one program a token."""
    batch_size, num_steps, width = new.shape
    if batch_size * num_steps == 0:
        return
    paged_write_kernel[(batch_size * num_steps,)](
        pages,
        *pages.stride(),
        new,
        *new.stride(),
        *table_arguments(block_table),
        lengths.contiguous(),
        num_steps,
        X=width,
        BLOCK_X=triton.next_power_of_2(width),
        num_warps=4,
    )


def paged_gather_triton(
    pages: torch.Tensor, block_table: torch.Tensor, max_len: int
) -> torch.Tensor:
    """Launch one program for eight rows of a sequence."""
    batch_size, width = block_table.shape[0], pages.shape[2]
    gathered = pages.new_empty((batch_size, max_len, width))
    if gathered.numel():
        paged_gather_kernel[(triton.cdiv(max_len, _GATHER_ROWS), batch_size)](
            pages,
            *pages.stride(),
            *table_arguments(block_table),
            gathered,
            max_len,
            X=width,
            BLOCK_ROWS=_GATHER_ROWS,
            BLOCK_X=triton.next_power_of_2(width),
            num_warps=4,
        )
    return gathered


def paged_write_fp8_triton(
    key_pages: torch.Tensor, new: torch.Tensor, block_table: torch.Tensor, lengths: torch.Tensor
) -> None:
    """Launch one program a token."""
    batch_size, num_steps, head_dim = new.shape
    if batch_size * num_steps == 0:
        return
    paged_write_fp8_kernel[(batch_size * num_steps,)](
        key_pages,
        key_pages.view(torch.float32),
        new,
        *new.stride(),
        *table_arguments(block_table),
        lengths.contiguous(),
        num_steps,
        D=head_dim,
        BLOCK_D=triton.next_power_of_2(head_dim),
        num_warps=1,
    )


def paged_gather_fp8_triton(
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    max_len: int,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Launch one program for eight rows of a sequence."""
    batch_size = block_table.shape[0]
    gathered = key_pages.new_empty((batch_size, max_len, head_dim), dtype=dtype)
    if gathered.numel():
        paged_gather_fp8_kernel[(triton.cdiv(max_len, _GATHER_ROWS), batch_size)](
            key_pages,
            key_pages.view(torch.float32),
            *table_arguments(block_table),
            gathered,
            max_len,
            D=head_dim,
            BLOCK_ROWS=_GATHER_ROWS,
            BLOCK_D=triton.next_power_of_2(head_dim),
            num_warps=2,
        )
    return gathered
