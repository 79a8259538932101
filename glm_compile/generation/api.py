"""`generate` and `warmup`.

`generate` lets transformers' own `generate` prepare the call (defaults, processors, criteria,
special tokens, validation of unknown arguments) and takes over where decoding starts. Called as
`custom_generate`, it is entered there directly.
"""

from __future__ import annotations

import inspect
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch

from glm_compile.arguments import check_flag, check_integer
from glm_compile.generation.arguments import (
    DEFAULT_NUM_DRAFT_TOKENS,
    check_callbacks,
    check_config_class,
    check_cuda_graph,
    check_device,
    check_draft_arguments,
    check_fields,
    check_input_ids,
    check_model,
    check_mtp_fits,
    check_names,
    check_stop_strings,
)
from glm_compile.generation.draft_length import draft_lengths
from glm_compile.generation.iteration import Iteration
from glm_compile.generation.loop import DecodingLoop, needed_cache_len
from glm_compile.generation.output import GenerationOutput, assemble
from glm_compile.generation.padding import pad_batch
from glm_compile.generation.prompt import check_mask_shape
from glm_compile.generation.request import (
    CAPTURES_BY_DEFAULT,
    build_request,
    check_model_kwargs,
    check_refused,
    no_cache_error,
    wants_cuda_graph,
)
from glm_compile.generation.steps import Steps, unwrap_compiled
from glm_compile.model_facts import CACHE_ARGUMENTS

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

# Arguments of transformers' `generate` that a custom_generate never sees, and what to do instead.
_UNSUPPORTED_ARGUMENTS = {
    "assistant_model": "; pass the MTP layer as mtp=",
    "negative_prompt_ids": "",
    "negative_prompt_attention_mask": "",
}


