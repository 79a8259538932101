"""The indexer prologue of one layer at the release's widths, fused beside unfused.

The tail alone is hot, as the projections have just written its inputs. The whole prologue, from the
layer's normed input to what the scores read, reads cold weights: two merged linears and the tail.
Head gates kept in fp32 read their weight cold too.

    pytest tests/benchmarks/test_indexer_prologue_benchmark.py --benchmark-enable

Shape legend: B batch, S tokens of the step, H index heads, D index head dim, P rope dim.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_compile import merge_weights
from glm_compile.ops.indexer_prologue import (
    indexer_gates,
    indexer_prologue,
    indexer_prologue_fp8,
)
from glm_compile.ops.paged_cache import key_page_bytes
from tests.benchmarks.conftest import cold_copies
from tests.benchmarks.conftest import device as where
from tests.indexer_layer import (
    RELEASE,
    IndexerOfLayer,
    make_cache,
    one_layer_config,
    prologue_step,
)

H, D, P = 32, 128, 64
NUM_ROWS = [1, 2, 4, 6, 16, 64, 2048]


@pytest.mark.parametrize("B, S", [*((1, S) for S in NUM_ROWS), (8, 6)])
@pytest.mark.parametrize("tier", ["exact", "fp8"])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_indexer_prologue(
    gpu_bench: Any, benchmark: Any, B: int, S: int, tier: str, backend: str
) -> None:
    device = where()
    if device == "cpu" and (backend == "triton" or S > 6):
        pytest.skip("small cases of the reference prove that the benchmark runs")
    if device == "cuda" and backend == "reference" and tier == "fp8":
        pytest.skip("the reference's store waits for the host, which a captured graph cannot")
    benchmark.group = f"indexer_prologue {tier} B={B} S={S}"
    merged = torch.randn(B, S, D + H, device=device).bfloat16()
    rope = torch.rand(B, S, P, device=device).bfloat16()
    norm = torch.randn(2, D, device=device).bfloat16()
    arguments = (
        torch.randn(B, S, H, D, device=device).bfloat16(),
        merged[..., :D],
        merged[..., D:],
        norm[0],
        norm[1],
        1e-6,
        rope,
        rope,
    )
    options: dict[str, Any] = {"gate_scale": H**-0.5, "backend": backend}
    num_bytes = 2 * B * S * (H * D + D + H + 2 * P) + B * S * 4 * H
    if tier == "exact":
        gpu_bench(
            lambda *args: indexer_prologue(*args, **options),
            [arguments],
            bytes_moved=num_bytes + 2 * B * S * (H + 1) * D,
            note="hot",
        )
        return
    pages_of_row = -(-S // 64)
    table = torch.arange(B * pages_of_row, dtype=torch.int32, device=device).view(B, -1)
    options |= {
        "key_pages": torch.zeros(
            B * pages_of_row, key_page_bytes(D), dtype=torch.uint8, device=device
        ),
        "block_table": table,
        "lengths_B": torch.zeros(B, dtype=torch.int32, device=device),
    }
    gpu_bench(
        lambda *args: indexer_prologue_fp8(*args, **options),
        [arguments],
        bytes_moved=num_bytes + B * S * ((H + 1) * D + 4),
        note="hot",
    )


@pytest.mark.parametrize("S", [1, 6, 64] if where() == "cuda" else [6])
@pytest.mark.parametrize("backend", ["triton", "reference"])
def test_indexer_gates(gpu_bench: Any, benchmark: Any, backend: str, S: int) -> None:
    """Head gates of a weights_proj kept in fp32; the reference is a cast and the library."""
    if where() == "cpu" and backend == "triton":
        pytest.skip("the reference proves that the benchmark runs")
    benchmark.group = f"indexer_gates S={S}"
    hidden = torch.randn(1, S, 6144, device=where()).bfloat16()
    weight_bytes = 4 * H * 6144
    weights = torch.randn(cold_copies(weight_bytes), H, 6144, device=where())
    gpu_bench(
        lambda weight: indexer_gates(hidden, weight, backend=backend),
        [(weight,) for weight in weights],
        bytes_moved=weight_bytes + 2 * hidden.numel(),
        note="weight cold",
    )


@pytest.mark.parametrize("S", NUM_ROWS if where() == "cuda" else [1, 6])
@pytest.mark.parametrize("kind", ["paged", "paged_fp8"])
def test_whole_prologue(gpu_bench: Any, benchmark: Any, kind: str, S: int) -> None:
    benchmark.group = f"whole prologue {kind} S={S}"
    config = one_layer_config(**(RELEASE if where() == "cuda" else {}))
    options: dict[str, Any] = {"device": where(), "dtype": torch.bfloat16}
    weight_bytes = 2 * (2784 * 6144 + 20480 * 2048)
    inputs = []
    for _ in range(cold_copies(weight_bytes)):
        layer = IndexerOfLayer(config, **options)
        merge_weights(layer)
        step = prologue_step(layer, make_cache(config, kind, max(256, S), **options))
        hidden = torch.randn(1, S, config.hidden_size, **options)
        tables = layer.tables(hidden, torch.zeros((), dtype=torch.int64, device=where()))
        inputs.append((step, hidden, *tables))
    gpu_bench(
        lambda step, *arguments: step(*arguments),
        inputs,
        bytes_moved=weight_bytes,
        note="weights cold",
    )
