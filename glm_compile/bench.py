"""Time of a decode step on a slice of the release: 3 dense and 3 MoE layers, everything full size.

A whole GLM-5.2 does not fit on one GPU; six of its layers, the embedding and the head do, in bf16
(32.7 billion parameters), and a step over them reads what a step over the model reads for each
layer. Weights and cache contents are random; the router is the model's own, so which experts run
follows from them: of our backend's steps those that the measured step reads are counted, of
transformers' as many as such tokens meet.

Steps are captured in a CUDA graph where the GPU allows it, and a time is the median of its replays:
with 15 GB of weights a step, all are cold.

Shape legend: S query tokens, T tokens of the cache, E experts.
"""

from __future__ import annotations

import contextlib
import copy
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from glm_compile.cache import FP8, PagedCache
from glm_compile.errors import UnsupportedError
from glm_compile.model_facts import cache_argument
from glm_compile.ops import _dispatch

#: How a step is run: our backend in its two tiers, and what transformers has.
BACKENDS = ("glm", "glm-fp8", "inductor", "eager")
REPLAYS = 20
# Reads from device memory, bytes a second, measured on large copies.
READ_BANDWIDTH = {"NVIDIA H200": 4.56e12}
# Tokens of the cache over which experts are counted.
_COUNTED_LEN = 4096


@dataclass(frozen=True)
class StepTime:
    """One measured step.

    Attributes:
        backend: of `BACKENDS`.
        query_len, cache_len: S, and T with the step's own tokens.
        median_us: microseconds a step; None where it does not fit into memory.
        timer: `graph replay`, or `events` or `perf_counter` where steps cannot be captured.
        num_experts: distinct routed experts of the step, summed over the layers.
        weight_bytes: weights that the step has to read, those experts among them.
        floor_us: time to read these weights; None where the GPU's bandwidth is not known.
        device, torch: where it ran, and on what.
    """

    backend: str
    query_len: int
    cache_len: int
    median_us: float | None
    timer: str
    num_experts: int
    weight_bytes: int
    floor_us: float | None
    device: str
    torch: str

    def as_dict(self) -> dict[str, Any]:
        """The fields, for a JSON file."""
        return asdict(self)


def slice_config(num_dense: int = 3, num_moe: int = 3, **overrides: Any) -> Any:
    """Config of the slice: the release's, with fewer layers; dense layers select, MoE ones share.

    The release's schedule is the same over its first six layers: full at 0, 1 and 2.
    """
    from transformers import GlmMoeDsaConfig

    num_layers = num_dense + num_moe
    values: dict[str, Any] = {
        "num_hidden_layers": num_layers,
        "first_k_dense_replace": num_dense,
        "mlp_layer_types": ["dense"] * num_dense + ["sparse"] * num_moe,
        "indexer_types": ["full"] * num_dense + ["shared"] * num_moe,
        "max_position_embeddings": 1 << 20,
        "rope_parameters": {"rope_theta": 8e6, "rope_type": "default"},
        **overrides,
    }
    return GlmMoeDsaConfig(**values)


def make_model(config: Any, device: str | torch.device, seed: int = 0) -> Any:
    """A GlmMoeDsaForCausalLM in bf16 with random weights, made on its device."""
    from transformers import GlmMoeDsaForCausalLM

    device = torch.device(device)
    torch.manual_seed(seed)
    # Only this way transformers keeps the parameters in fp32 that it keeps so when it loads.
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM._from_config(copy.deepcopy(config), dtype=torch.bfloat16)
    model.to_empty(device=device)
    model.eval().requires_grad_(False)
    for name, parameter in model.named_parameters():
        if "embed_tokens" in name:
            # As large as a layer's output: tokens stay unlike each other, and meet other experts.
            parameter.normal_()
        elif parameter.dim() > 1:
            parameter.normal_(0.0, parameter.shape[-1] ** -0.5)
        elif "norm" in name and name.endswith("weight"):
            parameter.fill_(1.0)
        else:
            parameter.zero_()
    for name, buffer in model.named_buffers():
        if "inv_freq" not in name:
            buffer.zero_()
    rotary = model.model.rotary_emb
    model.model.rotary_emb = type(rotary)(config).to(device)
    return model


def make_cache(model: Any, backend: str, query_len: int, cache_len: int) -> Any:
    """A cache of `cache_len` tokens with random contents, all but the step's own in use."""
    from transformers import StaticCache

    device, config = model.lm_head.weight.device, model.config
    num_cached = cache_len - query_len
    if backend not in ("glm", "glm-fp8"):
        return StaticCache(config, max_cache_len=cache_len)
    index_dtype = FP8 if backend == "glm-fp8" else None
    cache = PagedCache(
        config,
        1,
        cache_len,
        dtype=model.lm_head.weight.dtype,
        index_dtype=index_dtype,
        device=device,
    )
    cache.auto_advance = False
    for layer in cache.layers:
        layer.latent_pages.normal_()
        if layer.key_pages is not None and index_dtype is None:
            layer.key_pages.normal_()
    if index_dtype is not None:
        _fill_fp8_keys(cache, config.index_head_dim, num_cached)
    cache.set_lengths(num_cached)
    return cache


