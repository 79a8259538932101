"""rms_norm_linear: a norm goes into the linears behind it; near misses stay as they are.

Shape legend: M rows, K in features, N out features, R width of the normed value.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from glm_compile.fx_passes.base import PassOptions
from glm_compile.fx_passes.bf16_linear import Bf16Linear
from glm_compile.fx_passes.merge_linears import MergeLinears
from glm_compile.fx_passes.rms_norm_linear import RmsNormLinear
from tests.fx_passes.aten_graphs import LEVELS, count_ops, graph_text
from tests.fx_passes.tiny_indexer import trace

pytestmark = pytest.mark.newest_transformers

K, R, N = 16, 24, 12
EPS = 1e-3
BF16 = torch.bfloat16
OP = "glm.rms_norm_linear"


def norm(x: torch.Tensor, weight: torch.Tensor, eps: float = EPS) -> torch.Tensor:
    """GlmMoeDsaRMSNorm.forward."""
    x_fp32 = x.to(torch.float32)
    variance = x_fp32.pow(2).mean(-1, keepdim=True)
    x_fp32 = x_fp32 * torch.rsqrt(variance + eps)
    return weight * x_fp32.to(x.dtype)


def norm_by_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """The square as a product, the operands the other way round."""
    x_fp32 = x.float()
    inverse = torch.rsqrt(EPS + (x_fp32 * x_fp32).mean(-1, keepdim=True))
    return (inverse * x_fp32).to(x.dtype) * weight


def norm_rounded_once(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x_fp32 = x.float()
    inverse = torch.rsqrt(x_fp32.pow(2).mean(-1, keepdim=True) + EPS)
    return (weight.float() * (x_fp32 * inverse)).to(x.dtype)


def norm_over_rows(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    x_fp32 = x.float()
    inverse = torch.rsqrt(x_fp32.pow(2).mean(-2, keepdim=True) + EPS)
    return weight * (x_fp32 * inverse).to(x.dtype)


def inputs(dtype: torch.dtype = BF16, batch: int = 2, tokens: int = 3) -> list[torch.Tensor]:
    """x, two linears that read it, the norm's weight, two linears that read the normed value."""
    shapes = [(batch, tokens, K), (R, K), (5, K), (R,), (N, R), (N + 2, R)]
    return [torch.randn(shape).to(dtype) for shape in shapes]


def passes(disable: tuple[str, ...] = ()) -> list[Any]:
    options = PassOptions()
    made = (MergeLinears(options), Bf16Linear(options), RmsNormLinear(options))
    return [p for p in made if p.name not in disable]


def apply(gm: fx.GraphModule, disable: tuple[str, ...] = ()) -> Any:
    *_, result = [p(gm) for p in passes(disable)]
    gm.graph.lint()
    return result


def attention(*values: torch.Tensor, norm: Callable[..., torch.Tensor] = norm) -> Any:
    """The projections of an attention with an indexer."""
    x, q_a, kv_a, weight, q_b, wq_b = values
    q_resid = norm(F.linear(x, q_a), weight)
    return F.linear(q_resid, q_b), F.linear(q_resid, wq_b), F.linear(x, kv_a)


def check(
    fn: Callable[..., Any],
    level: str,
    disable: tuple[str, ...] = (),
    num_ops: int = 1,
    **shape: int,
) -> fx.GraphModule:
    values = inputs(**shape)
    gm = trace(fn, *values, level=level)
    before = gm(*values)
    result = apply(gm, disable)
    assert (result.num_matches, result.declined) == (1, [])
    ops = count_ops(gm)
    assert ops[OP] == num_ops
    assert ops["aten.rsqrt"] == 0
    for new, old in zip(gm(*values), before):
        torch.testing.assert_close(new, old, atol=5e-2, rtol=2e-2)
    text = graph_text(gm)
    assert all(p(gm).num_matches == 0 for p in passes(disable))
    assert graph_text(gm) == text
    return gm


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("spelling", [norm, norm_by_product])
@pytest.mark.parametrize(("batch", "tokens"), [(2, 3), (1, 1), (1, 48)])
def test_norm_and_merged_linear_become_one(
    spelling: Callable[..., torch.Tensor], batch: int, tokens: int, level: str
) -> None:
    gm = check(lambda *a: attention(*a, norm=spelling), level, batch=batch, tokens=tokens)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.rms_norm_linear.default)
    x, weight, weights, bias, eps, *_ = call.args
    assert x.meta["val"].shape == (batch, tokens, R)
    # A slice of the merged product, not a copy of it.
    if tokens > 1:
        assert x.meta["val"].stride()[-2:] == (R + 5, 1)
    names = [n.name for n in gm.graph.find_nodes(op="placeholder")]
    assert [n.name for n in (weight, *weights)] == names[3:6]
    assert bias is None and eps == pytest.approx(EPS)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("disable", "num_ops"),
    [(("merge_linears",), 2), (("bf16_linear",), 1), (("merge_linears", "bf16_linear"), 2)],
)
def test_each_reader_norms_for_itself_where_other_passes_are_off(
    disable: tuple[str, ...], num_ops: int, level: str
) -> None:
    check(attention, level, disable, num_ops)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("disable", [(), ("bf16_linear",)])
