"""Published faults of compilation (COMP) and of upstream drift (CFG-8), as they would show here."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.utils import counters
from torch.profiler import ProfilerActivity, profile

import glm_compile
import glm_compile.ops
from glm_compile import inner
from glm_compile.errors import MatchError
from tests.compiling import (
    Step,
    assert_logits_close,
    compile_model,
    final_text,
    make_cache,
    report_of_last_compilation,
    short_model,
    small_model,
    tokens,
)
from tests.tiny_models import CACHE_ARGUMENT

ROOT = Path(__file__).parents[2]


def no_rewrite(graph_module):
    """An empty list of passes."""


def compiled_by(kind):
    """torch.compile with one of the inner compilers alone, without passes."""

    def backend(graph_module, example_inputs):
        compiler = inner.compile_with_eager if kind == "eager" else inner.compile_with_inductor
        return compiler(graph_module, example_inputs, no_rewrite)

    def wrap(function):
        return torch.compile(function, backend=backend, fullgraph=True)

    return wrap


INNER = ["eager", pytest.param("inductor", marks=pytest.mark.slow)]


def final_graphs(monkeypatch):
    """Collect the graphs that the passes-only inner compiler runs."""
    graphs = []
    reinplace = inner.reinplace

    def keep(graph_module, example_inputs):
        reinplace(graph_module, example_inputs)
        graphs.append(graph_module.graph)

    monkeypatch.setattr(inner, "reinplace", keep)
    return graphs


def test_comp_1_the_whole_model_is_one_graph_and_a_break_is_never_silent():
    model = small_model()
    counters.clear()
    Step(model, "static", 6).run(compile_model(model))
    assert counters["stats"]["unique_graphs"] == 1
    assert not counters["graph_break"]
    assert report_of_last_compilation().ok


def cast_output(module, arguments, output):
    return output.to(torch.float64).to(output.dtype)


def cast_norm_output(module, arguments, output):
    return output * torch.ones((), dtype=output.dtype)


@pytest.mark.newest_transformers
def test_comp_2_an_extra_cast_is_matched_or_named_and_never_changes_numbers():
    model = small_model()
    for layer in model.model.layers:
        if getattr(layer.self_attn, "indexer", None) is not None:
            layer.self_attn.indexer.wk.register_forward_hook(cast_output)
    step = Step(model, "static", 6)
    actual, _ = step.run(compile_model(model, strict=False))
    assert_logits_close(actual, step.run(model)[0], step.exact(model))
    report = report_of_last_compilation()
    assert report.ok or report.declined["indexer_prologue"]


@pytest.mark.newest_transformers
def test_comp_2_zero_matches_are_an_error_and_leave_the_model_alone():
    model = small_model()
    for layer in model.model.layers:
        if getattr(layer.self_attn, "indexer", None) is not None:
            layer.self_attn.indexer.k_norm.register_forward_hook(cast_norm_output)
    step = Step(model, "static", 6)
    before = {n: (p.data_ptr(), p.clone()) for n, p in model.named_parameters()}
    with pytest.raises(MatchError, match="indexer_prologue: 0 of 2") as raised:
        step.run(compile_model(model))
    assert len(raised.value.report.declined["indexer_prologue"]) == 2
    for name, parameter in model.named_parameters():
        assert parameter.data_ptr() == before[name][0]
        assert torch.equal(parameter, before[name][1])


@pytest.mark.parametrize("kind", INNER)
def test_comp_7_a_written_view_is_not_copied_with_its_buffer(kind):
    num_bytes = []
    for num_pages in (64, 1024):
        torch._dynamo.reset()
        both = torch.zeros(2, num_pages, 64, 32)  # keys and values in one allocation
        block_table = torch.arange(num_pages, dtype=torch.int32)[None]
        lengths_B = torch.tensor([70], dtype=torch.int32)

        @compiled_by(kind)
        def step(both, block_table, lengths_B, new_1SD):
            torch.ops.glm.paged_write(both[0], new_1SD, block_table, lengths_B)
            return both[0, 1].sum(0)

        pointer = both.data_ptr()
        step(both, block_table, lengths_B, torch.ones(1, 2, 32))
        new_1SD = torch.full((1, 2, 32), 3.0)
        num_bytes.append(allocated_bytes(step, both, block_table, lengths_B, new_1SD))
        assert both.data_ptr() == pointer
        assert torch.equal(both[0, 1, 6:8], new_1SD[0])
        assert both.sum() == 2 * 32 * 3
    small, large = num_bytes
    assert large - small < 1 << 15  # the block table's own 4 bytes a page


@pytest.mark.parametrize("kind", INNER)
def test_comp_7_an_aten_write_into_a_view_is_right(kind):
    cache_2TD = torch.zeros(2, 256, 64)

    @compiled_by(kind)
    def step(cache_2TD, new_1D, position):
        cache_2TD[0].index_copy_(0, position, new_1D)
        return cache_2TD[0, :8].sum(0)

    pointer = cache_2TD.data_ptr()
    read_D = step(cache_2TD, torch.ones(1, 64), torch.tensor([5]))
    assert cache_2TD.data_ptr() == pointer
    assert torch.equal(read_D, torch.ones(64))
    assert cache_2TD.sum() == cache_2TD[0, 5].sum() == 64


def allocated_bytes(function, *arguments):
    """Bytes that one call allocates."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        function(*arguments)
    return sum(max(e.self_cpu_memory_usage, 0) for e in profiler.key_averages())


