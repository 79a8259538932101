"""What a compiled model's first call is refused with before Dynamo traces anything."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._dynamo.callback import callback_handler
from torch._dynamo.exc import BackendCompilerFailed, InternalTorchDynamoError
from torch._dynamo.utils import counters
from transformers import DynamicCache, GlmMoeDsaForCausalLM, LlamaConfig, StaticCache
from transformers.cache_utils import Cache

import glm_compile
from glm_compile import CompileOptions, PagedCache, early
from glm_compile.backend import glm
from glm_compile.errors import ConfigError, MatchError, UnsupportedError
from glm_compile.generation.steps import unwrap_compiled
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

IDS = torch.arange(10).view(2, 5)
FEW = {"num_hidden_layers": 1, "first_k_dense_replace": 1, "indexer_types": ["full"]}


@pytest.fixture(scope="module")
def model() -> Any:
    return tiny_model()


@pytest.fixture(autouse=True)
def _told() -> None:
    """The fixture of every test makes Dynamo forget; loading the entry point does this."""
    early.check_calls_of(glm)
    counters.clear()


def call(model: Any, cache: Any = None, *, fullgraph: bool = True, **kwargs: Any) -> Any:
    compiled = torch.compile(model, backend="glm", fullgraph=fullgraph, **kwargs)
    return compiled(IDS, **{CACHE_ARGUMENT: cache})


def assert_nothing_traced() -> None:
    assert not counters["frames"]["ok"] and not counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("fullgraph", [True, False])
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"options": {"strickt": True}}, "unknown option 'strickt' .did you mean 'strict'"),
        ({"options": {"inner": "eagr"}}, "expected one of .* got 'eagr' .did you mean 'eager'"),
        ({"options": "fp8"}, "expected a dict or CompileOptions, got str 'fp8'"),
        ({"mode": "max-autotune"}, "mode='max-autotune'"),
    ],
)
def test_options_are_checked_ahead_of_the_trace(
    model: Any, kwargs: dict[str, Any], message: str, fullgraph: bool
) -> None:
    with pytest.raises(ValueError, match=message) as raised:
        call(model, fullgraph=fullgraph, **kwargs)
    assert isinstance(raised.value, BackendCompilerFailed)
    assert_nothing_traced()
    with pytest.raises(ValueError, match=message):
        glm_compile.generate(torch.compile(model, backend="glm", **kwargs), IDS)


def test_other_backends_have_options_of_their_own() -> None:
    def backend(graph_module: Any, inputs: Any, *, options: Any) -> Any:
        return graph_module

    compiled = torch.compile(torch.nn.Linear(5, 2), backend=backend, options={"strickt": 1})
    assert compiled(torch.ones(1, 5)).shape == (1, 2)


WRONG_CACHES: list[tuple[Any, type[Exception], str]] = [
    (lambda config: "paged", ValueError, "got str 'paged'; for instance glm_compile.PagedCache"),
    (lambda config: ((torch.zeros(1),) * 2,) * 4, ValueError, "got tuple"),
    (lambda config: PagedCache, ValueError, "got the class PagedCache itself"),
    (lambda config: DynamicCache(), ConfigError, "got DynamicCache with 0 layers"),
    (
        lambda config: StaticCache(LlamaConfig(num_hidden_layers=4), max_cache_len=8),
        ConfigError,
        r"got StaticCache with none for layer 0; .*config=model\.config",
    ),
    (
        lambda config: StaticCache(tiny_config(**FEW), max_cache_len=8),
        ConfigError,
        "the model's 4 layers .* got StaticCache with 1 layers",
    ),
    (
        lambda config: PagedCache(tiny_config(**FEW), 2, 64),
        ConfigError,
        "made for 1 decoder layers and 0 MTP layers, but layer 1 of the model writes to it",
    ),
    (
        lambda config: PagedCache(tiny_config(kv_lora_rank=128), 2, 64),
        ConfigError,
        "holds latents of 192 numbers but the model computes 128",
    ),
    (lambda config: PagedCache(config, 3, 64), ValueError, "batch_size=3, .* has 2 sequences"),
    (
        lambda config: PagedCache(config, 2, 64, dtype=torch.bfloat16),
        ValueError,
        "holds torch.bfloat16 but the model computes torch.float32",
    ),
]


@pytest.mark.parametrize(("make", "error", "message"), WRONG_CACHES)
def test_a_wrong_cache_is_named_ahead_of_the_trace(
    model: Any, make: Any, error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message):
        call(model, make(model.config))
    with pytest.raises(error, match=message):
        torch.compile(model, backend="glm")(IDS, None, None, make(model.config))
    assert_nothing_traced()


def test_the_fp8_tier_asks_for_its_cache_ahead_of_the_trace(model: Any) -> None:
    for cache in (DynamicCache(config=model.config), PagedCache(model.config, 2, 64)):
        with pytest.raises(UnsupportedError, match="needs a PagedCache whose index keys are FP8"):
            call(model, cache, options={"indexer_dtype": "fp8"})
    assert_nothing_traced()


def test_gradients_are_refused_ahead_of_the_trace() -> None:
    model = tiny_model(tiny_config(**FEW)).requires_grad_(True)
    with torch.enable_grad(), pytest.raises(ValueError, match=r"embed_tokens.* and \d+ more requi"):
        call(model)
    assert_nothing_traced()


def test_an_argument_that_would_be_ignored_is_an_error(
    model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """transformers 5.20 calls it past_key_values, and drops arguments that it does not know."""
    monkeypatch.setattr(early, "cache_argument", lambda: "past_key_values")
    compiled = torch.compile(model, backend="glm")
    with pytest.raises(ValueError, match="calls the argument past_key_values"):
        compiled(IDS, cache=DynamicCache(config=model.config))
    assert_nothing_traced()


class Reached(Exception):
    pass


@pytest.fixture
def reaches() -> Iterator[Any]:
    """Asserts that a call gets past the checks: who is told next stops it."""

    def stop(*args: Any) -> None:
        raise Reached

    def check(
        model: Any,
        cache: Any = None,
        *args: Any,
        ids: Any = IDS,
        backend: Any = "glm",
        **kwargs: Any,
    ) -> None:
        if cache is not None:
            kwargs[CACHE_ARGUMENT] = cache
        with pytest.raises(InternalTorchDynamoError, match="Reached"):
            torch.compile(model, backend=backend)(*([] if ids is None else [ids]), *args, **kwargs)

    callback_handler.register_start_callback(stop)
    yield check
    callback_handler.remove_start_callback(stop)


class OwnCache(Cache):
    """Hands on to another one, which its own layers do not show."""

    def __init__(self, config: Any) -> None:
        super().__init__(layers=[])
        self.inner = DynamicCache(config=config)

    def update(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.update(*args, **kwargs)

    def update_indexer(self, *args: Any, **kwargs: Any) -> Any:
        return self.inner.update_indexer(*args, **kwargs)


class OwnStaticCache(StaticCache):
    pass


class OwnForward(GlmMoeDsaForCausalLM):
    """As wrappers of other libraries are."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return super().forward(*args, **kwargs)


