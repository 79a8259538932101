"""What is checked of a compiled model's call before Dynamo traces it.

torch.compile hands a backend nothing but finished graphs, and it may take a minute to trace one,
only to hear of a misspelt option. A wrong cache never gets so far: Dynamo stops in the middle of
the model, with an error about tracing. But Dynamo tells who asks that it begins. It does not say
for which backend nor with which arguments, so both are read off the frame that compiles. Where
there is no such frame (another torch), or nobody is told any more (`torch._dynamo.reset` until the
next compilation; a compilation that begins while another thread compiles), options are checked by
the backend, behind the trace.

A call is refused only where it cannot work. So nothing is said of a model whose forward is not
transformers' own, which may do anything with its arguments, nor of gradients that a part of the
model may need which the call does not use: the backend sees what is used.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping, Sequence
from types import FrameType
from typing import Any

import torch
from torch._dynamo.callback import callback_handler
from transformers import GlmMoeDsaForCausalLM, GlmMoeDsaModel

from glm_compile.arguments import describe
from glm_compile.errors import ConfigError, GlmCompileError, as_backend_error
from glm_compile.model_facts import CACHE_ARGUMENTS, attentions_of, cache_argument
from glm_compile.options import CompileOptions, check_mode, fp8_cache_error

_BACKENDS: list[Callable[..., Any]] = []


def check_calls_of(backend: Callable[..., Any]) -> None:
    """Check each call of a model that is about to be compiled by this backend."""
    if backend not in _BACKENDS:
        _BACKENDS.append(backend)
    if _on_start not in callback_handler.start_callbacks:
        callback_handler.register_start_callback(_on_start)


def find_wrapper(callback: Any) -> Any:
    """What torch.compile wraps a backend in, below its other wrappers: None if it is not there.

    Its `compiler_fn` is the backend, its `kwargs` are what that is called with.
    """
    while (inner := getattr(callback, "_torchdynamo_orig_backend", None)) is not None:
        callback = inner
    return callback if hasattr(callback, "compiler_fn") else None


def check_options(keywords: Mapping[str, Any]) -> CompileOptions:
    """The options among torch.compile's keywords.

    Raises:
        ValueError: an unknown option, value or mode.
        UnsupportedError: an option that this version cannot serve.
    """
    check_mode(keywords.get("mode"))
    return CompileOptions.from_dict(keywords.get("options"))


def refuse_gradients(names: Sequence[str]) -> None:
    """Raise ValueError if there are names: of tensors whose gradients would be recorded."""
    if names:
        more = f" and {len(names) - 1} more" if len(names) > 1 else ""
        raise ValueError(
            "the glm backend compiles for inference only, and gradients are enabled while "
            f"{names[0]}{more} require them: call the model under torch.no_grad() or "
            "torch.inference_mode(), or model.requires_grad_(False)"
        )


def _on_start(*_args: Any) -> None:
    # Dynamo holds a plain lock meanwhile: whatever compiled anything in here would wait for itself.
    frame = _compiling_frame()
    wrapper = None if frame is None else find_wrapper(frame.f_locals.get("compiler_fn"))
    if frame is None or wrapper is None or not any(wrapper.compiler_fn is b for b in _BACKENDS):
        return
    try:
        options = check_options(getattr(wrapper, "kwargs", {}))
        scope = frame.f_locals.get("locals")
        if isinstance(scope, Mapping):
            _check_call(scope, options)
    except (GlmCompileError, ValueError) as error:
        raise as_backend_error(error) from None


def _compiling_frame() -> FrameType | None:
    """Dynamo's `_compile` below this one: its locals hold the backend and the traced frame's."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        is_dynamo = frame.f_globals.get("__name__") == "torch._dynamo.convert_frame"
        if is_dynamo and frame.f_code.co_name == "_compile":
            return frame
        frame = frame.f_back
    return None


