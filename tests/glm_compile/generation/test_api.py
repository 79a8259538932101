"""`generate` follows transformers' meaning of its arguments, or refuses them by name."""

from __future__ import annotations

import functools
import io
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import (
    DynamicCache,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    PreTrainedTokenizerFast,
    StoppingCriteria,
    StoppingCriteriaList,
    TemperatureLogitsWarper,
    TextIteratorStreamer,
)
from transformers.generation import configuration_utils
from transformers.generation.streamers import BaseStreamer

import glm_compile
from glm_compile.generation import GenerationOutput
from tests.chi_square import chi_square_p
from tests.glm_compile.generation.drafts import ScriptedMtp, always, padded, prompt_of, random_mtp
from tests.tiny_models import tiny_config, tiny_model

NEW = 9
VOCAB = 512


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    # StopStringCriteria looks at tokens behind this prefix.
    vocabulary = {"abcdef": 0} | {f"t{i}x": i for i in range(1, VOCAB)}
    core = Tokenizer(WordLevel(vocabulary, unk_token="abcdef"))
    core.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(tokenizer_object=core, unk_token="abcdef")


class Puts(BaseStreamer):
    """Notes what it gets."""

    def __init__(self, fails_at: int | None = None) -> None:
        self.values: list[list[int]] = []
        self.fails_at = fails_at
        self.ended = False

    def put(self, value: torch.Tensor) -> None:
        self.values.append(value.flatten().tolist())
        if len(self.values) == self.fails_at:
            raise RuntimeError("enough")

    def end(self) -> None:
        self.ended = True


class EndsWith(StoppingCriteria):
    def __init__(self, token: int) -> None:
        self.token = token

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        return input_ids[:, -1] == self.token


def both(
    model: Any, ids: torch.Tensor, *, num_right: int = 2, mask: Any = None, **kwargs: Any
) -> tuple[Any, Any]:
    """transformers' result and ours with drafts that follow it, so that blocks are accepted."""
    kwargs.setdefault("max_new_tokens", NEW)
    mask = torch.ones_like(ids) if mask is None else mask
    expected = model.generate(ids, attention_mask=mask, **kwargs)
    text = expected if isinstance(expected, torch.Tensor) else expected.sequences
    rows = [row[kept.nonzero().flatten()[0] :].tolist() for row, kept in zip(text, mask)]
    mtp = ScriptedMtp(rows, always(num_right), VOCAB)
    got = glm_compile.generate(
        model, ids, attention_mask=mask, mtp=mtp, num_draft_tokens=3, **kwargs
    )
    return expected, got


# -- fields that are taken ------------------------------------------------------------------------

GREEDY_FIELDS: list[dict[str, Any]] = [
    {},
    {"max_new_tokens": None},
    {"max_new_tokens": None, "max_length": 18},
    {"max_length": 12},
    {"repetition_penalty": 1.7},
    {"encoder_repetition_penalty": 0.3},
    {"no_repeat_ngram_size": 1},
    {"encoder_no_repeat_ngram_size": 1},
    {"suppress_tokens": [370, 5, 51]},
    {"begin_suppress_tokens": [370, 5]},
    {"bad_words_ids": [[370, 5], [51]]},
    {"sequence_bias": [[[5], -20.0], [[100], 5.0]]},
    {"watermarking_config": {"bias": 6.0}},
    {
        "repetition_penalty": 1.4,
        "no_repeat_ngram_size": 2,
        "forced_eos_token_id": 7,
        "logits_processor": LogitsProcessorList([TemperatureLogitsWarper(0.5)]),
    },
    {"forced_eos_token_id": 510},
    {"min_new_tokens": 6, "eos_token_id": [5, 510]},
    {"min_length": 15, "eos_token_id": [5, 510]},
    {"exponential_decay_length_penalty": (2, 1.9)},
    {"remove_invalid_values": True, "renormalize_logits": True},
    {"prefix_allowed_tokens_fn": lambda b, prefix: [int(prefix[-1]) + 1, 7]},
    {"stopping_criteria": [EndsWith(51)]},
    {"temperature": 0.3, "top_k": 2},
]


