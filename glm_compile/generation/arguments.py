"""Arguments of `generate`, checked before transformers prepares the call.

Each message says what was expected, what was found, and what to do. Fields of a generation config
are checked by their kind here, where transformers would stumble over one without naming it; whether
they can be honoured is decided when it has prepared them (`request`).
"""

from __future__ import annotations

import inspect
import numbers
from collections.abc import Callable, Collection, Mapping, Sequence, Set
from decimal import Decimal
from typing import Any

import torch
from transformers import GenerationConfig

from glm_compile.arguments import (
    check_flag,
    check_integer,
    closest,
    describe,
    is_integer,
    name_of,
)
from glm_compile.model_facts import MODEL_TYPE

DEFAULT_NUM_DRAFT_TOKENS = 5


def check_model(model: Any, where: str = "generate") -> None:
    """Raise for what is no causal language model of the family, plain or compiled."""
    plain_model = getattr(model, "_orig_mod", model)
    found = getattr(getattr(plain_model, "config", None), "model_type", None)
    if found != MODEL_TYPE or not hasattr(plain_model, "lm_head"):
        hint = "; glm_compile.load returns (model, mtp)" if isinstance(model, tuple) else ""
        raise ValueError(
            f"{where}: model must be a GlmMoeDsaForCausalLM, plain or compiled, got "
            f"{type(plain_model).__name__}{hint}"
        )


def check_input_ids(input_ids: Any) -> None:
    """Raise for what is no batch of prompts."""
    if isinstance(input_ids, torch.Tensor) and input_ids.dim() == 2 and input_ids.numel() > 0:
        return
    found = type(input_ids).__name__
    if isinstance(input_ids, torch.Tensor):
        found = f"shape {tuple(input_ids.shape)}"
    raise ValueError(
        "generate: input_ids must be a tensor [batch, length] with at least one token, got "
        f'{found}; a tokenizer returns one as tokenizer(text, return_tensors="pt").input_ids'
    )


def check_device(input_ids: torch.Tensor, device: torch.device) -> None:
    """Raise for a prompt that is not where the model is."""
    if input_ids.device != device:
        raise ValueError(
            f"generate: input_ids are on {input_ids.device}, the model is on {device}; move them: "
            f'input_ids.to("{device}")'
        )


def check_draft_arguments(
    mtp: Any, num_draft_tokens: int | None, index_share: bool | None
) -> tuple[int, bool]:
    """Number of drafts, and whether draft steps share the index; ValueError for a misfit."""
    check_integer("generate", "num_draft_tokens", num_draft_tokens, 0, is_optional=True)
    check_flag("generate", "index_share", index_share, is_optional=True)
    if num_draft_tokens is None:
        num_draft_tokens = 0 if mtp is None else DEFAULT_NUM_DRAFT_TOKENS
    if num_draft_tokens > 0 and mtp is None:
        raise ValueError(
            f"generate: num_draft_tokens={num_draft_tokens} needs an MTP layer; pass mtp=, as "
            "glm_compile.load returns it, or num_draft_tokens=0"
        )
    for name in ("extend", "draft", "compute_logits") if mtp is not None else ():
        if not callable(getattr(mtp, name, None)):
            raise ValueError(
                f"generate: mtp must be an MTP layer as glm_compile.load returns it; "
                f"{describe(mtp)} has no {name}()"
            )
    shared = bool(getattr(mtp, "is_index_shared", False)) if index_share is None else index_share
    return int(num_draft_tokens), shared


def check_mtp_fits(model: Any, mtp: Any) -> None:
    """Raise for an MTP layer of another size, dtype or device than the model."""
    ours, theirs = model.lm_head.weight, getattr(getattr(mtp, "eh_proj", None), "weight", None)
    if theirs is None:
        return
    pairs = {
        "hidden size": (ours.shape[1], theirs.shape[0]),
        "dtype": (ours.dtype, theirs.dtype),
        "device": (ours.device, theirs.device),
        "number of layers": (model.config.num_hidden_layers, mtp.layer_idx),
        "vocabulary size": (ours.shape[0], mtp.vocab_size),
    }
    for name, (expected, found) in pairs.items():
        if expected != found:
            raise ValueError(
                f"generate: the model's {name} is {expected}, the MTP layer's is {found}; load "
                "both together with glm_compile.load(path, dtype=..., device=...), or move one"
            )


