"""The whole indexer of a layer, hidden state in and positions out, over contexts of 8K to 1M.

`compiled` is transformers' own layer through the glm backend. `ops` are the compiled graph's ops,
called one by one; `slots` the same with physical slots as the selection.
`inductor` is the same layer, unfused, as torch.compile makes it over a StaticCache. Weights and
keys are cold; all include the attention's q_a, kv_a and q_b, which share their inputs with the
indexer's projections.

    pytest tests/benchmarks/test_indexer_benchmark.py --benchmark-enable \
        --benchmark-json indexer.json
    python -m tests.benchmarks.plot_indexer indexer.json examples/indexer_latency.png

Shape legend: S rows (query tokens of the step), T cached tokens, D index head dim.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import Any

import pytest
import torch

from glm_compile import merge_weights
from tests.benchmarks.conftest import cold_copies, device
from tests.indexer_layer import (
    RELEASE,
    IndexerOfLayer,
    make_cache,
    one_layer_config,
    ops_step,
    paged_step,
    static_step,
)

IS_GPU = device() == "cuda"
CONTEXTS = [8192, 32_768, 131_072, 524_288, 1_048_576] if IS_GPU else [256]
ROWS = [1, 6] if IS_GPU else [6]
TIERS = {"fp8": "paged_fp8", "exact": "paged"}
WEIGHT_BYTES = 2 * (2784 * 6144 + 20480 * 2048)


def make_layers(num_tokens: int, key_bytes: int) -> list[tuple[Any, ...]]:
    """(layer, hidden, cos, sin, position) in rotation: as many as leave each other's data cold."""
    torch._dynamo.reset()
    gc.collect()
    config = one_layer_config(**(RELEASE if IS_GPU else {}))
    where: dict[str, Any] = {"device": device(), "dtype": torch.bfloat16}
    made = []
    for _ in range(cold_copies(WEIGHT_BYTES + key_bytes)):
        layer = IndexerOfLayer(config, **where)
        hidden = torch.randn(1, num_tokens, config.hidden_size, **where)
        position = torch.zeros((), dtype=torch.int64, device=device())
        made.append((config, layer, hidden, *layer.tables(hidden, position), position))
    return made


def fill(cache: Any, kind: str, num_cached: int, head_dim: int) -> None:
    """Random keys in all rows that the step does not write."""
    block = 65_536
    for start in range(0, num_cached, block):
        size = min(block, num_cached - start)
        keys = torch.randn(1, size, head_dim, device=device(), dtype=torch.bfloat16)
        if kind != "static":
            cache.lengths.fill_(start)
        cache.update_indexer(keys, 0)
    if kind != "static":
        cache.lengths.fill_(num_cached)


def prepare(kind: str, num_tokens: int, max_len: int, path: str) -> list[tuple[Any, ...]]:
    """Inputs of `call` in rotation: (step, its arguments)."""
    key_bytes = max_len * (132 if kind == "paged_fp8" else 256)
    inputs = []
    for config, layer, hidden, cos, sin, position in make_layers(num_tokens, key_bytes):
        where = {} if kind == "static" else {"device": device(), "dtype": torch.bfloat16}
        cache = make_cache(config, kind, max_len, **where)
        num_cached = max_len - num_tokens
        fill(cache, kind, num_cached, config.index_head_dim)
        position.fill_(num_cached)
        arguments: tuple[torch.Tensor, ...] = (hidden, cos, sin)
        step: Callable[..., Any]
        if path != "inductor":
            # Copies run what was compiled for the first one, which lays out that one's weights.
            merge_weights(layer)
        if path == "inductor":
            counter = cache.layers[0].indexer_cumulative_length
            arguments = (*arguments, position)
            step = torch.compile(_from(static_step(layer, cache, max_len), counter, num_cached))
        elif path == "compiled":
            options = {"indexer_dtype": "fp8" if kind == "paged_fp8" else "auto"}
            step = torch.compile(
                paged_step(layer, cache, num_tokens),
                backend="glm",
                fullgraph=True,
                options=options if IS_GPU else {**options, "inner": "eager"},
            )
        else:
            step = ops_step(layer, cache, has_slots=path == "slots")
        inputs.append((step, *arguments))
    return inputs


def _from(step: Callable[..., Any], counter: torch.Tensor, num_cached: int) -> Callable[..., Any]:
    """The step of a StaticCache, whose own counter is set back so that it never runs over."""

    def run(*arguments: torch.Tensor) -> Any:
        counter.fill_(num_cached)
        return step(*arguments)

    return run


def call(step: Callable[..., Any], *arguments: torch.Tensor) -> torch.Tensor:
    """One step; only the selection is kept."""
    selected = step(*arguments)
    return selected if isinstance(selected, torch.Tensor) else selected[0]


@pytest.mark.parametrize("num_keys", CONTEXTS)
@pytest.mark.parametrize("num_tokens", ROWS)
@pytest.mark.parametrize(
    ("tier", "path"),
    [
        ("fp8", "compiled"),
        ("fp8", "ops"),
        ("fp8", "slots"),
        ("exact", "compiled"),
        ("exact", "ops"),
        ("exact", "slots"),
        ("exact", "inductor"),
    ],
)
def test_indexer(
    gpu_bench: Any, benchmark: Any, tier: str, path: str, num_tokens: int, num_keys: int
) -> None:
    benchmark.group = f"indexer S={num_tokens} T={num_keys}"
    kind = "static" if path == "inductor" else TIERS[tier]
    benchmark.extra_info.update(tier=tier, path=path, rows=num_tokens, context=num_keys)
    inputs = prepare(kind, num_tokens, num_keys, path)
    key_bytes = num_keys * (132 if kind == "paged_fp8" else 256)
    selected = gpu_bench(
        call, inputs, bytes_moved=WEIGHT_BYTES + key_bytes, note="weights and keys cold"
    )
    assert (selected >= 0).all() and (selected < num_keys).all()
