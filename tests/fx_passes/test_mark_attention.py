"""mark_attention: which calls become glm.attention, which do not and why, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.nn import functional as F

from glm_compile.fx_passes.base import PassResult
from glm_compile.fx_passes.mark_attention import mark_attention
from tests.fx_passes.dynamo_graphs import calls, small_model, tokens

MARKER = torch.ops.glm.attention.default


class Marker:
    """Backend that marks and keeps the result."""

    def __init__(self) -> None:
        self.results: list[PassResult] = []
        self.graphs: list[fx.GraphModule] = []

    def __call__(self, graph_module: fx.GraphModule, _inputs: list[Any]) -> Any:
        self.results.append(mark_attention(graph_module))
        self.graphs.append(graph_module)
        return graph_module.forward

    @property
    def reasons(self) -> list[str]:
        return [declined.reason for declined in self.results[-1].declined]


def inputs(heads: int = 4) -> tuple[torch.Tensor, ...]:
    """q, k, v with different head dims, and an additive mask."""
    q, k, v = (
        torch.randn(2, heads, 5, 40),
        torch.randn(2, heads, 9, 40),
        torch.randn(2, heads, 9, 24),
    )
    return q, k, v, torch.randn(2, 1, 5, 9)


def eager(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    mask: torch.Tensor | None,
    dropout: float = 0.0,
    training: bool = False,
) -> torch.Tensor:
    weights = torch.matmul(q, k.transpose(2, 3)) * 0.3
    if mask is not None:
        weights = weights + mask
    weights = F.softmax(weights, dim=-1, dtype=torch.float32).to(q.dtype)
    weights = F.dropout(weights, p=dropout, training=training)
    return torch.matmul(weights, v).transpose(1, 2).contiguous()


def run(function: Callable[..., Any], *args: Any) -> Marker:
    marker = Marker()
    found = torch.compile(function, backend=marker, fullgraph=True)(*args)
    expected = function(*args)
    for ours, theirs in (
        zip(found, expected) if isinstance(expected, tuple) else [(found, expected)]
    ):
        assert torch.equal(ours, theirs)
    return marker


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@pytest.mark.parametrize("dynamic", [None, True])
def test_model(attention: str, dynamic: bool | None) -> None:
    """Every layer's call, with its module path and module stack."""
    model = small_model(attention)
    ids = tokens(2, 26)
    marker = Marker()
    compiled = torch.compile(model, backend=marker, fullgraph=True, dynamic=dynamic)
    assert torch.equal(compiled(ids, use_cache=False).logits, model(ids, use_cache=False).logits)
    (result,) = marker.results
    assert (result.num_matches, result.declined) == (2, [])
    assert result.matched == [f"model.layers.{i}.self_attn" for i in range(2)]
    for node in calls(marker.graphs[0], MARKER):
        assert node.args[4:] == (model.model.layers[0].self_attn.scaling, attention == "eager")
        assert node.meta["example_value"].shape == (2, 4, 26, 96) or dynamic
        assert "DecoderLayer" in str(node.meta["nn_module_stack"])


def test_a_changed_module_float_compiles_again() -> None:
    """The constant that `dynamic=True` would not have is guarded."""
    model = small_model()
    ids = tokens(2, 26)
    marker = Marker()
    compiled = torch.compile(model, backend=marker, fullgraph=True, dynamic=True)
    for scaling in (None, 0.31):
        if scaling is not None:
            model.model.layers[1].self_attn.scaling = scaling
        found, expected = (f(ids, use_cache=False).logits for f in (compiled, model))
        assert torch.equal(found, expected)
    assert len(marker.graphs) == 2


@pytest.mark.parametrize("with_mask", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_eager_chain(with_mask: bool, dtype: torch.dtype) -> None:
    q, k, v, mask = (t.to(dtype) for t in inputs())
    marker = run(eager, q, k, v, mask if with_mask else None)
    assert (marker.results[0].num_matches, marker.reasons) == (1, [])
    (node,) = calls(marker.graphs[0], MARKER)
    assert node.args[4:] == (0.3, True) and (node.args[3] is None) != with_mask
    assert not [n for n in marker.graphs[0].graph.nodes if "softmax" in str(n.target)]


def test_sdpa_with_the_default_scale_and_keyword_arguments() -> None:
    q, k, v, mask = inputs()
    marker = run(
        lambda q, k, v, m: F.scaled_dot_product_attention(query=q, key=k, value=v, attn_mask=m),
        *(q, k, v, mask),
    )
    (node,) = calls(marker.graphs[0], MARKER)
    assert node.args[4] == pytest.approx(40**-0.5)


def shows_weights(q: Any, k: Any, v: Any, mask: Any) -> Any:
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask, -1, dtype=torch.float32)
    weights = weights.to(q.dtype)
    return torch.matmul(weights, v), weights


