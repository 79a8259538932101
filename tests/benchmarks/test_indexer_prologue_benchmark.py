"""The indexer prologue of one layer at the release's widths, fused beside unfused.

The tail alone is hot, as the projections have just written its inputs. The whole prologue, from the
layer's normed input to what the scores read, reads cold weights: two merged linears and the tail.
Head gates kept in fp32 read their weight cold too.

    pytest tests/benchmarks/test_indexer_prologue_benchmark.py --benchmark-enable

A table ends the run: microseconds, times torch, the byte floor and how much of it is reached. Torch
is the same unfused, in plain torch and bf16, its keys not stored.

Shape legend: B batch, S tokens of the step, H index heads, D index head dim, P rope dim, C hidden.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
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
from tests.benchmarks.conftest import cold_copies, printed, time_replays
from tests.benchmarks.conftest import device as where
from tests.indexer_layer import (
    RELEASE,
    IndexerOfLayer,
    make_cache,
    one_layer_config,
    prologue_step,
)

IS_GPU = where() == "cuda"
H, D, P, C = 32, 128, 64, 6144
NUM_ROWS = [1, 2, 4, 6, 16, 64, 2048] if IS_GPU else [1, 6]


def _line(
    bandwidth: float | None,
    what: str,
    batch: int,
    tokens: int,
    ours: float,
    library: float,
    num_bytes: int,
) -> str:
    line = (
        f"{what:15} {batch} x {tokens:4}: {ours * 1e6:8.2f} us, torch {library * 1e6:8.2f}, "
        f"{library / ours:5.1f}x"
    )
    if bandwidth:
        floor = num_bytes / bandwidth
        line += f", floor {floor * 1e6:6.2f}, {floor / ours:4.0%} of it"
    return line


@pytest.fixture(scope="module")
def table(request: pytest.FixtureRequest) -> Iterator[list[tuple[Any, ...]]]:
    """Rows (what, B, S, our seconds, torch's, bytes), printed at the end."""
    yield from printed(request, _line)


@pytest.fixture(scope="module")
def note_times(table: list) -> Callable[..., None]:
    """Add a row of the table to what was just measured; torch is measured once for both tiers."""
    measured: dict[tuple[str, int, int], float] = {}

    def note(
        benchmark: Any,
        what: str,
        shape: tuple[int, int],
        num_bytes: int,
        fn: Callable[..., Any],
        inputs: Sequence[tuple],
    ) -> None:
        if not IS_GPU or benchmark.disabled:
            return
        key = (what.split()[0], *shape)
        if key not in measured:
            measured[key] = statistics.median(time_replays(fn, inputs))
        ours = benchmark.extra_info["median_us"] * 1e-6
        benchmark.extra_info["times_library"] = measured[key] / ours
        table.append((what, *shape, ours, measured[key], num_bytes))

    return note


@pytest.mark.parametrize("B, S", [*((1, S) for S in NUM_ROWS), (8, 6)])
@pytest.mark.parametrize("tier", ["exact", "fp8"])
def test_indexer_prologue(
    gpu_bench: Any, benchmark: Any, note_times: Callable[..., None], B: int, S: int, tier: str
) -> None:
    device = where()
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
    scale = H**-0.5
    num_bytes = 2 * B * S * (H * D + D + H + 2 * P) + B * S * 4 * H
    if tier == "exact":
        num_bytes += 2 * B * S * (H + 1) * D
        fused = partial(indexer_prologue, gate_scale=scale)
    else:
        num_bytes += B * S * ((H + 1) * D + 4)
        num_pages = B * -(-S // 64)
        pages: dict[str, torch.Tensor] = {
            "key_pages": torch.zeros(
                num_pages, key_page_bytes(D), dtype=torch.uint8, device=device
            ),
            "block_table": torch.arange(num_pages, dtype=torch.int32, device=device).view(B, -1),
            "lengths_B": torch.zeros(B, dtype=torch.int32, device=device),
        }
        fused = partial(indexer_prologue_fp8, gate_scale=scale, **pages)
    gpu_bench(fused, [arguments], bytes_moved=num_bytes, note="hot")
    unfused = partial(indexer_prologue, gate_scale=scale, backend="reference")
    note_times(benchmark, f"tail {tier}", (B, S), num_bytes, unfused, [arguments])


@pytest.mark.parametrize("S", [1, 6, 64] if IS_GPU else [6])
def test_indexer_gates(
    gpu_bench: Any, benchmark: Any, note_times: Callable[..., None], S: int
) -> None:
    """Head gates of a weights_proj kept in fp32; torch's are a cast and the library."""
    hidden = torch.randn(1, S, C, device=where()).bfloat16()
    weight_bytes = 4 * H * C
    weights = [(weight,) for weight in torch.randn(cold_copies(weight_bytes), H, C, device=where())]
    num_bytes = weight_bytes + 2 * hidden.numel()
    gpu_bench(partial(indexer_gates, hidden), weights, bytes_moved=num_bytes, note="weight cold")
    unfused = partial(indexer_gates, hidden, backend="reference")
    note_times(benchmark, "gates", (1, S), num_bytes, unfused, weights)


def fused_step(step: Callable[..., Any], *arguments: torch.Tensor) -> Any:
    """A layer's step of the three ops."""
    return step(*arguments)


def unfused_step(layer: IndexerOfLayer, *arguments: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The layer's own modules, one by one, and the tail in plain torch."""
    hidden, cos, sin = arguments
    indexer, norm = layer.indexer, layer.indexer.k_norm
    q_resid = layer.q_a_layernorm(layer.q_a_proj(hidden))
    queries, latents = layer.q_b_proj(q_resid), layer.kv_a_proj_with_mqa(hidden)
    q = indexer.wq_b(q_resid).unflatten(-1, (indexer.n_heads, -1))
    tail = (q, indexer.wk(hidden), indexer.weights_proj(hidden), norm.weight, norm.bias, norm.eps)
    prepared = indexer_prologue(
        *tail, cos, sin, gate_scale=indexer.n_heads**-0.5, backend="reference"
    )
    return queries, latents, *prepared


@pytest.mark.parametrize("S", NUM_ROWS)
@pytest.mark.parametrize("kind", ["paged", "paged_fp8"])
def test_whole_prologue(
    gpu_bench: Any, benchmark: Any, note_times: Callable[..., None], kind: str, S: int
) -> None:
    config = one_layer_config(**(RELEASE if IS_GPU else {}))
    options: dict[str, Any] = {"device": where(), "dtype": torch.bfloat16}
    weight_bytes = 2 * (2784 * C + 20480 * 2048)
    inputs, layers = [], []
    for _ in range(cold_copies(weight_bytes)):
        layer = IndexerOfLayer(config, **options)
        merge_weights(layer)
        step = prologue_step(layer, make_cache(config, kind, max(256, S), **options))
        hidden = torch.randn(1, S, config.hidden_size, **options)
        tables = layer.tables(hidden, torch.zeros((), dtype=torch.int64, device=where()))
        inputs.append((step, hidden, *tables))
        layers.append((layer, hidden, *tables))
    gpu_bench(fused_step, inputs, bytes_moved=weight_bytes, note="weights cold")
    tier = "fp8" if kind == "paged_fp8" else "exact"
    note_times(benchmark, f"whole {tier}", (1, S), weight_bytes, unfused_step, layers)
