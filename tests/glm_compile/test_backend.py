"""The backend on small models: what is found, what the graphs hold, and the numbers."""

from __future__ import annotations

import logging

import pytest
import torch
from torch._dynamo.exc import BackendCompilerFailed
from torch._dynamo.utils import counters

import glm_compile
from glm_compile import inner, pipeline
from glm_compile.errors import MatchError, UnsupportedError
from glm_compile.ops.merged_linear import adjacent_block
from glm_compile.report import CompileReport, last_report, listening
from tests.compiling import (
    Step,
    assert_logits_close,
    compile_model,
    final_text,
    report_of_last_compilation,
    short_model,
    small_model,
    tokens,
)
from tests.tiny_models import CACHE_ARGUMENT

SDPA, EAGER = "sdpa", "eager"
FP32, BF16 = torch.float32, torch.bfloat16

# cache, query_len, batch_size, attention, dtype, padding
GRID = [
    ("static", 6, 1, SDPA, FP32, 0),
    ("static", 1, 2, EAGER, FP32, 0),
    ("static", 6, 2, SDPA, FP32, 5),
    ("static", 1, 1, SDPA, BF16, 0),
    ("dynamic", 6, 2, SDPA, BF16, 0),
    ("dynamic", 1, 1, EAGER, FP32, 0),
    ("dynamic", 6, 2, EAGER, FP32, 5),
    (None, 6, 1, EAGER, BF16, 0),
    (None, 6, 2, SDPA, FP32, 5),
    ("paged", 6, 1, SDPA, FP32, 0),
    ("paged", 1, 2, EAGER, BF16, 0),
]


MOE_PARTS = ("glm.moe_router", "glm.moe_experts", "glm.merged_linear")


def expected_of(model) -> dict[str, int]:
    """Expected matches from the config, not from the graph as the backend takes them."""
    config = model.config
    num_layers = config.num_hidden_layers
    num_full = config.indexer_types.count("full")
    is_bf16 = model.dtype == BF16
    return {
        "mask": num_layers + num_full,
        "indexer_prologue": num_full,
        "indexer_topk": num_full,
        "sparse_mla": num_layers,
        "merge_linears": 2 * num_layers + num_full,
        # o of each layer, q_b of shared ones, down projections, lm_head
        "bf16_linear": is_bf16 * (2 * num_layers + (num_layers - num_full) + 1),
        # input_layernorm and q_a_layernorm of each layer, the one before a dense MLP, the last one
        "rms_norm_linear": is_bf16 * (2 * num_layers + config.mlp_layer_types.count("dense") + 1),
        "moe_router": config.mlp_layer_types.count("sparse"),
        "moe_experts": config.mlp_layer_types.count("sparse"),
    }


@pytest.mark.parametrize(
    ("cache", "query_len", "batch_size", "attention", "dtype", "padding"), GRID
)
def test_compiled_step_equals_the_eager_model(
    cache, query_len, batch_size, attention, dtype, padding
):
    model = small_model(dtype=dtype, attention=attention)
    step = Step(model, cache, query_len, batch_size, padding=padding)
    expected, expected_cache = step.run(model)
    actual, actual_cache = step.run(compile_model(model))
    assert_logits_close(actual, expected, step.exact(model))

    assert laid_out(model.model.layers[0].self_attn)
    assert glm_compile.merge_weights(model).num_moved == 0
    report = report_of_last_compilation()
    assert report.ok, report.table()
    assert report.expected == expected_of(model) == report.matches
    assert report.mask_route == "proven"
    assert report.tier == "exact"
    text = final_text(report)
    # Without a cache the prompt is in the graph, too.
    is_few = dtype == BF16 and cache is not None and batch_size * query_len <= 8
    attended = "glm.sparse_mla." if cache == "paged" else "glm.sparse_mla_contiguous"
    for op in (
        "glm.topk_select",
        "glm.attention_prologue_paged" if cache == "paged" else "glm.indexer_prologue",
        # few tokens in bf16: norm, router, experts and shared expert are one op
        *(("glm.moe_layer",) if is_few else MOE_PARTS),
        attended,
    ):
        assert op in text
    for op in ("glm.masked_topk", "attention.default", "paged_gather", "softmax", "layer_norm"):
        assert op not in text
    assert ("glm.bf16_linear" in text) == (dtype == BF16)
    if cache == "paged":
        assert torch.equal(actual_cache.lengths, expected_cache.lengths)
    if dtype == FP32 and cache == "static":
        for ours, theirs in zip(actual_cache.layers, expected_cache.layers):
            torch.testing.assert_close(ours.keys, theirs.keys)
            assert torch.equal(ours.cumulative_length, theirs.cumulative_length)