def generate(
    model: Any,
    input_ids: torch.Tensor,
    attention_mask: torch.Tensor | None = None,
    generation_config: Any = None,
    mtp: Any = None,
    num_draft_tokens: int | None = None,
    streamer: Any = None,
    stopping_criteria: Any = None,
    logits_processor: Any = None,
    return_dict_in_generate: bool = False,
    overlap: bool = True,
    cuda_graph: bool | None = None,
    index_share: bool | None = None,
    adaptive_draft_length: bool = False,
    **generate_kwargs: Any,
) -> torch.Tensor | GenerationOutput:
    """Decode with the model's own MTP layer as the draft; the result is what the model alone would
    give.

    Greedy decoding gives the same tokens as transformers' `generate`; sampling follows the same
    distribution. `torch.manual_seed` makes a call repeatable, as in transformers, whatever
    `overlap` and `cuda_graph` say. Without drafts a seed gives the text that it gives in
    transformers. With drafts a call takes one number of torch's default generator, the seed of
    numbers that depend on the sequence, the position and what they are for; the text depends on
    the drafts, so a seed gives other tokens with another `num_draft_tokens`.

    Also works as `model.generate(**inputs, custom_generate=glm_compile.generate, mtp=mtp)`; with a
    compiled model call this function, because `compiled.generate` is the plain model's method.

    Args:
        model: GlmMoeDsaForCausalLM, plain (runs eagerly) or compiled with `torch.compile`; then the
            steps of decoding are compiled with the same backend and options.
        input_ids: [B, W] prompts.
        attention_mask: [B, W], 0 for padding, which may be anywhere. None: as transformers infers
            it.
        generation_config: as in transformers. A field that cannot be honoured is a ValueError.
        mtp: GlmMoeDsaMtp, the draft.
        num_draft_tokens: drafts per iteration; None: 5 with an mtp, 0 (plain decoding) without.
        streamer: transformers' protocol, batch of one: the prompt, then each token, then the end.
        stopping_criteria: called with each prefix that plain decoding would have, whatever the
            blocks.
        logits_processor: applied to each position with its own prefix. A processor may depend on
            nothing else: one that keeps a state between calls would see drafts that are rejected
            later, or that a stopping criterion cuts off. It and the criteria see the padding of a
            prompt on the left, wherever it is.
        return_dict_in_generate: return a GenerationOutput (also if the generation config says so).
        overlap: whether the host launches an iteration before it has read the results of the one
            before, so that a GPU need not wait for the host; else it waits for each. The result is
            the same. A streamer gets tokens, and a stopping criterion is asked, while the next
            iteration runs; what that one adds to a sequence that has ended is dropped. The
            processors that fields of the generation config stand for run on the device, those that
            look at the text (a repetition penalty, n-grams, bad words) included. Only a logits
            processor of the caller's own class, a `prefix_allowed_tokens_fn` or a
            `watermarking_config` runs on the host in the middle of every iteration: such a call
            waits, whatever is said here; so does sampling without drafts with a streamer or a
            criterion of the caller's own class, which might draw a number between two tokens. On
            the CPU nothing runs beside the host; one iteration may
            be computed in vain.
        cuda_graph: whether the iteration is captured in a CUDA graph, in the first call of its kind
            (batch size, draft length, capacity, processors), and replayed. None: where that can be
            expected, with a compiled model in 16 bits on a CUDA device and no processor that needs
            the host. True asks for it: a plain model captures anew in each call, and a processor
            on the host is a ValueError that names it. False does without. The result is the same.
            Work that cannot be captured is an UnsupportedError that names it. A graph whose weights
            have moved since is captured anew.
        index_share: whether draft steps reuse the selection of the last accepted row and write
            nothing; None: as `index_share_for_mtp_iteration` of the config.
        adaptive_draft_length: whether a block may have fewer drafts than `num_draft_tokens`: the
            host follows how many were accepted, up to the last iteration but one, and chooses among
            all of them, half of them and 1 what adds the most tokens for its time (of which a draft
            is taken to cost a tenth of an iteration). Greedy text does not change; sampled text
            follows the same distribution, but a seed gives other tokens. It pays where drafts of
            one text are accepted much more often than those of another. Each length has compiled
            steps, each pair of lengths in turn a CUDA graph of its own. transformers' schedules,
            `num_assistant_tokens_schedule` and `assistant_confidence_threshold`, are for its own
            assistants and not looked at.
        generate_kwargs: any field of GenerationConfig; also `tokenizer` for `stop_strings`,
            `prefix_allowed_tokens_fn`.

    Returns:
        Ids [B, W + new]: the prompts as given, new tokens, `pad_token_id` behind a sequence that
        ended earlier.

    Raises:
        ValueError: an argument or field that cannot be honoured, before any work.
        UnsupportedError: an iteration that cannot be captured in a CUDA graph.
    """
    check_model(model)
    check_input_ids(input_ids)
    check_mask_shape(input_ids, attention_mask)
    check_config_class(generation_config)
    check_callbacks(
        streamer, stopping_criteria=stopping_criteria, logits_processor=logits_processor
    )
    check_flag("generate", "overlap", overlap)
    check_flag("generate", "adaptive_draft_length", adaptive_draft_length)
    num_drafts, is_index_shared = check_draft_arguments(mtp, num_draft_tokens, index_share)
    plain_model, compiler = unwrap_compiled(model)
    if mtp is not None:
        check_mtp_fits(plain_model, mtp)
    device = plain_model.model.embed_tokens.weight.device
    check_device(input_ids, device)
    check_cuda_graph(cuda_graph, device)
    arguments: dict[str, Any] = {
        "mtp": mtp,
        "num_drafts": num_drafts,
        "is_index_shared": is_index_shared,
        "compiler": compiler,
        "is_overlapped": overlap,
        "cuda_graph": cuda_graph,
        "adapts_draft_length": adaptive_draft_length,
    }
    if _is_prepared(generation_config):
        dropped = _arguments_that_transformers_dropped(sys._getframe(1))
        if dropped.get("assistant_model") is not None:
            raise ValueError(
                "generate: assistant_model is not supported; pass the MTP layer as mtp="
            )
        # transformers gave the prompt to its streamer already; one that was bound by a partial has
        # nothing.
        is_prompt_streamed = streamer is None
        return _decode(
            plain_model,
            input_ids,
            attention_mask=attention_mask,
            generation_config=generation_config,
            stopping_criteria=stopping_criteria,
            logits_processor=logits_processor,
            streamer=dropped.get("streamer") if streamer is None else streamer,
            is_prompt_streamed=is_prompt_streamed,
            returns_dict=bool(return_dict_in_generate or generation_config.return_dict_in_generate),
            model_kwargs=generate_kwargs,
            **arguments,
        )

    for name, advice in _UNSUPPORTED_ARGUMENTS.items():
        if generate_kwargs.pop(name, None) is not None:
            raise ValueError(f"generate: {name} is not supported{advice}")
    for name in CACHE_ARGUMENTS:
        if (cache := generate_kwargs.pop(name, None)) is not None:
            raise no_cache_error(name, cache)
    if generate_kwargs.pop("synced_gpus", None):
        raise ValueError("generate: synced_gpus is not supported")
    if "custom_generate" in generate_kwargs:
        raise ValueError(
            "generate: custom_generate is not an argument of this function, it is its place"
        )
    check_names([*generate_kwargs], (generate, plain_model.generate, plain_model.forward))
    generation_config, stopping_criteria = _take_stop_strings(
        plain_model, generation_config, stopping_criteria, generate_kwargs
    )
    fields = {"return_dict_in_generate": return_dict_in_generate, **generate_kwargs}
    check_fields(plain_model, generation_config, fields)
    check_refused(generate_kwargs)

    def decode(
        prepared_model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        **model_kwargs: Any,
    ) -> torch.Tensor | GenerationOutput:
        generation_config.max_cache_len = max_cache_len or generation_config.max_cache_len
        return _decode(
            prepared_model,
            input_ids,
            attention_mask=model_kwargs.pop("attention_mask", None),
            generation_config=generation_config,
            stopping_criteria=stopping_criteria,
            logits_processor=logits_processor,
            streamer=streamer,
            is_prompt_streamed=False,
            returns_dict=bool(generation_config.return_dict_in_generate),
            model_kwargs=model_kwargs,
            **arguments,
        )

    # A capacity is ours to honour: transformers would warn that only static caches have one.
    max_cache_len = generate_kwargs.pop("max_cache_len", None)
    if return_dict_in_generate:
        generate_kwargs["return_dict_in_generate"] = True
    return plain_model.generate(
        input_ids,
        attention_mask=attention_mask,
        generation_config=generation_config,
        stopping_criteria=stopping_criteria,
        logits_processor=logits_processor,
        custom_generate=decode,
        **generate_kwargs,
    )


