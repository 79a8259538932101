"""rms_norm_linear: a norm between linears goes into the second; near misses stay as they are.

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
    """A norm of a sum, as input_layernorm's."""
    x, q_a, _, weight, q_b, _ = values
    return F.linear(norm(F.linear(x, q_a) + weight, weight), q_b), None


def norm_of_residual(*values: torch.Tensor) -> Any:
    """An MTP layer's input_layernorm behind eh_proj."""
    x, q_a, _, weight, q_b, _ = values
    residual = F.linear(x, q_a)
    return F.linear(norm(residual, weight), q_b), residual + 1


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fn", "dtype"),
    [
        (norm_of_sum, BF16),
        (norm_of_residual, BF16),
        (lambda *a: attention(*a, norm=norm_rounded_once), BF16),
        (lambda *a: attention(*a, norm=norm_over_rows), BF16),
        (attention, torch.float32),
    ],
)
def test_what_is_no_norm_between_bf16_linears_is_norm_of_sum(
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
