"""Routers and experts: which calls become one op, which do not and why, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from transformers.activations import ACT2FN
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaMoE

from glm_compile.fx_passes.base import PassResult
from glm_compile.fx_passes.moe_experts import moe_experts
from glm_compile.fx_passes.moe_router import moe_router
from tests.fx_passes.dynamo_graphs import calls
from tests.tiny_models import randomize, tiny_config

EXPERTS = torch.ops.glm.moe_experts.default
ROUTER = torch.ops.glm.moe_router.default


class Rewriter:
    """Backend that runs both passes, keeps what they say, and runs the graph as it is."""

    def __init__(self) -> None:
        self.routers: list[PassResult] = []
        self.experts: list[PassResult] = []
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph_module: fx.GraphModule, _inputs: list[Any]) -> Any:
        self.routers.append(moe_router(graph_module))
        self.experts.append(moe_experts(graph_module))
        graph_module.graph.lint()
        self.graphs.append(graph_module)
        return graph_module.forward

    @property
    def counts(self) -> tuple[int, int]:
        return self.routers[-1].num_matches, self.experts[-1].num_matches

    @property
    def reasons(self) -> list[str]:
        results = (self.routers[-1], self.experts[-1])
        return [declined.reason for result in results for declined in result.declined]


class Model(torch.nn.Module):
    """One MoE block under the name that it has in a model."""

    def __init__(self, implementation: str = "grouped_mm", **overrides: Any) -> None:
        super().__init__()
        config = tiny_config(hidden_size=64, moe_intermediate_size=32, **overrides)
        config._experts_implementation = implementation
        self.mlp = GlmMoeDsaMoE(config)
        randomize(self, 0.2)
        self.eval().requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(x)


def run(
    model: torch.nn.Module,
    *,
    dtype: torch.dtype = torch.float32,
    shape: tuple[int, ...] = (2, 5),
    dynamic: bool | None = None,
) -> Rewriter:
    """Compile, and compare with the eager model."""
    rewriter = Rewriter()
    x = torch.randn(*shape, 64).to(dtype)
    expected = model(x)
    found = torch.compile(model, backend=rewriter, fullgraph=True, dynamic=dynamic)(x)
    tolerance = {torch.float32: 1e-5, torch.bfloat16: 0.05, torch.float16: 0.01}.get(dtype)
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
    return rewriter


def in_dtype(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """As from_pretrained does: the correction bias stays in float32."""
    bias = model.mlp.gate.e_score_correction_bias
    model.to(dtype)
    model.mlp.gate.e_score_correction_bias = bias
    return model


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 1), (2, 5)])
def test_both_become_one_op(
    implementation: str, dtype: torch.dtype, shape: tuple[int, ...]
) -> None:
    model = in_dtype(Model(implementation), dtype)
    rewriter = run(model, dtype=dtype, shape=shape)
    assert rewriter.counts == (1, 1) and rewriter.reasons == []
    assert rewriter.routers[0].matched == ["mlp.gate"]
    assert rewriter.experts[0].matched == ["mlp.experts"]
    graph = rewriter.graphs[0]
    (router,), (experts,) = calls(graph, ROUTER), calls(graph, EXPERTS)
    assert router.args[3:] == (2, True, 2.5, "")
    assert experts.meta["example_value"].shape == (shape[0] * shape[1], 64)
    assert {node.args[0] for node in experts.args[1:3]} == {router}
    for node in (router, experts):
        assert "GlmMoeDsaMoE" in str(node.meta["nn_module_stack"])
    left = {str(node.target) for node in graph.graph.nodes}
    for name in ("sort", "topk", "histc", "grouped_mm", "bmm", "scatter_", "setitem", "sigmoid"):
        assert not any(name in target for target in left), (name, left)


@pytest.mark.parametrize("implementation", ["grouped_mm", "batched_mm"])
def test_any_number_of_tokens_is_one_graph(implementation: str) -> None:
    model, rewriter = Model(implementation), Rewriter()
    compiled = torch.compile(model, backend=rewriter, fullgraph=True, dynamic=True)
    for length in (5, 9, 33):
        x = torch.randn(2, length, 64)
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    assert len(rewriter.graphs) == 1 and rewriter.counts == (1, 1)


def test_a_changed_scaling_factor_compiles_again() -> None:
    model, rewriter = Model(), Rewriter()
    compiled = torch.compile(model, backend=rewriter, fullgraph=True, dynamic=True)
    x = torch.randn(2, 5, 64)
    for factor in (2.5, 1.25):
        model.mlp.gate.routed_scaling_factor = factor
        torch.testing.assert_close(compiled(x), model(x), rtol=1e-5, atol=1e-5)
    factors = [calls(graph, ROUTER)[0].args[5] for graph in rewriter.graphs]
    assert factors == [2.5, 1.25]


def test_weights_need_not_be_normalized() -> None:
    rewriter = run(Model(norm_topk_prob=False, num_experts_per_tok=1, routed_scaling_factor=1.0))
    assert rewriter.counts == (1, 1)
    assert calls(rewriter.graphs[0], ROUTER)[0].args[3:] == (1, False, 1.0, "")


def test_a_default_device_changes_nothing() -> None:
    torch.set_default_device("cpu")
    try:
        assert run(Model()).counts == (1, 1)
    finally:
        torch.set_default_device(None)


def hook_experts(model: Model) -> None:
    model.mlp.experts.register_forward_hook(lambda _m, _i, output: output * 2)


def hook_experts_ahead(model: Model) -> None:
    model.mlp.experts.register_forward_pre_hook(lambda _m, inputs: (inputs[0] + 1, *inputs[1:]))


def other_activation(model: Model) -> None:
    model.mlp.experts.act_fn = ACT2FN["gelu"]


def hook_activation(model: Model) -> None:
    model.mlp.experts.act_fn.register_forward_hook(lambda _m, _i, output: output.clamp(max=1))


def expert_parallel(model: Model) -> None:
    model.mlp.experts._is_expert_parallel = True


def other_gate(model: Model) -> None:
    def swapped(gate_up_out: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up_out.chunk(2, dim=-1)
        return model.mlp.experts.act_fn(up) * gate

    model.mlp.experts._apply_gate = swapped


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_experts, r"own experts: mul follows \(.*\). Hooks and adapters"),
        (hook_experts_ahead, r"expected reshape\(weights, _\), found add\("),
        (other_activation, r"expected silu\(gate\), found gelu\("),
        (hook_activation, r"expected mul\(activation, up\), found clamp\("),
        (expert_parallel, r"expected transpose\(gate_up, -2, -1\), found "),
        (other_gate, r"expected silu\(gate\), found silu\("),
    ],
)
def test_other_experts_are_declined_with_the_difference(
    change: Callable[[Model], None], reason: str
) -> None:
    model = Model()
    change(model)
    rewriter = run(model)
    assert rewriter.counts == (1, 0)
    (declined,) = rewriter.experts[0].declined
    assert declined.where == "mlp.experts"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(declined.reason)


def hook_router(model: Model) -> None:
    model.mlp.gate.register_forward_hook(lambda _m, _i, outputs: (outputs[0], outputs[1] * 2, outputs[2]))  # fmt: skip  # noqa: E501


def several_groups(model: Model) -> None:
    model.mlp.gate.num_group, model.mlp.gate.topk_group = 2, 1


class ReadsLogits(torch.nn.Module):
    """A router's logits are read as well, as a loss over the experts' load does."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.mlp = model.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        logits, weights, ids = self.mlp.gate(x)
        return self.mlp.experts(x.view(-1, 64), ids, weights) + logits.sum()