def check_cuda_graph(cuda_graph: bool | None, device: torch.device) -> None:
    """Raise for a CUDA graph that cannot be had on this device."""
    check_flag("generate", "cuda_graph", cuda_graph, is_optional=True)
    if cuda_graph and device.type != "cuda":
        raise ValueError(
            f"generate: cuda_graph=True needs a model on a CUDA device, this one is on {device}; "
            "leave it None"
        )


def check_callbacks(streamer: Any, **lists: Any) -> None:
    """Raise for a streamer that is none, and for lists of callables that are no lists."""
    for name in ("put", "end") if streamer is not None else ():
        if isinstance(streamer, type) or not callable(getattr(streamer, name, None)):
            raise ValueError(
                f"generate: streamer must have put() and end(), as a TextStreamer(tokenizer) does, "
                f"got {describe(streamer)}"
            )
    for name, value in lists.items():
        if value is not None and (isinstance(value, str) or not isinstance(value, Sequence)):
            hint = f"; pass [{name_of(value)}]" if callable(value) else ""
            raise ValueError(
                f"generate: {name} must be a list of callables, got {describe(value)}{hint}"
            )


def check_config_class(config: Any) -> None:
    """Raise for a generation config that is none."""
    if config is not None and not isinstance(config, GenerationConfig):
        hint = "; pass its fields as arguments: **config" if isinstance(config, dict) else ""
        raise ValueError(
            "generate: generation_config must be a transformers.GenerationConfig, got "
            f"{describe(config)}{hint}"
        )


def check_names(names: Sequence[str], functions: Sequence[Callable[..., Any]]) -> None:
    """Raise for a name that nobody takes and that is nearly another one; the rest is transformers'.

    Args:
        functions: whose arguments are taken, beside fields of a GenerationConfig.
    """
    known = {name for name in vars(GenerationConfig()) if not name.startswith("_")}
    known |= {"tokenizer", "assistant_tokenizer"}
    for function in functions:
        known.update(inspect.signature(function).parameters)
    for name in names:
        if name not in known and (question := closest(name, sorted(known), cutoff=0.8)):
            raise ValueError(f"generate: unknown argument {name!r}{question}")


def check_fields(model: Any, generation_config: Any, arguments: Mapping[str, Any]) -> None:
    """Raise ValueError for a field of another kind, naming it.

    What transformers takes as such a value is one: arrays and tensors of NumPy and torch, 0 and 1
    as flags, whole numbers that are floats.

    Args:
        generation_config: as the caller gave it, or None.
        arguments: of the call; they come before the config, and the config before the model's.
    """

    def value_of(name: str) -> Any:
        if name in arguments:
            return arguments[name]
        configs = (generation_config, getattr(model, "generation_config", None))
        values = (getattr(config, name, None) for config in configs)
        return next((value for value in values if value is not None), None)

    for is_kind, described, names in FIELDS_BY_KIND:
        for name in names:
            if (value := value_of(name)) is not None and not is_kind(value):
                raise ValueError(f"generate: {name} must be {described}, got {value!r}")
    if (value := value_of("max_cache_len")) is not None and value < 1:
        raise ValueError(f"generate: max_cache_len must be at least 1, got {value}")
    name = "exponential_decay_length_penalty"
    if (value := value_of(name)) is None:
        return
    if not _is_list_of(_is_number, value) or len(value) != 2:
        raise ValueError(f"generate: {name} must be (start, factor), got {value!r}")
    if value_of("eos_token_id") is None:
        raise ValueError(f"generate: {name}={value!r} needs an eos_token_id")


