"""merge_linears: linears of one input become one, weights are never copied."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from glm_compile.fx_passes.base import MergeResult, PassOptions
from glm_compile.fx_passes.merge_linears import MergeLinears
from tests.fx_passes.aten_graphs import (
    LEVELS,
    capture,
    count_ops,
    graph_text,
    mark_indexer_topk,
)
from tests.fx_passes.tiny_indexer import trace
from tests.tiny_models import tiny_config, tiny_model

K = 16


def apply(gm: fx.GraphModule, deterministic: bool = False) -> MergeResult:
    result = MergeLinears(PassOptions(deterministic=deterministic))(gm)
    gm.graph.lint()
    return result


def weights(*sizes: int, dtype: torch.dtype = torch.float32) -> list[torch.Tensor]:
    return [torch.randn(n, K).to(dtype) for n in sizes]


def check(fn: Callable, *inputs: Any, level: str = "plain") -> tuple[MergeResult, fx.GraphModule]:
    """Apply, compare numbers, apply again."""
    gm = trace(fn, *inputs, level=level)
    before = gm(*inputs)
    result = apply(gm)
    tolerance = 1e-5 if inputs[0].dtype == torch.float32 else 2e-2
    torch.testing.assert_close(gm(*inputs), before, atol=tolerance, rtol=tolerance)
    text = graph_text(gm)
    assert apply(gm).num_matches == 0
    assert graph_text(gm) == text
    placeholders = set(gm.graph.find_nodes(op="placeholder"))
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.cat.default):
        assert placeholders.isdisjoint(node.all_input_nodes)
    return result, gm


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 1, K), (1, 6, K), (2, 6, K), (7, K)])
def test_linears_of_one_input_become_one(
    level: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b).relu(), F.linear(x.view(-1, K), c)

    x = torch.randn(shape).to(dtype)
    result, gm = check(run, x, *weights(8, 4, 12, dtype=dtype), level=level)
    assert result.num_matches == 1
    assert [len(group) for group in result.groups] == [3]
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    assert list(result.groups[0]) == names[1:]
    ops = count_ops(gm)
    assert ops["glm.merged_linear"] == 1
    assert ops["aten.mm"] == ops["aten.bmm"] == 0
    assert result.declined == []


@pytest.mark.parametrize("level", LEVELS)
def test_other_inputs_stay_apart(level: str) -> None:
    """kv_b reads the cache: no group, whatever its width."""

    def run(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(y, b)

    result, gm = check(run, torch.randn(2, 3, K), torch.randn(2, 3, K), *weights(8, 4), level=level)
    assert (result.num_matches, result.groups, result.declined) == (0, [], [])
    assert count_ops(gm)["aten.mm"] == 2


def test_one_weight_read_twice_is_no_group() -> None:
    def run(x: torch.Tensor, a: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(x.view(-1, K), a)

    result, _ = check(run, torch.randn(2, 3, K), *weights(8))
    assert result.num_matches == 0


def test_a_weight_belongs_to_one_group() -> None:
    def run(x: torch.Tensor, y: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: Any) -> Any:
        return F.linear(x, a), F.linear(x, b), F.linear(y, b), F.linear(y, c)

    result, _ = check(run, torch.randn(3, K), torch.randn(3, K), *weights(8, 4, 4))
    assert result.num_matches == 1
    assert len(result.groups[0]) == 2
    assert any("part of another merged linear" in d.reason for d in result.declined)


@pytest.mark.parametrize("level", LEVELS)
def test_fp32_rows_stay_out_of_a_bf16_group(level: str) -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b), F.linear(x.float(), gate)

    x = torch.randn(2, 3, K).to(torch.bfloat16)
    result, _ = check(run, x, *weights(8, 4, dtype=torch.bfloat16), *weights(6), level=level)
    assert [len(g) for g in result.groups] == [2]
    (declined,) = result.declined
    assert "its weight is float32, the others' are bfloat16" in declined.reason


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_cast_in_the_graph_stays_out(level: str) -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b), F.linear(x.float(), gate.float())

    x = torch.randn(2, 3, K).to(torch.bfloat16)
    result, _ = check(run, x, *weights(8, 4, 6, dtype=torch.bfloat16), level=level)
    assert [len(g) for g in result.groups] == [2]
    assert "cast from bfloat16 to float32 in the graph" in result.declined[0].reason


@pytest.mark.parametrize("level", LEVELS)
def test_a_bias_stays_out(level: str) -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: Any, bias: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b, bias), F.linear(x, c)

    result, _ = check(run, torch.randn(2, 3, K), *weights(8, 4, 6), torch.randn(4), level=level)
    assert [len(g) for g in result.groups] == [2]
    assert "it adds a bias" in result.declined[0].reason


@pytest.mark.parametrize("level", LEVELS)
def test_linears_that_all_stay_out_say_why(level: str) -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> Any:
        return F.linear(x, a, bias), F.linear(x, b, bias)

    result, _ = check(run, torch.randn(2, 3, K), *weights(4, 4), torch.randn(4), level=level)
    assert not result.groups
    assert ["it adds a bias" in declined.reason for declined in result.declined] == [True, True]


def test_a_quantised_weight_stays_out() -> None:
    """A weight that is unpacked in the graph is no placeholder: nothing to lay out (IDX-3)."""

    def run(x: torch.Tensor, packed: torch.Tensor, scale: torch.Tensor, b: torch.Tensor) -> Any:
        return F.linear(x, packed.to(torch.float32) * scale), F.linear(x, b)

    packed = torch.randint(-8, 8, (8, K), dtype=torch.int8)
    result, gm = check(run, torch.randn(2, K), packed, torch.rand(8, 1), *weights(6))
    assert result.num_matches == 0
    assert count_ops(gm)["aten.mm"] == 2


def test_a_transposed_weight_is_not_a_linear() -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return x @ a, x @ b

    result, _ = check(run, torch.randn(3, K), torch.randn(K, K), torch.randn(K, K))
    assert result.num_matches == 0


def test_a_weight_with_gaps_stays_out() -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b), F.linear(x, c)

    gaps = torch.randn(8, 2 * K)[:, :K]
    result, _ = check(run, torch.randn(3, K), gaps, *weights(4, 4))
    assert [len(g) for g in result.groups] == [2]
    assert "strides" in result.declined[0].reason


def test_determinism_is_passed_on() -> None:
    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return F.linear(x, a), F.linear(x, b)

    gm = trace(run, torch.randn(3, K), *weights(4, 4))
    apply(gm, deterministic=True)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.merged_linear.default)
    assert call.args[2] is True


def test_readers_that_need_dense_rows_get_a_copy() -> None:
    """A slice of the merged result is not contiguous; a view over its rows becomes a reshape."""

    def run(x: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> Any:
        return F.linear(x, a).view(-1), F.linear(x, b)

    result, _ = check(run, torch.randn(3, K), *weights(8, 4))
    assert result.num_matches == 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_groups_of_the_unmodified_model(level: str, dtype: torch.dtype) -> None:
    config = tiny_config(
        num_hidden_layers=2, indexer_types=["full", "shared"], first_k_dense_replace=1
    )
    model = tiny_model(config, dtype=dtype)
    ids = torch.randint(0, config.vocab_size, (1, 12))
    options = PassOptions()
    output, captured = capture(
        model,
        ids,
        level=level,
        passes=(MergeLinears(options),),
        dynamo_stage=mark_indexer_topk,
        use_cache=False,
    )
    result = captured.results["merge_linears"]
    assert isinstance(result, MergeResult)
    attention, indexer = "model.layers.0.self_attn", "model.layers.0.self_attn.indexer"
    assert result.matched[:3] == [
        f"{attention}.q_a_proj + {attention}.kv_a_proj_with_mqa + {indexer}.wk + "
        f"{indexer}.weights_proj",
        f"{attention}.q_b_proj + {indexer}.wq_b",
        "model.layers.0.mlp.gate_proj + model.layers.0.mlp.up_proj",
    ]
    # fp32: the router's weight has the dtype of the shared expert's; bf16: it is cast.
    assert [len(g) for g in result.groups] == [4, 2, 2, 2, 3 if dtype == torch.float32 else 2]
    assert len(result.declined) == (dtype == torch.bfloat16)
    difference = (output.logits - model(ids, use_cache=False).logits).abs().max()
    assert float(difference) < (2e-5 if dtype == torch.float32 else 0.1)


def test_one_graph_serves_other_batch_sizes_and_lengths() -> None:
    model = torch.nn.ModuleList([torch.nn.Linear(K, n, bias=False) for n in (8, 4)])
    model.requires_grad_(False)

    def run(x: torch.Tensor) -> Any:
        return model[0](x), model[1](x)

    x = torch.randn(2, 5, K)
    torch._dynamo.mark_dynamic(x, 0)
    torch._dynamo.mark_dynamic(x, 1)
    _, captured = capture(run, x, passes=(MergeLinears(PassOptions()),))
    assert captured.results["merge_linears"].num_matches == 1
    compiled_for = [i for i in captured.inputs if isinstance(i, torch.SymInt)]
    assert compiled_for
