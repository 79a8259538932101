"""One call of `generate`, validated: what transformers prepared, and nothing that would be ignored.

B batch, W prompt width.
"""

from __future__ import annotations

import copy
import operator
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from transformers import (
    EncoderNoRepeatNGramLogitsProcessor,
    GenerationConfig,
    RepetitionPenaltyLogitsProcessor,
)
from transformers.cache_utils import Cache

from glm_compile.arguments import describe
from glm_compile.generation.arguments import FIELDS_BY_KIND
from glm_compile.generation.device_processors import DeviceProcessors
from glm_compile.generation.processors import HostProcessors, make_processors
from glm_compile.generation.prompt import Prompt, compact_prompt
from glm_compile.generation.stopping import StopRules
from glm_compile.model_facts import CACHE_ARGUMENTS

# What cuda_graph=None means for a compiled model in 16 bits on a CUDA device.
CAPTURES_BY_DEFAULT = True
# Up to here a call with a smaller budget keeps its drafts: their number is a shape of the graphs.
UNCLIPPED_DRAFT_TOKENS = 16


@dataclass(frozen=True)
class Request:
    """What the decoding loop needs to know.

    Attributes:
        prompt: compacted prompts, and the ids as given.
        max_new_tokens: most tokens that a row may get, at least 1.
        do_sample: sampling, else greedy.
        pad_id: filler behind a finished row.
        stop: end-of-sequence ids and the caller's criteria.
        processor: logits to scores.
        num_drafts: drafts of a block, 0 without MTP.
        is_index_shared: whether draft steps reuse the selection of the last accepted row.
        streamer: receives the prompt and each token, or None.
        is_prompt_streamed: the streamer has the prompt already.
        prefill_chunk_size: prompt tokens per forward, None for all at once.
        min_cache_len: a capacity that the caller asked for.
        keeps_scores, keeps_logits: whether the output carries them.
        returns_dict: GenerationOutput instead of the ids alone.
        adapts_draft_length: whether blocks may have fewer drafts than `num_drafts`.
        num_padding: rows at the end of the batch that are nobody's.
    """

    prompt: Prompt
    max_new_tokens: int
    do_sample: bool
    pad_id: int
    stop: StopRules
    processor: DeviceProcessors | HostProcessors
    num_drafts: int
    is_index_shared: bool
    streamer: Any
    is_prompt_streamed: bool
    prefill_chunk_size: int | None
    min_cache_len: int
    keeps_scores: bool
    keeps_logits: bool
    returns_dict: bool
    adapts_draft_length: bool = False
    num_padding: int = 0

    @property
    def batch_size(self) -> int:
        """Rows, padding included."""
        return self.prompt.given_ids_BW.shape[0]


def wants_cuda_graph(
    cuda_graph: bool | None,
    processor: DeviceProcessors | HostProcessors,
    model: Any,
    *,
    is_compiled: bool,
) -> bool:
    """Whether the iteration is captured.

    Raises:
        ValueError: it is asked for, and a processor needs the host in every iteration.
    """
    if cuda_graph and processor.why_host is not None:
        raise ValueError(
            f"generate: cuda_graph=True cannot be had with {processor.why_host}, which needs the "
            "host in every iteration; leave it None"
        )
    if cuda_graph is not None:
        return cuda_graph
    weight = model.lm_head.weight
    is_half = weight.dtype in (torch.bfloat16, torch.float16)
    can_capture = is_compiled and is_half and weight.is_cuda and processor.why_host is None
    return CAPTURES_BY_DEFAULT and can_capture