def _check_call(scope: Mapping[str, Any], options: CompileOptions) -> None:
    """Check how a model of the family is called: without gradients, with a cache that it can use.

    Args:
        scope: locals of the frame that is traced: of the forward, or of a wrapper around it.
    """
    model: Any = scope.get("self")
    if not isinstance(model, (GlmMoeDsaForCausalLM, GlmMoeDsaModel)):
        return
    decoder = getattr(model, "model", model)
    if not (_has_plain_forward(model) and _has_plain_forward(decoder)):
        return
    # Behind the last norm nothing is without gradients if its weight records them.
    weight = getattr(decoder.norm, "weight", None)
    if torch.is_grad_enabled() and getattr(weight, "requires_grad", False):
        refuse_gradients([n for n, p in decoder.named_parameters() if p.requires_grad])
    parameters = list(inspect.signature(type(model).forward).parameters)
    given = {name: scope[name] for name in parameters if name in scope}
    if isinstance(arguments := scope.get("args"), tuple):
        given.update(zip(parameters[1:], arguments))
    if isinstance(keywords := scope.get("kwargs"), dict):
        given.update(keywords)
    for name in CACHE_ARGUMENTS:
        if given.get(name) is not None:
            check_cache(name, given[name], model, options, _batch_size(given))
    if given.get("cache") is not None and cache_argument() != "cache":
        raise ValueError(
            "this version of transformers would ignore cache=: it calls the argument "
            "past_key_values"
        )


def _has_plain_forward(module: Any) -> bool:
    """Whether transformers' own forward gets the arguments as they are."""
    forward = getattr(module.forward, "_torchdynamo_orig_callable", module.forward)
    function = getattr(forward, "__func__", None)
    is_own = getattr(function, "__module__", None) == GlmMoeDsaForCausalLM.__module__
    return is_own and not module._forward_pre_hooks


def check_cache(
    name: str, cache: Any, model: Any, options: CompileOptions, batch_size: int | None
) -> None:
    """Raise for a cache that a step of the model could not write into.

    What has methods of its own to write with is let through.

    Args:
        name: of the argument, for messages.
        batch_size: sequences of the step; None if it is not known.

    Raises:
        ValueError: no cache, or one of another batch size or dtype.
        ConfigError: a cache made for another model.
        UnsupportedError: the FP8 tier without FP8 index keys.
    """
    from transformers.cache_utils import Cache

    from glm_compile.cache import PagedCache

    kind = type(cache)
    if isinstance(cache, type) or not callable(getattr(cache, "update_indexer", None)):
        raise ValueError(
            f"{name}: expected a cache of transformers (StaticCache, DynamicCache), a "
            f"glm_compile.PagedCache or None, got {describe(cache)}; for instance "
            "glm_compile.PagedCache(model.config, batch_size=1, max_cache_len=4096)"
        )
    is_paged, is_theirs = (
        isinstance(cache, base)
        and kind.update is base.update
        and kind.update_indexer is base.update_indexer
        for base in (PagedCache, Cache)
    )
    if is_paged:
        cache.check_model(model, batch_size)
    elif is_theirs:
        _check_layers(name, cache, model)
    else:
        return
    if options.indexer_dtype == "fp8" and not getattr(cache, "is_index_fp8", False):
        raise fp8_cache_error()


def _check_layers(name: str, cache: Any, model: Any) -> None:
    """Raise for transformers' own cache whose layers are not those of the model."""
    if hasattr(getattr(cache, "layer_class_to_replicate", None), "update_indexer"):
        return  # layers are made when they are needed
    layers = dict(enumerate(getattr(cache, "layers", ())))
    attentions = attentions_of(model)
    num_layers = max((attention.layer_idx + 1 for attention in attentions), default=0)
    missing = [
        attention.layer_idx
        for attention in attentions
        if attention.indexer is not None
        and not hasattr(layers.get(attention.layer_idx), "update_indexer")
    ]
    if len(layers) >= num_layers and not missing:
        return
    found = f"{len(layers)} layers" if len(layers) < num_layers else f"none for layer {missing[0]}"
    raise ConfigError(
        f"{name}: expected a cache with the model's {num_layers} layers and places for index keys, "
        f"got {type(cache).__name__} with {found}; make it from the model's config, for instance "
        "DynamicCache(config=model.config)"
    )


def _batch_size(given: Mapping[str, Any]) -> int | None:
    for name in ("input_ids", "inputs_embeds"):
        if isinstance(given.get(name), torch.Tensor) and given[name].dim() > 1:
            return int(given[name].shape[0])
    return None
