"""The slice benchmark: what it builds, what it counts, what it refuses."""

from __future__ import annotations

import json

import pytest
import torch

from glm_compile import bench
from glm_compile.cli import main
from tests.checkpoints import write_checkpoint
from tests.tiny_models import tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers


@pytest.fixture(scope="module")
def model():
    return bench.make_model(tiny_config(), "cpu")


def test_slice_is_the_release_with_six_layers():
    from transformers import GlmMoeDsaForCausalLM

    config = bench.slice_config()
    with torch.device("meta"):
        slice_ = GlmMoeDsaForCausalLM(config)
    layers = slice_.model.layers
    assert [layer.self_attn.indexer is not None for layer in layers] == [True] * 3 + [False] * 3
    assert [hasattr(layer.mlp, "experts") for layer in layers] == [False] * 3 + [True] * 3
    billions = sum(parameter.numel() for parameter in slice_.parameters()) / 1e9
    assert round(billions, 1) == 32.7


def test_model_is_usable_and_repeats_with_its_seed(model):
    again = bench.make_model(tiny_config(), "cpu")
    for (name, a), (_, b) in zip(model.state_dict().items(), again.state_dict().items()):
        assert torch.equal(a, b), name
    assert torch.isfinite(model(torch.arange(6)[None]).logits).all()
    assert model.lm_head.weight.dtype == torch.bfloat16
    # Tables of the rotary embedding are the config's, not what lay in memory.
    fresh = type(model.model.rotary_emb)(model.config)
    assert torch.equal(model.model.rotary_emb.inv_freq, fresh.inv_freq)


def test_the_cache_is_of_the_models_dtype() -> None:
    """A checkpoint may be in float32, with which an eager step is measured."""
    for dtype in (torch.float32, torch.bfloat16):
        assert bench.make_cache(tiny_model(dtype=dtype), "glm", 2, 70).dtype == dtype


@pytest.mark.parametrize("backend", ["glm", "glm-fp8", "eager"])
def test_a_step_stays_where_it_is(model, backend, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_options: model)
    with torch.no_grad():
        step = bench.make_step(model, backend, 6, 200)
        first = step()
        for _ in range(3):
            assert torch.equal(step(), first)
    assert first.shape == (1, 6, model.config.vocab_size)


def test_experts_are_counted_once_and_their_bytes_with_them(model):
    config = model.config
    num_moe = sum(kind == "sparse" for kind in config.mlp_layer_types)
    num_experts, num_bytes = bench.read_weights(model, 1)
    assert num_experts == num_moe * config.num_experts_per_tok
    experts = 3 * config.moe_intermediate_size * config.hidden_size * 2
    router = [module for name, module in model.named_modules() if name.endswith("mlp.gate")]
    everything = sum(p.numel() * p.element_size() for p in model.parameters())
    embedding = model.get_input_embeddings().weight.numel() * 2
    all_experts = num_moe * config.n_routed_experts * experts
    assert len(router) == num_moe
    assert num_bytes == everything - embedding - all_experts + num_experts * experts
    assert not any(module._forward_hooks for module in model.modules())


def test_experts_of_a_long_step_are_counted(model, monkeypatch):
    """It is longer than the cache that is enough to count over."""
    monkeypatch.setattr(bench, "_COUNTED_LEN", 64)
    num_experts, _ = bench.read_weights(model, 65, 200)
    num_moe = sum(kind == "sparse" for kind in model.config.mlp_layer_types)
    assert num_experts == num_moe * model.config.n_routed_experts


def test_experts_of_a_compiled_step_are_its_own(model, monkeypatch):
    """Those that the plain model's routers choose on the same tokens and the same cache."""
    compile_, make_cache = torch.compile, bench.make_cache
    caches = []

    def compile_without_code(model, *, backend, options, **others):
        return compile_(model, backend=backend, options={**options, "inner": "eager"}, **others)

    def keep_cache(*arguments):
        torch.manual_seed(7)
        caches.append(make_cache(*arguments))
        return caches[-1]

    monkeypatch.setattr(torch, "compile", compile_without_code)
    monkeypatch.setattr(bench, "make_cache", keep_cache)
    monkeypatch.setattr(bench, "_COUNTED_LEN", 100)
    measured = bench.time_step(model, "glm", query_len=3, cache_len=100)
    assert len(caches) == 1, "counted in the step itself"
    with torch.no_grad():
        expected = bench.read_weights(model, 3, 100)
    assert len(caches) == 2
    assert (measured.num_experts, measured.weight_bytes) == expected