# transformers takes the arguments that a custom_generate names out of its own preparation. These
# two must stay in it: the mask infers padding and is expanded with the batch, the flag belongs to
# the config.
_signature = inspect.signature(generate)
generate.__signature__ = _signature.replace(  # type: ignore[attr-defined]
    parameters=[
        parameter
        for name, parameter in _signature.parameters.items()
        if name not in ("attention_mask", "return_dict_in_generate")
    ]
)


def warmup(
    model: Any,
    mtp: Any = None,
    batch_sizes: Sequence[int] = (1,),
    num_draft_tokens: int = DEFAULT_NUM_DRAFT_TOKENS,
    *,
    max_cache_len: int | None = None,
    adaptive_draft_length: bool = False,
) -> dict[int, float]:
    """Compile ahead what `generate` will run, with progress on the terminal.

    Decodes a few tokens behind a short prompt for each batch size, so that the prompt's, verify's,
    decode's and draft's graphs exist. A later call compiles again only if it needs a larger cache
    than any before it. On a CUDA device the iterations of calls with the model's own generation
    config are captured as well, with drafts and without; those with other processors are captured
    by the first call that has them.

    Args:
        model: compiled, or plain (then there is nothing to compile, and it runs once).
        mtp: the MTP layer, if `generate` will get one.
        batch_sizes: each has graphs of its own. Calls are brought to 1, 2, 3, 4, 6, 8, 12, 16, 24,
            32, 48 or 64 sequences by some that are finished from the start, where nobody sees them
            and they take no more than 32,768 tokens of the cache (see `padding`), so that these
            sizes are enough for texts that are not long.
        num_draft_tokens: as `generate` will get it.
        max_cache_len: tokens that a sequence may reach, prompt and drafts included; graphs are
            made per capacity, in powers of two.
        adaptive_draft_length: as `generate` will get it: shorter blocks are compiled too. CUDA
            graphs of such calls are captured by them, as each pair of lengths comes up.

    Returns:
        Seconds that each batch size took.
    """
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    from glm_compile.report import listening

    check_model(model, "warmup")
    _check_batch_sizes(batch_sizes)
    check_integer("warmup", "num_draft_tokens", num_draft_tokens, 0)
    check_integer("warmup", "max_cache_len", max_cache_len, 1, is_optional=True)
    check_flag("warmup", "adaptive_draft_length", adaptive_draft_length)
    num_drafts = num_draft_tokens if mtp is not None else 0
    lengths = draft_lengths(num_drafts) if adaptive_draft_length and num_drafts else (num_drafts,)
    # Each further length has a verify and an extend step of its own.
    total = num_graphs(num_drafts) + 2 * (len(lengths) - 1)
    plain_model, compiler = unwrap_compiled(model)
    device = plain_model.model.embed_tokens.weight.device
    seconds: dict[int, float] = {}
    columns = [
        TextColumn("{task.description}"),
        BarColumn(),
        TextColumn("{task.completed}/{task.total} graphs"),
        TimeElapsedColumn(),
    ]
    with (
        Progress(*columns, disable=compiler is None) as progress,
        _without_stop_strings(plain_model.generation_config),
    ):
        # The largest first: the others find room in its cache, and its graphs stay.
        for batch_size in sorted(batch_sizes, reverse=True):
            task = progress.add_task(f"compiling for batch size {batch_size}", total=total)
            start = time.perf_counter()
            prompt = torch.ones(batch_size, 3, dtype=torch.long, device=device)
            for count in dict.fromkeys((*lengths, 0)):
                with listening(lambda _report, task=task: _advance(progress, task)):  # type: ignore[misc]
                    generate(
                        model,
                        prompt,
                        attention_mask=torch.ones_like(prompt),
                        mtp=mtp,
                        num_draft_tokens=count,
                        max_new_tokens=3 + 2 * count,
                        min_new_tokens=3 + 2 * count,
                        max_cache_len=max_cache_len,
                        do_sample=False,
                        num_return_sequences=1,
                        cuda_graph=False,
                    )
            if CAPTURES_BY_DEFAULT and compiler is not None and device.type == "cuda":
                for count in dict.fromkeys((num_drafts, 0)):
                    _capture_ahead(model, mtp, prompt, count, max_cache_len)
            seconds[batch_size] = time.perf_counter() - start
    return seconds