@pytest.mark.parametrize("kind", INNER)
def test_comp_8_a_step_does_not_copy_a_cache_back(kind):
    glm = torch.ops.glm
    num_bytes = {}
    for num_pages in (64, 1024):
        torch._dynamo.reset()
        keys_1TD = torch.zeros(1, 64 * num_pages, 32)
        pages = torch.zeros(num_pages, 64, 32)
        block_table = torch.arange(num_pages, dtype=torch.int32)[None]
        lengths_B = torch.tensor([70], dtype=torch.int32)
        length = torch.tensor(70)

        @compiled_by(kind)
        def step(keys_1TD, pages, block_table, lengths_B, length, new_1SD):
            positions = torch.arange(new_1SD.shape[1]) + length
            length.add_(new_1SD.shape[1])
            keys_1TD.index_copy_(1, positions, new_1SD)
            glm.paged_write(pages, new_1SD, block_table, lengths_B)
            glm.advance(lengths_B, 2)
            read = glm.paged_gather(pages, block_table[:, :2], 128)
            return keys_1TD[:, :128].sum(1) + read.sum(1)

        arguments = keys_1TD, pages, block_table, lengths_B, length
        pointers = [a.data_ptr() for a in arguments]
        step(*arguments, torch.ones(1, 2, 32))
        num_bytes[num_pages] = allocated_bytes(step, *arguments, torch.full((1, 2, 32), 2.0))
        assert [a.data_ptr() for a in arguments] == pointers
        assert (int(length), int(lengths_B)) == (74, 74)
        expected = torch.tensor([1.0, 1.0, 2.0, 2.0])
        assert torch.equal(keys_1TD[0, 70:74, 0], expected)
        assert torch.equal(pages[1, 6:10, 0], expected)
        assert keys_1TD.sum() == pages.sum() == 6 * 32
    small, large = num_bytes.values()
    assert large - small < 1 << 15  # the block table's own 4 bytes a page


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_comp_8_no_step_of_the_model_copies_a_cache(cache, monkeypatch):
    graphs = final_graphs(monkeypatch)
    model = small_model()
    compiled = compile_model(model)
    state = Step(model, cache, 6).cache
    pages = [
        tensor
        for layer in state.layers
        for name in ("keys", "values", "indexer_keys", "latent_pages", "key_pages")
        if isinstance(tensor := getattr(layer, name, None), torch.Tensor)
    ]
    pointers = [t.data_ptr() for t in pages]
    assert len(pages) >= 5
    compiled(tokens(1, 6), **{CACHE_ARGUMENT: state})
    assert [t.data_ptr() for t in pages] == pointers
    shapes = {tuple(t.shape) for t in pages}
    copies = [
        node
        for graph in graphs
        for node in graph.nodes
        if node.op == "call_function"
        and node.target in (torch.ops.aten.clone.default, torch.ops.aten.copy_.default)
        and tuple(node.meta["val"].shape) in shapes
    ]
    assert graphs
    assert not copies
    assert not any("auto_functionalized" in str(node.target) for g in graphs for node in g.nodes)


