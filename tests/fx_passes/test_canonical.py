"""The canonical form by itself: a test per spelling, a reason per near miss."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from glm_compile.fx_passes import canonical, index_scores, layouts, rotations
from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.canonical import peel
from glm_compile.fx_passes.layouts import Axis, axes, names, regroup
from tests.fx_passes.aten_graphs import LEVELS
from tests.fx_passes.tiny_indexer import trace

pytestmark = pytest.mark.newest_transformers

aten = torch.ops.aten


def graph(fn: Callable, *inputs: Any, level: str = "plain") -> tuple[fx.Node, list[fx.Node]]:
    """(what `fn` returns, its inputs) as nodes."""
    gm = trace(fn, *inputs, level=level)
    graph.kept.append(gm)  # type: ignore[attr-defined]
    output = gm.graph.output_node().args[0]
    return output, gm.graph.find_nodes(op="placeholder")  # type: ignore[return-value]


graph.kept = []  # type: ignore[attr-defined]


# Views


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.view(6, 4),
        lambda x: x.reshape(6, 4),
        lambda x: aten._unsafe_view(x, [6, 4]),
        lambda x: x.unsqueeze(0),
        lambda x: x.unsqueeze(0).squeeze(0),
        lambda x: x[:, None].squeeze(),
        lambda x: x.transpose(0, 1),
        lambda x: x.permute(2, 0, 1),
        lambda x: x.transpose(0, 1).contiguous().view(-1),
        lambda x: x.unsqueeze(1).expand(2, 5, 3, 4),
        lambda x: x.clone(),
        lambda x: aten.alias(x),
        lambda x: x.flatten(0, 1),
    ],
)
def test_views_are_peeled_in_every_spelling(fn: Callable, level: str) -> None:
    out, (x,) = graph(fn, torch.randn(2, 3, 4), level=level)
    assert peel(out).source is x


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x + 1,
        lambda x: x[:, :2],
        lambda x: x.flip(0),
        lambda x: x.select(0, 1),
        lambda x: x.roll(1, 0),
        lambda x: torch.cat([x, x.neg()]),
    ],
)
def test_what_computes_or_drops_elements_is_not_peeled(fn: Callable, level: str) -> None:
    out, (x,) = graph(fn, torch.randn(2, 3, 4), level=level)
    assert peel(out).source is not x


# Casts and factors


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "fn",
    [
        lambda x: x.float(),
        lambda x: x.to(torch.float32),
        lambda x: x.type(torch.float32),
        lambda x: x.view(-1).float().view(2, 3),
    ],
)
def test_casts_are_peeled_on_request_and_recorded(fn: Callable, level: str) -> None:
    out, (x,) = graph(fn, torch.randn(2, 3).to(torch.bfloat16), level=level)
    assert peel(out).source is not x
    peeled = peel(out, casts=True)
    assert peeled.source is x
    assert peeled.casts == (torch.bfloat16, torch.float32)


def test_a_cast_there_and_back_is_recorded() -> None:
    out, (x,) = graph(lambda x: x.to(torch.bfloat16).float(), torch.randn(2, 3))
    peeled = peel(out, casts=True)
    assert peeled.source is x
    assert peeled.casts == (torch.float32, torch.bfloat16, torch.float32)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fn", "factor"),
    [
        (lambda x: x * 0.25, 0.25),
        (lambda x: 0.25 * x, 0.25),
        (lambda x: x / 4, 0.25),
        (lambda x: aten.mul.Scalar(x, 0.25), 0.25),
        (lambda x: x * torch.full((), 0.25), 0.25),
        (lambda x: x * torch.scalar_tensor(0.25), 0.25),
        (lambda x: (x * 0.5).view(-1) * 0.5, 0.25),
        (lambda x: x * 3, 3.0),
    ],
)
def test_constant_factors_are_collected(fn: Callable, factor: float, level: str) -> None:
    out, (x,) = graph(fn, torch.randn(2, 3), level=level)
    peeled = peel(out, factors=True)
    assert peeled.source is x
    assert peeled.factor == pytest.approx(factor)


def test_a_tensor_factor_is_not_a_constant() -> None:
    out, _ = graph(lambda x, y: x * y, torch.randn(2, 3), torch.randn(()))
    assert peel(out, factors=True).source is out


# Layouts


def test_axes_of_size_one_vanish() -> None:
    assert names(axes(B=1, S=6, H=16)) == ((), ("S",), ("H",))


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ((12, 16), (("B", "S"), ("H",))),
        ((2, 1, 6, 16, 1), (("B",), (), ("S",), ("H",), ())),
        ((192,), (("B", "S", "H"),)),
        ((2, 96), (("B",), ("S", "H"))),
        ((16, 12), None),
        ((2, 3, 2, 16), None),
        ((6, 2, 16), None),
    ],
)
def test_regroup_follows_whole_axes_only(shape: tuple[int, ...], expected: Any) -> None:
    layout = regroup(axes(B=2, S=6, H=16), shape)
    assert (None if layout is None else names(layout)) == expected


def test_a_transpose_then_a_view_is_told_from_a_view() -> None:
    """Equal shapes, other order: what node-by-node matching gets wrong."""
    own = axes(B=2, S=3, H=3)
    for fn, expected in (
        (lambda x: x.view(6, 3), (("B", "S"), ("H",))),
        (lambda x: x.transpose(1, 2).reshape(6, 3), (("B", "H"), ("S",))),
    ):
        out, _ = graph(fn, torch.randn(2, 3, 3))
        layout = canonical.layout_after(own, peel(out).chain)
        assert layout is not None
        assert names(layout) == expected


def test_expand_makes_axes_that_only_repeat() -> None:
    out, _ = graph(lambda x: x.unsqueeze(1).expand(2, 5, 3), torch.randn(2, 3))
    layout = canonical.layout_after(axes(B=2, D=3), peel(out).chain)
    assert layout is not None
    assert names(layout) == (("B",), ("*",), ("D",))
    assert layouts.merge_dims(layout[1], (Axis("S", 5),)) == (Axis("S", 5),)
    assert layouts.merge_dims((Axis("T", 5),), (Axis("S", 5),)) is None


# Linear


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shape", [(20,), (1, 20), (5, 20), (1, 1, 20), (2, 3, 20), (2, 3, 5, 20)])
def test_linear_is_found_with_its_input_weight_and_bias(
    shape: tuple[int, ...], bias: bool, level: str
) -> None:
    inputs = [torch.randn(shape), torch.randn(6, 20), *([torch.randn(6)] if bias else [])]
    out, nodes = graph(F.linear, *inputs, level=level)
    found = canonical.linear(peel(out).source)
    if found is None:
        # One row times a matrix is a matrix-vector product: the library's.
        assert len(shape) == 1
        return
    assert (found.x, found.weight) == (nodes[0], nodes[1])
    assert (found.bias is None) is not bias


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w: x @ w,
        lambda x, w: torch.mm(x, w.t().t()),
        lambda x, w: torch.mm(x, w.t() * 2),
        lambda x, w: torch.addmm(torch.zeros(4), x, w.t(), beta=0.5),
        lambda x, w: torch.addmm(torch.zeros(5, 4), x, w.t()),
        lambda x, w: x.t() @ x,
    ],
)
def test_what_is_no_linear(fn: Callable) -> None:
    out, _ = graph(fn, torch.randn(5, 4), torch.randn(4, 4))
    assert canonical.linear(out) is None


def test_a_linear_reads_the_cast_not_what_was_cast() -> None:
    out, (x, w) = graph(
        lambda x, w: F.linear(x.float(), w), torch.randn(2, 3, 4).bfloat16(), torch.randn(6, 4)
    )
    found = canonical.linear(peel(out).source)
    assert found is not None
    assert found.weight is w
    assert canonical.is_cast(found.x)
    assert peel(found.x, casts=True).source is x


# Norms


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("eps", [1e-6, 1e-5])
def test_layer_norm_is_found_whole_and_decomposed(
    dtype: torch.dtype, eps: float, level: str
) -> None:
    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(x, (8,), w, b, eps)

    tensors = [torch.randn(2, 3, 8), torch.randn(8), torch.randn(8)]
    out, (x, w, b) = graph(run, *(t.to(dtype) for t in tensors), level=level)
    norm = canonical.layer_norm(out)
    assert (norm.x, norm.weight, norm.bias) == (x, w, b)
    assert norm.eps == pytest.approx(eps)


@pytest.mark.parametrize(
    "fn",
    [
        lambda x, w, b: ((x - x.mean(-1, True)) * torch.rsqrt(x.var(-1, keepdim=True) + 1e-6)) * w,
        lambda x, w, b: torch.softmax(x, -1),
        lambda x, w, b: F.layer_norm(x, (3, 8)),
        lambda x, w, b: F.layer_norm(x, (8,), w),
    ],
)
@pytest.mark.parametrize("level", LEVELS)
def test_other_norms_are_refused(fn: Callable, level: str) -> None:
    out, _ = graph(fn, torch.randn(2, 3, 8), torch.randn(8), torch.randn(8), level=level)
    with pytest.raises(No):
        canonical.layer_norm(out)


@pytest.mark.parametrize("level", LEVELS)
def test_an_unbiased_variance_is_no_layer_norm(level: str) -> None:
    def run(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        var, mean = torch.var_mean(x, -1, correction=1, keepdim=True)
        return (x - mean) * torch.rsqrt(var + 1e-6) * w + b

    out, _ = graph(run, torch.randn(2, 8), torch.randn(8), torch.randn(8), level=level)
    with pytest.raises(No, match="expected LayerNorm with bias"):
        canonical.layer_norm(out)


def rms_norm(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return w * (y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


@pytest.mark.parametrize("level", LEVELS)
def test_an_rms_norm_is_called_one(level: str) -> None:
    out, _ = graph(rms_norm, torch.randn(2, 8).bfloat16(), torch.randn(8).bfloat16(), level=level)
    with pytest.raises(No, match="k_norm is an RMSNorm"):
        canonical.layer_norm(out, "k_norm")


@pytest.mark.parametrize(("size", "is_found"), [(8, True), (1, False)])
@pytest.mark.parametrize("level", LEVELS)
def test_an_rms_norm_has_a_weight_for_each_element(level: str, size: int, is_found: bool) -> None:
    x, weight = torch.randn(2, 8).bfloat16(), torch.randn(size).bfloat16()
    out, _ = graph(rms_norm, x, weight, level=level)
    assert (canonical.rms_norm(out) is not None) == is_found


# SwiGLU


def sigmoid_in_fp32(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (torch.sigmoid(y) * y).to(x.dtype)


def quotient_in_fp32(x: torch.Tensor) -> torch.Tensor:
    y = x.float()
    return (y / (1 + (-y).exp())).to(x.dtype)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("silu", [F.silu, sigmoid_in_fp32, quotient_in_fp32])
@pytest.mark.parametrize("shape", [(2, 3, 4), (6, 4)])
def test_swiglu_in_every_spelling(silu: Callable, shape: tuple[int, ...], level: str) -> None:
    inputs = [torch.randn(2, 3, 4).bfloat16() for _ in range(2)]
    for fn in (
        lambda g, u: silu(g).view(shape) * u.view(shape),
        lambda g, u: u.view(shape) * silu(g.view(shape)),
    ):
        out, (gate, up) = graph(fn, *inputs, level=level)
        assert canonical.swiglu(out) == (gate, up)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "fn",
    [
        lambda g, u: g * u,
        lambda g, u: torch.sigmoid(g) * u,
        lambda g, u: F.gelu(g) * u,
        lambda g, u: (g * torch.sigmoid(g)) * u,
        lambda g, u: (g.float() * torch.sigmoid(u.float())).to(g.dtype) * u,
        lambda g, u: (g.float() / (2 + (-g.float()).exp())).to(g.dtype) * u,
        lambda g, u: F.silu(g).view(4, 1, 4) * u.view(1, 4, 4),
        lambda g, u: F.silu(g) * u[:1],
    ],
)
def test_other_products_are_no_swiglu(fn: Callable, level: str) -> None:
    out, _ = graph(fn, *(torch.randn(4, 4).bfloat16() for _ in range(2)), level=level)
    assert canonical.swiglu(out) is None


@pytest.mark.parametrize("level", LEVELS)
def test_transposed_gates_are_no_input_of_swiglu(level: str) -> None:
    inputs = [torch.randn(4, 4).bfloat16() for _ in range(2)]
    out, (gate, up) = graph(lambda g, u: F.silu(g.t()) * u, *inputs, level=level)
    found = canonical.swiglu(out)
    assert found is not None and found[0] is not gate and found[1] is up


# Slices


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fn", "start", "step", "length"),
    [
        (lambda x: x[..., :8], 0, 1, 8),
        (lambda x: x[..., 8:], 8, 1, 8),
        (lambda x: x[..., -4:], 12, 1, 4),
        (lambda x: x[..., 1::2], 1, 2, 8),
        (lambda x: x[..., 4:12][..., 1::2], 5, 2, 4),
        (lambda x: x.split([6, 10], -1)[1], 6, 1, 10),
        (lambda x: x.split(4, -1)[2], 8, 1, 4),
        (lambda x: x.chunk(2, -1)[1][..., ::2], 8, 2, 4),
        (lambda x: x.narrow(-1, 3, 5), 3, 1, 5),
        (lambda x: x[..., 0:16], 0, 1, 16),
    ],
)
def test_slices_of_the_last_dimension_compose(
    fn: Callable, start: int, step: int, length: int, level: str
) -> None:
    out, (x,) = graph(fn, torch.randn(2, 3, 16), level=level)
    assert rotations.last_dim_slice(out) == rotations.Slice(x, start, step, length)


def test_a_slice_of_another_dimension_is_its_own_source() -> None:
    out, _ = graph(lambda x: x[:, 1:], torch.randn(2, 3, 16))
    assert rotations.last_dim_slice(out).source is out


# Stores


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("fn", "kind"),
    [
        (lambda c, k: c.index_copy(1, torch.arange(2), k), "index_copy"),
        (lambda c, k: aten.index_put(c, [None, torch.arange(2)], k), "index_copy"),
        (lambda c, k: torch.cat([c, k], dim=1), "cat"),
        (lambda c, k: torch.cat([c, k], dim=-2), "cat"),
        (lambda c, k: torch.slice_scatter(c, k, 1, 0, 2), "index_copy"),
    ],
)
def test_stores_are_found_with_what_they_store(fn: Callable, kind: str, level: str) -> None:
    out, (_, k) = graph(fn, torch.randn(1, 4, 8), torch.randn(1, 2, 8), level=level)
    store = index_scores.key_store(out)
    assert (store.kind, store.new) == (kind, k)


def test_keys_that_are_not_stored_are_the_new_keys() -> None:
    out, _ = graph(lambda k: k * 2, torch.randn(1, 2, 8))
    assert index_scores.key_store(out).new is out


def test_adding_into_a_cache_is_no_store() -> None:
    def run(c: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        return aten.index_put(c, [None, torch.arange(2)], k, True)

    out, _ = graph(run, torch.randn(1, 4, 8), torch.randn(1, 2, 8))
    with pytest.raises(No, match="added into the cache"):
        index_scores.key_store(out)


def test_keys_that_only_come_from_outside_are_said_so() -> None:
    _, (c, _k) = graph(lambda c, k: c + k, torch.randn(1, 4, 8), torch.randn(1, 4, 8))
    with pytest.raises(No, match="this step stores none"):
        index_scores.key_store(c)
