"""SwiGLU in plain torch, as several ops take it."""

from __future__ import annotations

import torch
import torch.nn.functional as F


def swiglu_reference(product: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of rows [..., 2N] that hold gates, then ups: [..., N], each rounded."""
    gate, up = product.chunk(2, dim=-1)
    return F.silu(gate) * up
