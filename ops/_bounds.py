"""Which keys a query row may see: windows `start <= position < length` and key masks.

Shape legend: B batch, S query tokens, T cached tokens, R = B * S rows.
"""

from __future__ import annotations

import torch

INDEX_DTYPES = (torch.int32, torch.int64)


def expand_key_mask(
    key_mask: torch.Tensor, num_batch: int, num_queries: int, num_keys: int
) -> torch.Tensor:
    """View of a bool mask as [B, S, T]; broadcast axes get stride 0, a longer last axis is cut."""
    if key_mask.dim() and key_mask.shape[-1] > num_keys:
        key_mask = key_mask[..., :num_keys]
    return key_mask.expand(num_batch, num_queries, num_keys)


def check_key_mask(
    op: str, key_mask: torch.Tensor | None, num_batch: int, num_queries: int, num_keys: int
) -> None:
    """Raise ValueError unless `key_mask` is bool and broadcasts to [B, S, T] (T or longer)."""
    if key_mask is None:
        return
    if key_mask.dtype != torch.bool:
        raise ValueError(f"{op}: key_mask must be bool, got {key_mask.dtype}")
    wanted = (num_batch, num_queries, num_keys)
    shape = key_mask.shape
    fits = len(shape) <= 3 and all(
        size == 1 or size == want or (axis == -1 and size >= want)
        for axis, size, want in zip(range(-1, -4, -1), reversed(shape), reversed(wanted))
    )
    if not fits:
        raise ValueError(
            f"{op}: key_mask must broadcast to {wanted} (or a longer T), got {tuple(shape)}"
        )


def check_rows(op: str, name: str, rows: torch.Tensor | None, shape: tuple[int, ...]) -> None:
    """Raise ValueError unless `rows` holds one int32 or int64 a row."""
    if rows is None:
        return
    if rows.dtype not in INDEX_DTYPES:
        raise ValueError(f"{op}: {name} must be int32 or int64, got {rows.dtype}")
    if tuple(rows.shape) != tuple(shape):
        raise ValueError(
            f"{op}: {name} must hold one value a row, shape {tuple(shape)}, got {tuple(rows.shape)}"
        )


def check_lengths(
    op: str, lengths: torch.Tensor, num_rows: int, rows_per_sequence: int, is_causal: bool
) -> None:
    """Raise ValueError unless `lengths` holds one int32 or int64 a row, or a sequence if causal."""
    if is_causal and num_rows % rows_per_sequence:
        raise ValueError(
            f"{op}: causal lengths need whole sequences of {rows_per_sequence} rows, got "
            f"{num_rows} rows"
        )
    check_rows(op, "lengths", lengths, (num_rows // rows_per_sequence if is_causal else num_rows,))


def causal_lengths(lengths_B: torch.Tensor, rows_per_sequence: int) -> torch.Tensor:
    """[B * S] lengths of the rows of a step behind so many cached tokens: row s sees s + 1 more."""
    step_S = torch.arange(1, rows_per_sequence + 1, device=lengths_B.device)
    return (lengths_B[:, None] + step_S).flatten()
