"""Shared by the tests of the backend: small models, prefilled caches, one step eager and compiled.

The models have one layer of each kind (dense full, MoE shared, MoE full), because Dynamo's trace is
what such a test waits for. Contexts are longer than `index_topk`.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from transformers import DynamicCache, StaticCache

from glm_compile import PagedCache
from glm_compile.report import CompileReport, last_report
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

NUM_CACHED = 20
MAX_CACHE_LEN = 64


def small_config(**overrides: Any):
    """Config with one layer of each kind."""
    values = {
        "num_hidden_layers": 3,
        "first_k_dense_replace": 1,
        "indexer_types": ["full", "shared", "full"],
    }
    return tiny_config(**{**values, **overrides})


def small_model(**kwargs: Any):
    """Model of `small_config`."""
    return tiny_model(small_config(**kwargs.pop("config", {})), **kwargs)


def short_model(**kwargs: Any):
    """One full and one shared layer, where a test is about steps and caches, not about layers."""
    config = {"num_hidden_layers": 2, "indexer_types": ["full", "shared"]}
    return small_model(config={**config, **kwargs.pop("config", {})}, **kwargs)


def tokens(batch_size: int, num_tokens: int, seed: int = 1) -> torch.Tensor:
    """Random token ids without special ones."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 500, (batch_size, num_tokens), generator=generator)


def make_cache(model, kind: str | None, batch_size: int, **kwargs: Any):
    """An empty cache of a kind, or None."""
    if kind == "static":
        return StaticCache(model.config, max_cache_len=MAX_CACHE_LEN)
    if kind == "dynamic":
        return DynamicCache(config=model.config)
    if kind == "paged":
        dtype = model.lm_head.weight.dtype
        return PagedCache(model.config, batch_size, MAX_CACHE_LEN, dtype=dtype, **kwargs)
    return None


class Step:
    """One step of a model over a prefilled cache; `run` takes the model or its compiled form.

    Every run starts from a copy of the same cache.
    """

    def __init__(
        self, model, cache: str | None, query_len: int, batch_size: int = 1, *, padding: int = 0
    ) -> None:
        self.arguments = cache, query_len, batch_size
        self.ids = tokens(batch_size, NUM_CACHED + query_len)
        self.num_cached = NUM_CACHED if cache is not None else 0
        self.mask = None
        self.padding = padding
        if padding:
            self.mask = torch.ones_like(self.ids)
            self.mask[0, :padding] = 0
        self.cache = make_cache(model, cache, batch_size)
        if self.cache is not None:
            self.forward(model, self.cache, 0, NUM_CACHED)

    def forward(self, model, cache, start: int, stop: int) -> torch.Tensor:
        """Logits of tokens start to stop."""
        kwargs: dict[str, Any] = {"use_cache": cache is not None}
        if cache is not None:
            kwargs[CACHE_ARGUMENT] = cache
        if self.mask is not None:
            kwargs["attention_mask"] = self.mask[:, :stop]
        return model(self.ids[:, start:stop], **kwargs).logits

    def run(self, model) -> tuple[torch.Tensor, Any]:
        """Logits of the step (rows of padding left out), and the cache after it."""
        cache = copy.deepcopy(self.cache)
        logits = self.forward(model, cache, self.num_cached, self.ids.shape[1])
        if self.padding and cache is None:
            logits = torch.cat((logits[0, self.padding :], logits[1:].flatten(0, 1)))
        return logits, cache

    def exact(self, model) -> torch.Tensor | None:
        """Logits of the same step, prompt included, in float32; None for a float32 model."""
        if model.dtype == torch.float32:
            return None
        wide = copy.deepcopy(model).float()
        return Step(wide, *self.arguments, padding=self.padding).run(wide)[0]


def compile_model(model, **options: Any):
    """The model compiled with the passes-only inner compiler unless told otherwise."""
    dynamic = options.pop("dynamic", None)
    fullgraph = options.pop("fullgraph", True)
    options = {"inner": "eager", **options}
    return torch.compile(
        model, backend="glm", fullgraph=fullgraph, dynamic=dynamic, options=options
    )


def report_of_last_compilation() -> CompileReport:
    """The report, which must exist."""
    report = last_report()
    assert report is not None
    return report


def final_text(report: CompileReport) -> str:
    """All kinds' graphs as they went to the inner compiler."""
    last = {dump.graph: dump.after for dump in report.graphs if dump.graph != "model"}
    return "\n".join(last.values())


def assert_logits_close(
    actual: torch.Tensor, expected: torch.Tensor, exact: torch.Tensor | None
) -> None:
    """Tight in float32; in bf16 as near the float32 model as the eager model is, up to twice.

    In bf16 some rows of a small model select another key or expert, of the eager model as well, and
    are off by more than rounding: a median over the logits leaves them out.

    Args:
        exact: of `Step.exact`.
    """
    assert actual.dtype == expected.dtype
    actual, expected = actual.double(), expected.double()
    if exact is None:
        torch.testing.assert_close(actual, expected, atol=2e-5, rtol=1e-4)
        return
    ours, theirs = ((logits - exact).abs().median() for logits in (actual, expected))
    assert ours <= 2 * theirs + 0.01 * exact.std()