def check_stop_strings(stop_strings: Any, tokenizer: Any) -> None:
    """Raise for stop strings that are no text, or a tokenizer that cannot read them."""
    is_text = isinstance(stop_strings, str)
    if not is_text and not _is_list_of(lambda v: isinstance(v, str), stop_strings):
        raise ValueError(
            f"generate: stop_strings must be a text or a list of them, got {stop_strings!r}"
        )
    if tokenizer is None:
        raise ValueError("generate: stop_strings needs the model's tokenizer; pass tokenizer=")
    if not callable(getattr(tokenizer, "get_vocab", None)):
        raise ValueError(
            "generate: tokenizer must be the model's tokenizer, as AutoTokenizer.from_pretrained "
            f"returns it, got {describe(tokenizer)}"
        )


def _is_flag(value: Any) -> bool:
    """Whether it knows if it is true, as a condition of NumPy, 0 and 1 do; no text or list does."""
    return hasattr(value, "__bool__")


def _is_integer(value: Any) -> bool:
    value = _unwrap(value)
    # False switches a field off in some configs.
    return value is False or is_integer(value) or (isinstance(value, float) and value.is_integer())


def _is_number(value: Any) -> bool:
    value = _unwrap(value)
    return isinstance(value, (numbers.Real, Decimal)) and not isinstance(value, bool)


def _is_id(value: Any) -> bool:
    return _is_integer(value) and value is not False


def _is_id_list(value: Any) -> bool:
    return _is_list_of(_is_id, value)


def _is_id_or_list(value: Any) -> bool:
    return _is_id(value) or (_is_id_list(value) and not isinstance(value, Set))


def _is_list_of(is_kind: Callable[[Any], bool], value: Any) -> bool:
    if hasattr(value, "tolist"):
        value = value.tolist()
    is_list = isinstance(value, Collection) and not isinstance(value, (str, bytes, Mapping))
    return is_list and all(map(is_kind, value))


def _unwrap(value: Any) -> Any:
    """The one value of a tensor or an array; others are what they are."""
    if hasattr(value, "tolist"):
        value = value.tolist()
        while isinstance(value, list) and len(value) == 1:
            value = value[0]
    return value


def _is_watermark(value: Any) -> bool:
    return isinstance(value, dict) or hasattr(value, "construct_processor")


# What `generate` takes as one value, by its kind: (whether a value is of it, what the kind is
# called, names). Several beams are refused later.
FIELDS_BY_KIND: tuple[tuple[Callable[[Any], bool], str, tuple[str, ...]], ...] = (
    (
        _is_flag,
        "True or False",
        (
            "do_sample",
            "output_scores",
            "output_logits",
            "renormalize_logits",
            "remove_invalid_values",
            "return_dict_in_generate",
        ),
    ),
    (
        _is_integer,
        "an integer",
        (
            "max_length",
            "max_new_tokens",
            "min_length",
            "min_new_tokens",
            "max_cache_len",
            "num_beams",
            "num_return_sequences",
            "no_repeat_ngram_size",
            "encoder_no_repeat_ngram_size",
            "top_k",
        ),
    ),
    (
        _is_number,
        "a number",
        (
            "max_time",
            "temperature",
            "top_p",
            "min_p",
            "top_h",
            "typical_p",
            "epsilon_cutoff",
            "eta_cutoff",
            "repetition_penalty",
            "encoder_repetition_penalty",
        ),
    ),
    (_is_id, "a token id", ("pad_token_id",)),
    (_is_id_list, "a list of token ids", ("suppress_tokens", "begin_suppress_tokens")),
    (
        _is_id_or_list,
        "a token id or a list of them",
        ("bos_token_id", "eos_token_id", "forced_bos_token_id", "forced_eos_token_id"),
    ),
    (callable, "callable", ("prefix_allowed_tokens_fn",)),
    (_is_watermark, "a WatermarkingConfig or a dict", ("watermarking_config",)),
)
