"""The cached rows that the draft steps of a block attend to, gathered once for all of them.

Shape legend: B batch, S rows of a block, K selected tokens, X width of a cached row, P pages of a
sequence.
"""

from __future__ import annotations

from typing import Any

import torch

from glm_compile.ops import _dispatch
from glm_compile.ops._bounds import INDEX_DTYPES
from glm_compile.ops._library import register_op
from glm_compile.ops.draft_seed.reference import draft_seed_reference
from glm_compile.ops.paged_cache import PAGE_SIZE

__all__ = ["draft_seed"]

# Selected tokens that one program looks at.
_MAX_TRITON_TOKENS = 16384
_MAX_GRID = 65535


def draft_seed(
    pages: torch.Tensor,
    topk_BSK: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
    *,
    row_B: torch.Tensor | None = None,
    backend: str | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read the rows of selected positions, and say which of them count.

    A place counts if its position is within 0 and the length, in a page that there is, and not that
    of the place before. Deterministic; nothing is read on the host.

    Args:
        pages: [pages, 64, X].
        topk_BSK: int32 or int64 positions, any strides.
        block_table_BP: int32 or int64.
        lengths_B: int32 or int64, tokens that count.
        row_B: int32 or int64: the selection is that of this row of the block, whose tokens up to
            it count as well. None: of row 0, and none does.
        backend: `reference` or `triton` to force one; None takes the first that can.

    Returns:
        The rows [B, K, X], zeros at places that do not count, and int32 [B, K]: for each place
        itself if it counts, else the nearest before it that does, or the first one; 0 where none
        counts. So they are a selection of the rows that repeats what counts.

    Raises:
        ValueError: shapes or dtypes outside the above, or a forced backend that cannot run.
    """
    if pages.dim() != 3 or pages.shape[1] != PAGE_SIZE:
        raise ValueError(
            f"draft_seed: pages must be [pages, {PAGE_SIZE}, X], got {tuple(pages.shape)}"
        )
    sizes = {len(block_table_BP), len(lengths_B), len(lengths_B if row_B is None else row_B)}
    if topk_BSK.dim() != 3 or {len(topk_BSK)} != sizes:
        raise ValueError(
            "draft_seed: expected positions [B, S, K], a table [B, P], lengths [B] and rows [B], "
            f"got {tuple(topk_BSK.shape)}, {tuple(block_table_BP.shape)}, "
            f"{tuple(lengths_B.shape)} and {None if row_B is None else tuple(row_B.shape)}"
        )
    for name, tensor in (
        ("positions", topk_BSK),
        ("the table", block_table_BP),
        ("lengths", lengths_B),
        ("rows", lengths_B if row_B is None else row_B),
    ):
        if tensor.dtype not in INDEX_DTYPES:
            raise ValueError(f"draft_seed: {name} must be int32 or int64, got {tensor.dtype}")
    arguments = (pages, topk_BSK, block_table_BP, lengths_B, row_B)
    if not backend:
        return _op(*arguments)
    return _dispatch.run("draft_seed", _BACKENDS, backend, *arguments)


def _why_not_triton(
    pages: torch.Tensor,
    topk_BSK: torch.Tensor,
    block_table_BP: torch.Tensor,
    lengths_B: torch.Tensor,
    row_B: torch.Tensor | None,
) -> str | None:
    batch_size, _, num_tokens = topk_BSK.shape
    if num_tokens > _MAX_TRITON_TOKENS or batch_size > _MAX_GRID:
        return (
            f"written for at most {_MAX_TRITON_TOKENS} tokens of {_MAX_GRID} sequences, got "
            f"{num_tokens} of {batch_size}"
        )
    if pages.stride(2) != 1:
        return "rows of a page must be contiguous"
    return _dispatch.why_no_triton(pages, topk_BSK, block_table_BP, lengths_B, row_B)


def _run_triton(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    from glm_compile.ops.draft_seed.triton_kernel import draft_seed_triton

    return draft_seed_triton(*arguments)


_BACKENDS = (
    _dispatch.Backend("triton", _why_not_triton, _run_triton),
    _dispatch.Backend("reference", _dispatch.always, draft_seed_reference),
)


def _draft_seed(*arguments: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return _dispatch.run("draft_seed", _BACKENDS, None, *arguments)


def _draft_seed_fake(
    pages: torch.Tensor, topk_BSK: torch.Tensor, *_rest: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    batch_size, _, num_tokens = topk_BSK.shape
    rows_BK = topk_BSK.new_empty((batch_size, num_tokens), dtype=torch.int32)
    return pages.new_empty((batch_size, num_tokens, pages.shape[2])), rows_BK


_op = register_op(
    "draft_seed(Tensor pages, Tensor topk_BSK, Tensor block_table_BP, Tensor lengths_B, "
    "Tensor? row_B) -> (Tensor, Tensor)",
    _draft_seed,
    _draft_seed_fake,
)
