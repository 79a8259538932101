"""The way of a step's latents into their cache in plain torch.

Shape legend: B batch, S tokens of the step, L rank of the latent, P rope dim.
"""

from __future__ import annotations

import torch

from glm_compile.ops._rope import rope_reference
from glm_compile.ops.paged_cache.reference import paged_write_reference


def latent_write_reference(
    latents_BSL: torch.Tensor,
    ropes_BSP: torch.Tensor,
    norm_weight_L: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    interleaved: bool,
    pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_B: torch.Tensor,
) -> None:
    """Store normed latents and rotated keys; transformers' own numbers."""
    x_BSL = latents_BSL.float()
    x_BSL = x_BSL * torch.rsqrt(x_BSL.pow(2).mean(-1, keepdim=True) + norm_eps)
    normed_BSL = norm_weight_L * x_BSL.to(latents_BSL.dtype)
    turned_BSP = rope_reference(ropes_BSP, cos_BSP, sin_BSP, interleaved)
    rows_BSX = torch.cat([normed_BSL, turned_BSP], -1)
    paged_write_reference(pages, rows_BSX, block_table, lengths_B)