def _fill_fp8_keys(cache: PagedCache, head_dim: int, num_cached: int) -> None:
    block = 1 << 16
    for start in range(0, num_cached, block):
        keys = torch.randn(
            1,
            min(block, num_cached - start),
            head_dim,
            dtype=torch.bfloat16,
            device=cache.lengths.device,
        )
        cache.set_lengths(start)
        for index, layer in enumerate(cache.layers):
            if layer.key_pages is not None:
                cache.update_indexer(keys, index)


def check_lengths(query_len: int, cache_len: int) -> None:
    """Raise ValueError unless a step of `query_len` tokens can end a cache of `cache_len`."""
    if not 0 < query_len < cache_len:
        raise ValueError(
            f"bench: query_len must be at least 1 and below cache_len, got {query_len} and "
            f"{cache_len}"
        )


def check_memory(model: Any, cache_len: int) -> None:
    """Raise ValueError where a cache alone is larger than the device's whole memory."""
    config, device = model.config, model.lm_head.weight.device
    row = config.kv_lora_rank + config.qk_rope_head_dim + config.index_head_dim
    needed = 2 * row * config.num_hidden_layers * cache_len
    if device.type == "cuda":
        there = torch.cuda.get_device_properties(device).total_memory
    else:
        there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        raise ValueError(
            f"bench: a cache of cache_len={cache_len} tokens takes {needed / 1e9:.0f} GB, and "
            f"{device} has {there / 1e9:.0f} GB; choose a smaller cache_len"
        )


def _tokens(model: Any, query_len: int) -> torch.Tensor:
    """The step's token ids, the same for all backends."""
    generator = torch.Generator().manual_seed(query_len)
    ids_BS = torch.randint(0, model.config.vocab_size, (1, query_len), generator=generator)
    return ids_BS.to(model.lm_head.weight.device)


def make_step(model: Any, backend: str, query_len: int, cache_len: int) -> Callable[[], Any]:
    """A function that runs one step over a cache of its own and leaves the lengths as they are.

    Raises:
        ValueError: unknown backend, or no room for the step's tokens.
    """
    if backend not in BACKENDS:
        raise ValueError(f"bench: unknown backend {backend!r}; known are {', '.join(BACKENDS)}")
    check_lengths(query_len, cache_len)
    check_memory(model, cache_len)
    device = model.lm_head.weight.device
    cache = make_cache(model, backend, query_len, cache_len)
    ids_BS = _tokens(model, query_len)
    positions_BS = torch.arange(cache_len - query_len, cache_len, device=device)[None]
    arguments = {"position_ids": positions_BS, "use_cache": True, cache_argument(): cache}
    if isinstance(cache, PagedCache):
        options: Any = {"indexer_dtype": "fp8"} if backend == "glm-fp8" else {}
        compiled = torch.compile(
            model, backend="glm", fullgraph=True, dynamic=False, options=options
        )

        def step() -> Any:
            return compiled(ids_BS, **arguments).logits

        return step
    if not cache.layers[0].is_initialized:
        # Writes to fill it would go through the model; its contents are set below.
        model(ids_BS, **arguments)
    counters = []
    for layer in cache.layers:
        for name, value in vars(layer).items():
            if not isinstance(value, torch.Tensor):
                continue
            if name.endswith("cumulative_length"):
                counters.append(value)
            elif value.is_floating_point():
                value.normal_()
    run = torch.compile(model, fullgraph=True, dynamic=False) if backend == "inductor" else model

    def step_from_counters() -> Any:
        for counter in counters:
            counter.fill_(cache_len - query_len)
        return run(ids_BS, **arguments).logits

    return step_from_counters


@torch.no_grad()
def time_step(
    model: Any,
    backend: str = "glm",
    *,
    query_len: int = 6,
    cache_len: int = 8192,
    keep_graphs: bool = False,
) -> StepTime:
    """Measure one step of `model` (see `make_model`) over a cache of `cache_len` tokens.

    A step that does not fit into memory has no time. Every call compiles anew, unless graphs of
    earlier calls are to be used where they fit: Dynamo keeps eight.

    Raises:
        ValueError: unknown backend, or no room for the step's tokens.
        UnsupportedError: the step gives logits that are not finite.
    """
    device = model.lm_head.weight.device
    if not keep_graphs:
        torch._dynamo.reset()
    step = None
    experts: list[tuple[int, int]] = []
    try:
        step = make_step(model, backend, query_len, cache_len)
        for _ in range(2):
            step()
        with noted_experts() as experts:
            logits = step()
        if not logits.isfinite().all():
            raise UnsupportedError(f"bench: backend {backend!r} gave logits that are not finite")
        samples, timer = _time(step, device)
    except torch.OutOfMemoryError:
        samples, timer = [], "out of memory"
    finally:
        del step  # its cache makes room for the next one
        gc.collect()
        if device.type == "cuda":
            torch.cuda.empty_cache()
    if experts:
        num_experts = sum(number for number, _ in experts)
        weight_bytes = _other_weight_bytes(model) + sum(size for _, size in experts)
    else:
        num_experts, weight_bytes = read_weights(model, query_len, cache_len)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    bandwidth = READ_BANDWIDTH.get(name)
    return StepTime(
        backend=backend,
        query_len=query_len,
        cache_len=cache_len,
        median_us=statistics.median(samples) * 1e6 if samples else None,
        timer=timer,
        num_experts=num_experts,
        weight_bytes=weight_bytes,
        floor_us=weight_bytes / bandwidth * 1e6 if bandwidth else None,
        device=name,
        torch=torch.__version__,
    )


