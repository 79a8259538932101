"""Decoding by iterations: ours, its modes and phases, and transformers' own on the same weights.

    pytest tests/benchmarks/test_generate_benchmark.py --benchmark-enable \
        --benchmark-json generate.json
    python -m tests.benchmarks.plot_timeline examples/tiny_glm52 timeline.png

`tiny` is the trained model of the repository: tokens a second mean something. `slice` is three
dense and three MoE layers of the release and an MTP layer with random weights, whose drafts are
rejected: what counts is the time of an iteration (verify with 1 + k tokens, accept, draft-extend,
k - 1 further draft steps), beside transformers' time of a single-token step. Batch 1.

Shape legend: T tokens of the cache.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch

import glm_compile
from glm_compile import bench
from glm_compile.cache import PagedCache
from glm_compile.generation.iteration import by_step
from glm_compile.generation.steps import MtpSteps, unwrap_compiled
from glm_compile.model_facts import cache_argument
from tests.benchmarks.conftest import device
from tests.benchmarks.decoding_runs import (
    MeasuredLoop,
    decode,
    idle_between,
    kernel_us,
    make_mtp,
    make_slice,
    measured,
    phase_times,
    time_iterations,
    trace_call,
)
from tests.tiny_models import tiny_config, tiny_model

IS_GPU = device() == "cuda"
TINY = Path(__file__).parents[2] / "examples" / "tiny_glm52"
CONTEXTS = [8192, 131_072] if IS_GPU else [64]
# Draft steps need no more memory behind a longer text, so they go further.
DRAFT_CONTEXTS = [*CONTEXTS, 1_048_576] if IS_GPU else [64]
CASES = [("tiny", 300), *(("slice", context) for context in CONTEXTS)]
MODES = {
    "graph, overlap": {"cuda_graph": True, "overlap": True},
    "graph, waiting": {"cuda_graph": True, "overlap": False},
    "eager launches, overlap": {"cuda_graph": False, "overlap": True},
    "eager launches, waiting": {"cuda_graph": False, "overlap": False},
}
# Parts of the names of kernels: of the indexer, and of the gather that stands for it.
INDEXER_KERNELS = ("indexer_", "topk")
SEED_KERNELS = ("draft_seed",)
# A TP8 rank's share of the heads and of the experts' width.
EIGHTH = {"num_attention_heads": 8, "num_key_value_heads": 8, "moe_intermediate_size": 256}


class Models:
    """One pair at a time: a slice with its MTP layer takes most of a GPU."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.pair: Any = None

    def get(self, name: str) -> Any:
        """(model, MTP layer, compiled model)."""
        if self.name != name:
            self.pair = None
            torch._dynamo.reset()
            if IS_GPU:
                torch.cuda.empty_cache()
            if not IS_GPU:
                model = tiny_model(tiny_config(num_hidden_layers=2, indexer_types=["full"] * 2))
                mtp = make_mtp(model)
            elif name == "tiny":
                model, mtp = glm_compile.load(TINY, device="cuda", dtype=torch.bfloat16)
            else:
                model, mtp = make_slice("cuda")
            compiled = torch.compile(model, backend="glm", fullgraph=True) if IS_GPU else model
            self.name, self.pair = name, (model, mtp, compiled)
        return self.pair


@pytest.fixture(scope="module")
def models() -> Iterator[Models]:
    with torch.no_grad():
        yield Models()


@pytest.fixture(scope="module")
def lines(request: pytest.FixtureRequest) -> Iterator[list[str]]:
    """Printed at the end."""
    rows: list[str] = []
    yield rows
    reporter = request.config.pluginmanager.get_plugin("terminalreporter")
    for row in ["", *rows]:
        reporter.write_line(row)


def note(benchmark: Any, microseconds: float, **facts: Any) -> None:
    """One measured time, in the plugin's report."""
    benchmark.extra_info.update(
        facts,
        median_us=microseconds,
        device=torch.cuda.get_device_name() if IS_GPU else "CPU",
        torch=torch.__version__,
    )
    if benchmark.disabled:
        benchmark(lambda: None)
        return
    benchmark._mode = "decoding"
    benchmark._make_stats(1).update(microseconds * 1e-6)