@pytest.mark.parametrize("fields", GREEDY_FIELDS, ids=lambda f: "-".join(f) or "defaults")
def test_greedy_fields_equal_transformers(model: Any, fields: dict[str, Any]) -> None:
    expected, got = both(model, prompt_of(12), **fields)
    assert torch.equal(got, expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"repetition_penalty": 1.7, "eos_token_id": 331},
        {"encoder_repetition_penalty": 0.3},
        {"encoder_no_repeat_ngram_size": 1, "no_repeat_ngram_size": 1},
        {"min_new_tokens": 4, "eos_token_id": [5, 309]},
        {"prefix_allowed_tokens_fn": lambda b, prefix: [int(prefix[-1]) + 1 + b, 7]},
        {"stopping_criteria": [EndsWith(309)]},
    ],
    ids="-".join,
)
def test_greedy_fields_equal_transformers_in_a_batch(model: Any, fields: dict[str, Any]) -> None:
    ids = torch.cat([prompt_of(6), prompt_of(6, 2)])
    expected, got = both(model, ids, num_right=1, **fields)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("side", ["right", "holes"])
@pytest.mark.parametrize("num_drafts", [0, 2])
def test_ngrams_of_a_prompt_are_those_of_its_tokens(model: Any, side: str, num_drafts: int) -> None:
    """Wherever the padding is: as if it were on the left."""
    rows = [prompt_of(6), prompt_of(3, 1)]
    fields: dict[str, Any] = {"encoder_no_repeat_ngram_size": 2, "eos_token_id": None}
    fields |= {"mtp": random_mtp(model), "num_draft_tokens": num_drafts, "pad_token_id": 7}
    scores = []
    for where in ("left", side):
        ids, mask = padded(rows, where, pad_id=7)
        result = glm_compile.generate(
            model, ids, attention_mask=mask, max_new_tokens=4, return_dict_in_generate=True,
            output_scores=True, num_return_sequences=1, **fields,
        )  # fmt: skip
        scores.append((result.sequences[:, -4:], torch.stack(result.scores).isneginf()))
    assert torch.equal(scores[0][0], scores[1][0])
    if side == "right":  # with holes there is a column more of padding
        assert torch.equal(scores[0][1], scores[1][1])


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"no_repeat_ngram_size": "2"}, "no_repeat_ngram_size must be an integer, got '2'"),
        ({"min_new_tokens": "x"}, "min_new_tokens must be an integer"),
        ({"top_p": "a", "do_sample": True}, "top_p must be a number"),
        ({"temperature": [1.0], "do_sample": True}, "temperature must be a number"),
        ({"forced_eos_token_id": "x"}, "forced_eos_token_id must be a token id or a list"),
        ({"forced_bos_token_id": "a"}, "forced_bos_token_id must be a token id or a list"),
    ],
)
def test_fields_of_another_kind_are_named(model: Any, fields: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        glm_compile.generate(model, prompt_of(5), max_new_tokens=2, **fields)


def test_the_generation_config_is_taken_and_left_alone(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=4, eos_token_id=None, suppress_tokens=[370])
    before = config.to_dict()
    ids = prompt_of(12)
    got = glm_compile.generate(model, ids, generation_config=config)
    assert torch.equal(got, model.generate(ids, generation_config=config))
    assert config.to_dict() == before
    assert not hasattr(config, "_eos_token_tensor")


def test_criteria_and_processors_of_the_caller_take_precedence(model: Any) -> None:
    ids = prompt_of(12)
    got = glm_compile.generate(
        model,
        ids,
        max_new_tokens=NEW,
        stopping_criteria=StoppingCriteriaList([MaxLengthCriteria(15)]),
        logits_processor=LogitsProcessorList([lambda text, scores: scores.flip(-1)]),
    )
    assert got.shape[1] == 15
    plain = glm_compile.generate(model, ids, max_new_tokens=1)
    assert int(got[0, 12]) == VOCAB - 1 - int(plain[0, 12])


def test_stop_strings(model: Any, tokenizer: Any) -> None:
    ids = prompt_of(12)
    plain = model.generate(ids, max_new_tokens=NEW)
    stop = f"t{int(plain[0, 15])}x"
    expected = model.generate(ids, max_new_tokens=NEW, stop_strings=[stop], tokenizer=tokenizer)
    mtp = ScriptedMtp(plain.tolist(), always(3), VOCAB)
    config = GenerationConfig(max_new_tokens=NEW, stop_strings=[stop])
    for kwargs in ({"max_new_tokens": NEW, "stop_strings": stop}, {"generation_config": config}):
        mtp.iteration = -1
        got = glm_compile.generate(
            model, ids, mtp=mtp, num_draft_tokens=3, tokenizer=tokenizer, **kwargs
        )
        assert torch.equal(got, expected)
    assert config.stop_strings == [stop]
    with pytest.raises(ValueError, match="tokenizer"):
        glm_compile.generate(model, ids, stop_strings="a")


def test_max_time_stops_after_the_token_in_hand(model: Any) -> None:
    mtp = random_mtp(model)
    got = glm_compile.generate(model, prompt_of(5), mtp=mtp, max_new_tokens=50, max_time=1e-6)
    assert got.shape[1] == 6


def test_scores_and_logits_equal_transformers(model: Any) -> None:
    fields = {
        "repetition_penalty": 1.4,
        "output_scores": True,
        "output_logits": True,
        "return_dict_in_generate": True,
    }
    expected, got = both(model, prompt_of(12), **fields)
    assert torch.equal(got.sequences, expected.sequences)
    assert len(got.scores) == len(got.logits) == len(expected.scores) > 4
    for ours, theirs in zip(got.scores + got.logits, expected.scores + expected.logits):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)
    transition = model.compute_transition_scores(got.sequences, got.scores)
    assert transition.shape == (1, len(got.scores))