# Fields of GenerationConfig that are taken, in transformers' meaning.
_TAKEN = frozenset(name for *_, names in FIELDS_BY_KIND for name in names) | {
    "stop_strings",
    "use_cache",
    "bad_words_ids",
    "sequence_bias",
    "exponential_decay_length_penalty",
    "prefill_chunk_size",
    "disable_compile",
}
# Fields without a meaning for this kind of decoding; transformers' own sampling ignores them too.
_MEANINGLESS = frozenset(
    {
        "early_stopping",
        "length_penalty",
        "decoder_start_token_id",
        "num_assistant_tokens",
        "num_assistant_tokens_schedule",
        "assistant_confidence_threshold",
        "max_matching_ngram_size",
        "assistant_lookbehind",
        "target_lookbehind",
        "transformers_version",
    }
)
# Fields that are refused: the values that mean "not asked for", and what to do instead.
_REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((None, 1), "only greedy decoding and sampling are supported"),
    "num_beam_groups": ((None, 1), "only greedy decoding and sampling are supported"),
    "diversity_penalty": ((None, 0.0), "only greedy decoding and sampling are supported"),
    "constraints": ((None,), "only greedy decoding and sampling are supported"),
    "force_words_ids": ((None,), "only greedy decoding and sampling are supported"),
    "penalty_alpha": ((None, 0.0), "only greedy decoding and sampling are supported"),
    "dola_layers": ((None,), "only greedy decoding and sampling are supported"),
    "low_memory": ((None, False), "only greedy decoding and sampling are supported"),
    "use_mtp": ((None, False), "pass the MTP layer as mtp="),
    "is_assistant": ((None, False), "pass the MTP layer as mtp="),
    "prompt_lookup_num_tokens": ((None,), "drafts come from the MTP layer: pass mtp="),
    "assistant_early_exit": ((None,), "drafts come from the MTP layer: pass mtp="),
    "assistant_ensemble_weight": ((None,), "drafts are verified without loss"),
    "speculation_type": ((None,), "drafts come from the MTP layer: pass mtp="),
    "guidance_scale": ((None, 1, 1.0), "it runs the model a second time for each token"),
    "token_healing": ((None, False), "it rewrites the prompt; do so before the call"),
    "output_attentions": ((None, False), "attention weights are never built"),
    "output_hidden_states": ((None, False), "call the model's forward for them"),
    "use_cache": ((None, True), "decoding works on a cache of its own"),
    "cache_implementation": ((None,), "decoding works on a cache of its own"),
    "cache_config": ((None,), "decoding works on a cache of its own"),
    "compile_config": ((None,), 'compile the model with torch.compile(model, backend="glm")'),
    "continuous_batching_config": ((None,), "use transformers' generate_batch"),
}


def check_refused(fields: Mapping[str, Any]) -> None:
    """Raise ValueError for a field that is refused, naming it."""
    for name, (unset, advice) in _REFUSED.items():
        value = fields.get(name)
        # `True == 1` would let output_attentions=1 or num_beams=True through unseen.
        if not any(value is u or (value == u and type(value) is type(u)) for u in unset):
            raise ValueError(f"generate: {name}={value!r} is not supported; {advice}")


def check_generation_config(config: Any) -> None:
    """Raise ValueError for a field that cannot be honoured, naming it."""
    check_refused({name: getattr(config, name, None) for name in _REFUSED})
    known = _TAKEN | _MEANINGLESS | _REFUSED.keys()
    for name in vars(GenerationConfig()):
        if (
            not name.startswith("_")
            and name not in known
            and getattr(config, name, None) is not None
        ):
            raise ValueError(
                f"generate: {name}={getattr(config, name)!r} is not supported (a field that this "
                "version does not know)"
            )


def check_token_ids(config: Any, prompt_width: int, vocab_size: int) -> None:
    """Raise ValueError for a field whose token is not in the vocabulary, where it would matter.

    transformers finds out in the middle of the text.
    """
    has_decay = getattr(config, "exponential_decay_length_penalty", None) is not None
    fields = {
        "forced_eos_token_id": config.forced_eos_token_id,
        "forced_bos_token_id": config.forced_bos_token_id if prompt_width == 1 else None,
        "bad_words_ids": config.bad_words_ids,
        "sequence_bias": _biased_sequences(config.sequence_bias),
        "eos_token_id": config.eos_token_id if has_decay else None,
    }
    for name, value in fields.items():
        wrong = [i for i in _flat_ids(value) if not 0 <= i < vocab_size]
        if wrong:
            reason = ", which exponential_decay_length_penalty favours," if has_decay else ""
            reason = reason if name == "eos_token_id" else ""
            raise ValueError(
                f"generate: {name}{reason} must hold ids in 0..{vocab_size - 1}, got {wrong}"
            )