def laid_out(attention) -> bool:
    """Whether the weights that read the layer's input lie behind each other."""
    weights = [
        attention.q_a_proj.weight,
        attention.kv_a_proj_with_mqa.weight,
        attention.indexer.wk.weight,
        attention.indexer.weights_proj.weight,
    ]
    return adjacent_block(weights) is not None


@pytest.mark.newest_transformers
def test_a_hooked_weight_is_left_alone_and_named():
    model = small_model()
    model.model.layers[2].self_attn.indexer.wk.register_forward_hook(doubles)
    step = Step(model, "static", 6)
    expected, _ = step.run(model)
    actual, _ = step.run(compile_model(model))
    assert_logits_close(actual, expected, step.exact(model))
    report = report_of_last_compilation()
    (left_alone,) = report.declined["merge_linears"]
    assert "model.layers.2.self_attn.indexer.wk" in left_alone.reason
    assert "forward hook (doubles)" in left_alone.reason


def doubles(module, arguments, output):
    return 2 * output


class Extended(torch.nn.Module):
    """A linear with a low-rank product beside it, as a user's own adapter has it."""

    def __init__(self, linear: torch.nn.Linear) -> None:
        super().__init__()
        self.linear = linear
        self.down = torch.nn.Linear(linear.in_features, 4, bias=False, dtype=linear.weight.dtype)
        self.up = torch.nn.Linear(4, linear.out_features, bias=False, dtype=linear.weight.dtype)
        self.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.up(self.down(x))


def scale_input(_module, arguments):
    return (arguments[0] * 1.25,)


