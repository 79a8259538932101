"""The rows that draft steps attend to, in Triton: one launch.

Programs of a sequence copy some columns of some rows each; one more finds which places count.

Shape legend: B batch, S rows of a block, K selected tokens, X width of a cached row, P pages of a
sequence.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from glm_compile.ops._triton import supports_pdl
from glm_compile.ops.paged_cache import PAGE_SIZE

_BLOCK_K = 16
_BLOCK_X = 64


@triton.jit
def find_rows(
    topk, stride_topk, length, table, num_columns, num_pages, places, K, PAGE: tl.constexpr
):
    """(counts, page, row in it) of the places of one sequence."""
    inside = places < K
    position = tl.load(topk + places * stride_topk, mask=inside, other=-1).to(tl.int64)
    is_later = inside & (places > 0)
    before = tl.load(topk + (places - 1) * stride_topk, mask=is_later, other=-1).to(tl.int64)
    counts = (position >= 0) & (position < length) & (position != before)
    counts = counts & (position < num_columns * PAGE)
    page = tl.load(table + position // PAGE, mask=counts, other=-1).to(tl.int64)
    counts = counts & (page >= 0) & (page < num_pages)
    return counts, page, position % PAGE


@triton.jit(
    do_not_specialize=["stride_tb", "stride_ts", "stride_table", "num_columns", "num_pages"]
)
def draft_seed_kernel(
    pages,
    stride_page,
    stride_row,
    topk,
    stride_tb,
    stride_ts,
    stride_tk,
    table,
    stride_table,
    num_columns,
    num_pages,
    lengths,
    row,
    out,
    rows,
    K: tl.constexpr,
    X: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_X: tl.constexpr,
    ALL_K: tl.constexpr,
    HAS_ROW: tl.constexpr,
    PDL: tl.constexpr,
):
    sequence = tl.program_id(2).to(tl.int64)
    topk += sequence * stride_tb
    table += sequence * stride_table
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    length = tl.load(lengths + sequence).to(tl.int64)
    if HAS_ROW:
        chosen = tl.load(row + sequence).to(tl.int64)
        topk += chosen * stride_ts
        length += chosen + 1
    if tl.program_id(0) == tl.num_programs(0) - 1:
        if tl.program_id(1) == 0:
            every = tl.arange(0, ALL_K)
            is_found, _page, _row = find_rows(
                topk, stride_tk, length, table, num_columns, num_pages, every, K, PAGE
            )
            last = tl.associative_scan(tl.where(is_found, every, -1), 0, _larger)
            first = tl.min(tl.where(is_found, every, ALL_K), 0)
            first = tl.where(first < ALL_K, first, 0)
            tl.store(rows + sequence * K + every, tl.where(last < 0, first, last), mask=every < K)
    else:
        place = tl.program_id(0) * BLOCK_K + tl.arange(0, BLOCK_K)
        counts, page, inner = find_rows(
            topk, stride_tk, length, table, num_columns, num_pages, place, K, PAGE
        )
        column = tl.program_id(1) * BLOCK_X + tl.arange(0, BLOCK_X)
        is_column = (column < X)[None, :]
        source = (pages + page * stride_page + inner * stride_row)[:, None] + column[None, :]
        value = tl.load(source, mask=counts[:, None] & is_column, other=0.0)
        target = (out + (sequence * K + place) * X)[:, None] + column[None, :]
        tl.store(target, value, mask=(place < K)[:, None] & is_column)


@triton.jit
def _larger(a, b):
    return tl.maximum(a, b)


def draft_seed_triton(
    pages: torch.Tensor,
    topk_BSK: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
    row_B: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Launch the kernel."""
    batch_size, _, num_places = topk_BSK.shape
    width = pages.shape[2]
    out_BKX = pages.new_empty((batch_size, num_places, width))
    rows_BK = topk_BSK.new_empty((batch_size, num_places), dtype=torch.int32)
    if not rows_BK.numel():
        return out_BKX, rows_BK
    if block_table_BP.stride(1) != 1:
        block_table_BP = block_table_BP.contiguous()
    has_pdl = supports_pdl(pages.device)
    block_x = min(_BLOCK_X, triton.next_power_of_2(width))
    grid = (triton.cdiv(num_places, _BLOCK_K) + 1, triton.cdiv(width, block_x), batch_size)
    draft_seed_kernel[grid](
        pages,
        pages.stride(0),
        pages.stride(1),
        topk_BSK,
        *topk_BSK.stride(),
        block_table_BP,
        block_table_BP.stride(0),
        block_table_BP.shape[1],
        pages.shape[0],
        lengths_B.contiguous(),
        lengths_B if row_B is None else row_B.contiguous(),
        out_BKX,
        rows_BK,
        K=num_places,
        X=width,
        PAGE=PAGE_SIZE,
        BLOCK_K=_BLOCK_K,
        BLOCK_X=block_x,
        ALL_K=triton.next_power_of_2(num_places),
        HAS_ROW=row_B is not None,
        PDL=has_pdl,
        num_warps=4,
        **({"launch_pdl": True} if has_pdl else {}),
    )
    return out_BKX, rows_BK