def _biased_sequences(value: Any) -> Any:
    """The ids of a `sequence_bias`, whose form transformers has checked."""
    if value is None:
        return None
    return [list(s) for s in value] if isinstance(value, dict) else [pair[0] for pair in value]


def _flat_ids(value: Any) -> list[int]:
    if value is None:
        return []
    if hasattr(value, "tolist"):  # a tensor, or NumPy's
        value = value.tolist()
    if isinstance(value, Collection):
        return [i for part in value for i in _flat_ids(part)]
    return [value]


def check_model_kwargs(kwargs: Mapping[str, Any], attention_mask: torch.Tensor | None) -> None:
    """Raise ValueError for an argument of the model's forward that the loop would drop."""
    for name, value in kwargs.items():
        if value is None or name in ("use_cache", "inputs_tensor"):
            continue
        if name in CACHE_ARGUMENTS:
            # transformers prepares an empty cache; one of the caller's own would be left unused.
            is_prepared = isinstance(value, Cache) and not getattr(value, "_is_user_defined", False)
            if not is_prepared or int(value.get_seq_length()) > 0:
                raise no_cache_error(name, value)
        elif name == "logits_to_keep" and not isinstance(value, torch.Tensor) and value == 1:
            continue
        elif name == "position_ids":
            _check_position_ids(value, attention_mask)
        else:
            raise ValueError(f"generate: {name} is not supported")


def no_cache_error(name: str, cache: Any) -> ValueError:
    """What a cache of the caller's own is refused with."""
    return ValueError(
        f"generate: {name} is not supported, got {describe(cache)}: decoding starts from the "
        "prompt, in a cache of its own; leave it out (max_cache_len= sets that one's capacity)"
    )


def _check_position_ids(position_ids: Any, attention_mask: torch.Tensor | None) -> None:
    """transformers prepares the positions that the mask means; any others are the caller's."""
    if not isinstance(position_ids, torch.Tensor):
        raise ValueError(
            f"generate: position_ids is not supported, got {describe(position_ids)}; leave it out"
        )
    if attention_mask is None:
        expected = torch.arange(position_ids.shape[-1], device=position_ids.device)
        agrees = position_ids == expected
    else:
        real = attention_mask != 0
        if not bool((attention_mask == real).all()):
            # transformers counts positions by adding the mask up.
            raise ValueError("generate: attention_mask must hold 0 (padding) and 1 only")
        agrees = (position_ids == real.long().cumsum(-1) - 1) | ~real
    if not bool(agrees.all()):
        raise ValueError(
            "generate: position_ids is not supported: a token's position is the number of real "
            "tokens before it"
        )