CACHES: dict[str, Any] = {
    "paged": lambda config: PagedCache(config, 2, 64),
    "more layers": lambda config: PagedCache(config, 2, 64, num_mtp_layers=1),
    "dynamic": lambda config: DynamicCache(config=config),
    "static": lambda config: StaticCache(config, max_cache_len=8),
    "none": lambda config: None,
    "own": OwnCache,
    "own static": lambda config: OwnStaticCache(config, max_cache_len=8),
}


@pytest.mark.parametrize("kind", CACHES)
def test_a_cache_that_can_be_used_is_let_through(reaches: Any, kind: str) -> None:
    model = tiny_model(tiny_config(**FEW))
    reaches(model, CACHES[kind](model.config))


def test_a_model_that_can_be_used_is_let_through(reaches: Any) -> None:
    config = tiny_config(**FEW)
    model, cache = tiny_model(config), PagedCache(config, 2, 64)
    own = OwnForward(config).eval().requires_grad_(False)
    reaches(own, cache)
    reaches(own, None, None, None, cache)
    reaches(own, "of its own kind")
    with torch.enable_grad():
        reaches(own.requires_grad_(True), cache)
    reaches(model, None, None, None, cache)
    reaches(model.model, cache)
    reaches(lambda ids, **kwargs: model(ids, **kwargs), cache)
    reaches(model, cache, backend=functools.partial(glm, options={"inner": "eager"}))
    torch._dynamo.mark_dynamic(marked := IDS.clone(), 1)
    reaches(model, cache, ids=marked)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        reaches(model, PagedCache(config, 2, 64, dtype=torch.bfloat16))
    hook = model.model.register_forward_pre_hook(lambda *call: None, with_kwargs=True)
    reaches(model, "what the hook replaces")
    hook.remove()
    # What the call does not use may be anything, and need gradients.
    embeddings = model.model.embed_tokens(IDS)
    model.model.embed_tokens.to(torch.float64).requires_grad_(True)
    with torch.enable_grad():
        reaches(model, cache, ids=None, inputs_embeds=embeddings)
    model.model.embed_tokens.to("meta")
    reaches(model, cache, ids=None, inputs_embeds=embeddings)


def test_a_model_that_was_cut_is_let_through(reaches: Any) -> None:
    """Its config says more layers than run."""
    config = tiny_config(**{**FEW, "num_hidden_layers": 2, "indexer_types": ["full"] * 2})
    model = tiny_model(config)
    model.model.layers = model.model.layers[:1]
    for cache in (PagedCache(tiny_config(**FEW), 2, 64), DynamicCache(config=tiny_config(**FEW))):
        reaches(model, cache)


def test_weights_that_are_not_what_computes_decide_nothing() -> None:
    model = tiny_model(tiny_config(**FEW))
    cache = PagedCache(model.config, 2, 64)
    model.model.layers[0].self_attn.kv_a_layernorm.to(torch.float64)
    model.model.layers[0].self_attn.kv_a_proj_with_mqa.to(torch.bfloat16)
    cache.check_model(model)
    model.model.layers[0].self_attn.kv_a_proj_with_mqa = torch.nn.Identity()
    cache.check_model(model)


def test_who_is_told_no_more_is_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def compile_graph(*args: Any) -> Any:
        raise Reached

    monkeypatch.setattr("glm_compile.pipeline.compile_graph", compile_graph)
    model = tiny_model(tiny_config(**FEW))
    torch._dynamo.reset()  # forgets whom to tell; the backend asks anew
    with pytest.raises(BackendCompilerFailed, match="Reached"):
        call(model, PagedCache(model.config, 2, 64), options=CompileOptions(inner="eager"))
    with pytest.raises(ValueError, match="strickt"):
        call(model, options={"strickt": True})


def test_a_record_of_options_reaches_generate(model: Any) -> None:
    options = CompileOptions(indexer_dtype="fp8")
    _, compiler = unwrap_compiled(torch.compile(model, backend="glm", options=options))
    assert compiler is not None and compiler.options["indexer_dtype"] == "fp8"
    with pytest.raises(MatchError, match="not one of glm_moe_dsa"):  # a step, in two wrappers
        compiler(lambda x: x + 1)(torch.ones(2))
