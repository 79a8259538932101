"""Say what the backend would replace in a model, without compiling or computing anything.

The model is copied with fake tensors (shapes, no weights), given a fake cache of the asked length,
and traced once; the passes run on the graph, and the report tells what they found. The release's 78
layers need neither its weights nor a GPU.
"""

from __future__ import annotations

import contextlib
import copy
import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from glm_compile.arguments import check_integer, closest, describe
from glm_compile.model_facts import MODEL_TYPE
from glm_compile.options import CompileOptions, fp8_cache_error
from glm_compile.report import CompileReport

if TYPE_CHECKING:
    from glm_compile.mtp import GlmMoeDsaMtp

CACHES = ("static", "paged", "dynamic", None)


def explain(
    model: nn.Module,
    batch_size: int = 1,
    query_len: int = 6,
    cache_len: int = 4096,
    cache: str | None = "static",
    options: CompileOptions | Mapping[str, Any] | None = None,
    *,
    mtp: nn.Module | None = None,
) -> CompileReport:
    """Report what `torch.compile(model, backend="glm")` would replace in one step.

    Neither the model nor what is compiled of it is touched.

    Args:
        model: GlmMoeDsaForCausalLM, compiled or not, on any device (`meta` too), or a GlmMoeDsaMtp.
        batch_size: sequences.
        query_len: tokens of the step.
        cache_len: tokens that the cache holds before the step; ignored without a cache.
        cache: `static`, `paged`, `dynamic`, or None for a forward without one. An MTP layer keeps
            its rows in a paged cache, whatever is given here.
        options: as for the backend. `strict` does not raise here: ask the report's `ok`.
        mtp: an MTP layer to explain as well; its report is the `mtp` attribute of the model's.

    Raises:
        ValueError: a size below its least, an unknown cache or option, a model of another family.
        UnsupportedError: the FP8 tier without a paged cache.
    """
    model, mtp = _unwrap(model), _unwrap(mtp) if mtp is not None else None
    checked = CompileOptions.from_dict(options)
    _check_sizes(batch_size, query_len, cache_len, cache)
    if mtp is not None and not _is_mtp(mtp):
        raise ValueError(
            f"explain: mtp must be an MTP layer as glm_compile.load returns it, got {describe(mtp)}"
        )
    if checked.indexer_dtype == "fp8" and cache != "paged" and not _is_mtp(model):
        raise fp8_cache_error()
    if _is_mtp(model):
        return _explain_mtp(model, batch_size, query_len, cache_len, checked)
    _check_family(model)
    report = _explain_model(model, batch_size, query_len, cache_len, cache, checked)
    if mtp is not None:
        report.mtp = _explain_mtp(mtp, batch_size, query_len, cache_len, checked)
    return report


def _explain_model(
    model: nn.Module,
    batch_size: int,
    query_len: int,
    cache_len: int,
    cache_kind: str | None,
    options: CompileOptions,
) -> CompileReport:
    from glm_compile.model_facts import cache_argument

    fake = _Fake(model)
    with fake:
        cache = _make_cache(model, batch_size, query_len, cache_len, cache_kind, options)
        ids = torch.zeros(batch_size, query_len, dtype=torch.int64)
    kwargs: dict[str, Any] = {"use_cache": cache is not None}
    if cache is not None:
        kwargs[cache_argument()] = cache

    def step(module: nn.Module, input_ids: torch.Tensor, kwargs: dict[str, Any]) -> Any:
        return module(input_ids, **kwargs)

    report = _trace(step, (fake.copy(model), ids, kwargs), options)
    _add_weights(report, model)
    return report


def _explain_mtp(
    mtp: Any, batch_size: int, query_len: int, cache_len: int, options: CompileOptions
) -> CompileReport:
    from glm_compile.cache import PagedCache

    model = mtp._model
    weight = model.lm_head.weight
    fake = _Fake(model)
    with fake:
        cache = PagedCache(
            model.config,
            batch_size,
            cache_len + query_len,
            dtype=weight.dtype,
            index_dtype=_index_dtype(options),
            num_mtp_layers=1,
        )
        ids = torch.zeros(batch_size, query_len, dtype=torch.int64)
        hidden = torch.zeros(batch_size, query_len, weight.shape[1], dtype=weight.dtype)

    def step(
        module: GlmMoeDsaMtp, ids: torch.Tensor, hidden: torch.Tensor, cache: PagedCache
    ) -> Any:
        offsets = torch.arange(ids.shape[1], device=ids.device)
        positions = cache.lengths[:, None] + offsets
        return module.extend(ids, hidden, positions, None, cache)

    report = _trace(step, (fake.copy(mtp), ids, hidden, cache), options)
    _add_weights(report, mtp)
    return report


class _Analysed(Exception):
    """Ends a trace once the graph is analysed: nothing is to be run or kept of it."""


