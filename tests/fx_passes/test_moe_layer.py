"""moe_layer: what the passes before left of an MoE layer becomes one op; near misses stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from transformers.activations import ACT2FN
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from glm_compile.fx_passes import make_passes
from glm_compile.fx_passes.base import PassOptions
from glm_compile.fx_passes.moe_experts import moe_experts
from glm_compile.fx_passes.moe_router import moe_router
from tests.fx_passes.aten_graphs import LEVELS, Capture, Captured, count_ops, graph_text
from tests.fx_passes.test_moe_experts import Model, in_dtype

pytestmark = pytest.mark.newest_transformers

BF16 = torch.bfloat16
OP = "glm.moe_layer"
PARTS = (
    "glm.moe_router",
    "glm.moe_experts",
    "glm.merged_linear",
    "glm.bf16_linear",
    "aten.add.Tensor",
)


class Layer(torch.nn.Module):
    """A block as a decoder layer has it: behind a norm, with a residual."""

    def __init__(self, model: Model, has_residual: bool = True) -> None:
        super().__init__()
        self.mlp = model.mlp
        self.norm = GlmMoeDsaRMSNorm(64, eps=1e-3)
        self.norm.weight.data.uniform_(0.5, 1.5)
        self.norm.to(model.mlp.gate.weight.dtype).requires_grad_(False)
        self.has_residual = has_residual

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.mlp(self.norm(hidden))
        return hidden + output if self.has_residual else output * 2


def run(
    layer: torch.nn.Module,
    *,
    level: str = "inductor",
    shape: tuple[int, int] = (2, 3),
    dtype: torch.dtype = BF16,
    dynamic: bool | None = None,
    options: PassOptions | None = None,
) -> Captured:
    """Compile, and compare with the eager model."""
    options = options or PassOptions()

    def rewrite(graph_module: fx.GraphModule) -> None:
        if "moe_router" not in options.disable:
            moe_router(graph_module)
        moe_experts(graph_module)

    capture = Capture(level=level, passes=make_passes(options), dynamo_stage=rewrite)
    x = torch.randn(*shape, 64).to(dtype)
    expected = layer(x)
    found = torch.compile(layer, backend=capture, fullgraph=True, dynamic=dynamic)(x)
    torch.testing.assert_close(found, expected, rtol=0.05, atol=0.05)
    (captured,) = capture.graphs
    return captured


def make(dtype: torch.dtype = BF16, **overrides: Any) -> Layer:
    return Layer(in_dtype(Model(**overrides), dtype))


def result_of(captured: Captured) -> tuple[int, list[str]]:
    result = captured.results["moe_layer"]
    return result.num_matches, [declined.reason for declined in result.declined]


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (8, 1), (1, 8)])
def test_a_layer_becomes_one_op(level: str, shape: tuple[int, int]) -> None:
    captured = run(make(), level=level, shape=shape)
    assert result_of(captured) == (1, [])
    graph = captured.after
    ops = count_ops(graph)
    assert ops[OP] == 1 and not any(ops[part] for part in PARTS)
    assert ops["aten.cat"] == ops["aten.clone"] == ops["aten.mm"] == 0
    (call,) = graph.graph.find_nodes(op="call_function", target=torch.ops.glm.moe_layer.default)
    x, weight, bias, top_k, normalize, scale, *weights, eps, residual, backend = call.args
    assert (top_k, normalize, scale, backend) == (2, True, 2.5, "")
    assert eps == pytest.approx(1e-3) and ops["aten.rsqrt"] == 0
    # Weights are the graph's inputs, as they are.
    assert all(node.op == "placeholder" for node in (weight, bias, *weights))
    assert [tuple(w.meta["val"].shape) for w in weights[2:]] == [
        (32, 64),
        (32, 64),
        (64, 32),
        (64,),
    ]
    assert x.meta["val"].shape == residual.meta["val"].shape == (shape[0] * shape[1], 64)
    # Others have matched what they would without it.
    for name, number in (("merge_linears", 1), ("bf16_linear", 1)):
        assert captured.results[name].num_matches == number
    text = graph_text(graph)
    assert all(p(graph).num_matches == 0 for p in make_passes(PassOptions()))
    assert graph_text(graph) == text


@pytest.mark.parametrize("level", LEVELS)
def test_a_residual_is_optional(level: str) -> None:
    captured = run(Layer(in_dtype(Model(), BF16), has_residual=False), level=level)
    assert result_of(captured) == (1, [])
    (call,) = captured.after.graph.find_nodes(
        op="call_function", target=torch.ops.glm.moe_layer.default
    )
    assert call.args[-2] is None


class ReadsSum(Layer):
    """The MLP's output is read twice."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.mlp(self.norm(hidden))
        return (hidden + output) * output


class WideResidual(Layer):
    """What is added behind is fp32, or has another shape."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return (hidden[:, :1] + self.mlp(self.norm(hidden))).float() + hidden.float()


class FlatResidual(Layer):
    """The sum goes on in another shape."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output = self.mlp(self.norm(hidden))
        return hidden.reshape(-1, 8, 8) + output.reshape(-1, 8, 8)


class ReadsNormed(Layer):
    """The normed value is read elsewhere, too."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        normed = self.norm(hidden)
        return self.mlp(normed) * normed


class NoNorm(Layer):
    """What the block reads is made by something else."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + self.mlp(hidden * 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("kind", [ReadsNormed, NoNorm])