def extend_linears(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.q_a_proj = Extended(layer.self_attn.q_a_proj)
        layer.self_attn.o_proj = Extended(layer.self_attn.o_proj)


def scale_inputs(model) -> None:
    for layer in model.model.layers:
        layer.self_attn.kv_a_proj_with_mqa.register_forward_pre_hook(scale_input)


@pytest.mark.parametrize(
    ("config", "change"),
    [({"attention_bias": True}, None), ({}, extend_linears), ({}, scale_inputs)],
    ids=["biased", "extended", "other_inputs"],
)
def test_merges_are_expected_where_linears_read_one_input(config, change):
    model = small_model(config=config, dtype=BF16)
    if change is not None:
        change(model)
    step = Step(model, None, 12)
    expected, _ = step.run(model)
    actual, _ = step.run(compile_model(model))
    assert_logits_close(actual, expected, step.exact(model))
    report = report_of_last_compilation()
    assert report.matches == report.expected
    assert report.expected["merge_linears"] >= 5


def test_a_growing_dynamic_cache_compiles_a_few_times():
    model = short_model()
    compiled = compile_model(model)
    ids = tokens(1, 32)
    caches = [Step(model, "dynamic", 6).cache for _ in range(2)]
    counters.clear()
    for i in range(10):
        actual, expected = (
            f(ids[:, i : i + 1], **{CACHE_ARGUMENT: cache}).logits
            for f, cache in zip((compiled, model), caches)
        )
        assert_logits_close(actual, expected, None)
    # A length is taken for constant once, before there is a graph for all of them.
    assert counters["stats"]["unique_graphs"] == 2
    assert report_of_last_compilation().ok


@pytest.mark.slow
def test_dynamic_true_is_replaced_as_well():
    model = short_model()
    step = Step(model, "static", 6)
    actual, _ = step.run(compile_model(model, dynamic=True))
    assert_logits_close(actual, step.run(model)[0], step.exact(model))
    assert report_of_last_compilation().ok


@pytest.mark.newest_transformers
@pytest.mark.parametrize("names", [("indexer_topk", "bf16_linear"), ("mask",), ("sparse_mla",)])
def test_a_disabled_pass_is_absent_and_not_expected(names):
    model = small_model(dtype=BF16)
    step = Step(model, "static", 6)
    actual, _ = step.run(compile_model(model, disable=names))
    assert_logits_close(actual, step.run(model)[0], step.exact(model))
    report = report_of_last_compilation()
    assert report.ok
    assert not set(names) & {*report.expected, *report.matches}
    assert "merge_linears" in report.matches


@pytest.mark.newest_transformers
def test_a_default_device_changes_nothing():
    """Dynamo then records operators as methods."""
    model = short_model(dtype=BF16)
    step = Step(model, "static", 6)
    torch.set_default_device("cpu")
    try:
        actual, _ = step.run(compile_model(model))
    finally:
        torch.set_default_device(None)
    assert_logits_close(actual, step.run(model)[0], step.exact(model))
    report = report_of_last_compilation()
    assert report.ok and report.matches["rms_norm_linear"] == report.expected["rms_norm_linear"] > 3


@pytest.mark.newest_transformers
def test_everything_disabled_is_bitwise_the_eager_model():
    model = short_model()
    step = Step(model, "static", 6)
    actual, _ = step.run(compile_model(model, disable=tuple(pipeline.PASS_NAMES)))
    assert torch.equal(actual, step.run(model)[0])


def break_indexer(model):
    """Make one indexer's norm something that no pass knows."""
    model.model.layers[2].self_attn.indexer.k_norm.register_forward_hook(doubles)


@pytest.mark.newest_transformers
def test_strict_raises_with_the_report_and_changes_nothing():
    model = small_model()
    break_indexer(model)
    step = Step(model, "static", 6)
    pointers = [p.data_ptr() for p in model.parameters()]
    with pytest.raises(MatchError, match="indexer_prologue: 1 of 2") as raised:
        step.run(compile_model(model))
    assert isinstance(raised.value, BackendCompilerFailed)
    report = raised.value.report
    assert report is last_report()
    assert not report.ok
    assert any("layers.2" in d.where for d in report.declined["indexer_prologue"])
    assert [p.data_ptr() for p in model.parameters()] == pointers


@pytest.mark.newest_transformers
def test_not_strict_warns_once_and_computes_the_right_thing(caplog):
    model = small_model()
    break_indexer(model)
    step = Step(model, "static", 6)
    pipeline._WARNED.clear()
    with caplog.at_level(logging.WARNING, logger="glm_compile"):
        actual, _ = step.run(compile_model(model, strict=False))
        torch._dynamo.reset()
        step.run(compile_model(model, strict=False))
    assert_logits_close(actual, step.run(model)[0], step.exact(model))
    messages = [r.getMessage() for r in caplog.records if "did not match" in r.getMessage()]
    assert len(messages) == 1
    assert report_of_last_compilation().matches["indexer_prologue"] == 1


@pytest.mark.newest_transformers
def test_gradients_are_refused():
    model = short_model().requires_grad_(True)
    with torch.enable_grad(), pytest.raises(ValueError, match="inference only"):
        compile_model(model)(tokens(1, 24), use_cache=False)


@pytest.mark.newest_transformers
def test_parameters_that_require_grad_are_fine_without_it():
    """They are laid out as well; the compiled callable carries its report."""
    model = short_model().requires_grad_(True)
    kept = []

    def keep(graph_module, example_inputs):
        kept.append(
            glm_compile.backend.glm(graph_module, example_inputs, options={"inner": "eager"})
        )
        return kept[-1]

    step = Step(model, None, 6)
    actual, _ = step.run(torch.compile(model, backend=keep, fullgraph=True))
    assert_logits_close(actual, step.run(model)[0], None)
    assert all(p.requires_grad for p in model.parameters())
    assert laid_out(model.model.layers[0].self_attn)
    assert glm_compile.merge_weights(model).num_moved == 0
    assert kept[0].report is last_report()


@pytest.mark.newest_transformers
def test_another_module_is_not_compiled_in_silence():
    module = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.ReLU())
    with pytest.raises(MatchError, match="not one of glm_moe_dsa"):
        compile_model(module)(torch.randn(2, 4))


