"""Top-k by Python's own sort, and rows that have broken selection kernels."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import torch


def select_row(scores: Sequence[float], first: int, stop: int, k: int) -> list[int]:
    """Ascending positions of the k best of [first, stop), -1 padded; ties go to the lower one."""
    stop = min(stop, len(scores))
    candidates = [p for p in range(max(first, 0), stop) if scores[p] > -math.inf]
    candidates.sort(key=lambda p: (-scores[p], p))
    chosen = sorted(candidates[:k])
    return chosen + [-1] * (k - len(chosen))


def select(
    scores_RT: torch.Tensor,
    lengths: Sequence[int],
    k: int,
    starts: Sequence[int] | None = None,
) -> torch.Tensor:
    """`select_row` of each row as int32 [R, k]."""
    starts = starts or [0] * len(lengths)
    picked = [
        select_row(row, first, stop, k)
        for row, first, stop in zip(scores_RT.tolist(), starts, lengths)
    ]
    return torch.tensor(picked, dtype=torch.int32).reshape(len(lengths), k)


def repeat_last(positions: torch.Tensor) -> torch.Tensor:
    """The rows with their last position instead of -1; 0 in a row that has none."""
    rows = [[p for p in row if p >= 0] for row in positions.tolist()]
    width = positions.shape[1]
    filled = [row + (row[-1:] or [0]) * (width - len(row)) for row in rows]
    return torch.tensor(filled, dtype=positions.dtype).reshape(positions.shape)


def to_slots(
    positions: torch.Tensor, table: torch.Tensor, rows: int, page_size: int
) -> torch.Tensor:
    """Physical slots of positions, one at a time."""
    slots = positions.clone()
    for r, row in enumerate(positions.tolist()):
        for i, p in enumerate(row):
            page = p // page_size
            has_page = p >= 0 and page < table.shape[1]
            entry = int(table[r // rows, page]) if has_page else -1
            slots[r, i] = entry * page_size + p % page_size if entry >= 0 else -1
    return slots


def assert_same_scores_as_torch(
    selected_RK: torch.Tensor, scores_RT: torch.Tensor, lengths_R: torch.Tensor
) -> None:
    """Selected scores, sorted, equal torch.topk's bit for bit (scores without NaN and -inf).

    Indices must be unique, ascending, inside the window, and as many as possible.
    """
    k = selected_RK.shape[1]
    for row, scores, length in zip(selected_RK.cpu(), scores_RT.cpu(), lengths_R.tolist()):
        count = max(0, min(k, length, scores.numel()))
        assert (row[count:] == -1).all()
        chosen = row[:count].long()
        assert (chosen >= 0).all() and (chosen < max(length, 1)).all()
        assert (chosen.diff() > 0).all()
        got = (scores[chosen].float() + 0.0).sort(descending=True).values
        want = scores[: max(length, 0)].float().topk(count).values + 0.0
        assert torch.equal(got.view(torch.int32), want.view(torch.int32))


def _with_special(num_keys: int, *values: float) -> torch.Tensor:
    row = torch.randn(num_keys)
    for i, value in enumerate(values):
        row[i :: len(values) + 2] = value
    return row


def _with_ties(num_keys: int, num_above: int, tied: float = 0.0) -> torch.Tensor:
    """Equal scores but for some higher ones, at random places."""
    row = torch.full((num_keys,), tied)
    above = torch.randperm(num_keys)[: min(num_above, num_keys // 2)]
    row[above] += 1 + torch.rand(len(above))
    return row


NAN = math.nan
INF = math.inf
NEGATIVE_NAN = torch.tensor([-1], dtype=torch.int32).view(torch.float32).item()

# Name -> row of n scores.
ADVERSARIAL: dict[str, Callable[[int], torch.Tensor]] = {
    "normal": torch.randn,
    "constant": lambda n: torch.full((n,), 1.5),
    "all zero": torch.zeros,
    "zero plateau": lambda n: torch.randn(n).clamp(min=0),
    "zeros of both signs": lambda n: torch.where(torch.arange(n) % 3 == 0, -0.0, 0.0),
    "few values": lambda n: torch.randint(-2, 3, (n,)).float(),
    "infinities": lambda n: _with_special(n, INF, -INF),
    "NaN": lambda n: _with_special(n, NAN),
    "negative NaN": lambda n: torch.where(
        torch.arange(n) % 2 == 0, torch.tensor(-1, dtype=torch.int32).view(torch.float32), 1.0
    ),
    "all NaN": lambda n: torch.full((n,), NAN),
    "all -inf": lambda n: torch.full((n,), -INF),
    "all +inf": lambda n: torch.full((n,), INF),
    "denormals": lambda n: torch.randn(n) * 1e-41,
    "one bucket": lambda n: 1.0 + torch.rand(n) * 1e-4,
    "ascending": lambda n: torch.arange(n).float(),
    "descending": lambda n: -torch.arange(n).float(),
    "outlier": lambda n: torch.cat([torch.full((1,), 3e38), torch.randn(n)])[:n],
    "bf16 ties": lambda n: torch.randn(n).bfloat16().float(),
    "few above ties": lambda n: _with_ties(n, 100, -0.7),
    "2047 above zeros": lambda n: _with_ties(n, 2047),
    "ties at the end": lambda n: torch.where(torch.arange(n) < n - 2048, 0.0, 1.5),
    "all lowest": lambda n: torch.full((n,), torch.finfo(torch.float32).min),
    "teeth": lambda n: (torch.arange(n) % 1000).float(),
    "all negative": lambda n: -torch.rand(n) - 1,
}


def adversarial_rows(num_keys: int) -> torch.Tensor:
    """One row of each kind."""
    return torch.stack([make(num_keys) for make in ADVERSARIAL.values()])
