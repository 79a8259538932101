"""bf16_linear: what merge_linears leaves in bf16 becomes the op, the rest stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from glm_compile.fx_passes import make_passes
from glm_compile.fx_passes.base import PassOptions
from glm_compile.fx_passes.bf16_linear import Bf16Linear
from tests.fx_passes.aten_graphs import (
    LEVELS,
    capture,
    count_ops,
    graph_text,
    mark_indexer_topk,
)
from tests.fx_passes.tiny_indexer import trace
from tests.tiny_models import tiny_config, tiny_model

K, N = 16, 12
BF16 = torch.bfloat16


def check(fn: Callable, *inputs: torch.Tensor, level: str = "plain") -> tuple[Any, fx.GraphModule]:
    gm = trace(fn, *inputs, level=level)
    before = gm(*inputs)
    result = Bf16Linear(PassOptions())(gm)
    gm.graph.lint()
    torch.testing.assert_close(gm(*inputs), before, atol=2e-2, rtol=2e-2)
    text = graph_text(gm)
    assert Bf16Linear(PassOptions())(gm).num_matches == 0
    assert graph_text(gm) == text
    return result, gm


def product_by_rows(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """What Inductor makes of one row on devices where it prefers no GEMM."""
    return (x.unsqueeze(2) * w.t().unsqueeze(0)).sum(dim=1)


def batched(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return torch.bmm(x, w.t().unsqueeze(0).expand(x.shape[0], K, N))


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fn", "shape"),
    [
        (F.linear, (1, 1, K)),
        (F.linear, (2, 6, K)),
        (F.linear, (7, K)),
        (lambda x, w: x @ w.t(), (2, 6, K)),
        (lambda x, w: torch.mm(x, w.permute(1, 0)), (6, K)),
        (lambda x, w: torch.mm(x, w.transpose(0, 1)), (1, K)),
        (batched, (2, 6, K)),
        (batched, (1, 6, K)),
        (product_by_rows, (1, K)),
    ],
)
def test_every_spelling_of_a_linear_becomes_the_op(
    fn: Callable, shape: tuple[int, ...], level: str
) -> None:
    x, w = torch.randn(shape).to(BF16), torch.randn(N, K).to(BF16)
    result, gm = check(fn, x, w, level=level)
    assert (result.num_matches, result.declined) == (1, [])
    ops = count_ops(gm)
    assert ops["glm.bf16_linear"] == 1
    assert ops["aten.mm"] == ops["aten.bmm"] == ops["aten.sum.dim_IntList"] == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_bias_is_kept(level: str) -> None:
    x, w, b = torch.randn(2, 3, K).to(BF16), torch.randn(N, K).to(BF16), torch.randn(N).to(BF16)
    result, gm = check(F.linear, x, w, b, level=level)
    assert result.num_matches == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.bf16_linear.default)
    assert call.args[2] is not None


def sum_of_products(x: torch.Tensor, w: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
    return F.linear(x, w) + F.linear(residual[..., :K], w)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 6), (7,)])
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, residual: residual + F.linear(x, w),
        lambda x, w, residual: F.linear(x, w).view(-1, N).clone() + residual.view(-1, N),
        lambda x, w, residual: (residual + F.linear(x, w)) * residual,
    ],
)
def test_a_residual_is_added_by_the_op(fn: Callable, shape: tuple[int, ...], level: str) -> None:
    x, w, residual = (torch.randn(s).to(BF16) for s in ((*shape, K), (N, K), (*shape, N)))
    result, gm = check(fn, x, w, residual, level=level)
    assert result.num_matches == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.bf16_linear.default)
    assert call.args[3] is not None
    assert torch.equal(gm(x, w, residual), fn(x, w, residual))


@pytest.mark.parametrize("level", LEVELS)
def test_no_size_is_left_that_nothing_reads(level: str) -> None:
    x, w, residual = (torch.randn(s).to(BF16) for s in ((2, 3, K), (N, K), (2, 3, N)))
    gm = trace(lambda x, w, r: F.linear(x, w) + r, x, w, residual, level=level, symbolic=True)
    unread = {node.name for node in gm.graph.nodes if not node.users and node.op != "output"}
    assert Bf16Linear(PassOptions())(gm).num_matches == 1
    assert count_ops(gm)["aten.add.Tensor"] == 0
    left = {node.name for node in gm.graph.nodes if not node.users and node.op != "output"}
    assert left <= unread
    torch.testing.assert_close(gm(x, w, residual), F.linear(x, w) + residual, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
def test_of_two_products_one_is_the_others_residual(level: str) -> None:
    x, w, residual = (torch.randn(s).to(BF16) for s in ((2, 3, K), (N, K), (2, 3, K)))
    result, gm = check(sum_of_products, x, w, residual, level=level)
    assert result.num_matches == 2
    assert count_ops(gm)["aten.add.Tensor"] == 0


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, residual: (product := F.linear(x, w), residual + product),
        lambda x, w, residual: F.linear(x, w) + residual[:1],
        lambda x, w, residual: F.linear(x, w) + residual.float(),
        lambda x, w, residual: torch.add(F.linear(x, w), residual, alpha=2),
        lambda x, w, residual: F.linear(x, w).transpose(0, 1) + residual.transpose(0, 1),
        lambda x, w, residual: (product := F.linear(x, w)) + product,
        lambda x, w, residual: F.linear(x, w) + 1,
    ],
)
def test_other_sums_are_not_taken(fn: Callable, level: str) -> None:
    x, w, residual = (torch.randn(s).to(BF16) for s in ((2, 3, K), (N, K), (2, 3, N)))
    result, gm = check(fn, x, w, residual, level=level)
    assert result.num_matches == 1
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.bf16_linear.default)
    assert call.args[3] is None


@pytest.mark.parametrize("level", LEVELS)
def test_other_dtypes_stay_with_the_library(level: str) -> None:
    result, gm = check(F.linear, torch.randn(3, K), torch.randn(N, K), level=level)
    assert (result.num_matches, result.declined) == (0, [])
    assert count_ops(gm)["aten.mm"] == 1


@pytest.mark.parametrize("level", LEVELS)
def test_a_weight_that_is_cast_is_declined(level: str) -> None:
    def run(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        return F.linear(x, w.to(BF16))

    result, _ = check(run, torch.randn(3, K).to(BF16), torch.randn(N, K), level=level)
    assert result.num_matches == 0
    assert "cast from torch.float32 in the graph" in result.declined[0].reason


def test_products_of_two_activations_stay() -> None:
    def run(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return x.relu() @ y.relu().t()

    result, _ = check(run, torch.randn(3, K).to(BF16), torch.randn(N, K).to(BF16))
    assert (result.num_matches, result.declined) == (0, [])


@pytest.mark.parametrize("level", LEVELS)
def test_the_unmodified_model_has_no_bf16_product_left(level: str) -> None:
    config = tiny_config(num_hidden_layers=1, indexer_types=["full"], first_k_dense_replace=1)
    model = tiny_model(config, dtype=BF16)
    ids = torch.randint(0, config.vocab_size, (1, 12))
    output, captured = capture(
        model,
        ids,
        level=level,
        passes=make_passes(PassOptions()),
        dynamo_stage=mark_indexer_topk,
        use_cache=False,
    )
    counts = {name: r.num_matches for name, r in captured.results.items()}
    # kv_b, o_proj, down_proj and lm_head are left by merge_linears.
    assert counts == {
        "indexer_topk": 1,
        "indexer_prologue": 1,
        "sparse_mla": 0,  # the mask was not read
        "merge_linears": 3,
        "bf16_linear": 4,
        "moe_layer": 0,
        # the four of the layer (kv_a's without a cache), and the last one
        "rms_norm_linear": 5,
    }
    assert count_ops(captured.after)["aten.mm"] == 0
    assert float((output.logits - model(ids, use_cache=False).logits).abs().max()) < 0.1


def test_a_disabled_pass_is_not_made() -> None:
    names = [p.name for p in make_passes(PassOptions(disable=frozenset(["merge_linears", "mask"])))]
    others = ["indexer_topk", "indexer_prologue", "sparse_mla", "bf16_linear", "moe_layer"]
    assert names == [*others, "rms_norm_linear"]


def test_an_unknown_tier_is_an_error_that_names_the_known_ones() -> None:
    with pytest.raises(ValueError, match="'auto', 'fp8', 'bf16', 'fp32'"):
        PassOptions(indexer_dtype="fp4")