def build_request(
    *,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None,
    config: Any,
    logits_processor: Any,
    stopping_criteria: Any,
    streamer: Any,
    is_prompt_streamed: bool,
    num_drafts: int,
    is_index_shared: bool,
    returns_dict: bool,
    vocab_size: int,
    min_prompt_width: int = 1,
    adapts_draft_length: bool = False,
) -> Request:
    """Put a request together from what transformers' `generate` prepared.

    Args:
        config: GenerationConfig after transformers' preparation (special tokens as tensors,
            `max_length` counted from the start of the prompt).
        logits_processor, stopping_criteria: the prepared lists; warpers are in the former.
        min_prompt_width: least width of the compacted prompts and of their chunks.
    """
    check_generation_config(config)
    check_token_ids(config, input_ids.shape[1], vocab_size)
    stop = StopRules.from_criteria(stopping_criteria)
    for criterion in stop.criteria:
        if not callable(criterion):
            raise ValueError(
                f"generate: stopping_criteria holds {criterion!r}, which is not callable"
            )
    chunk_size = _chunk_size(config.prefill_chunk_size, min_prompt_width)
    prompt = compact_prompt(input_ids, attention_mask, min_width=min_prompt_width)
    # Judged on real tokens only: padding may be any id.
    biggest, smallest = int(prompt.ids_BP.max()), int(prompt.ids_BP.min())
    if smallest < 0 or biggest >= vocab_size:
        raise ValueError(
            f"generate: input_ids must be in 0..{vocab_size - 1}, got {smallest}..{biggest}"
        )
    batch_size = input_ids.shape[0]
    if streamer is not None and batch_size > 1:
        raise ValueError(f"generate: streamer works with one sequence, got a batch of {batch_size}")
    max_length = stop.max_length if stop.max_length is not None else config.max_length
    try:
        max_new_tokens = operator.index(max_length) - prompt.given_width
    except TypeError:
        raise ValueError(
            f"generate: max_new_tokens and max_length must be integers, got {max_length!r}"
        ) from None
    if max_new_tokens < 1:
        raise ValueError(
            f"generate: max_length ({max_length}) leaves no token to generate behind a prompt of "
            f"{prompt.given_width}"
        )
    pad_id = _pad_id(config, stop, batch_size)
    return Request(
        prompt=prompt,
        max_new_tokens=max_new_tokens,
        do_sample=bool(config.do_sample),
        pad_id=pad_id,
        stop=stop,
        processor=make_processors(
            [_ignore_padding(p, prompt, attention_mask) for p in logits_processor],
            prompt_BW=prompt.aligned_ids_BW,
            vocab_size=vocab_size,
            eos_ids=stop.eos_ids,
            max_length=prompt.given_width + max_new_tokens,
            fill_id=pad_id,
        ),
        # More drafts than tokens are wanted could never be kept.
        num_drafts=min(num_drafts, max(max_new_tokens, UNCLIPPED_DRAFT_TOKENS)),
        is_index_shared=is_index_shared,
        streamer=streamer,
        is_prompt_streamed=is_prompt_streamed,
        prefill_chunk_size=chunk_size,
        min_cache_len=config.max_cache_len or 0,
        keeps_scores=returns_dict and bool(config.output_scores),
        keeps_logits=returns_dict and bool(config.output_logits),
        returns_dict=returns_dict,
        adapts_draft_length=adapts_draft_length,
    )


def _ignore_padding(processor: Any, prompt: Prompt, attention_mask: torch.Tensor | None) -> Any:
    """A processor that transformers prepared, for prompts whose padding is on the left.

    A repetition penalty leaves out what stands before a row's first real token (from transformers
    5.21 or so on); n-grams of the prompt are those of its real tokens, one behind the other.
    """
    if type(processor) is EncoderNoRepeatNGramLogitsProcessor:
        return _ngrams_of_aligned(processor, prompt)
    ignored = getattr(processor, "prompt_ignore_length", None)
    is_penalty = type(processor) is RepetitionPenaltyLogitsProcessor
    if not is_penalty or not isinstance(ignored, torch.Tensor) or attention_mask is None:
        return processor
    if not torch.equal(ignored, (attention_mask != 0).int().argmax(dim=1).to(ignored)):
        return processor
    processor = copy.copy(processor)
    processor.prompt_ignore_length = (prompt.given_width - prompt.lengths_B).to(ignored)
    return processor


def _ngrams_of_aligned(processor: Any, prompt: Prompt) -> Any:
    given_BW: Any = prompt.given_ids_BW
    aligned_BW: Any = prompt.aligned_ids_BW
    if torch.equal(given_BW, aligned_BW) or len(given_BW) % processor.batch_size:
        return processor
    # One for each prompt, of which there may be several sequences.
    every = len(given_BW) // processor.batch_size
    size = processor.ngram_size
    of_given = EncoderNoRepeatNGramLogitsProcessor(size, given_BW[::every])
    if processor.generated_ngrams != of_given.generated_ngrams:
        return processor  # the caller's own, of another text
    return EncoderNoRepeatNGramLogitsProcessor(size, aligned_BW[::every])


def _pad_id(config: Any, stop: StopRules, batch_size: int) -> int:
    """transformers' pad token; it is an error to have none where rows may end apart."""
    prepared = getattr(config, "_pad_token_tensor", None)
    if prepared is not None:
        return int(prepared)
    if batch_size > 1 and (stop.eos_ids or stop.criteria):
        raise ValueError(
            "generate: pad_token_id is needed: sequences of the batch may end at different tokens"
        )
    return 0


def _chunk_size(value: int | None, least: int) -> int | None:
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(
            f"generate: prefill_chunk_size must be an integer of at least 1 or None, got {value!r}"
        )
    return max(value, least)
