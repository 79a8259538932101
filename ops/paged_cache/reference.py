"""Paged cache access in plain torch.

Shape legend: B batch, S tokens of the step, X row width, D head dim, P pages of a sequence.

A token t of a sequence lies in the page `block_table[b, t // 64]`, row `t % 64`. A page of FP8
index keys is one run of bytes: 64 rows of D e4m3 values, then 64 fp32 scales.
"""

from __future__ import annotations

import torch

from glm_compile.ops.fp8_quant.reference import fp8_quant_reference

PAGE_SIZE = 64
SCALE_BYTES = 4


def slots_of_step(
    block_table_BP: torch.Tensor, lengths_B: torch.Tensor, num_tokens: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (page, row, is_stored), each [B, S], of the tokens that follow the cached ones.

    Tokens beyond the table, before the sequence, or with a negative table entry are not stored.
    """
    steps = torch.arange(num_tokens, device=block_table_BP.device)
    positions_BS = lengths_B.long()[:, None] + steps
    columns_BS = torch.div(positions_BS, PAGE_SIZE, rounding_mode="floor")
    num_columns = block_table_BP.shape[1]
    if not num_columns:
        nothing_BS = torch.zeros_like(positions_BS)
        return nothing_BS, nothing_BS, nothing_BS.bool()
    pages_BS = block_table_BP.long().gather(1, columns_BS.clamp(0, num_columns - 1))
    is_stored_BS = (columns_BS >= 0) & (columns_BS < num_columns) & (pages_BS >= 0)
    return pages_BS, positions_BS - columns_BS * PAGE_SIZE, is_stored_BS


def split_key_pages(key_pages: torch.Tensor, head_dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return views of FP8 pages: keys e4m3 [pages, 64, D] and scales fp32 [pages, 64]."""
    key_bytes = PAGE_SIZE * head_dim
    keys = key_pages[:, :key_bytes].view(torch.float8_e4m3fn)
    scales = key_pages[:, key_bytes:].view(torch.float32)
    return keys.unflatten(1, (PAGE_SIZE, head_dim)), scales


def paged_write_reference(
    pages: torch.Tensor,
    new_BSX: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    """Store `new_BSX` at the positions `lengths_B[b] + s`, cast to the pages' dtype."""
    page_BS, row_BS, is_stored_BS = slots_of_step(block_table_BP, lengths_B, new_BSX.shape[1])
    pages[page_BS[is_stored_BS], row_BS[is_stored_BS]] = new_BSX[is_stored_BS].to(pages.dtype)


def paged_gather_reference(
    pages: torch.Tensor, block_table_BP: torch.Tensor, max_len: int
) -> torch.Tensor:
    """Return the rows 0..max_len-1 of each sequence; zeros where the table has no page."""
    table_BP = _fit_table(block_table_BP, max_len)
    rows = pages[table_BP.clamp(min=0)]
    rows = torch.where((table_BP >= 0)[..., None, None], rows, rows.new_zeros(()))
    return rows.flatten(1, 2)[:, :max_len].contiguous()


def paged_write_fp8_reference(
    key_pages: torch.Tensor,
    new_BSD: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    """Quantise `new_BSD` with one scale per row and store it behind the cached rows."""
    page_BS, row_BS, is_stored_BS = slots_of_step(block_table_BP, lengths_B, new_BSD.shape[1])
    values, scale_values = fp8_quant_reference(new_BSD[is_stored_BS], False)
    keys, scales = split_key_pages(key_pages, new_BSD.shape[2])
    where = page_BS[is_stored_BS], row_BS[is_stored_BS]
    keys.view(torch.uint8)[where] = values.view(torch.uint8)
    scales[where] = scale_values


def paged_gather_fp8_reference(
    key_pages: torch.Tensor,
    block_table_BP: torch.Tensor,
    max_len: int,
    head_dim: int,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return the dequantised rows 0..max_len-1 of each sequence; zeros without a page."""
    table_BP = _fit_table(block_table_BP, max_len)
    keys, scales = split_key_pages(key_pages[table_BP.clamp(min=0)].flatten(0, 1), head_dim)
    rows = (keys.float() * scales[..., None]).to(dtype).unflatten(0, table_BP.shape)
    rows = torch.where((table_BP >= 0)[..., None, None], rows, rows.new_zeros(()))
    return rows.flatten(1, 2)[:, :max_len].contiguous()


def _fit_table(block_table_BP: torch.Tensor, max_len: int) -> torch.Tensor:
    """The table's columns that `max_len` rows need; missing ones are -1."""
    num_columns = -(-max_len // PAGE_SIZE)
    table_BP = block_table_BP[:, :num_columns].long()
    missing = num_columns - table_BP.shape[1]
    return torch.nn.functional.pad(table_BP, (0, missing), value=-1) if missing else table_BP