def prompt_ids(model: Any, name: str, num_tokens: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    num_tokens -= 64 if name == "slice" and IS_GPU else 0  # room for what is generated
    ids = torch.randint(5, model.config.vocab_size, (1, num_tokens), generator=generator)
    return ids.to(device())


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("num_drafts", [5, 0])
@pytest.mark.parametrize(("name", "num_tokens"), CASES)
def test_iteration(
    benchmark: Any, models: Models, lines: list[str], name: str, num_tokens: int, num_drafts: int,
    mode: str,
) -> None:  # fmt: skip
    if not IS_GPU and "graph" in mode:
        pytest.skip("needs a GPU")
    benchmark.group = f"iteration {name} T={num_tokens} drafts={num_drafts}"
    model, mtp, compiled = models.get(name)
    ids = prompt_ids(model, name, num_tokens)
    fields = MODES[mode] if IS_GPU else {"overlap": MODES[mode]["overlap"]}
    count = 200 if name == "tiny" and IS_GPU else 24 if IS_GPU else 4
    is_filled = name == "slice"

    def call() -> Any:
        return decode(compiled, ids, mtp, num_drafts, count, **fields)

    measure = time_iterations(call, is_filled=is_filled, repeats=3 if IS_GPU else 1)
    facts = asdict(measure)
    text = (
        f"{name:5} T={num_tokens:>7,} drafts={num_drafts} {mode:23}: {measure.wall_us:8.0f} us an "
        f"iteration, host {measure.host_us:5.0f} us"
    )
    if name == "tiny":
        text += f", {measure.accept_length:.2f} tokens each, {measure.tokens_per_s:.0f} tokens/s"
    if mode == "graph, overlap" and not benchmark.disabled:
        with measured(is_filled):
            idle_us, idle_share = idle_between(call)
            trace = trace_call(call)
        facts |= {"idle_us": idle_us, "idle_share": idle_share, "phases": phase_times(trace)}
        facts["num_kernels"] = trace.iterations[-1].num_kernels
        phases = ", ".join(f"{phase} {us:.0f}" for phase, us in facts["phases"].items())
        text += f", GPU idle {idle_us:.1f} us = {idle_share:.2%}, {facts['num_kernels']} kernels"
        text += f" ({phases})"
    lines.append(text)
    note(benchmark, measure.wall_us, **facts)
    assert measure.num_iterations > 1 and measure.wall_us > 0


@pytest.mark.parametrize("is_compiled", [False, True], ids=["eager", "static cache, compiled"])
@pytest.mark.parametrize(("name", "num_tokens"), CASES)
def test_transformers(
    benchmark: Any, models: Models, lines: list[str], name: str, num_tokens: int, is_compiled: bool
) -> None:
    """`model.generate` of transformers, untouched; behind a filled cache for the slice."""
    if is_compiled and not IS_GPU:
        pytest.skip("compiles for half a minute")
    benchmark.group = f"transformers {name} T={num_tokens}"
    model, _, _ = models.get(name)
    ids = prompt_ids(model, name, num_tokens)
    short, long = (8, 72) if name == "tiny" and IS_GPU else (4, 14) if IS_GPU else (2, 4)
    seconds = step_seconds(model, ids, is_compiled, name == "slice", short, long)
    way = "static cache, compiled" if is_compiled else "eager"
    lines.append(
        f"{name:5} T={num_tokens:>7,} transformers' generate, {way:22}: {seconds * 1e6:8.0f} us a "
        "token"
    )
    note(benchmark, seconds * 1e6)
    assert seconds > 0


def step_seconds(
    model: Any, ids: torch.Tensor, is_compiled: bool, is_filled: bool, short: int, long: int
) -> float:
    """Seconds a token of `model.generate`: the difference of a longer and a shorter call."""

    def run(count: int) -> float:
        fields: dict[str, Any] = {"cache_implementation": "static"} if is_compiled else {}
        if is_filled:
            fields = {cache_argument(): filled_cache(model, ids, long, is_compiled)}
        if IS_GPU:
            torch.cuda.synchronize()
        start = time.perf_counter()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=count,
            min_new_tokens=count,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
            disable_compile=not is_compiled,
            **fields,
        )
        if IS_GPU:
            torch.cuda.synchronize()
        return time.perf_counter() - start

    run(long)  # compiles
    times = [[run(count) for count in (short, long)] for _ in range(3)]
    return statistics.median(b - a for a, b in times) / (long - short)


