"""Pearson's test for counts."""

from __future__ import annotations

import math

import torch


def chi_square_p(counts: torch.Tensor, expected: torch.Tensor) -> float:
    """Probability of a deviation at least this large (Wilson-Hilferty); bins below 5 are merged."""
    small = expected < 5
    counts, expected = counts.double(), expected.double()
    if small.any():
        counts = torch.cat([counts[~small], counts[small].sum()[None]])
        expected = torch.cat([expected[~small], expected[small].sum()[None]])
        if expected[-1] < 5:
            counts[-2], expected[-2] = counts[-2] + counts[-1], expected[-2] + expected[-1]
            counts, expected = counts[:-1], expected[:-1]
    statistic = float(((counts - expected) ** 2 / expected).sum())
    free = len(counts) - 1
    z = ((statistic / free) ** (1 / 3) - (1 - 2 / (9 * free))) / math.sqrt(2 / (9 * free))
    return 0.5 * math.erfc(z / math.sqrt(2))