@pytest.mark.newest_transformers
def test_comp_9_no_weight_is_rearranged_in_a_step(monkeypatch):
    graphs = final_graphs(monkeypatch)
    model = small_model(dtype=torch.bfloat16)
    Step(model, "static", 6).run(compile_model(model))
    weights = {tuple(p.shape) for p in model.parameters() if p.dim() > 1}
    copying = (torch.ops.aten.cat.default, torch.ops.aten.clone.default)
    for graph in graphs:
        for node in graph.nodes:
            if node.op == "placeholder" and tuple(node.meta["val"].shape) in weights:
                assert not [user for user in node.users if user.target in copying]
    text = final_text(report_of_last_compilation())
    assert all(op in text for op in ("glm.rms_norm_linear", "glm.moe_layer"))


@pytest.mark.slow
def test_comp_10_compilations_do_not_grow_with_steps_prompts_or_calls():
    model = short_model()
    prefill, decode = compile_model(model), compile_model(model)
    counters.clear()
    for call in range(2):
        for prompt_len in (25, 29):
            cache = make_cache(model, "static", 1)
            ids = tokens(1, prompt_len, seed=call)
            torch._dynamo.mark_dynamic(ids, 1)
            logits = prefill(ids, **{CACHE_ARGUMENT: cache}).logits
            for _ in range(8):
                logits = decode(logits[:, -1:].argmax(-1), **{CACHE_ARGUMENT: cache}).logits
    # An empty cache, which makes its tensors, and one that has them; a prompt and a token.
    assert counters["stats"]["unique_graphs"] <= 3


@pytest.mark.slow
def test_comp_13_many_layers_are_one_graph_of_few_kinds():
    model = small_model(
        config={
            "num_hidden_layers": 10,
            "first_k_dense_replace": 3,
            "indexer_types": ["full"] * 3 + ["shared", "shared", "full"] * 2 + ["shared"],
        }
    )
    step = Step(model, "static", 6)
    counters.clear()
    actual, _ = step.run(compile_model(model))
    assert_logits_close(actual, step.run(model)[0], step.exact(model))
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["stats"].get("recompile_limit", 0) == 0
    report = report_of_last_compilation()
    assert report.matches["indexer_topk"] == 5
    kinds = {dump.graph for dump in report.graphs} - {"model"}
    assert len(kinds) <= 6


@pytest.mark.newest_transformers
def test_comp_14_values_that_escape_a_step_survive_the_next():
    model = short_model()
    compiled = compile_model(model)
    cache = Step(model, "static", 6).cache
    first = compiled(tokens(1, 6), **{CACHE_ARGUMENT: cache}).logits
    kept = first.clone()
    compiled(tokens(1, 6, seed=2), **{CACHE_ARGUMENT: cache})
    assert torch.equal(first, kept)


@pytest.mark.newest_transformers
def test_comp_19_passes_run_at_every_compilation():
    model = short_model()
    step = Step(model, "static", 6)
    for disable in ("merge_linears",), ():
        torch._dynamo.reset()
        step.run(compile_model(model, disable=disable))
        report = report_of_last_compilation()
        assert ("glm.merged_linear" in final_text(report)) == (not disable)
        assert report.ok


