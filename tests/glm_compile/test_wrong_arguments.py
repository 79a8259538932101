"""Arguments of the wrong kind: each is named, with what was expected and found, before any work.

What belongs to one function's meaning is tested with it; this is the table of plain mistakes.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from transformers import StaticCache, TextStreamer

import glm_compile
from glm_compile import PagedCache
from glm_compile.mtp import GlmMoeDsaMtp
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

IDS = torch.arange(10).view(2, 5)


@pytest.fixture(scope="module")
def model() -> Any:
    config = tiny_config(num_hidden_layers=1, first_k_dense_replace=1, indexer_types=["full"])
    return tiny_model(config)


def assert_all_named(cases: list[tuple[Callable[[], Any], str]]) -> None:
    """Each call raises an error of this package or a ValueError with its message."""
    for call, message in cases:
        with pytest.raises((ValueError, glm_compile.GlmCompileError)) as raised:
            call()
        assert re.search(message, str(raised.value)), (message, str(raised.value))


def test_of_a_paged_cache(model: Any) -> None:
    config = model.config

    def make(batch_size: Any = 1, max_cache_len: Any = 64, **kwargs: Any) -> PagedCache:
        return PagedCache(kwargs.pop("config", config), batch_size, max_cache_len, **kwargs)

    cache = make(2)
    static = StaticCache(config, max_cache_len=8)
    topk = torch.zeros(2, 1, 4, dtype=torch.int32)
    assert_all_named(
        [
            (lambda: make(config=None), "expected a GlmMoeDsaConfig .* got NoneType"),
            (lambda: make(config="tiny"), "expected a GlmMoeDsaConfig .* got str 'tiny'"),
            (lambda: make(config=model), "got GlmMoeDsaForCausalLM; pass its .config"),
            (lambda: make("1"), "batch_size must be an integer of at least 1, got '1'"),
            (lambda: make(1.0), "batch_size must be an integer of at least 1, got 1.0"),
            (lambda: make(True), "batch_size must be an integer of at least 1, got True"),
            (lambda: make(1, None), "max_cache_len must be an integer .* got None"),
            (lambda: make(1, 64.5), "max_cache_len must be an integer .* got 64.5"),
            (lambda: make(num_mtp_layers="1"), "num_mtp_layers must be an integer"),
            (lambda: make(dtype="bfloat16"), "torch.bfloat16 .* got dtype='bfloat16'"),
            (lambda: make(index_dtype="fp8"), "torch.float8_e4m3fn, got index_dtype='fp8'"),
            (lambda: make(device="gpu"), "PagedCache: device='gpu' cannot be used"),
            (lambda: make(device=1.5), "PagedCache: device=1.5 cannot be used"),
            (lambda: make(memory="x"), "memory must be another PagedCache, got str 'x'"),
            (lambda: make(memory=static), "memory must be another PagedCache, got StaticCache"),
            (lambda: cache.set_lengths("3"), "set_lengths: expected integers, got '3'"),
            (lambda: cache.set_lengths(None), "set_lengths: expected integers, got None"),
            (lambda: cache.set_lengths([[1], [1, 2]]), "set_lengths: expected integers"),
            (lambda: cache.crop("x"), "crop: expected an integer, got 'x'"),
            (lambda: cache.crop(-1.5), "crop: expected an integer, got -1.5"),
            (lambda: cache.reorder_cache([0, 1]), "expected 2 indices, int64, got list"),
            (lambda: cache.reorder_cache(torch.ones(2)), "expected 2 indices, .*torch.float32"),
            (lambda: cache.reorder_cache(torch.tensor([0, 7])), r"indices in 0..1, got \[0, 7\]"),
            (lambda: cache.causal_mask(-1), "num_query_tokens must be at least 0, got -1"),
            (lambda: cache.causal_mask("x"), "num_query_tokens must be an integer"),
            (lambda: cache.causal_mask(2, "bool"), "causal_mask: dtype must be .* got str 'bool'"),
            (lambda: cache.causal_mask(2, starts_B=[0, 0]), "starts_B must be a tensor, got list"),
            (lambda: cache.gather_rows(9, topk), "layer_idx must be in 0..0, got 9"),
            (lambda: cache.gather_rows("0", topk), "layer_idx must be in 0..0, got '0'"),
            (lambda: cache.batch_repeat_interleave("x"), "repeats must be an integer .*got 'x'"),
            (lambda: cache.advance(np.array([65, 0])), r"\[65, 0\] tokens behind \[0, 0\] make"),
            (lambda: cache.advance(np.array([0.5, 0])), "advance: expected integers, got"),
        ]
    )


def test_a_mask_of_a_symbolic_size_is_made(model: Any) -> None:
    cache = PagedCache(model.config, 2, 64)

    def make(ids_BS: torch.Tensor) -> torch.Tensor:
        return cache.causal_mask(ids_BS.shape[1])

    graph = make_fx(make, tracing_mode="symbolic", _allow_non_fake_inputs=True)(IDS)
    assert torch.equal(graph(IDS), cache.causal_mask(5))


def test_of_memory_that_nobody_has(model: Any) -> None:
    for num_tokens in (10**9, 10**12):  # no memory, no such size
        with pytest.raises(torch.OutOfMemoryError, match=r"no memory for 1000000 x .*max_cache_le"):
            PagedCache(model.config, 10**6, num_tokens)


def test_of_a_device_that_fails(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*args: Any) -> None:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr("glm_compile.cache.PagedLayer", fail)
    with pytest.raises(RuntimeError, match=r"^CUDA error: an illegal memory access") as raised:
        PagedCache(model.config, 1, 64)
    assert not isinstance(raised.value, torch.OutOfMemoryError)


def test_of_generate(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        type(model.model), "forward", lambda *args, **kwargs: pytest.fail("the model was run")
    )
    mtp, cache = GlmMoeDsaMtp(model), PagedCache(model.config, 2, 8)

    def case(message: str, ids: Any = IDS, **kwargs: Any) -> tuple[Callable[[], Any], str]:
        kwargs = {"max_new_tokens": 2, **kwargs}
        return lambda: glm_compile.generate(model, ids, **kwargs), message

    integers = ("max_new_tokens", "max_length", "top_k", "num_beams", "num_return_sequences")
    flags = ("overlap", "adaptive_draft_length", "return_dict_in_generate", "do_sample")
    cases = [case(f"{name} must be an integer", **{name: "2"}) for name in integers]
    cases += [case(f"{name} must be an integer", **{name: True}) for name in integers]
    cases += [case(f"{name} must be True.* or .*, got 'no'", **{name: "no"}) for name in flags]
    cases += [
        case("at least one token, got shape", IDS[:, :0]),
        case("at least one token, got dict", {"input_ids": IDS}),
        case("mask must be a tensor .*got ndarray", attention_mask=np.ones((2, 5))),
        case("generation_config must be .*got dict; pass its fields", generation_config={}),
        case("generation_config must be .*got GlmMoeDsaConfig", generation_config=model.config),
        case("mtp must be an MTP layer .*; str 'x' has no extend", mtp="x"),
        case("index_share must be True, False or None", mtp=mtp, index_share="no"),
        case("cuda_graph must be True, False or None, got 'off'", cuda_graph="off"),
        case("num_draft_tokens must be an integer", mtp=mtp, num_draft_tokens="5"),
        case("streamer must have put.. and end.., .*got str 'stdout'", streamer="stdout"),
        case("streamer must .* got the class TextStreamer itself", streamer=TextStreamer),
        case("stopping_criteria must be a list .*pass .len.$", stopping_criteria=len),
        case("stopping_criteria must be a list .*got str 'x'", stopping_criteria="x"),
        case("logits_processor must be a list .*pass .len.$", logits_processor=len),
        case(r"must take \(input_ids, scores\)", logits_processor=[lambda scores: scores]),
        case(f"{CACHE_ARGUMENT} is not supported, got str 'x'", **{CACHE_ARGUMENT: "x"}),
        case(
            "cache is not supported, got PagedCache.*max_cache_len",
            cache=cache,
        ),
        case("max_cache_len must be an integer", max_cache_len=True),
        case("max_cache_len must be at least 1, got 0", max_cache_len=0),
        case("temperature must be a number, got True", do_sample=True, temperature=True),
        case("max_time must be a number", max_time="x"),
        case("eos_token_id must be a token id or a list of them, got '</s>'", eos_token_id="</s>"),
        case("eos_token_id must be a token id", eos_token_id=1.5),
        case("eos_token_id must be a token id or a list of them, got .1, 2.", eos_token_id={1, 2}),
        case("pad_token_id must be a token id, got 'pad'", pad_token_id="pad"),
        case("bos_token_id must be a token id", bos_token_id="bos"),
        case("prefix_allowed_tokens_fn must be callable", prefix_allowed_tokens_fn="x"),
        case("watermarking_config must be a WatermarkingConfig", watermarking_config=3),
        case("stop_strings must be a text or a list of them, got 3", stop_strings=3, tokenizer=0),
        case("tokenizer must be the model's", stop_strings="a", tokenizer="x"),
        case("position_ids is not supported, got str", position_ids="x"),
        case("'num_draft_token' .did you mean 'num_draft_tokens'", num_draft_token=3),
        case("cache_implementation='paged' is not supp", cache_implementation="paged"),
        case("'overlapp' .did you mean 'overlap'", overlapp=True),
    ]
    assert_all_named(cases)


def test_of_what_is_none(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """What transformers takes as well: it hands it on."""
    monkeypatch.setattr(type(model), "generate", lambda self, *args, **kwargs: kwargs)
    one, several = torch.tensor(1), np.array([1, 2])
    cases: dict[str, tuple[Any, ...]] = {
        "do_sample": (np.True_, np.bool_(False), 1, 0, torch.tensor(True)),
        "output_scores": (0, 1, True),
        "return_dict_in_generate": (1, np.True_),
        "max_length": (20.0, np.int64(20), torch.tensor(20), np.array([20])),
        "num_return_sequences": (1.0, np.int64(1)),
        "top_k": (False, 0, one),
        "max_time": (1, torch.tensor(0.5), np.float32(0.5), Decimal("0.5")),
        "eos_token_id": (several, [one], range(1, 3), (1, 2), [np.int64(1)], 1.0, one, []),
        "bos_token_id": ([3], several, one),
        "pad_token_id": (np.array(1), one),
        "suppress_tokens": (several, {1, 2}, range(2), [one]),
        "exponential_decay_length_penalty": ((1, 1.5), np.array([1, 1.5]), [one, 1.5]),
        "assistant_tokenizer": (None,),
        "synced_gpus": (False,),
        # transformers' own message is the better one
        "token_type_ids": (IDS,),
        "cache_position": (IDS,),
    }
    for name, values in cases.items():
        for value in values:
            kwargs = glm_compile.generate(model, IDS, **{name: value, "overlap": np.True_})
            assert isinstance(kwargs, dict), (name, value)


@pytest.mark.parametrize("ids", [np.array([1, 2]), range(1, 3), [torch.tensor(1)]])
def test_ids_of_any_kind_are_honoured(model: Any, ids: Any) -> None:
    for name in ("eos_token_id", "forced_eos_token_id", "suppress_tokens"):
        call = {name: ids, "max_new_tokens": 3}
        assert torch.equal(glm_compile.generate(model, IDS, **call), model.generate(IDS, **call))


def test_of_callbacks_that_return_nothing(model: Any) -> None:
    def forgets(*args: Any) -> None:
        pass

    for fields, message in (
        ({"logits_processor": [forgets]}, "processor forgets must return scores of shape .*None"),
        ({"stopping_criteria": [forgets]}, "criterion forgets must return one bool .* got None"),
        ({"prefix_allowed_tokens_fn": forgets}, "fn must return a list of ids, got None"),
    ):
        with pytest.raises(ValueError, match=message):
            glm_compile.generate(model, IDS, max_new_tokens=2, **fields)


def test_of_the_other_functions(model: Any) -> None:
    assert_all_named(
        [
            (lambda: glm_compile.load(None), "load: path must be the directory .*got NoneType"),
            (lambda: glm_compile.load(model), "got GlmMoeDsaForCausalLM; .*loaded already"),
            (lambda: glm_compile.load("x", mtp="no"), "mtp must be True or False, got 'no'"),
            (lambda: glm_compile.merge_weights("x"), "model must be a module, got str 'x'"),
            (lambda: glm_compile.merge_weights((model,)), "got tuple; glm_compile.load returns"),
            (lambda: GlmMoeDsaMtp("x"), "GlmMoeDsaMtp: model must be .* got str 'x'"),
            (
                lambda: GlmMoeDsaMtp(model).extend(IDS, None, IDS, None, None),
                "cache must be a PagedCache made with num_mtp_layers=1, got NoneType",
            ),
            (lambda: glm_compile.warmup("x"), "warmup: model must be .*got str"),
            (lambda: glm_compile.warmup(model, max_cache_len="x"), "warmup: max_cache_len must"),
            (
                lambda: glm_compile.warmup(model, adaptive_draft_length=1),
                "warmup: adaptive_draft_length must be True or False, got 1",
            ),
        ]
    )
    with pytest.raises(AttributeError) as raised:
        _ = glm_compile.explian
    assert raised.value.obj is glm_compile  # Python names the nearest attribute