def test_criteria_get_the_scores_that_were_asked_for(model: Any) -> None:
    seen: list[int] = []

    def criterion(input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(len(scores))
        assert int(scores[-1][0].argmax()) == int(input_ids[0, -1])
        return torch.tensor([len(scores) == 5])

    _, got = both(
        model,
        prompt_of(12),
        output_scores=True,
        return_dict_in_generate=True,
        stopping_criteria=[criterion],
    )
    assert seen == [1, 2, 3, 4, 5] * 2
    assert len(got.scores) == 5 and got.sequences.shape[1] == 17


def test_output_record(model: Any) -> None:
    got = glm_compile.generate(
        model, prompt_of(4), max_new_tokens=5, mtp=random_mtp(model), return_dict_in_generate=True
    )
    assert isinstance(got, GenerationOutput)
    assert got.accept_lengths.shape == (got.num_iterations, 1)
    assert got.scores is None and got.logits is None
    assert set(got.timings) == {"prefill", "decode", "total"}
    assert got["sequences"] is got.sequences


def test_default_number_of_drafts_is_five_with_an_mtp_layer(model: Any) -> None:
    ids = prompt_of(12)
    text = model.generate(ids, max_new_tokens=20, eos_token_id=None)
    got = glm_compile.generate(
        model,
        ids,
        mtp=ScriptedMtp(text.tolist(), always(9), VOCAB),
        max_new_tokens=13,
        eos_token_id=None,
        return_dict_in_generate=True,
    )
    assert got.accept_lengths.flatten().tolist() == [6, 6]
    plain = glm_compile.generate(
        model, ids, mtp=random_mtp(model), num_draft_tokens=0, max_new_tokens=13, eos_token_id=None
    )
    assert torch.equal(plain, got.sequences)


def test_padding_is_inferred_as_transformers_does(model: Any) -> None:
    rows = [prompt_of(4), prompt_of(9, 1)]
    ids, mask = padded(rows, "left", pad_id=3)
    explicit = glm_compile.generate(model, ids, mask, max_new_tokens=4, pad_token_id=3)
    inferred = glm_compile.generate(model, ids, max_new_tokens=4, pad_token_id=3)
    assert torch.equal(explicit, inferred)


# -- sampling -----------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"temperature": 0.7, "top_k": 5},
        {"top_p": 0.8, "top_k": 0},
        {"min_p": 0.05},
        {"typical_p": 0.7, "repetition_penalty": 1.2},
        {"eta_cutoff": 0.02, "epsilon_cutoff": 0.003, "no_repeat_ngram_size": 2},
        {"top_h": 0.7, "suppress_tokens": list(range(0, 400)), "min_new_tokens": 5},
        {"num_return_sequences": 3},
    ],
    ids=lambda f: "-".join(f) or "defaults",
)
def test_plain_sampling_equals_transformers_with_the_same_seed(
    model: Any, fields: dict[str, Any]
) -> None:
    ids = prompt_of(12)
    results = []
    for generate in (model.generate, functools.partial(glm_compile.generate, model)):
        torch.manual_seed(5)
        results.append(generate(ids, max_new_tokens=NEW, do_sample=True, **fields))
    assert torch.equal(*results)