def test_comp_19_the_cache_key_holds_the_sources(monkeypatch):
    first = inner._source_key(None).uuid()
    read = Path.read_bytes

    def changed(self):
        return read(self) + (b"# changed" if self.name == "merge_linears.py" else b"")

    monkeypatch.setattr(Path, "read_bytes", changed)
    inner.source_hash.cache_clear()
    try:
        assert inner._source_key(None).uuid() != first
    finally:
        monkeypatch.undo()
        inner.source_hash.cache_clear()
    assert inner._source_key(None).uuid() == first


COMPILES_IN_TURN = """
import sys, torch
from torch._dynamo.utils import counters
from tests.compiling import Step, compile_model, final_text, report_of_last_compilation, small_model
with torch.no_grad():
    for disable in sys.argv[1:]:
        torch._dynamo.reset()
        counters.clear()
        model = small_model(config={"num_hidden_layers": 1, "indexer_types": ["full"]})
        step = Step(model, "static", 6)
        names = tuple(filter(None, [disable]))
        actual, _ = step.run(compile_model(model, inner="inductor", disable=names))
        torch.testing.assert_close(actual, step.run(model)[0], atol=2e-5, rtol=1e-4)
        report = report_of_last_compilation()
        assert report.ok
        how = "merged" if "merged_linear" in final_text(report) else "apart"
        print(how, counters["inductor"]["fxgraph_cache_hit"])
"""


@pytest.mark.slow
def test_comp_19_a_second_process_uses_the_cache_and_obeys_its_options(tmp_path):
    environment = {
        **os.environ,
        "TORCHINDUCTOR_CACHE_DIR": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]),
    }
    outputs = []
    for process in (["", "merge_linears"], [""]):
        result = subprocess.run(
            [sys.executable, "-c", COMPILES_IN_TURN, *process],
            env=environment,
            cwd=ROOT,
            capture_output=True,
            text=True,
            check=False,
        )
        assert result.returncode == 0, result.stderr
        outputs += [line.split() for line in result.stdout.splitlines()]
    assert [how for how, _hits in outputs] == ["merged", "apart", "merged"]
    assert int(outputs[0][1]) == 0
    assert int(outputs[2][1]) > 0


@pytest.mark.slow
def test_comp_21_upstream_generate_uses_our_graph_and_compiles_nothing_of_its_own():
    model = small_model()
    ids = tokens(1, 20)
    kwargs = {"max_new_tokens": 6, "do_sample": False, "cache_implementation": "static"}
    expected = model.generate(ids, **kwargs)
    eager_forward = model.forward
    model.forward = torch.compile(
        eager_forward, backend="glm", fullgraph=True, options={"inner": "eager"}
    )
    counters.clear()
    actual = model.generate(ids, **kwargs, disable_compile=True)
    assert torch.equal(actual, expected)
    assert 0 < counters["stats"]["unique_graphs"] <= 3
    report = report_of_last_compilation()
    assert report.ok
    assert report.mask_route in ("bounds", "proven")


def test_cfg_8_an_unknown_version_of_the_indexer_is_an_error(monkeypatch):
    from transformers.models.glm_moe_dsa import modeling_glm_moe_dsa as modeling

    class Functional:
        def __getattr__(self, name):
            return torch.sigmoid if name == "relu" else getattr(F, name)

    monkeypatch.setattr(modeling, "F", Functional())
    model = small_model()
    with pytest.raises(MatchError, match="indexer_topk: 0 of 2") as raised:
        Step(model, "static", 6).run(compile_model(model))
    report = raised.value.report
    assert report.matches["indexer_topk"] == 0
    assert len(report.declined["indexer_topk"]) == 2


def test_cfg_8_the_installed_version_is_matched_completely():
    model = small_model()
    report = glm_compile.explain(model, cache_len=100)
    assert report.ok, report.table()
    assert not report.declined["mask"]