def _advance(progress: Progress, task: TaskID) -> None:
    """Count a graph; where no bar can move (a file, a pipe), in a line of its own."""
    progress.advance(task)
    if not progress.console.is_terminal and not progress.disable:
        (now,) = (t for t in progress.tasks if t.id == task)
        if not now.finished:
            count = f"{now.completed:.0f}/{now.total:.0f} graphs"
            progress.console.print(f"{now.description}: {count}, {now.elapsed:.0f} s")


@contextmanager
def _without_stop_strings(config: Any) -> Iterator[None]:
    """A model's generation config without what needs a tokenizer: no graph depends on it."""
    stop_strings, config.stop_strings = config.stop_strings, None
    try:
        yield
    finally:
        config.stop_strings = stop_strings


def _check_batch_sizes(batch_sizes: Any) -> None:
    """Raise ValueError for what is no sequence of batch sizes."""
    is_sequence = isinstance(batch_sizes, Sequence) and not isinstance(batch_sizes, str)
    if not is_sequence or not all(
        isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in batch_sizes
    ):
        raise ValueError(
            f"warmup: batch_sizes must be a sequence of positive integers, got {batch_sizes!r}"
        )


def _capture_ahead(
    model: Any, mtp: Any, prompt: torch.Tensor, num_drafts: int, max_cache_len: int | None
) -> None:
    """Decode two iterations or more as the model's generation config says: the second is captured.

    A text that ends before is a graph that the first call will capture.
    """
    config = model.generation_config
    with torch.random.fork_rng(devices=[prompt.device] if prompt.is_cuda else []):
        generate(
            model,
            prompt,
            attention_mask=torch.ones_like(prompt),
            mtp=mtp,
            num_draft_tokens=num_drafts,
            max_new_tokens=1 + 2 * (1 + num_drafts) + 1,
            max_cache_len=max_cache_len,
            num_return_sequences=1,
            pad_token_id=0 if config.pad_token_id is None else config.pad_token_id,
        )


def num_graphs(num_drafts: int) -> int:
    """Graphs of one batch size: prompt and decode; verify, MTP prompt and extend; MTP draft."""
    return 2 + (3 if num_drafts else 0) + (1 if num_drafts > 1 else 0)


