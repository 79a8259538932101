"""explain: what it finds, and that it touches neither the model nor what Dynamo knows of it."""

from __future__ import annotations

import pytest
import torch
from torch._dynamo.utils import counters

import glm_compile
from glm_compile import inner
from glm_compile.errors import UnsupportedError
from glm_compile.mtp import GlmMoeDsaMtp
from glm_compile.report import reports
from tests.compiling import Step, compile_model, short_model, small_config, small_model, tokens
from tests.tiny_models import tiny_model

BF16 = torch.bfloat16


@pytest.mark.parametrize(
    ("cache", "batch_size", "query_len", "attention"),
    [
        ("static", 1, 6, "sdpa"),
        ("paged", 2, 1, "eager"),
        ("dynamic", 1, 1, "sdpa"),
        (None, 2, 12, "eager"),
    ],
)
def test_report_says_what_the_model_has(cache, batch_size, query_len, attention):
    model = small_model(dtype=BF16, attention=attention)
    report = glm_compile.explain(model, batch_size, query_len, cache_len=100, cache=cache)
    assert report.ok, report.table()
    assert report.matches == report.expected
    assert report.expected["indexer_topk"] == report.expected["indexer_prologue"] == 2
    assert report.expected["mask"] == 5
    assert report.expected["merge_linears"] == 8
    assert report.mask_route == "proven"
    assert "exact" in report.table()


def test_mtp_layer_has_a_report_of_its_own(tmp_path):
    model = small_model(dtype=BF16)
    mtp = GlmMoeDsaMtp(model)
    report = glm_compile.explain(model, cache_len=100, mtp=mtp)
    assert report.ok
    assert report.expected["indexer_topk"] == 2
    assert report.mtp.title == "MTP layer"
    assert report.mtp.matches["indexer_topk"] == report.mtp.expected["indexer_topk"] == 1
    assert report.mtp.table() in report.table()
    assert any("MTP" in p.name for p in report.save(tmp_path / "report").iterdir())
    alone = glm_compile.explain(mtp, cache_len=100)
    assert alone.expected == report.mtp.expected
    assert alone.matches == report.mtp.matches


@pytest.mark.newest_transformers
def test_model_grad_state_and_compiled_graphs_stay_as_they_were():
    model = short_model().requires_grad_(True)
    step = Step(model, "static", 6)
    compiled = compile_model(model)
    expected, _ = step.run(compiled)
    state = {n: (p.data_ptr(), p.requires_grad, p._version) for n, p in model.named_parameters()}
    counters.clear()
    with torch.enable_grad():
        report = glm_compile.explain(compiled, cache_len=100)
        assert torch.is_grad_enabled()
    assert report.ok
    assert state == {
        n: (p.data_ptr(), p.requires_grad, p._version) for n, p in model.named_parameters()
    }
    counters.clear()
    actual, _ = step.run(compiled)
    assert torch.equal(actual, expected)
    assert not counters["stats"]["unique_graphs"]


@pytest.mark.newest_transformers
def test_explain_is_no_compilation_of_the_backend():
    before = reports()
    assert glm_compile.explain(short_model(), cache_len=100).ok
    assert reports() == before


@pytest.mark.newest_transformers
def test_explain_does_not_make_later_sizes_dynamic():
    model = short_model()
    glm_compile.explain(model, query_len=6, cache=None)
    glm_compile.explain(model, query_len=12, cache=None)
    torch.compile(model, backend=record_shapes, fullgraph=True)(tokens(1, 24), use_cache=False)
    assert SHAPES == [(1, 24)]


SHAPES = []


def record_shapes(graph_module, example_inputs):
    node = graph_module.graph.find_nodes(op="placeholder")[0]
    SHAPES.append(tuple(node.meta["example_value"].shape))
    assert all(isinstance(size, int) for size in SHAPES[0])
    return graph_module.forward


@pytest.mark.newest_transformers
def test_a_model_without_weights_is_explained():
    with torch.device("meta"):
        model = type(small_model())(small_config()).eval()
    assert glm_compile.explain(model, cache_len=100).ok


