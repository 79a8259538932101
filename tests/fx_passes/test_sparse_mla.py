"""sparse_mla: attention over expanded latents becomes attention over the selected ones."""

from __future__ import annotations

import copy
import math
import re
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from glm_compile.fx_passes.base import PassOptions, PassResult
from glm_compile.fx_passes.sparse_mla import SparseMla
from tests.fx_passes.aten_graphs import LEVELS, count_ops, graph_text
from tests.fx_passes.tiny_attention import (
    H,
    Inputs,
    K,
    N,
    T,
    TinyAttention,
    V,
    make_inputs,
    trace_attention,
)

pytestmark = pytest.mark.newest_transformers

CACHES = ("static", "dynamic", "paged", "none")
FP32, BF16 = torch.float32, torch.bfloat16


def apply(gm: fx.GraphModule) -> PassResult:
    result = SparseMla(PassOptions())(gm)
    gm.graph.lint()
    return result


def run(gm: fx.GraphModule, flat: list[torch.Tensor]) -> torch.Tensor:
    """The graph's output on copies of its inputs, some of which it writes."""
    return gm(*copy.deepcopy(flat))


def expanded(gm: fx.GraphModule) -> list[fx.Node]:
    """Nodes that hold the cached tokens of every head, or all cached rows as one gather."""
    return [
        node
        for node in gm.graph.nodes
        if isinstance(node.meta.get("val"), torch.Tensor)
        and node.op == "call_function"
        and math.prod(node.meta["val"].shape) % (T * H) == 0
    ]


def check(
    inputs: Inputs,
    cache: str = "static",
    module: TinyAttention | None = None,
    declined: str | None = None,
    **kwargs: Any,
) -> fx.GraphModule:
    """Rewrite, compare numbers, rewrite again.

    Args:
        declined: why a part around the attention stays what it was.
    """
    module = module or TinyAttention()
    gm, flat = trace_attention(module, inputs, cache, **kwargs)
    before = run(gm, flat)
    exact = run(*trace_attention(module, inputs.to(torch.float64), cache, **kwargs))
    result = apply(gm)
    assert result.num_matches == 1
    reasons = [entry.reason for entry in result.declined]
    assert len(reasons) == (declined is not None), reasons
    assert declined is None or re.search(declined, reasons[0]), reasons
    after = run(gm, flat)
    assert after.dtype == before.dtype
    if before.dtype == FP32:
        torch.testing.assert_close(after, before, atol=2e-5, rtol=1e-5)
    error, allowed = ((x.double() - exact).abs().mean() for x in (after, before))
    assert error <= 2 * allowed + 1e-6
    assert expanded(gm) == [] or cache == "none"
    text = graph_text(gm)
    assert apply(gm).num_matches == 0
    assert graph_text(gm) == text
    return gm


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", [FP32, BF16, torch.float16])
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 1), (2, 6), (1, 6)])
@pytest.mark.parametrize("cache", CACHES)
def test_the_expansion_goes(
    cache: str, batch: int, tokens: int, dtype: torch.dtype, level: str
) -> None:
    gm = check(make_inputs(cache, batch, tokens, dtype), cache, level=level)
    ops = count_ops(gm)
    attended = "glm.sparse_mla" if cache == "paged" else "glm.sparse_mla_contiguous"
    assert ops[attended] == ops["glm.mla_absorb_query"] == ops["glm.mla_project_values"] == 1
    gone = ("indexed_attention", "paged_gather")
    assert not any(ops[f"glm.{name}"] for name in gone)
    gone = ("mm", "bmm", "addmm", "slice_scatter", "new_empty", "empty", "copy", "sort", "where")
    assert not any(name.split(".")[1] in gone for name in ops if name.startswith("aten."))
    assert ops["aten.clone"] == 0  # what o_proj reads needs no copy


def test_symbolic_widths_are_declined() -> None:
    gm, _ = trace_attention(TinyAttention(), make_inputs(), symbolic=True)
    (declined,) = apply(gm).declined
    assert "rows for 5 heads" in declined.reason


class ByCat(TinyAttention):
    def join(self, k_nope: torch.Tensor, k_rot: torch.Tensor) -> torch.Tensor:
        return torch.cat([k_nope, k_rot], dim=-1)


