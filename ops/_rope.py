"""The rotary embedding of the model in plain torch, as several ops take it."""

from __future__ import annotations

import torch


def rope_reference(
    x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """Rotate the first P dims of `x`, each product and sum rounded to the dtype torch promotes to.

    `cos` and `sin` are [..., P], both halves alike, and broadcast against `x`. Interleaved pairs
    are (2i, 2i + 1), and the result holds all the even dims' results first, then all the odd
    ones'; half split pairs are (i, i + P/2), and stay where they are.
    """
    rope_dim = cos.shape[-1]
    rotated, passed = x[..., :rope_dim], x[..., rope_dim:]
    if interleaved:
        cos, sin = cos[..., : rope_dim // 2], sin[..., : rope_dim // 2]
        even, odd = rotated[..., 0::2], rotated[..., 1::2]
        rotated = torch.cat([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    else:
        first, second = rotated.chunk(2, dim=-1)
        rotated = rotated * cos + torch.cat([-second, first], dim=-1) * sin
    return torch.cat([rotated.to(x.dtype), passed], dim=-1)