def filled_cache(model: Any, ids: torch.Tensor, room: int, is_static: bool) -> Any:
    """transformers' cache that holds all of the ids but the last one, random rows."""
    from transformers import DynamicCache, StaticCache

    config, num_cached = model.config, ids.shape[1] - 1
    where: dict[str, Any] = {"device": ids.device, "dtype": model.dtype}
    cache: Any = (
        StaticCache(config, max_cache_len=num_cached + 1 + room)
        if is_static
        else DynamicCache(config=config)
    )
    block = 4096
    for start in range(0, num_cached, block):
        size = min(block, num_cached - start)
        for i, kind in enumerate(config.indexer_types):
            latents = torch.randn(1, 1, size, config.kv_lora_rank, **where)
            ropes = torch.randn(1, 1, size, config.qk_rope_head_dim, **where)
            cache.update(latents, ropes, i)
            if kind == "full":
                keys = torch.randn(1, size, config.index_head_dim, **where)
                cache.update_indexer(keys, i)
    return cache


@pytest.mark.parametrize("num_tokens", CONTEXTS)
def test_prompt(benchmark: Any, models: Models, lines: list[str], num_tokens: int) -> None:
    """A prompt is run in parts: seconds, and memory beyond what the weights and the cache take."""
    benchmark.group = f"prompt T={num_tokens}"
    model, mtp, compiled = models.get("slice")
    ids = prompt_ids(model, "slice", num_tokens)
    times, peaks = [], []
    with measured(False):
        for _ in range(3 if IS_GPU else 1):
            if IS_GPU:
                torch.cuda.reset_peak_memory_stats()
            result = decode(compiled, ids, mtp, 2, 2)
            num_parts = len(MeasuredLoop.last._chunks())
            times.append(result.timings["prefill"])
            if IS_GPU:
                held = torch.cuda.memory_allocated()
                peaks.append((torch.cuda.max_memory_allocated() - held) / 1e9)
    seconds, peak = min(times), max(peaks, default=0.0)
    lines.append(
        f"prompt of {ids.shape[1]:>7,} tokens in {num_parts} parts: {seconds:.2f} s "
        f"({ids.shape[1] / seconds:,.0f} tokens/s), {peak:.1f} GB for the largest part"
    )
    note(benchmark, seconds * 1e6, num_parts=num_parts, peak_gb=peak)


@pytest.mark.parametrize("width", ["full", "eighth"])
def test_draft_steps(benchmark: Any, lines: list[str], width: str) -> None:
    """A draft step with and without a shared index against the context's length.

    At an eighth of the width stands one of eight ranks: its heads and its part of the experts and
    of the vocabulary, and the whole indexer. The indexer's own time are its kernels in a step
    (prologue, scores, top-k); what is left of it in a shared step is that step's part of the gather
    behind draft-extend.
    """
    benchmark.group = f"draft step, {width} width"
    chains = DraftChains(EIGHTH if width == "eighth" else {})
    times: dict[int, tuple[float, float]] = {}
    for num_tokens in DRAFT_CONTEXTS:
        shared, own = (chains.step_us(chain, num_tokens) for chain in (chains.shared, chains.own))
        times[num_tokens] = shared, own
        lines.append(
            f"draft step, {width:6} width, T={num_tokens:>9,}: {shared:7.1f} us with a shared "
            f"index, {own:7.1f} us with its own ({own / shared:.2f}x)"
        )
    first, last = times[DRAFT_CONTEXTS[0]][0], times[DRAFT_CONTEXTS[-1]][0]
    facts: dict[str, Any] = {"growth": last / first}
    if IS_GPU:
        own_us, left_us = chains.indexer_us(DRAFT_CONTEXTS[-1])
        facts |= {"indexer_us": own_us, "left_us": left_us, "saved": 1 - left_us / own_us}
        lines.append(
            f"draft step, {width:6} width, T={DRAFT_CONTEXTS[-1]:>9,}: {own_us:.1f} us of its own "
            f"are the indexer's, {left_us:.1f} us are left with a shared index: "
            f"{facts['saved']:.1%} saved"
        )
    note(benchmark, last, times={str(k): v for k, v in times.items()}, **facts)