class BySlices(TinyAttention):
    def split(self, expanded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return expanded[..., :N].contiguous(), expanded[..., N:].contiguous()


class ByPermute(TinyAttention):
    def heads(self, expanded: torch.Tensor) -> torch.Tensor:
        batch, _, tokens, _ = expanded.shape
        return (
            expanded.squeeze(1)
            .reshape(batch * tokens, H, -1)
            .view(batch, tokens, H, -1)
            .permute(0, 2, 1, 3)
        )


class WholeQuery(TinyAttention):
    """A query that was never put together from two parts."""

    def query(self, q: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return q.view(*q.shape[:2], H, -1).transpose(1, 2).sin()


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("module", [ByCat, BySlices, ByPermute, WholeQuery])
def test_other_spellings_are_found(module: type[TinyAttention], level: str) -> None:
    own_rotation = "rotated in a launch of their own: .* found slice"
    declined = own_rotation if module is WholeQuery else None
    for cache in ("static", "paged"):
        check(make_inputs(cache), cache, module(), declined, level=level)


def test_eager_order_is_replaced_as_well() -> None:
    class Eager(TinyAttention):
        eager = True

    check(make_inputs(), module=Eager())


def test_the_weight_is_read_as_it_is() -> None:
    inputs = make_inputs()
    gm = check(inputs)
    weight = gm.graph.find_nodes(op="placeholder")[5]
    assert [user.target for user in weight.users] == [
        torch.ops.glm.mla_absorb_query.default,
        torch.ops.glm.mla_project_values.default,
    ]


# Bounds -------------------------------------------------------------------------------------------


def bounded(cache: str, batch: int = 2, tokens: int = 6) -> Inputs:
    """Inputs with positions of every kind, and bounds that exclude some of them."""
    inputs = make_inputs(cache, batch, tokens)
    num_keys = tokens if cache == "none" else T
    selection = torch.randint(-2, num_keys + 3, (batch, tokens, K), dtype=torch.int32)
    selection[..., K - 1] = selection[..., 0]  # a repeat that lies apart
    inputs.selection = selection
    return inputs


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize(
    ("has_lengths", "has_starts", "mask_shape"),
    [
        (True, False, None),
        (True, True, None),
        (True, False, (2, 1, T + 3)),
        (True, True, (1, 6, T)),
        (True, False, (T,)),
        (True, False, (2, 6, 1)),
        (False, False, (2, 6, T)),
    ],
)
def test_positions_outside_the_bounds_and_repeats_do_not_count(
    cache: str, has_lengths: bool, has_starts: bool, mask_shape: tuple[int, ...] | None
) -> None:
    inputs = bounded(cache)
    if cache == "none" and mask_shape is not None:
        mask_shape = tuple(size - T + 6 if size >= T else size for size in mask_shape)
    num_keys = 6 if cache == "none" else T
    inputs.bounds = [
        torch.randint(0, num_keys + 2, (2, 6)) if has_lengths else None,
        torch.randint(0, 5, (2, 6), dtype=torch.int32) if has_starts else None,
        None if mask_shape is None else torch.rand(mask_shape) > 0.4,
    ]
    gm = check(inputs, cache)
    assert count_ops(gm)["aten.sort"] == 1


def test_wide_positions_are_taken() -> None:
    inputs = bounded("static")
    inputs.selection = inputs.selection.long()
    inputs.bounds = [torch.full((2, 6), T), None, torch.rand(2, 1, T) > 0.4]
    check(inputs)


@pytest.mark.parametrize("has_mask", [False, True])
def test_a_range_of_positions_is_not_sorted(has_mask: bool) -> None:
    """What a draft step attends to: every row of a small buffer that counts."""

    def everything(selection: torch.Tensor) -> torch.Tensor:
        return torch.arange(T, dtype=torch.int32).expand(2, 6, T)

    inputs = bounded("static")
    inputs.bounds = [
        torch.randint(0, T + 1, (2, 6)),
        None,
        torch.rand(2, 1, T) > 0.4 if has_mask else None,
    ]
    ops = count_ops(check(inputs, select=everything))
    assert ops["aten.sort"] == ops["aten.gather"] == 0

    def some(selection: torch.Tensor) -> torch.Tensor:
        return torch.arange(3, 3 + K).expand(2, 6, K)

    ops = count_ops(check(inputs, select=some))
    assert (ops["aten.sort"], ops["aten.gather"]) == (0, int(has_mask))


# Near misses --------------------------------------------------------------------------------------


class WithBias(TinyAttention):
    def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(latents, weight, weight[:, 0])


class Hooked(TinyAttention):
    def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(latents, weight) * 2


class Adapted(TinyAttention):
    def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(latents, weight) + F.linear(F.linear(latents, weight[:4]), weight[:, :4])


class Cast(TinyAttention):
    def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(latents, weight.to(latents.dtype))


class MadeWeight(TinyAttention):
    def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.linear(latents, weight * 2)


class ValuesFirst(TinyAttention):
    def split(self, expanded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        values, k_nope = expanded.split([V, N], dim=-1)
        return k_nope, values


class GapBetween(TinyAttention):
    def split(self, expanded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return expanded[..., :N], expanded[..., N + 4 :]


class HeadsLast(TinyAttention):
    """The rows of the weight are grouped by column, not by head."""

    def heads(self, expanded: torch.Tensor) -> torch.Tensor:
        shape = (expanded.shape[0], expanded.shape[2], -1, H)
        return expanded.view(shape).permute(0, 3, 1, 2)


class OwnRope(TinyAttention):
    """A rotated part that differs between heads."""

    def repeat(self, k_rot: torch.Tensor) -> torch.Tensor:
        return torch.stack([k_rot[:, 0] * head for head in range(H)], dim=1)


class Swapped(TinyAttention):
    """Values of another token than the key's."""

    def split(self, expanded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        k_nope, values = expanded.split([N, V], dim=-1)
        return k_nope, values.flip(2)


class OtherLatents(TinyAttention):
    """Keys and values of two linears."""

    def split(self, expanded: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.key_source[..., :N], expanded[..., N:]

    def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        self.key_source = self.heads(F.linear(latents + 1, weight))
        return F.linear(latents, weight)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("module", "reason"),
    [
        (WithBias, "kv_b_proj adds a bias|found add"),
        (Hooked, "expected the values from kv_b_proj's linear over the latents, found mul"),
        (Adapted, "expected the values from kv_b_proj's linear over the latents, found add"),
        (MadeWeight, "expected the values from kv_b_proj's linear over the latents, found"),
        (ValuesFirst, f"values are columns 0 to {V} of the {N + V}"),
        (GapBetween, "expected the keys from kv_b_proj's linear over the latents, found slice"),
        (HeadsLast, "mix up heads or rows"),
        (OwnRope, "the rotated part of the keys .* is not one row a token"),
        (Swapped, "expected the values from kv_b_proj's linear over the latents, found"),
        (OtherLatents, f"keys are columns 0 to {N} of .*, expected the first {N} of "),
    ],
)
def test_near_misses_are_declined_and_left_alone(
    module: type[TinyAttention], reason: str, level: str
) -> None:
    inputs = make_inputs()
    gm, flat = trace_attention(module(), inputs, level=level)
    before, text = run(gm, flat), graph_text(gm)
    result = apply(gm)
    assert result.num_matches == 0
    (declined,) = result.declined
    assert re.search(reason, declined.reason), declined.reason
    assert graph_text(gm) == text
    assert torch.equal(run(gm, flat), before)


def test_a_weight_of_another_dtype_is_declined() -> None:
    inputs = make_inputs(dtype=BF16)
    inputs.weight = inputs.weight.float()
    gm, _ = trace_attention(Cast(), inputs)
    (declined,) = apply(gm).declined
    assert declined.reason == "kv_b_proj's weight is cast from torch.float32 in the graph"


def test_a_dtype_without_ops_is_declined() -> None:
    gm, _ = trace_attention(TinyAttention(), make_inputs(dtype=torch.float64))
    (declined,) = apply(gm).declined
    assert "expected one dtype of float32, bfloat16 and float16, found queries torch.float64" in (
        declined.reason
    )


def test_attention_with_an_unknown_mask_is_declined() -> None:
    class Masked(TinyAttention):
        def attend(self, q: Any, k: Any, v: Any, selection: Any, bounds: list[Any]) -> Any:
            return torch.ops.glm.attention(q, k, v, bounds[2], 0.3, False)

    inputs = make_inputs()
    inputs.bounds = [None, None, torch.rand(2, 1, 6, T) > 0.2]
    gm, _ = trace_attention(Masked(), inputs)
    result = apply(gm)
    assert result.num_matches == 0
    (declined,) = result.declined
    assert "what its mask means is not known" in declined.reason


def test_latents_changed_on_the_way_are_read_changed() -> None:
    """A hook before kv_b: what it makes of the latents is what is attended to."""

    class Prepared(TinyAttention):
        def linear(self, latents: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
            return F.linear(latents * 1.5, weight)

    for cache in CACHES:
        inputs = make_inputs(cache)
        gm, flat = trace_attention(Prepared(), inputs, cache)
        before = run(gm, flat)
        assert apply(gm).num_matches == 1
        torch.testing.assert_close(run(gm, flat), before, atol=2e-5, rtol=1e-5)
        assert count_ops(gm)["glm.sparse_mla_contiguous"] == 1
