"""The indexer's way from projections to queries, keys and head weights, in plain torch.

Shape legend: B batch, S tokens of the step, T cached tokens, H index heads, D index head dim, P
rope dim.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from glm_compile.ops._rope import rope_reference
from glm_compile.ops.fp8_quant.reference import fp8_quant_reference
from glm_compile.ops.latent_write.reference import latent_write_reference
from glm_compile.ops.paged_cache.reference import (
    paged_write_fp8_reference,
    paged_write_reference,
)


def indexer_gates_reference(x: torch.Tensor, weight_HC: torch.Tensor) -> torch.Tensor:
    """x W^T in fp32."""
    return F.linear(x.float(), weight_HC).contiguous()


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


def _with_latents(prologue: Callable[..., Any]) -> Callable[..., Any]:
    """A reference that stores keys, and then latents in pages of the same table."""

    def run(*args: Any) -> Any:
        cos, sin = args[6:8]
        pages, (latents, ropes, weight, eps, interleaved, latent_pages) = args[11:13], args[13:]
        results = prologue(*args[:13])
        step = (latents, ropes, weight, eps, cos, sin, interleaved)
        latent_write_reference(*step, latent_pages, *pages)
        return results

    return run


attention_prologue_paged_reference = _with_latents(indexer_prologue_paged_reference)
attention_prologue_fp8_reference = _with_latents(indexer_prologue_fp8_reference)
