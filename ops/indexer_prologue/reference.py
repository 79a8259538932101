"""The indexer's way from projections to queries, keys and head weights, in plain torch.

Shape legend: B batch, S tokens of the step, T cached tokens, H index heads, D index head dim, P
rope dim.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from glm_compile.ops.fp8_quant.reference import fp8_quant_reference
from glm_compile.ops.paged_cache.reference import (
    paged_write_fp8_reference,
    paged_write_reference,
)


def indexer_gates_reference(x: torch.Tensor, weight_HC: torch.Tensor) -> torch.Tensor:
    """x W^T in fp32."""
    return F.linear(x.float(), weight_HC).contiguous()


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


def key_norm_reference(
    k_BSD: torch.Tensor, weight_D: torch.Tensor, bias_D: torch.Tensor, eps: float
) -> torch.Tensor:
    """LayerNorm as `torch.nn.functional.layer_norm`, also with fp32 weights for bf16 input."""
    shape = weight_D.shape
    if k_BSD.dtype == weight_D.dtype == bias_D.dtype:
        return F.layer_norm(k_BSD, shape, weight_D, bias_D, eps)
    return F.layer_norm(k_BSD.float(), shape, weight_D.float(), bias_D.float(), eps).to(k_BSD.dtype)


def indexer_prologue_reference(
    q_BSHD: torch.Tensor,
    k_BSD: torch.Tensor,
    gates_BSH: torch.Tensor,
    norm_weight_D: torch.Tensor,
    norm_bias_D: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    interleaved: bool,
    gate_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return (rotated q, normed and rotated k, fp32 head weights); transformers' own numbers."""
    q_BSHD = rope_reference(q_BSHD, cos_BSP[:, :, None], sin_BSP[:, :, None], interleaved)
    k_BSD = key_norm_reference(k_BSD, norm_weight_D, norm_bias_D, norm_eps)
    k_BSD = rope_reference(k_BSD, cos_BSP, sin_BSP, interleaved)
    weights_BSH = (gates_BSH.float() * gate_scale).contiguous()
    return q_BSHD.contiguous(), k_BSD.contiguous(), weights_BSH


def indexer_prologue_rows_reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the exact tier's keys at their positions; return its queries and head weights."""
    *prologue, keys_BTD, first = args
    q_BSHD, k_BSD, weights_BSH = indexer_prologue_reference(*prologue)
    positions_S = first.view(1) + torch.arange(k_BSD.shape[1], device=first.device)
    is_stored = (positions_S >= 0) & (positions_S < keys_BTD.shape[1])
    keys_BTD[:, positions_S[is_stored]] = k_BSD[:, is_stored].to(keys_BTD.dtype)
    return q_BSHD, weights_BSH


def indexer_prologue_paged_reference(*args: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the exact tier's keys in their pages; return its queries and head weights."""
    *prologue, key_pages, block_table, lengths_B = args
    q_BSHD, k_BSD, weights_BSH = indexer_prologue_reference(*prologue)
    paged_write_reference(key_pages, k_BSD, block_table, lengths_B)
    return q_BSHD, weights_BSH


def indexer_prologue_fp8_reference(
    q_BSHD: torch.Tensor,
    k_BSD: torch.Tensor,
    gates_BSH: torch.Tensor,
    norm_weight_D: torch.Tensor,
    norm_bias_D: torch.Tensor,
    norm_eps: float,
    cos_BSP: torch.Tensor,
    sin_BSP: torch.Tensor,
    interleaved: bool,
    gate_scale: float,
    key_pages: torch.Tensor,
    block_table: torch.Tensor,
    lengths_B: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Store the quantised keys; return (e4m3 q, fp32 head weights with the folded scales)."""
    k_BSD = key_norm_reference(k_BSD, norm_weight_D, norm_bias_D, norm_eps)
    k_BSD = rope_reference(k_BSD, cos_BSP, sin_BSP, interleaved)
    paged_write_fp8_reference(key_pages, k_BSD, block_table, lengths_B)

    cos, sin = cos_BSP[:, :, None].float(), sin_BSP[:, :, None].float()
    q_BSHD, scale_BSH = fp8_quant_reference(
        rope_reference(q_BSHD.float(), cos, sin, interleaved), False
    )
    constant = gate_scale * q_BSHD.shape[3] ** -0.5
    weights_BSH = gates_BSH.float() * constant * scale_BSH
    return q_BSHD.contiguous(), weights_BSH.contiguous()
