"""The rows that draft steps attend to, in plain torch.

Shape legend: B batch, S rows of a block, K selected tokens, X width of a cached row, P pages of a
sequence.
"""

from __future__ import annotations

import torch

from glm_compile.ops.paged_cache import PAGE_SIZE


def draft_seed_reference(
    pages: torch.Tensor,
    topk_BSK: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
    row_B: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See `draft_seed` for the contract."""
    num_places = topk_BSK.shape[2]
    topk_BK = topk_BSK[:, 0]
    if row_B is not None:
        index_B1K = row_B.long()[:, None, None].expand(-1, 1, num_places)
        topk_BK = topk_BSK.gather(1, index_B1K)[:, 0]
        lengths_B = lengths_B + row_B + 1
    before_BK = torch.cat([torch.full_like(topk_BK[:, :1], -1), topk_BK[:, :-1]], dim=1)
    num_columns = block_table_BP.shape[1]
    if not num_columns:
        block_table_BP = block_table_BP.new_zeros(len(block_table_BP), 1)
    counts_BK = (topk_BK >= 0) & (topk_BK < lengths_B[:, None]) & (topk_BK != before_BK)
    counts_BK &= topk_BK < num_columns * PAGE_SIZE
    positions_BK = torch.where(counts_BK, topk_BK, 0).long()
    page_BK = block_table_BP.gather(1, positions_BK // PAGE_SIZE).long()
    counts_BK &= (page_BK >= 0) & (page_BK < len(pages))
    page_BK = torch.where(counts_BK, page_BK, 0)
    rows_BKX = pages[page_BK, positions_BK % PAGE_SIZE]
    rows_BKX = torch.where(counts_BK[..., None], rows_BKX, 0)

    places_K = torch.arange(num_places, dtype=torch.int32, device=topk_BK.device)
    last_BK = torch.where(counts_BK, places_K, -1).cummax(dim=1).values
    first_BK = torch.where(counts_BK, places_K, num_places).cummin(dim=1).values[:, -1:]
    first_BK = torch.where(first_BK < num_places, first_BK, 0)
    return rows_BKX, torch.where(last_BK < 0, first_BK, last_BK).to(torch.int32)