def test_a_lone_reader_keeps_its_bias(disable: tuple[str, ...], level: str) -> None:
    def shared_layer(*values: torch.Tensor) -> Any:
        x, q_a, kv_a, weight, q_b, _ = values
        bias = values[3][:N]
        return F.linear(norm(F.linear(x, q_a), weight), q_b, bias), F.linear(x, kv_a)

    gm = check(shared_layer, level, disable)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.rms_norm_linear.default)
    assert call.args[3] is not None


def norm_of_sum(*values: torch.Tensor) -> Any:
    """A norm of a sum that is the residual too, as post_attention_layernorm's."""
    x, q_a, _, weight, q_b, _ = values
    residual = F.linear(x, q_a) + x.repeat(1, 1, 2)[..., :R]
    return F.linear(norm(residual, weight), q_b), residual


def norm_of_residual(*values: torch.Tensor) -> Any:
    """An MTP layer's input_layernorm behind eh_proj."""
    x, q_a, _, weight, q_b, _ = values
    residual = F.linear(x, q_a)
    return F.linear(norm(residual, weight), q_b), residual + 1


def norm_of_input(*values: torch.Tensor) -> Any:
    """A layer's input_layernorm."""
    x, q_a, kv_a, weight, _, _ = values
    normed = norm(x, weight[:K])
    return F.linear(normed, q_a), F.linear(normed, kv_a), x


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("fn", [norm_of_sum, norm_of_residual, norm_of_input])
def test_what_is_normed_may_be_read_by_others(fn: Callable[..., Any], level: str) -> None:
    check(fn, level)


def mlp_inputs() -> list[torch.Tensor]:
    """x, the norm's weight, gate, up, down."""
    shapes = [(2, 3, K), (K,), (N, K), (N, K), (K, N)]
    return [torch.randn(shape).to(BF16) for shape in shapes]


def dense_mlp(x: torch.Tensor, weight: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
    """GlmMoeDsaMLP.forward behind its norm, and the residual."""
    gate, up, down = weights
    normed = norm(x, weight)
    return x + F.linear(F.silu(F.linear(normed, gate)) * F.linear(normed, up), down)


@pytest.mark.parametrize("level", LEVELS)
def test_a_dense_mlp_is_two_ops(level: str) -> None:
    values = mlp_inputs()
    gm = trace(dense_mlp, *values, level=level)
    before = gm(*values)
    assert apply(gm).num_matches == 1
    ops = count_ops(gm)
    assert (ops[OP], ops["glm.bf16_linear"]) == (1, 1)
    assert not any(
        ops[f"aten.{op}"] for op in ("silu", "exp", "div.Tensor", "mul.Tensor", "add.Tensor")
    )
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.rms_norm_linear.default)
    assert call.args[7] is True and call.meta["val"].shape == (2, 3, N)
    torch.testing.assert_close(gm(*values), before, atol=5e-2, rtol=2e-2)
    text = graph_text(gm)
    assert all(p(gm).num_matches == 0 for p in passes())
    assert graph_text(gm) == text


def gate_read_twice(x: torch.Tensor, weight: torch.Tensor, *weights: torch.Tensor) -> Any:
    gate, up, _ = weights
    normed = norm(x, weight)
    product = F.linear(normed, gate)
    return F.silu(product) * F.linear(normed, up), product


def up_through_silu(x: torch.Tensor, weight: torch.Tensor, *weights: torch.Tensor) -> Any:
    gate, up, _ = weights
    normed = norm(x, weight)
    # Merged in the order of use: what goes through silu comes second.
    product = F.linear(normed, up)
    return product * F.silu(F.linear(normed, gate))


def other_activation(x: torch.Tensor, weight: torch.Tensor, *weights: torch.Tensor) -> Any:
    gate, up, _ = weights
    normed = norm(x, weight)
    return F.gelu(F.linear(normed, gate)) * F.linear(normed, up)


def silu_in_fp32(x: torch.Tensor, weight: torch.Tensor, *weights: torch.Tensor) -> Any:
    gate, up, _ = weights
    normed = norm(x, weight)
    return F.silu(F.linear(normed, gate).float()) * F.linear(normed, up).float()