def _decode(
    model: Any,
    input_ids: torch.Tensor,
    *,
    attention_mask: torch.Tensor | None,
    generation_config: Any,
    stopping_criteria: Any,
    logits_processor: Any,
    streamer: Any,
    is_prompt_streamed: bool,
    returns_dict: bool,
    model_kwargs: dict[str, Any],
    mtp: Any,
    num_drafts: int,
    is_index_shared: bool,
    compiler: Any,
    is_overlapped: bool,
    cuda_graph: bool | None,
    adapts_draft_length: bool,
) -> torch.Tensor | GenerationOutput:
    """Validate what transformers prepared, decode, and put the output together."""
    check_model_kwargs(model_kwargs, attention_mask)
    steps = Steps.of(model, compiler)
    request = build_request(
        input_ids=input_ids,
        attention_mask=attention_mask,
        config=generation_config,
        logits_processor=logits_processor,
        stopping_criteria=stopping_criteria,
        streamer=streamer,
        is_prompt_streamed=is_prompt_streamed,
        num_drafts=num_drafts,
        is_index_shared=is_index_shared,
        returns_dict=returns_dict,
        vocab_size=model.config.vocab_size,
        min_prompt_width=steps.min_prompt_width,
        adapts_draft_length=adapts_draft_length,
    )
    num_sequences = request.batch_size
    if compiler is not None:
        request = pad_batch(request)
    is_graphed = wants_cuda_graph(
        cuda_graph, request.processor, model, is_compiled=getattr(compiler, "is_own", False)
    )
    uses_mtp = request.num_drafts > 0
    with steps.borrow_cache(request.batch_size, needed_cache_len(request), int(uses_mtp)) as cache:
        target = steps.for_target(cache)
        mtp_steps = (
            steps.for_mtp(mtp, cache, request.is_index_shared, request.num_drafts)
            if uses_mtp
            else None
        )
        borrowed = (
            steps.graphs.borrow(request, target, mtp_steps, cache) if is_graphed else nullcontext()
        )
        with borrowed as graphed:
            iteration = (
                Iteration(request, target, mtp_steps, cache)
                if graphed is None
                else graphed.iteration
            )
            decoded = DecodingLoop(
                request, iteration, is_overlapped=is_overlapped, graphed=graphed
            ).run()
            sequences = assemble(
                decoded.text_BW[:num_sequences],
                request.prompt.given_width,
                decoded.counts[:num_sequences],
                request.pad_id,
            )
    if not returns_dict:
        return sequences
    num_steps = max(decoded.counts)
    accept_lengths = torch.tensor(decoded.accept_lengths, dtype=torch.long)
    return GenerationOutput(
        sequences=sequences,  # type: ignore[arg-type]
        scores=decoded.scores.steps(num_steps) if decoded.scores else None,  # type: ignore[arg-type]
        logits=decoded.logits.steps(num_steps) if decoded.logits else None,  # type: ignore[arg-type]
        accept_lengths=accept_lengths.view(-1, request.batch_size)[:, :num_sequences],
        num_iterations=len(decoded.accept_lengths),
        timings=decoded.timings,
    )


def _is_prepared(generation_config: Any) -> bool:
    """Whether transformers' `generate` has worked on this config, that is, is calling us."""
    return generation_config is not None and "_eos_token_tensor" in vars(generation_config)


def _arguments_that_transformers_dropped(frame: Any) -> dict[str, Any]:
    """`streamer` and `assistant_model` of the calling `GenerationMixin.generate`.

    transformers (5.20 to 5.24) forwards neither to a callable `custom_generate`: a streamer would
    get the prompt and then wait for ever, an assistant would be ignored without a word.
    """
    is_transformers = frame.f_globals.get("__name__") == "transformers.generation.utils"
    if not is_transformers or frame.f_code.co_name != "generate":
        return {}
    return {name: frame.f_locals.get(name) for name in ("streamer", "assistant_model")}


def _take_stop_strings(
    model: Any, generation_config: Any, stopping_criteria: Any, kwargs: dict[str, Any]
) -> tuple[Any, Any]:
    """Build the criterion for `stop_strings` here: transformers drops the tokenizer on the way."""
    import copy

    from transformers import StoppingCriteriaList, StopStringCriteria

    tokenizer = kwargs.pop("tokenizer", None)
    stop_strings = kwargs.pop("stop_strings", None)
    if stop_strings is None and generation_config is not None and generation_config.stop_strings:
        generation_config = copy.deepcopy(generation_config)
        stop_strings, generation_config.stop_strings = generation_config.stop_strings, None
    if stop_strings is None and model.generation_config.stop_strings:
        raise ValueError(
            "generate: stop_strings of model.generation_config cannot reach a custom_generate; "
            "pass stop_strings= and tokenizer="
        )
    if stop_strings is None:
        return generation_config, stopping_criteria
    check_stop_strings(stop_strings, tokenizer)
    criterion = StopStringCriteria(tokenizer=tokenizer, stop_strings=stop_strings)
    return generation_config, StoppingCriteriaList([*(stopping_criteria or ()), criterion])