class Twice(torch.nn.Module):
    """One block, called twice in a graph, as draft steps do."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.mlp = model.mlp

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp(self.mlp(x))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_router, r"own router: mul follows"),
        (several_groups, "n_group=2, topk_group=1: experts in several groups"),
    ],
)
def test_other_routers_are_declined_with_the_difference(
    change: Callable[[Model], None], reason: str
) -> None:
    model = Model()
    change(model)
    rewriter = run(model)
    assert rewriter.counts == (0, 1)
    (declined,) = rewriter.routers[0].declined
    assert declined.where == "mlp.gate"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(declined.reason)


def test_logits_that_are_read_elsewhere_keep_the_router() -> None:
    rewriter = run(ReadsLogits(Model()))
    assert rewriter.counts == (0, 1)
    assert "computed within the router, is read outside of it" in rewriter.reasons[0]


def test_each_call_of_a_module_is_replaced() -> None:
    assert run(Twice(Model())).counts == (2, 2)


def test_a_subclass_is_no_candidate() -> None:
    model = Model()
    parent = type(model.mlp.experts)

    class Experts(parent):  # type: ignore[misc, valid-type]
        pass

    model.mlp.experts.__class__ = Experts
    rewriter = run(model)
    assert rewriter.counts == (1, 0) and rewriter.reasons == []


def test_float64_is_left_alone() -> None:
    model, rewriter = Model("batched_mm").double(), Rewriter()
    x = torch.randn(1, 5, 64, dtype=torch.float64)
    compiled = torch.compile(model, backend=rewriter, fullgraph=True)
    torch.testing.assert_close(compiled(x), model(x))
    assert rewriter.counts == (0, 0)
    assert "float32, float16 or bfloat16, found torch.float64" in rewriter.reasons[0]
    assert "one dtype of float32, float16 and bfloat16, found" in rewriter.reasons[1]


def test_autocast_is_declined() -> None:
    """It computes the router's logits and the experts' products in bf16; the ops would not."""
    model, rewriter = Model("batched_mm"), Rewriter()
    x = torch.randn(2, 5, 64)
    compiled = torch.compile(model, backend=rewriter, fullgraph=True)
    with torch.autocast("cpu", torch.bfloat16):
        found, expected = compiled(x), model(x)
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=0.02, atol=0.02)
    assert rewriter.counts == (0, 0)
    assert all("is autocast on?" in reason for reason in rewriter.reasons)