def _trace(
    step: Callable[..., Any], arguments: tuple[Any, ...], options: CompileOptions
) -> CompileReport:
    """Trace `step` with the backend's passes and return the report.

    The traced function is one of this module, so that Dynamo's record of the model's own forward
    (compiled graphs, sizes seen so far) stays as it was, and a failed compilation keeps nothing.
    """
    from torch._dynamo import config
    from torch._dynamo.exc import BackendCompilerFailed

    from glm_compile.pipeline import compile_graph

    reports: list[CompileReport] = []

    def backend(graph_module: torch.fx.GraphModule, example_inputs: list[Any]) -> Any:
        _runner, report = compile_graph(graph_module, example_inputs, options, is_analysis=True)
        reports.append(report)
        raise _Analysed

    compiled = torch.compile(step, backend=backend, fullgraph=True, dynamic=False)
    try:
        with (
            torch.no_grad(),
            config.patch(suppress_errors=False, verbose=False),
            warnings.catch_warnings(),
        ):
            # Dynamo's note on tracing through a cached helper of transformers; nothing to act on.
            warnings.filterwarnings("ignore", message=".*functools.lru_cache.*")
            compiled(*arguments)
    except BackendCompilerFailed as error:
        inner = error.inner_exception
        if not isinstance(inner, _Analysed):
            raise inner from None
    (report,) = reports
    return report


def _make_cache(
    model: Any,
    batch_size: int,
    query_len: int,
    cache_len: int,
    kind: str | None,
    options: CompileOptions,
) -> Any:
    """A cache that holds `cache_len` tokens, or None."""
    from transformers import DynamicCache, StaticCache

    from glm_compile.cache import PagedCache
    from glm_compile.model_facts import FULL, GlmDsaConfig

    if kind is None:
        return None
    config = model.config
    dtype: torch.dtype = model.get_input_embeddings().weight.dtype
    if kind == "paged":
        return PagedCache(
            config,
            batch_size,
            cache_len + query_len,
            dtype=dtype,
            index_dtype=_index_dtype(options),
        )
    facts = GlmDsaConfig.from_transformers(config)
    if kind == "static":
        cache: Any = StaticCache(config, max_cache_len=cache_len + query_len)
        num_held = 1  # makes its tensors, whose contents do not matter
    else:
        cache = DynamicCache(config=config)
        num_held = cache_len
    if num_held:
        for layer, indexer_type in enumerate(facts.indexer_types):
            shape = batch_size, 1, num_held
            latents = torch.zeros(*shape, facts.kv_lora_rank, dtype=dtype)
            cache.update(latents, latents.new_zeros(*shape, facts.qk_rope_head_dim), layer)
            if indexer_type == FULL:
                keys = latents.new_zeros(batch_size, num_held, facts.index_head_dim)
                cache.update_indexer(keys, layer)
    return cache


class _Fake:
    """Makes fake tensors within its context, and copies modules without their weights.

    The device is the model's, because the captured code may depend on it; `meta` counts as the CPU.
    """

    def __init__(self, model: nn.Module) -> None:
        from torch._subclasses import FakeTensorMode

        self._mode = FakeTensorMode()
        device = next(model.parameters()).device
        self._device = torch.device("cpu") if device.type == "meta" else device
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> None:
        for context in (torch.no_grad(), self._mode, self._device):
            self._stack.enter_context(context)

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def copy(self, module: Any) -> Any:
        """A copy of `module` in eval mode, with its hooks."""
        memo: dict[int, Any] = {}
        tensors = list(_tensors_of(module))
        with self:
            for tensor in tensors:
                fake = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype)
                if isinstance(tensor, nn.Parameter):
                    fake = nn.Parameter(fake, requires_grad=False)
                memo[id(tensor)] = fake
        return copy.deepcopy(module, memo).eval()


def _tensors_of(module: Any) -> Iterator[torch.Tensor]:
    """Parameters and buffers, those of modules that an MTP layer holds unregistered included."""
    others = (module.__dict__.get(name) for name in ("_model", "_draft_layer"))
    for owner in (module, *(other for other in others if other is not None)):
        yield from owner.parameters()
        yield from owner.buffers()


def _add_weights(report: CompileReport, model: nn.Module) -> None:
    """Add the weights that would be read apart, with the reasons; they are looked at, not moved."""
    from glm_compile.weights import find_left_alone

    if "merge_linears" in report.expected:
        report.add_declined("merge_linears", find_left_alone(model))


def _index_dtype(options: CompileOptions) -> torch.dtype | None:
    return torch.float8_e4m3fn if options.indexer_dtype == "fp8" else None


def _unwrap(model: Any) -> Any:
    return getattr(model, "_orig_mod", model)


def _is_mtp(model: nn.Module) -> bool:
    return type(model).__name__ == "GlmMoeDsaMtp"


def _check_family(model: Any) -> None:
    family = getattr(getattr(model, "config", None), "model_type", None)
    if family != MODEL_TYPE or not hasattr(model, "lm_head"):
        hint = "; pass its two parts as model and mtp=" if isinstance(model, tuple) else ""
        raise ValueError(
            "explain: expected a GlmMoeDsaForCausalLM (model_type 'glm_moe_dsa') or a GlmMoeDsaMtp,"
            f" got {type(model).__name__} (model_type {family!r}){hint}"
        )


def _check_sizes(batch_size: int, query_len: int, cache_len: int, cache: str | None) -> None:
    for name, value, least in (
        ("batch_size", batch_size, 1),
        ("query_len", query_len, 1),
        ("cache_len", cache_len, 0),
    ):
        check_integer("explain", name, value, least)
    if cache is not None and (not isinstance(cache, str) or cache not in CACHES):
        known = ", ".join(repr(c) for c in CACHES)
        question = closest(cache, [c for c in CACHES if c]) if isinstance(cache, str) else ""
        raise ValueError(f"explain: cache must be one of {known}, got {describe(cache)}{question}")
