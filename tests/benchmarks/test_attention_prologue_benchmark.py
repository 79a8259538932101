"""From the product that makes the queries to absorbed queries, at the release's widths, few rows.

    pytest tests/benchmarks/test_attention_prologue_benchmark.py --benchmark-enable

A layer with an indexer, one without, and a draft step that stores nothing. `fused` is what the
backend makes: one launch stores latents (and index keys), the absorbed product rotates its queries.
`apart` has the latents' norm, both rotations and the store in launches of their own, as Inductor
and `paged_write` have them. Weights cold, what is read of the first product hot; the second product
is a part of both.

Shape legend: S tokens of the step, H heads, N nope dim, P rope dim, L rank of the latent, V value
dim, C = L + P.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_compile.ops.indexer_prologue import (
    Latents,
    indexer_prologue_fp8,
    indexer_prologue_paged,
)
from glm_compile.ops.latent_write import latent_write
from glm_compile.ops.mla_absorb import absorb_query
from glm_compile.ops.paged_cache import key_page_bytes, paged_write
from glm_compile.ops.rms_norm_linear import rms_norm_linear
from tests.benchmarks.conftest import cold_copies
from tests.benchmarks.conftest import device as where

HAS_GPU = where() == "cuda"
Q_RANK, H, N, P, L, V = (2048, 64, 192, 64, 512, 256) if HAS_GPU else (96, 4, 32, 64, 64, 96)
INDEX_HEADS, D = (32, 128) if HAS_GPU else (4, 128)
EPS, PAGES = 1e-6, 4


def rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """As transformers rotates [B, H, S, P]."""
    cos, sin = cos[:, None, :, : P // 2], sin[:, None, :, : P // 2]
    x1, x2 = x[..., 0::2], x[..., 1::2]
    return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], -1)


def new_rows(
    kv: torch.Tensor, weight: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
) -> torch.Tensor:
    """As transformers makes the rows of a cache [B, S, C]."""
    latents, ropes = kv.split([L, P], -1)
    x = latents.float()
    x = x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + EPS)
    return torch.cat([weight * x.to(latents.dtype), rotated(ropes[:, None], cos, sin)[:, 0]], -1)


@pytest.mark.parametrize("S", [1, 6])
@pytest.mark.parametrize("layer", ["full", "full_fp8", "shared", "draft"])
@pytest.mark.parametrize("form", ["fused", "apart"])
def test_attention_prologue(gpu_bench: Any, benchmark: Any, form: str, layer: str, S: int) -> None:
    benchmark.group = f"attention prologue {layer} S={S}"
    is_full, is_fused = layer.startswith("full"), form == "fused"

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=where()).bfloat16()

    merged = random(1, S, Q_RANK + L + P + D + INDEX_HEADS)
    q_a, kv, k, gates = merged.split([Q_RANK, L + P, D, INDEX_HEADS], -1)
    q_weight, kv_weight, norm_weight, norm_bias = (random(n) for n in (Q_RANK, L, D, D))
    cos, sin = random(1, S, P), random(1, S, P)
    table = torch.arange(PAGES, dtype=torch.int32, device=where())[None]
    lengths = torch.tensor([100], dtype=torch.int32, device=where())
    places = {"block_table": table, "lengths_B": lengths}
    key_pages = random(PAGES, 64, D)
    if layer == "full_fp8":
        key_pages = torch.zeros(PAGES, key_page_bytes(D), dtype=torch.uint8, device=where())
    prologue = indexer_prologue_fp8 if layer == "full_fp8" else indexer_prologue_paged
    make_rows, rotate = new_rows, rotated
    if HAS_GPU and not is_fused:
        make_rows, rotate = (torch.compile(f, fullgraph=True) for f in (new_rows, rotated))
    num_q, num_index = H * (N + P), INDEX_HEADS * D if is_full else 0

    def step(weights: list[torch.Tensor], kv_b: torch.Tensor, pages: torch.Tensor) -> torch.Tensor:
        queries = rms_norm_linear(q_a, q_weight, weights, eps=EPS)
        q_nope, q_rot = queries[..., :num_q].unflatten(-1, (H, N + P)).split([N, P], -1)
        if not is_fused and layer != "draft":
            paged_write(pages, make_rows(kv, kv_weight, cos, sin), table, lengths)
        latents = Latents(kv[..., :L], kv[..., L:], kv_weight, EPS, True, pages)
        if is_full:
            q = queries[..., num_q:].unflatten(-1, (INDEX_HEADS, D))
            norm = (norm_weight, norm_bias, EPS, cos, sin)
            options = {"gate_scale": 0.1, "key_pages": key_pages, **places}
            prologue(q, k, gates, *norm, **options, latents=latents if is_fused else None)
        elif is_fused and layer != "draft":
            latent_write(*latents[:4], cos, sin, pages=pages, **places)
        if is_fused:
            return absorb_query(q_nope, q_rot, kv_b, cos=cos, sin=sin)
        turned = rotate(q_rot.transpose(1, 2), cos, sin)
        return absorb_query(q_nope, turned.transpose(1, 2), kv_b)

    weight_bytes = 2 * ((num_q + num_index) * Q_RANK + H * N * L)
    inputs = []
    for _ in range(cold_copies(weight_bytes)):
        block = random(num_q + num_index, Q_RANK)
        weights = list(block.split([num_q, num_index] if is_full else [num_q]))
        inputs.append((weights, random(H * (N + V), L), random(PAGES, 64, L + P)))
    output = gpu_bench(step, inputs, bytes_moved=weight_bytes, note="weights cold")
    assert output.shape == (1, S, H, L + P)