class DraftChains:
    """Four draft steps in a row, with a shared selection or each with its own."""

    NUM_STEPS = 4

    @torch.no_grad()
    def __init__(self, overrides: dict[str, Any]) -> None:
        torch._dynamo.reset()
        kinds = {"num_dense": 0, "num_moe": 1, "indexer_types": ["full"]}
        if IS_GPU:
            # Few experts: a step of one token meets eight of however many.
            vocab = {"vocab_size": 154_880 // 8} if overrides else {}
            model, mtp = make_slice("cuda", n_routed_experts=16, **kinds, **vocab, **overrides)
        else:
            model = tiny_model(tiny_config(num_hidden_layers=1, indexer_types=["full"]))
            mtp = make_mtp(model)
        compiler = None
        if IS_GPU:
            compiled = torch.compile(model, backend="glm", fullgraph=True)
            _, compiler = unwrap_compiled(compiled)
        config, where = model.config, {"device": device(), "dtype": model.dtype}
        capacity = DRAFT_CONTEXTS[-1]
        cache = PagedCache(config, 1, capacity, num_mtp_layers=1, **where)
        cache.auto_advance = False
        for pages in cache._pages():
            pages.normal_()
        cache.set_lengths(DRAFT_CONTEXTS[0] - self.NUM_STEPS)
        self.cache = cache
        steps, own_steps = MtpSteps(mtp, compiler, True), MtpSteps(mtp, compiler, False)
        token_B1 = torch.ones(1, 1, dtype=torch.long, device=device())
        hidden_B1C = torch.randn(1, 1, config.hidden_size, **where)
        row_B = torch.zeros(1, dtype=torch.long, device=device())
        first = steps.extend(token_B1, hidden_B1C, row_B, cache)
        latents, rows, *tables = first[2:]
        tables = [by_step(table) for table in tables]

        def shared() -> None:
            hidden = hidden_B1C
            for step in range(self.NUM_STEPS):
                hidden, _ = steps.draft(
                    token_B1, hidden, latents, rows, *(table[step] for table in tables)
                )

        def own() -> None:
            hidden = hidden_B1C
            for _ in range(self.NUM_STEPS):
                hidden = own_steps.extend(token_B1, hidden, row_B, cache)[0]

        def extend() -> None:
            steps.extend(token_B1, hidden_B1C, row_B, cache)

        self.shared, self.own, self.extend = shared, own, extend
        for chain in (shared, own, extend):
            chain()
        self._graphs: dict[Any, Any] = {}

    def _graph(self, chain: Callable[[], None]) -> Any:
        if chain not in self._graphs:
            self._graphs[chain] = bench.capture(chain)
        return self._graphs[chain]

    @torch.no_grad()
    def indexer_us(self, num_tokens: int) -> tuple[float, float]:
        """Microseconds of the indexer in a step of its own, and what is left in a shared one."""
        self.cache.set_lengths(num_tokens - self.NUM_STEPS)
        own = kernel_us(self._graph(self.own), INDEXER_KERNELS)
        shared = kernel_us(self._graph(self.shared), INDEXER_KERNELS)
        gather = kernel_us(self._graph(self.extend), SEED_KERNELS)
        return own / self.NUM_STEPS, (shared + gather) / self.NUM_STEPS

    @torch.no_grad()
    def step_us(self, chain: Callable[[], None], num_tokens: int) -> float:
        """Microseconds a step behind so many tokens, those of the steps among them."""
        self.cache.set_lengths(num_tokens - self.NUM_STEPS)
        if not IS_GPU:
            start = time.perf_counter()
            chain()
            return (time.perf_counter() - start) / self.NUM_STEPS * 1e6
        graph = self._graph(chain)
        samples = []
        for _ in range(bench.REPLAYS):
            start_event, end_event = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            start_event.record()
            graph.replay()
            end_event.record()
            end_event.synchronize()
            samples.append(start_event.elapsed_time(end_event) * 1e3)
        return statistics.median(samples) / self.NUM_STEPS