@pytest.mark.newest_transformers
def test_a_module_of_the_model_is_recognised_as_a_part(caplog):
    model = small_model()
    pipeline._WARNED.clear()
    with caplog.at_level(logging.WARNING, logger="glm_compile"):
        compile_model(model.model.norm)(torch.randn(1, 4, 128))
    assert "this graph holds no decoder layer, only code around the layers" in caplog.text
    assert report_of_last_compilation().title == "part of the model"


def graph_break(module, arguments):
    torch._dynamo.graph_break()


@pytest.mark.newest_transformers
def test_fragments_of_a_broken_graph_are_recognised(caplog):
    model = small_model()
    model.model.layers[0].register_forward_pre_hook(graph_break)
    step = Step(model, "static", 6)
    fragments: list[CompileReport] = []
    pipeline._WARNED.clear()
    with caplog.at_level(logging.WARNING, logger="glm_compile"), listening(fragments.append):
        actual, _ = step.run(compile_model(model, fullgraph=False))
    assert_logits_close(actual, step.run(model)[0], step.exact(model))
    assert "this graph holds no decoder layer, only" in caplog.text
    assert "fullgraph=True" in caplog.text
    assert all(report.ok for report in fragments)
    assert {report.title for report in fragments} == {"model", "part of the model"}
    assert sum(report.matches.get("indexer_topk", 0) for report in fragments) == 2


@pytest.mark.newest_transformers
def test_unknown_options_and_modes_are_errors():
    model = short_model()
    with pytest.raises(ValueError, match="did you mean 'strict'"):
        compile_model(model, strickt=True)(tokens(1, 24), use_cache=False)
    torch._dynamo.reset()
    with pytest.raises(ValueError, match="mode='reduce-overhead'"):
        torch.compile(model, backend="glm", mode="reduce-overhead")(tokens(1, 24), use_cache=False)


@pytest.mark.newest_transformers
def test_the_fp8_tier_over_another_cache_is_an_error():
    model = short_model()
    step = Step(model, "static", 6)
    with pytest.raises(UnsupportedError, match="needs a PagedCache"):
        step.run(compile_model(model, indexer_dtype="fp8"))


@pytest.mark.newest_transformers
def test_without_a_compiler_the_default_runs_the_passes_only_and_says_so(monkeypatch, caplog):
    monkeypatch.setattr(inner, "why_no_inductor", lambda device: "no C++ compiler found")
    inner._warn_passes_only.cache_clear()
    with caplog.at_level(logging.WARNING, logger="glm_compile"):
        for _ in range(2):
            assert inner.choose_inner("inductor", is_explicit=False, device_type="cpu") == "eager"
    assert caplog.text.count("no C++ compiler found") == 1
    with pytest.raises(UnsupportedError, match="no C\\+\\+ compiler found"):
        inner.choose_inner("inductor", is_explicit=True, device_type="cpu")
    assert inner.choose_inner("eager", is_explicit=True, device_type="cpu") == "eager"


@pytest.mark.newest_transformers
def test_a_missing_compiler_is_noticed():
    from torch._inductor import config

    inner.why_no_inductor.cache_clear()
    try:
        with config.patch({"cpp.cxx": ("no-such-compiler",)}):
            assert "no C++ compiler" in inner.why_no_inductor("cpu")
            assert inner.why_no_inductor("cuda") is None
    finally:
        inner.why_no_inductor.cache_clear()


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [FP32, BF16])
def test_inductor_equals_the_eager_model(dtype):
    make = small_model if dtype == BF16 else short_model
    model = make(dtype=dtype)
    step = Step(model, "static", 6)
    actual, _ = step.run(compile_model(model, inner="inductor"))
    expected, _ = step.run(model)
    assert_logits_close(actual, expected, step.exact(model))
    report = report_of_last_compilation()
    assert report.ok
    assert report.inner == "inductor"
    assert report.matches == expected_of(model)