def changed_up(x: torch.Tensor, weight: torch.Tensor, *weights: torch.Tensor) -> Any:
    """As by a hook."""
    gate, up, _ = weights
    normed = norm(x, weight)
    return F.silu(F.linear(normed, gate)) * (F.linear(normed, up) * 2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fn", "reason"),
    [
        (gate_read_twice, "gates or ups are also read by output"),
        (up_through_silu, "first half is expected to be the gates"),
        (other_activation, "silu(gate) * up, all in one dtype, is expected"),
        (silu_in_fp32, "silu(gate) * up"),
        (changed_up, "between the product and silu(gate) * up"),
    ],
)
def test_products_that_are_not_gates_and_ups_alone_stay_apart_and_say_why(
    fn: Callable[..., Any], reason: str, level: str
) -> None:
    values = mlp_inputs()
    gm = trace(fn, *values, level=level)
    before = gm(*values)
    result = apply(gm)
    assert result.num_matches == 1
    (declined,) = result.declined
    assert "what gates and ups make stays apart" in declined.reason
    assert reason in declined.reason
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.rms_norm_linear.default)
    assert len(call.args) == 7 and call.meta["val"].shape == (2, 3, 2 * N)
    torch.testing.assert_close(gm(*values), before, atol=5e-2, rtol=2e-2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (lambda *a: attention(*a, norm=norm_rounded_once), BF16),
        (lambda *a: attention(*a, norm=norm_over_rows), BF16),
        (attention, torch.float32),
    ],
)
def test_what_is_no_norm_before_bf16_linears_stays(
    fn: Callable[..., Any], dtype: torch.dtype, level: str
) -> None:
    gm = trace(fn, *inputs(dtype), level=level)
    *others, last = passes()
    for other in others:
        other(gm)
    text = graph_text(gm)
    result = last(gm)
    assert (result.num_matches, result.declined) == (0, [])
    assert graph_text(gm) == text


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("reader", "name"),
    [
        (lambda y, w: y.sum(), "sum"),
        (lambda y, w: y.view(-1, R).exp(), "exp"),
        (lambda y, w: F.linear(y.float(), w.float()), ""),
    ],
)
def test_a_normed_value_with_another_reader_is_declined(
    reader: Callable[..., torch.Tensor], name: str, level: str
) -> None:
    def fn(*values: torch.Tensor) -> Any:
        x, q_a, _, weight, q_b, wq_b = values
        normed = norm(F.linear(x, q_a), weight)
        return F.linear(normed, q_b), reader(normed, wq_b)

    gm = trace(fn, *inputs(), level=level)
    result = apply(gm)
    assert result.num_matches == 0
    assert "the normed value is also read by" in result.declined[0].reason
    assert name in result.declined[0].reason
    assert count_ops(gm)[OP] == 0


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_that_the_model_has_read_by_others_is_no_candidate(level: str) -> None:
    def last_norm(*values: torch.Tensor) -> Any:
        x, q_a, _, weight, _, _ = values
        normed = norm(x, weight[:K])
        return F.linear(normed, q_a), normed

    result = apply(trace(last_norm, *inputs(), level=level))
    assert (result.num_matches, result.declined) == (0, [])


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_that_something_else_reads_says_so(level: str) -> None:
    def hooked(*values: torch.Tensor) -> Any:
        x, q_a, _, weight, _, _ = values
        normed = norm(x, weight[:K])
        return F.linear(normed, q_a), normed.float().softmax(-1)

    result = apply(trace(hooked, *inputs(), level=level))
    assert result.num_matches == 0
    (declined,) = result.declined
    assert "the normed value is also read by" in declined.reason


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_a_norm_of_what_lies_in_memory_is_an_op_of_its_own(dtype: torch.dtype, level: str) -> None:
    def fn(*values: torch.Tensor) -> Any:
        x, q_a, kv_a, weight, _, _ = values
        hidden = F.linear(x, q_a) + x.repeat(1, 1, 2)[..., :R]
        of_input, of_sum = norm(x, weight[:K]), norm(hidden, weight)
        of_other = norm(x.exp(), weight[:K])
        return (
            of_input.float().softmax(-1),
            of_sum,
            of_other,
            F.linear(hidden, kv_a.repeat(1, 2)[:, :R]),
        )

    values = inputs(dtype)
    gm = trace(fn, *values, level=level)
    before = gm(*values)
    result = apply(gm)
    assert (result.num_matches, result.declined) == (0, [])
    ops = count_ops(gm)
    # A sum that the product takes in is stored by it; what the inner compiler makes is not.
    is_bf16 = dtype == BF16
    assert (ops["glm.rms_norm"], ops["aten.rsqrt"]) == (2 * is_bf16, 1 + 2 * (not is_bf16))
    for new, old in zip(gm(*values), before):
        torch.testing.assert_close(new, old, atol=5e-2, rtol=2e-2)
    text = graph_text(gm)
    assert apply(gm).num_matches == 0 and graph_text(gm) == text