def test_sampling_with_drafts_is_repeatable(model: Any) -> None:
    mtp = random_mtp(model)
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(
            glm_compile.generate(
                model, prompt_of(12), mtp=mtp, max_new_tokens=NEW, do_sample=True, temperature=2.0
            )
        )
    assert torch.equal(results[0], results[1])
    assert not torch.equal(results[0], results[2])


@pytest.mark.parametrize(
    "fields", [{}, {"temperature": 0.6, "top_k": 7, "repetition_penalty": 1.3}]
)
def test_sampled_tokens_follow_the_targets_distribution(fields: dict[str, Any]) -> None:
    """Third token of a small vocabulary against its exact marginal distribution."""
    config = tiny_config(vocab_size=12, num_hidden_layers=1, indexer_types=["full"],
                         first_k_dense_replace=1, pad_token_id=0, eos_token_id=None)  # fmt: skip
    model = tiny_model(config, std=0.15)
    ids = torch.randint(0, 12, (1, 10))
    samples, batch = 1536, 256
    fields = {"do_sample": True, "top_k": 0, "eos_token_id": None, "pad_token_id": 0} | fields

    def next_probabilities(prefixes: torch.Tensor) -> torch.Tensor:
        scores = model.generate(
            prefixes, attention_mask=torch.ones_like(prefixes), max_new_tokens=1,
            return_dict_in_generate=True, output_scores=True, **fields,
        ).scores[0]  # fmt: skip
        return scores.softmax(-1)

    # The penalty ignores nothing, so the distribution of a prefix is what one more step would use.
    first = next_probabilities(ids)[0]
    pairs = torch.cartesian_prod(torch.arange(12), torch.arange(12))
    second = next_probabilities(torch.cat([ids.expand(12, -1), torch.arange(12)[:, None]], 1))
    joint = (first[:, None] * second).flatten()
    third = (joint[:, None] * next_probabilities(torch.cat([ids.expand(144, -1), pairs], 1))).sum(0)

    torch.manual_seed(0)
    mtp = random_mtp(model)
    drawn, accepted = [], 0
    for _ in range(samples // batch):
        result = glm_compile.generate(
            model, ids.expand(batch, -1), mtp=mtp, num_draft_tokens=2, max_new_tokens=3,
            return_dict_in_generate=True, **fields,
        )  # fmt: skip
        drawn.append(result.sequences[:, 10:])
        accepted += int((result.accept_lengths[0] > 1).sum())
    tokens = torch.cat(drawn)
    assert accepted > 0.05 * samples
    for position, expected in enumerate((first, joint.view(12, 12).sum(0), third)):
        observed = torch.bincount(tokens[:, position], minlength=12)
        assert chi_square_p(observed, expected * samples) > 1e-3, position


# -- streamers ----------------------------------------------------------------------


def test_a_streamer_gets_the_same_calls_as_from_transformers(model: Any) -> None:
    ids = prompt_of(12)
    theirs, ours, custom = Puts(), Puts(), Puts()
    text = model.generate(ids, max_new_tokens=NEW, streamer=theirs)
    mtp = ScriptedMtp(text.tolist(), always(2), VOCAB)
    glm_compile.generate(model, ids, mtp=mtp, num_draft_tokens=3, max_new_tokens=NEW, streamer=ours)
    mtp.iteration = -1
    model.generate(
        ids, mtp=mtp, max_new_tokens=NEW, streamer=custom, custom_generate=glm_compile.generate
    )
    assert ours.values == custom.values == theirs.values
    assert ours.ended and custom.ended


def test_a_streamer_bound_to_the_callable_gets_the_prompt_too(model: Any) -> None:
    streamer = Puts()
    ids = prompt_of(5)
    text = model.generate(
        ids,
        max_new_tokens=3,
        custom_generate=functools.partial(glm_compile.generate, streamer=streamer),
    )
    assert sum(streamer.values, []) == text[0].tolist()  # noqa: RUF017


def test_text_streamer(model: Any, tokenizer: Any) -> None:
    streamer = TextIteratorStreamer(tokenizer, skip_prompt=True, timeout=5)
    text = glm_compile.generate(model, prompt_of(5), max_new_tokens=4, streamer=streamer)
    assert "".join(streamer).split() == [f"t{i}x" for i in text[0, 5:].tolist()]


def test_a_streamer_takes_one_sequence(model: Any) -> None:
    with pytest.raises(ValueError, match="streamer"):
        glm_compile.generate(model, prompt_of(4).expand(2, -1), streamer=Puts())


# -- through transformers ---------------------------------------------------------------


def test_custom_generate_equals_the_direct_call(model: Any) -> None:
    rows = [prompt_of(4), prompt_of(9, 1)]
    ids, mask = padded(rows, "left")
    kwargs: dict[str, Any] = {
        "attention_mask": mask,
        "max_new_tokens": NEW,
        "repetition_penalty": 1.5,
        "mtp": random_mtp(model),
        "num_draft_tokens": 2,
        "return_dict_in_generate": True,
    }
    direct = glm_compile.generate(model, ids, **kwargs)
    through = model.generate(ids, custom_generate=glm_compile.generate, **kwargs)
    assert isinstance(through, GenerationOutput)
    assert torch.equal(direct.sequences, through.sequences)
    assert torch.equal(direct.accept_lengths, through.accept_lengths)


def test_custom_generate_takes_the_prepared_processors_once(model: Any) -> None:
    class Doubled(TemperatureLogitsWarper):
        calls = 0

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            Doubled.calls += 1
            return super().__call__(input_ids, scores)

    model.generate(
        prompt_of(4),
        max_new_tokens=3,
        custom_generate=glm_compile.generate,
        logits_processor=LogitsProcessorList([Doubled(0.5)]),
    )
    assert Doubled.calls == 3


def test_custom_generate_with_several_sequences_a_prompt(model: Any) -> None:
    ids, mask = padded([prompt_of(4), prompt_of(9, 1)], "left")
    torch.manual_seed(0)
    got = model.generate(
        ids, attention_mask=mask, do_sample=True, num_return_sequences=2, max_new_tokens=3,
        custom_generate=glm_compile.generate, mtp=random_mtp(model),
    )  # fmt: skip
    assert got.shape == (4, 12)
    assert torch.equal(got[:, :9], ids.repeat_interleave(2, 0))


# -- what is refused ---------------------------------------------------------------------

REFUSED: list[tuple[str, dict[str, Any]]] = [
    ("num_beams", {"num_beams": 2}),
    ("use_mtp", {"use_mtp": True}),
    ("prompt_lookup_num_tokens", {"prompt_lookup_num_tokens": 3}),
    ("assistant_early_exit", {"assistant_early_exit": 1}),
    ("penalty_alpha", {"penalty_alpha": 0.6, "top_k": 4}),
    ("dola_layers", {"dola_layers": "low"}),
    ("guidance_scale", {"guidance_scale": 1.5}),
    ("output_attentions", {"output_attentions": True}),
    ("output_hidden_states", {"output_hidden_states": True}),
    ("use_cache", {"use_cache": False}),
    ("cache_implementation", {"cache_implementation": "static"}),
    ("position_ids", {"position_ids": torch.arange(5, 10)[None]}),
    ("unknown argument 'tempratur' .did you mean 'temperature'", {"tempratur": 0.5}),
    ("not used by the model: .'qqqq'", {"qqqq": 0.5}),
    ("past_key_values", {"past_key_values": "cache"}),
    ("cache", {"cache": "cache"}),
    ("output_router_logits", {"output_router_logits": True}),
    ("logits_to_keep", {"logits_to_keep": 3}),
    ("max_new_tokens", {"max_new_tokens": 0}),
    ("max_length", {"max_length": 4}),
    ("prefill_chunk_size", {"prefill_chunk_size": 0}),
    ("num_draft_tokens=2 needs an MTP layer", {"num_draft_tokens": 2}),
    ("num_draft_tokens", {"num_draft_tokens": -1}),
    ("num_draft_tokens", {"num_draft_tokens": 1.5}),
    ("mtp", {"mtp": object()}),
    ("temperature", {"do_sample": True, "temperature": 0.0}),
    ("num_return_sequences", {"num_return_sequences": 2}),
]


@pytest.mark.parametrize("do_sample", [False, True])
@pytest.mark.parametrize(
    ("message", "fields"),
    REFUSED,
    ids=[f"{i}-{'-'.join(fields)}" for i, (_message, fields) in enumerate(REFUSED)],
)
def test_what_cannot_be_honoured_is_refused_before_any_work(
    model: Any, monkeypatch: pytest.MonkeyPatch, message: str, fields: dict, do_sample: bool
) -> None:
    if "num_return_sequences" in fields and do_sample:
        pytest.skip("honoured when sampling")
    monkeypatch.setattr(
        type(model.model), "forward", lambda *a, **k: pytest.fail("the model was run")
    )
    fields = {"do_sample": do_sample} | fields
    fields = {k: DynamicCache() if v == "cache" else v for k, v in fields.items()}
    with pytest.raises(ValueError, match=message):
        glm_compile.generate(model, prompt_of(5), **fields)


@pytest.mark.parametrize("name", ["assistant_model", "negative_prompt_ids", "synced_gpus"])
def test_arguments_of_transformers_that_would_get_lost_are_refused(model: Any, name: str) -> None:
    with pytest.raises(ValueError, match=name):
        glm_compile.generate(model, prompt_of(5), **{name: model if "model" in name else True})


@pytest.mark.parametrize(
    ("ids", "found"),
    [("import os", "str"), ([[1, 2]], "list"), (torch.tensor([1, 2]), r"shape \(2,\)")],
)
def test_prompts_that_are_no_batch_of_ids_are_refused(model: Any, ids: Any, found: str) -> None:
    with pytest.raises(ValueError, match=rf"input_ids must be a tensor .*got {found}"):
        glm_compile.generate(model, ids, max_new_tokens=2)


def test_an_assistant_is_refused_through_transformers(model: Any) -> None:
    with pytest.raises(ValueError, match="assistant_model"):
        model.generate(prompt_of(5), assistant_model=model, custom_generate=glm_compile.generate)


def test_a_field_of_a_later_transformers_is_refused(model: Any) -> None:
    config = GenerationConfig(max_new_tokens=2)
    unknown = GenerationConfig()
    unknown.brand_new_field = None
    config.brand_new_field = 3
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("glm_compile.generation.request.GenerationConfig", lambda: unknown)
        with pytest.raises(ValueError, match="brand_new_field=3"):
            glm_compile.generate(model, prompt_of(5), generation_config=config)


def test_ids_outside_the_vocabulary_are_refused(model: Any) -> None:
    with pytest.raises(ValueError, match=r"0\.\.511"):
        glm_compile.generate(model, torch.tensor([[5, 512]]))


def test_a_batch_without_a_pad_token_is_refused(model: Any) -> None:
    with pytest.raises(ValueError, match="pad_token_id"):
        glm_compile.generate(
            tiny_model(tiny_config(pad_token_id=None, eos_token_id=None)),
            prompt_of(4).expand(2, -1),
            stopping_criteria=[EndsWith(3)],
        )


def test_a_cuda_graph_needs_a_gpu(model: Any) -> None:
    with pytest.raises(ValueError, match="cuda_graph"):
        glm_compile.generate(model, prompt_of(5), cuda_graph=True)
    for kwargs in ({"cuda_graph": False}, {"overlap": False}, {"overlap": True}):
        assert glm_compile.generate(model, prompt_of(5), max_new_tokens=2, **kwargs).shape == (1, 7)


# -- state between calls -------------------------------------------------------------------


def test_a_failing_callback_leaves_everything_usable(model: Any) -> None:
    ids = prompt_of(12)
    mtp = random_mtp(model)
    before = glm_compile.generate(model, ids, mtp=mtp, max_new_tokens=NEW)
    for kwargs in (
        {"streamer": Puts(fails_at=4)},
        {"stopping_criteria": [lambda ids, scores: 1 / 0]},
        {"logits_processor": [lambda ids, scores: 1 / 0]},
    ):
        with pytest.raises((RuntimeError, ZeroDivisionError)):
            glm_compile.generate(model, ids, mtp=mtp, max_new_tokens=NEW, **kwargs)
        assert torch.equal(glm_compile.generate(model, ids, mtp=mtp, max_new_tokens=NEW), before)
    assert torch.equal(model.generate(ids, max_new_tokens=NEW), before)


def test_inference_mode(model: Any) -> None:
    ids, mtp = prompt_of(9), random_mtp(model)
    expected = glm_compile.generate(model, ids, mtp=mtp, max_new_tokens=6)
    with torch.inference_mode():
        assert torch.equal(glm_compile.generate(model, ids, mtp=mtp, max_new_tokens=6), expected)


def test_gradients_are_never_recorded(model: Any) -> None:
    with torch.enable_grad():
        got = glm_compile.generate(
            model, prompt_of(5), max_new_tokens=2, return_dict_in_generate=True, output_logits=True
        )
    assert not got.logits[0].requires_grad


def test_a_model_that_is_none_is_named(model: Any) -> None:
    with pytest.raises(ValueError, match=r"got tuple; glm_compile.load returns \(model, mtp\)"):
        glm_compile.generate((model, None), torch.ones(1, 3, dtype=torch.long))
    with pytest.raises(ValueError, match="got Linear"):
        glm_compile.warmup(torch.nn.Linear(2, 2))


def test_a_file_gets_a_line_for_each_graph():
    from rich.console import Console
    from rich.progress import Progress

    from glm_compile.generation.api import _advance

    for is_terminal in (False, True):
        text = io.StringIO()
        console = Console(file=text, force_terminal=is_terminal, width=100)
        progress = Progress(console=console, auto_refresh=False)
        task = progress.add_task("compiling", total=3)
        for _ in range(3):
            _advance(progress, task)
        lines = [line.split(" graphs")[0] for line in text.getvalue().splitlines()]
        # The last one is the bar's own.
        assert lines == ([] if is_terminal else ["compiling: 1/3", "compiling: 2/3"])


def test_an_mtp_layer_of_another_dtype_is_named(model: Any) -> None:
    other = random_mtp(tiny_model(dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"dtype is torch.float32, the MTP layer's is torch.bfl"):
        glm_compile.generate(model, torch.ones(1, 3, dtype=torch.long), mtp=other)


@pytest.mark.parametrize(
    ("fields", "name"),
    [
        ({"vocab_size": 300, "eos_token_id": [299], "pad_token_id": 299}, "vocabulary size"),
        ({"num_hidden_layers": 3, "indexer_types": ["full"] * 3}, "number of layers"),
        ({"hidden_size": 64}, "hidden size"),
    ],
)
def test_an_mtp_layer_of_another_model_is_named(
    model: Any, fields: dict[str, Any], name: str
) -> None:
    other = random_mtp(tiny_model(tiny_config(**fields)))
    with pytest.raises(ValueError, match=name):
        glm_compile.generate(model, torch.ones(1, 3, dtype=torch.long), mtp=other)


def test_a_capacity_is_taken_without_a_warning(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    said: list[str] = []
    logger = configuration_utils.logger
    monkeypatch.setattr(logger, "warning", lambda *args: said.append(str(args)), raising=False)
    monkeypatch.setattr(logger, "warning_once", lambda *args: said.append(str(args)), raising=False)
    ids = torch.ones(1, 3, dtype=torch.long)
    generate = functools.partial(glm_compile.generate, model, ids, max_new_tokens=2)
    generate(max_cache_len=300, do_sample=False)
    assert not [text for text in said if "max_cache_len" in text]
    with pytest.raises(ValueError, match="max_cache_len"):
        generate(max_cache_len=-1, do_sample=False)


@pytest.mark.parametrize(
    ("mask", "found"),
    [
        (torch.ones(1, 2), r"\(1, 2\)"),
        (torch.ones(2, 5), r"\(2, 5\)"),
        (torch.ones(5), r"\(5,\)"),
        ([[1] * 5], "list"),
    ],
)
def test_a_mask_of_ones_has_the_shape_of_the_ids(model: Any, mask: Any, found: str) -> None:
    """transformers drops such a mask; as custom_generate we never see it."""
    with pytest.raises(ValueError, match=rf"shape of input_ids \(1, 5\), got {found}"):
        glm_compile.generate(model, prompt_of(5), attention_mask=mask, max_new_tokens=2)


@pytest.mark.parametrize(
    ("message", "fields"),
    [
        ("must be integers, got torch.float32", {"inputs": torch.ones(1, 5)}),
        ("must be integers, got torch.bool", {"inputs": torch.ones(1, 5, dtype=torch.bool)}),
        ("must hold 0 .padding. and 1", {"attention_mask": torch.full((1, 5), 2)}),
        ("must hold 0 .padding. and 1", {"attention_mask": torch.full((1, 5), 0.5)}),
        ("must hold 0 .padding. and 1", {"attention_mask": torch.full((1, 5), torch.nan)}),
        ("must be (an integer, got 2|integers, got 7).5", {"max_new_tokens": 2.5}),
    ],
    ids=lambda v: str(v)[:40],
)
def test_a_prompt_or_budget_of_the_wrong_kind(model: Any, message: str, fields: dict) -> None:
    fields = {"max_new_tokens": 2, "do_sample": False} | fields
    ids = fields.pop("inputs", prompt_of(5))
    with pytest.raises(ValueError, match=message):
        glm_compile.generate(model, ids, **fields)
    with pytest.raises(ValueError, match=message):
        model.generate(ids, custom_generate=glm_compile.generate, **fields)


@pytest.mark.parametrize("num_drafts", [0, 3])
@pytest.mark.parametrize("score", [-torch.inf, torch.nan, torch.inf])
def test_a_row_without_a_distribution_is_an_error_when_sampling(
    model: Any, num_drafts: int, score: float
) -> None:
    def spoil(ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.full_like(scores, score) if ids.shape[1] >= 7 else scores

    kwargs = {"mtp": random_mtp(model), "num_draft_tokens": num_drafts, "max_new_tokens": NEW}
    with pytest.raises(RuntimeError, match=r"nothing can be sampled for row\(s\) \[0, 1\]"):
        glm_compile.generate(
            model,
            torch.cat([prompt_of(5), prompt_of(5, 1)]),
            do_sample=True,
            eos_token_id=None,
            logits_processor=[spoil],
            **kwargs,
        )


def test_more_drafts_than_tokens_are_not_made(model: Any) -> None:
    ids, mtp = prompt_of(5), random_mtp(model)
    got = glm_compile.generate(
        model, ids, mtp=mtp, num_draft_tokens=10**6, max_new_tokens=3, do_sample=False
    )
    assert torch.equal(got, model.generate(ids, max_new_tokens=3, do_sample=False))


# Any other device shows it; `meta` is one that every machine has.
@pytest.mark.parametrize("other", ["meta", pytest.param("cuda:0", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("is_model_elsewhere", [False, True])
def test_a_prompt_elsewhere_than_the_model_is_named(other: str, is_model_elsewhere: bool) -> None:
    model, ids = tiny_model(), prompt_of(5)
    model, ids = (model.to(other), ids) if is_model_elsewhere else (model, ids.to(other))
    found = ("cpu", other) if is_model_elsewhere else (other, "cpu")
    message = "input_ids are on {}, the model is on {}; move them".format(*found)
    with pytest.raises(ValueError, match=message):
        glm_compile.generate(model, ids, max_new_tokens=2)
    if other != "meta":
        with pytest.raises(ValueError, match=message):
            model.generate(ids, custom_generate=glm_compile.generate, max_new_tokens=2)