@pytest.mark.newest_transformers
def test_a_mismatch_is_reported_and_not_raised():
    model = small_model()
    model.model.layers[2].self_attn.indexer.k_norm.register_forward_hook(doubles)
    report = glm_compile.explain(model, cache_len=100)
    assert not report.ok
    assert report.mismatched == ["indexer_prologue"]
    assert any("layers.2" in d.where for d in report.declined["indexer_prologue"])


def doubles(module, arguments, output):
    return 2 * output


@pytest.mark.newest_transformers
def test_a_hooked_weight_is_named():
    model = short_model()
    model.model.layers[0].self_attn.q_b_proj.register_forward_hook(doubles)
    report = glm_compile.explain(model, cache_len=100)
    assert report.ok
    (left_alone,) = report.declined["merge_linears"]
    assert "model.layers.0.self_attn.q_b_proj: its module has a forward hook" in left_alone.reason


@pytest.mark.newest_transformers
def test_options_are_those_of_the_backend():
    model = short_model(dtype=BF16)
    report = glm_compile.explain(model, cache_len=100, options={"disable": ("bf16_linear",)})
    assert "bf16_linear" not in report.expected
    report = glm_compile.explain(
        model, cache_len=100, cache="paged", options={"indexer_dtype": "fp8"}
    )
    assert report.ok, report.table()
    assert "tier: fp8 (changes numbers)" in report.table()
    with pytest.raises(ValueError, match="unknown option"):
        glm_compile.explain(model, options={"disabled": ()})


@pytest.mark.newest_transformers
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"batch_size": 0}, "batch_size must be at least 1, got 0"),
        ({"query_len": 0}, "query_len must be"),
        ({"query_len": 1.5}, "query_len must be an integer of at least 1, got 1.5"),
        ({"cache_len": -1}, "cache_len must be at least 0"),
        ({"cache": "sliding"}, "cache must be one of 'static', 'paged', 'dynamic', None"),
        ({"cache": "page"}, "got str 'page' .did you mean 'paged'"),
        ({"cache": ["paged"]}, "got list"),
        ({"mtp": True}, "mtp must be an MTP layer as glm_compile.load returns it, got bool"),
    ],
)
def test_wrong_arguments_say_what_was_expected(kwargs, message):
    with pytest.raises(ValueError, match=message):
        glm_compile.explain(short_model(), **kwargs)


@pytest.mark.newest_transformers
def test_another_family_is_refused():
    with pytest.raises(ValueError, match=r"expected a GlmMoeDsaForCausalLM.*got Linear"):
        glm_compile.explain(torch.nn.Linear(2, 2))
    with pytest.raises(ValueError, match=r"got tuple .*pass its two parts as model and mtp="):
        glm_compile.explain((small_model(), None))


def test_the_fp8_tier_asks_for_a_paged_cache_before_the_trace(monkeypatch):
    monkeypatch.setattr("glm_compile.explanation._trace", lambda *args: pytest.fail("it traces"))
    with pytest.raises(UnsupportedError, match="needs a PagedCache"):
        glm_compile.explain(small_model(), options={"indexer_dtype": "fp8"})


@pytest.mark.slow
def test_every_indexer_of_a_deep_model_is_counted():
    types = ["full"] * 3 + ["shared", "shared", "shared", "full"] * 3
    config = small_config(
        num_hidden_layers=len(types), indexer_types=types, first_k_dense_replace=3
    )
    with torch.device("meta"):
        model = type(tiny_model())(config).eval()
    report = glm_compile.explain(model)
    assert report.ok
    assert report.expected["indexer_topk"] == 6
    assert report.expected["mask"] == len(types) + 6


@pytest.mark.newest_transformers
def test_the_inner_compiler_is_the_one_that_would_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inner, "why_no_inductor", lambda device_type: "no C++ compiler found")
    report = glm_compile.explain(short_model(), cache_len=24, query_len=2)
    assert report.inner == "eager"
    assert "inner compiler: eager" in report.table()