def capture(step: Callable[[], Any]) -> torch.cuda.CUDAGraph:
    """A CUDA graph of one step, which must have run before."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    return graph


def _time(step: Callable[[], Any], device: torch.device) -> tuple[list[float], str]:
    """Seconds a step, and how they were taken."""
    if device.type != "cuda":
        samples = []
        for _ in range(3):
            start = time.perf_counter()
            step()
            samples.append(time.perf_counter() - start)
        return samples, "perf_counter"
    graph = capture(step)
    start = time.perf_counter()
    for _ in range(3):
        graph.replay()
    torch.cuda.synchronize(device)
    # Steps of a tenth of a second are steady: fewer of them.
    is_slow = time.perf_counter() - start > 0.1
    events = [
        [torch.cuda.Event(enable_timing=True) for _ in range(2)]
        for _ in range(REPLAYS // 4 if is_slow else REPLAYS)
    ]
    for start_event, end_event in events:
        start_event.record()
        graph.replay()
        end_event.record()
    torch.cuda.synchronize(device)
    return [start.elapsed_time(end) * 1e-3 for start, end in events], "graph replay"


@torch.no_grad()
def read_weights(model: Any, query_len: int, cache_len: int = 8192) -> tuple[int, int]:
    """(distinct experts, bytes of weights) of a step; each expert that is met counts once a layer.

    The experts are those that as many random tokens meet in the plain model over a cache of the
    same kind, of 4096 tokens at most, or the step's: which ones they are depends on the hidden
    states, how many hardly does.
    """
    met: dict[str, int] = {}
    expert_bytes = 0
    hooks = []
    for name, module in model.named_modules():
        if type(module).__name__ != "GlmMoeDsaTopkRouter":
            continue
        experts = model.get_submodule(name.removesuffix("gate") + "experts")

        def note(_module: Any, _inputs: Any, outputs: Any, name: str = name) -> None:
            met[name] = outputs[-1].unique().numel()

        hooks.append((module.register_forward_hook(note), name, experts))
    try:
        device = model.lm_head.weight.device
        cache_len = min(cache_len, max(_COUNTED_LEN, query_len))
        cache = make_cache(model, "glm", query_len, cache_len)
        ids_BS = _tokens(model, query_len)
        positions_BS = torch.arange(cache_len - query_len, cache_len, device=device)[None]
        model(ids_BS, position_ids=positions_BS, use_cache=True, **{cache_argument(): cache})
    finally:
        for hook, _, _ in hooks:
            hook.remove()
    for _, name, experts in hooks:
        size = sum(p.numel() * p.element_size() for p in experts.parameters())
        expert_bytes += met[name] * size // experts.num_experts
    return sum(met.values()), _other_weight_bytes(model) + expert_bytes


def _other_weight_bytes(model: Any) -> int:
    """Bytes of all weights but the routed experts' and the embedding's, of which rows are read."""
    left_out = {id(model.get_input_embeddings().weight)}
    for name, module in model.named_modules():
        if type(module).__name__ == "GlmMoeDsaTopkRouter":
            experts = model.get_submodule(name.removesuffix("gate") + "experts")
            left_out.update(id(parameter) for parameter in experts.parameters())
    return sum(
        parameter.numel() * parameter.element_size()
        for parameter in model.parameters()
        if id(parameter) not in left_out
    )


@contextlib.contextmanager
def noted_experts() -> Iterator[list[tuple[int, int]]]:
    """(distinct experts, bytes of their weights) of each call of the routed experts' op inside."""
    met: list[tuple[int, int]] = []

    def note(op: str, *args: Any) -> None:
        if op == "moe_experts":
            _, _, ids, gate_up, down = args[:5]
            number = ids[(ids >= 0) & (ids < gate_up.shape[0])].unique().numel()
            size = sum(weight[0].numel() * weight.element_size() for weight in (gate_up, down))
            met.append((number, number * size))

    with _dispatch.observed(note):
        yield met


def line(t: StepTime) -> str:
    """One step as text."""
    head = f"{t.backend:9} S={t.query_len} T={t.cache_len:>9,}"
    if t.median_us is None:
        return f"{head}: out of memory"
    floor = f", {t.floor_us / t.median_us:.0%} of the floor" if t.floor_us else ""
    return (
        f"{head}: {t.median_us / 1e3:8.3f} ms ({t.timer}; {t.num_experts} experts, "
        f"{t.weight_bytes / 1e9:.2f} GB of weights{floor})"
    )