def shows_scores(q: Any, k: Any, v: Any, mask: Any) -> Any:
    scores = torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask
    return torch.matmul(F.softmax(scores, -1, dtype=torch.float32), v), scores


def writes_keys(q: Any, k: Any, v: Any, mask: Any) -> Any:
    k = k.clone()
    weights = F.softmax(torch.matmul(q, k.transpose(2, 3)) * 0.3 + mask, -1, dtype=torch.float32)
    k.add_(1)
    return torch.matmul(weights, v), k


@pytest.mark.parametrize(
    "function, reason",
    [
        (shows_weights, "the attention weights have another user (output_attentions=True)"),
        (shows_scores, "the scores before softmax have another user"),
        (writes_keys, "is written in place by add_ inside the attention"),
        (
            lambda q, k, v, m: torch.matmul(F.softmax(q @ k.mT * 0.3 + m, -1), v),
            "softmax in None, expected torch.float32",
        ),
        (
            lambda q, k, v, m: torch.matmul(
                F.softmax(torch.tanh(torch.matmul(q, k.transpose(2, 3))), -1, dtype=torch.float32),
                v,
            ),
            "softmax of something else than matmul(q, k^T) * scale + mask",
        ),
        (
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
            "is_causal=True",
        ),
        (
            lambda q, k, v, m: F.scaled_dot_product_attention(
                q, k[:, :2], v[:, :2], m, enable_gqa=True
            ),
            "enable_gqa=True",
        ),
        (
            lambda q, k, v, m: F.scaled_dot_product_attention(q, k[:, :1], v[:, :1], m),
            "heads of q, k and v differ: 4, 1, 1",
        ),
    ],
)
def test_near_misses(function: Callable[..., Any], reason: str) -> None:
    marker = run(function, *inputs())
    assert marker.results[0].num_matches == 0
    assert len(marker.reasons) == 1 and reason in marker.reasons[0]


def test_dropout_is_declined() -> None:
    marker = Marker()
    q, k, v, mask = inputs()
    function = torch.compile(
        lambda: (
            F.scaled_dot_product_attention(q, k, v, mask, dropout_p=0.5),
            eager(q, k, v, mask, 0.5, True),
        ),
        backend=marker,
    )
    function()
    assert marker.reasons == ["attention dropout is on: call model.eval()"] * 2


def test_a_scale_that_is_an_input_is_declined() -> None:
    """A float of a module is guarded; a float argument of the user may change at every call."""
    marker = Marker()
    q, k, v, mask = inputs()
    function = torch.compile(
        lambda scale: F.scaled_dot_product_attention(q, k, v, mask, scale=scale),
        backend=marker,
        dynamic=True,
    )
    expected = F.scaled_dot_product_attention(q, k, v, mask, scale=0.7)
    assert torch.allclose(function(0.7), expected)
    assert not marker.graphs or marker.results[0].num_matches + len(marker.reasons) == 1


def test_softmax_without_attention_is_no_candidate() -> None:
    marker = run(lambda x: F.softmax(x, -1, dtype=torch.float32), torch.randn(3, 7))
    assert (marker.results[0].num_matches, marker.reasons) == (0, [])


@pytest.mark.parametrize("function", [F.scaled_dot_product_attention, eager])
@pytest.mark.parametrize("key_dtype", [torch.float32, torch.bfloat16])
def test_autocast_is_declined(function: Callable[..., Any], key_dtype: torch.dtype) -> None:
    """Autocast casts q, k and v of what transformers wrote, and would not those of the op."""
    q, k, v, mask = inputs()
    with torch.autocast("cpu", torch.bfloat16):
        marker = run(function, q, k.to(key_dtype), v.to(key_dtype), mask)
    assert marker.results[-1].num_matches == 0
    assert "is autocast on?" in marker.reasons[-1]