def test_a_norm_is_optional(kind: type[Layer], level: str) -> None:
    captured = run(kind(in_dtype(Model(), BF16)), level=level)
    assert result_of(captured) == (1, [])
    (call,) = captured.after.graph.find_nodes(
        op="call_function", target=torch.ops.glm.moe_layer.default
    )
    assert call.args[-4:-2] == (None, 0.0)


@pytest.mark.parametrize("kind", [ReadsSum, WideResidual, FlatResidual])
def test_other_additions_stay(kind: type[Layer]) -> None:
    captured = run(kind(in_dtype(Model(), BF16)))
    assert result_of(captured) == (1, [])
    ops = count_ops(captured.after)
    assert ops[OP] == 1 and ops["aten.add.Tensor"] >= 1


def test_several_layers_in_a_graph() -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = make(), make()

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(hidden) / 2)

    captured = run(Two())
    assert result_of(captured) == (2, [])
    assert count_ops(captured.after)[OP] == 2


def test_many_tokens_and_other_dtypes_stay_as_they_are() -> None:
    for layer, keywords in (
        (make(), {"shape": (3, 3)}),
        (make(torch.float32), {"dtype": torch.float32}),
        (make(torch.float16), {"dtype": torch.float16}),
    ):
        torch._dynamo.reset()
        captured = run(layer, **keywords)
        assert result_of(captured) == (0, [])
        assert count_ops(captured.after)["glm.moe_experts"] == 1


@pytest.mark.parametrize("level", LEVELS)
def test_any_number_of_tokens_may_be_few(level: str) -> None:
    layer = make()
    captured = run(layer, level=level, dynamic=True, shape=(2, 5))
    assert result_of(captured) == (1, [])
    (call,) = captured.after.graph.find_nodes(
        op="call_function", target=torch.ops.glm.moe_layer.default
    )
    # The residual comes along, and nothing of the old layer is left, nor sizes nobody reads.
    assert call.args[-2] is not None
    ops = count_ops(captured.after)
    assert not any(ops[part] for part in PARTS) and ops["aten.silu"] == ops["aten.div.Tensor"] == 0
    nodes = captured.after.graph.nodes
    assert all(node.users for node in nodes if node.op == "call_function")


@pytest.mark.parametrize("dynamic", [None, True])
def test_a_shared_expert_may_have_no_features(dynamic: bool | None) -> None:
    captured = run(make(n_shared_experts=0), dynamic=dynamic)
    assert count_ops(captured.after)["glm.merged_linear"] <= 1
    for name, number in (("merge_linears", 1), ("bf16_linear", 1)):
        assert captured.results[name].num_matches == number


def test_it_is_disabled_with_the_experts() -> None:
    options = PassOptions(disable=frozenset(("moe_experts",)))
    assert "moe_layer" not in {p.name for p in make_passes(options)}
    assert "moe_layer" in {p.name for p in make_passes(PassOptions())}


def hook_shared(layer: Layer) -> None:
    layer.mlp.shared_experts.register_forward_hook(lambda _m, _i, output: output * 2)


def hook_gate(layer: Layer) -> None:
    layer.mlp.shared_experts.gate_proj.register_forward_hook(lambda _m, _i, out: out + 1)


def hook_input(layer: Layer) -> None:
    layer.mlp.shared_experts.register_forward_pre_hook(lambda _m, inputs: (inputs[0] + 1,))


def other_activation(layer: Layer) -> None:
    layer.mlp.shared_experts.act_fn = ACT2FN["gelu"]


def hook_experts(layer: Layer) -> None:
    layer.mlp.experts.register_forward_hook(lambda _m, _i, output: output.relu())


def adapt_down(layer: Layer) -> None:
    down = layer.mlp.shared_experts.down_proj

    class Adapted(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.base = down
            self.lora_a = torch.nn.Linear(32, 4, bias=False, dtype=BF16)
            self.lora_b = torch.nn.Linear(4, 64, bias=False, dtype=BF16)
            self.requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.base(x) + self.lora_b(self.lora_a(x))

    layer.mlp.shared_experts.down_proj = Adapted()


def swap(layer: Layer) -> None:
    shared = layer.mlp.shared_experts
    shared.forward = lambda x: shared.down_proj(
        shared.gate_proj(x) * shared.act_fn(shared.up_proj(x))
    )


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (hook_shared, "a linear is expected beside the experts, found mul"),
        (hook_gate, "gate and up are not one linear"),
        (hook_input, "the shared expert reads other tokens than the router"),
        (other_activation, r"silu\(gate\) \* up is expected, found "),
        (adapt_down, "adds something to its product"),
        (swap, "silu is expected of the gate, the first half"),
    ],
)
def test_other_shared_experts_are_declined_with_the_difference(
    change: Callable[[Layer], None], reason: str, level: str
) -> None:
    layer = make()
    change(layer)
    number, reasons = result_of(run(layer, level=level))
    assert number == 0
    with pytest.raises(AssertionError, match="the shared expert stays apart: .*" + reason):
        raise AssertionError(*reasons)


def test_what_is_no_op_of_ours_is_no_candidate() -> None:
    layer = make()
    hook_experts(layer)
    assert result_of(run(layer)) == (0, [])


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"disable": frozenset(("moe_router",))}, "is moe_router disabled"),
        ({"disable": frozenset(("merge_linears",))}, "is merge_linears disabled"),
        ({"disable": frozenset(("bf16_linear",))}, "a linear is expected beside the experts"),
        ({"deterministic": True}, "deterministic linears"),
    ],
)
def test_parts_that_other_passes_left_are_named(options: dict[str, Any], reason: str) -> None:
    number, reasons = result_of(run(make(), options=PassOptions(**options)))
    assert number == 0 and len(reasons) == 1 and reason in reasons[0]