def test_pairs_of_no_expert_are_not_counted():
    from glm_compile.ops.moe import moe_experts

    E, C, I = 5, 8, 4  # noqa: E741
    x, weights = torch.randn(2, C).bfloat16(), torch.rand(2, 3)
    ids = torch.tensor([[0, 4, 4], [-1, 5, 0]])
    experts = torch.randn(E, 2 * I, C).bfloat16(), torch.randn(E, C, I).bfloat16()
    with bench.noted_experts() as met:
        expected = moe_experts(x, weights, ids, *experts)
    assert met == [(2, 2 * 2 * (2 * I * C + C * I))]
    assert torch.equal(moe_experts(x, weights, ids, *experts), expected) and len(met) == 1


def test_a_time_says_how_it_was_taken(model, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda model, **_options: model)
    measured = bench.time_step(model, "glm", query_len=2, cache_len=100)
    assert measured.median_us > 0 and measured.timer == "perf_counter"
    assert measured.floor_us is None and measured.device == "CPU"
    assert "S=2 T=      100" in bench.line(measured)


def test_a_step_that_does_not_fit_has_no_time(model, monkeypatch):
    def fail(*_arguments):
        raise torch.OutOfMemoryError("no")

    monkeypatch.setattr(bench, "make_step", fail)
    measured = bench.time_step(model, "eager", query_len=2, cache_len=100)
    assert measured.median_us is None and bench.line(measured).endswith("out of memory")


@pytest.mark.parametrize("query_len, cache_len", [(0, 10), (10, 10), (-1, 5), (6, 0)])
def test_impossible_lengths_are_refused(model, query_len, cache_len):
    with pytest.raises(ValueError, match="query_len must be at least 1 and below cache_len"):
        bench.make_step(model, "glm", query_len, cache_len)


def test_a_cache_larger_than_memory_is_refused_before_it_is_made(model, monkeypatch):
    monkeypatch.setattr(bench, "make_cache", lambda *_: pytest.fail("a cache was made"))
    with pytest.raises(ValueError, match=r"cache_len=1000000000000 tokens takes \d+ GB, and cpu"):
        bench.make_step(model, "eager", 6, 10**12)


def test_unknown_backend_is_refused(model):
    with pytest.raises(ValueError, match="known are glm, glm-fp8, inductor, eager"):
        bench.time_step(model, "onnx")


class TestCommand:
    def run(self, capsys, *arguments):
        code = main(["bench", *map(str, arguments)])
        return code, *capsys.readouterr()

    def test_it_prints_a_line_a_step_and_writes_json(self, capsys, tmp_path):
        path = write_checkpoint(tmp_path / "model", tiny_model(dtype=torch.bfloat16))
        target = tmp_path / "times.json"
        lengths = ("--query-len", 1, 6, "--cache-len", 100, "--device", "cpu")
        code, out, _ = self.run(capsys, path, "--backend", "eager", *lengths, "--json", target)
        assert code == 0 and len(out.splitlines()) == 2
        times = json.loads(target.read_text())
        assert [t["query_len"] for t in times] == [1, 6]
        assert all(t["backend"] == "eager" and t["median_us"] > 0 for t in times)

    def test_the_slice_needs_a_gpu(self, capsys):
        code, _, err = self.run(capsys, "--device", "cpu")
        assert code == 2 and "needs a GPU with 80 GB" in err

    @pytest.mark.parametrize(
        "arguments, message",
        [
            (("--query-len", 8, "--cache-len", 8), "below cache_len"),
            (("--json", "/no/such/folder/times.json"), "--json: no directory /no/such/folder"),
        ],
    )
    def test_bad_arguments_cost_no_load(self, capsys, arguments, message, monkeypatch):
        monkeypatch.setattr(bench, "make_model", lambda *_: pytest.fail("a model was made"))
        code, _, err = self.run(capsys, *arguments)
        assert code == 2 and message in err
