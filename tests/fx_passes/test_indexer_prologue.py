"""indexer_prologue: norm, rotations and head weights become one op, near misses say why not."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx, nn
from transformers import DynamicCache, StaticCache

from glm_compile.cache import PagedCache
from glm_compile.fx_passes.base import PassOptions
from glm_compile.fx_passes.indexer_prologue import IndexerPrologue
from glm_compile.fx_passes.indexer_topk import IndexerTopk
from glm_compile.fx_passes.layouts import named_args
from tests.fx_passes.aten_graphs import (
    LEVELS,
    capture,
    count_ops,
    graph_text,
    mark_indexer_topk,
)
from tests.fx_passes.tiny_indexer import D, H, P, TinyIndexer, make_inputs, trace_indexer
from tests.tiny_models import CACHE_ARGUMENT, tiny_config, tiny_model

pytestmark = pytest.mark.newest_transformers

DTYPES = (torch.float32, torch.bfloat16)
OP = "glm.indexer_prologue"


def apply(gm: fx.GraphModule, options: PassOptions | None = None, topk: bool = True) -> Any:
    options = options or PassOptions()
    if topk:
        IndexerTopk(options)(gm)
    result = IndexerPrologue(options)(gm)
    gm.graph.lint()
    return result


def check_equal(gm: fx.GraphModule, flat: list[torch.Tensor], **options: Any) -> Any:
    """Apply, compare selection and keys with those before, apply again."""
    selected, keys = gm(*flat)
    result = apply(gm, **options)
    assert (result.num_matches, result.declined) == (1, [])
    new_selected, new_keys = gm(*flat)
    assert torch.equal(selected, new_selected)
    rounding = 4e-6 if keys.dtype == torch.float32 else 2**-6
    torch.testing.assert_close(new_keys, keys, atol=rounding, rtol=rounding)
    text = graph_text(gm)
    assert apply(gm).num_matches == 0
    assert graph_text(gm) == text
    return result


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 1), (2, 6), (1, 48)])
@pytest.mark.parametrize("cache", ["none", "static", "dynamic"])
def test_prologue_becomes_one_op_with_equal_results(
    level: str, dtype: torch.dtype, batch: int, tokens: int, cache: str
) -> None:
    past = 0 if cache == "none" else 9
    keys = None
    if cache != "none":
        keys = torch.randn(batch, past + tokens * (cache == "static"), D, dtype=dtype)
    gm, flat = trace_indexer(
        TinyIndexer(dtype),
        make_inputs(batch, tokens, past, dtype),
        level=level,
        cache=keys,
        dynamic_cache=cache == "dynamic",
    )
    check_equal(gm, flat)
    ops = count_ops(gm)
    assert ops[OP] == 1
    gone = ("aten.native_layer_norm", "aten.var_mean.correction", "aten.sub.Tensor", "aten.rsqrt")
    assert not any(ops[name] for name in gone)


@pytest.mark.parametrize("level", LEVELS)
def test_prologue_is_found_without_indexer_topk(level: str) -> None:
    gm, flat = trace_indexer(TinyIndexer(), make_inputs(past=0), level=level)
    before = gm(*flat)
    result = apply(gm, topk=False)
    assert (result.num_matches, result.declined) == (1, [])
    assert torch.equal(gm(*flat)[0], before[0])
    assert apply(gm, topk=False).num_matches == 0
    assert apply(gm).num_matches == 0


@pytest.mark.parametrize("level", LEVELS)
def test_constants_come_from_the_graph(level: str) -> None:
    module = TinyIndexer()
    module.gate_scale = 0.3
    module.k_norm.eps = 1e-3
    gm, flat = trace_indexer(module, make_inputs(past=0), level=level)
    check_equal(gm, flat)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.indexer_prologue.default)
    assert call.args[5] == pytest.approx(1e-3)
    assert call.args[8] is True
    assert call.args[9] == pytest.approx(0.3)


@pytest.mark.parametrize("level", LEVELS)
def test_gates_in_fp32_beside_bf16_stay_fp32(level: str) -> None:
    module = TinyIndexer(torch.bfloat16, gates=torch.float32)
    gm, flat = trace_indexer(module, make_inputs(past=0, dtype=torch.bfloat16), level=level)
    check_equal(gm, flat)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.indexer_prologue.default)
    assert call.args[2].meta["val"].dtype == torch.float32


class HalfSplit(TinyIndexer):
    """DeepSeek's `apply_rotary_pos_emb`."""

    def rotate_one(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        x1, x2 = x[..., : P // 2], x[..., P // 2 :]
        return x * cos.unsqueeze(2) + torch.cat((-x2, x1), dim=-1) * sin.unsqueeze(2)


class HalfSplitByHalves(TinyIndexer):
    def rotate_one(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos[..., : P // 2].unsqueeze(2), sin[..., : P // 2].unsqueeze(2)
        x1, x2 = x.chunk(2, dim=-1)
        return torch.cat([x1 * cos - x2 * sin, x2 * cos + x1 * sin], dim=-1)


class OtherOrder(TinyIndexer):
    """Interleaved, the products and sums the other way round, one cat, slices instead of splits."""

    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        cos, sin = cos[..., None, : P // 2], sin[..., None, : P // 2]

        def one(x: torch.Tensor) -> torch.Tensor:
            x1, x2 = x[..., 0:P:2], x[..., 1:P:2]
            return torch.cat([cos * x1 - sin * x2, sin * x1 + cos * x2, x[..., P:]], dim=-1)

        return one(q), one(k).reshape(*k.shape[:2], D)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("kind", "interleaved"), [(HalfSplit, False), (HalfSplitByHalves, False), (OtherOrder, True)]
)
def test_both_rotations_are_found_in_every_spelling(
    kind: type[TinyIndexer], interleaved: bool, dtype: torch.dtype, level: str
) -> None:
    gm, flat = trace_indexer(kind(dtype), make_inputs(past=0, dtype=dtype), level=level)
    check_equal(gm, flat)
    (call,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.indexer_prologue.default)
    assert call.args[8] is interleaved


class RmsNorm(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(D) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.weight * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


def with_norm(norm: nn.Module) -> type[TinyIndexer]:
    class WithNorm(TinyIndexer):
        def __init__(self, dtype: torch.dtype = torch.float32) -> None:
            super().__init__(dtype)
            self.k_norm = norm.to(dtype)

    return WithNorm


class ExtraCastBeforeNorm(TinyIndexer):
    def project_k(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.k_norm(self.wk(hidden).to(torch.float64).float()).unsqueeze(2)


class ExtraCastBeforeRope(TinyIndexer):
    def project_q(self, q_resid: torch.Tensor) -> torch.Tensor:
        return super().project_q(q_resid).to(torch.bfloat16).float()


class ScaledAfterNorm(TinyIndexer):
    def project_k(self, hidden: torch.Tensor) -> torch.Tensor:
        return super().project_k(hidden) * 1.5


class DifferentCos(TinyIndexer):
    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return super().rotate(q, k, cos, sin)[0], super().rotate(q, k, cos * 1.0001, sin)[1]


class DifferentKinds(TinyIndexer):
    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        other = HalfSplit.rotate_one(self, q[..., :P], cos, sin)
        return torch.cat([other, q[..., P:]], dim=-1), super().rotate(q, k, cos, sin)[1]


class WrongSign(TinyIndexer):
    def rotate_one(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        cos, sin = cos[..., : P // 2].unsqueeze(2), sin[..., : P // 2].unsqueeze(2)
        x1, x2 = x[..., 0::2], x[..., 1::2]
        return torch.cat([x1 * cos + x2 * sin, x2 * cos - x1 * sin], dim=-1)


class SecondHalfOfCos(TinyIndexer):
    def rotate_one(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotate_one(x, cos.roll(P // 2, -1)[..., P // 4 :], sin)


class RopeInFp32(TinyIndexer):
    def rotate_one(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        return super().rotate_one(x.float(), cos.float(), sin.float()).to(x.dtype)


class GatesScaledInBf16(TinyIndexer):
    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
        return (self.weights_proj(hidden) * self.gate_scale).float()


class GatesRounded(TinyIndexer):
    def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.weights_proj(hidden).to(torch.bfloat16).float() * self.gate_scale


class NormAlsoReturned(TinyIndexer):
    def project_k(self, hidden: torch.Tensor) -> torch.Tensor:
        self.normed = self.k_norm(self.wk(hidden))
        return self.normed.unsqueeze(2)

    def finish(self, selected: torch.Tensor, k: torch.Tensor, scores: torch.Tensor) -> Any:
        return selected, k, self.normed.sum()


class NoRope(TinyIndexer):
    def rotate(
        self, q: torch.Tensor, k: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return q, k.squeeze(2)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        (with_norm(RmsNorm()), torch.float32, "k_norm is an RMSNorm, expected LayerNorm with bias"),
        (
            with_norm(nn.LayerNorm(D, bias=False)),
            torch.float32,
            "k_norm: ",
        ),
        (
            ExtraCastBeforeNorm,
            torch.float32,
            "extra cast between wk and k_norm (float32 -> float64 -> float32)",
        ),
        (ExtraCastBeforeRope, torch.float32, "extra cast between wq_b and the rotation"),
        (ScaledAfterNorm, torch.float32, "k_norm: expected LayerNorm with bias, found mul.Tensor"),
        (DifferentCos, torch.float32, "rope: different cos for q"),
        (DifferentKinds, torch.float32, "rope: q is rotated half-split and k interleaved"),
        (WrongSign, torch.float32, "expected cat(x1 cos - x2 sin, x2 cos + x1 sin)"),
        (SecondHalfOfCos, torch.float32, "cos"),
        (RopeInFp32, torch.bfloat16, "rope of q"),
        (GatesScaledInBf16, torch.bfloat16, "scaled in torch.bfloat16, expected float32 (IDX-2)"),
        (GatesRounded, torch.float32, "float32 -> bfloat16 -> float32"),
        (NormAlsoReturned, torch.float32, "inside the region, is also read by sum"),
        (NoRope, torch.float32, "rope of q: expected cat(rotated, passed)"),
    ],
)
def test_near_misses_are_declined_and_left_alone(
    kind: type[TinyIndexer], dtype: torch.dtype, reason: str, level: str
) -> None:
    gm, _ = trace_indexer(kind(dtype), make_inputs(past=0, dtype=dtype), level=level)
    IndexerTopk(PassOptions())(gm)
    text = graph_text(gm)
    result = apply(gm)
    assert result.num_matches == 0
    assert reason in result.declined[0].reason
    assert graph_text(gm) == text


@pytest.mark.parametrize("level", LEVELS)
def test_a_norm_in_fp32_between_matching_casts_is_a_norm(level: str) -> None:
    class NormInFp32(TinyIndexer):
        def project_k(self, hidden: torch.Tensor) -> torch.Tensor:
            return self.k_norm(self.wk(hidden).float()).to(torch.bfloat16).unsqueeze(2)

    module = NormInFp32(torch.bfloat16, norm=torch.float32)
    gm, flat = trace_indexer(module, make_inputs(past=0, dtype=torch.bfloat16), level=level)
    check_equal(gm, flat)


def test_gates_that_need_the_stored_keys_are_declined() -> None:
    """The op makes gates and keys at once, so gates cannot depend on the store."""

    class Circular(TinyIndexer):
        def rotate(self, *args: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            q, self.key = super().rotate(*args)
            return q, self.key

        def head_weights(self, hidden: torch.Tensor) -> torch.Tensor:
            return super().head_weights(hidden + self.key.mean())

    gm, _ = trace_indexer(Circular(), make_inputs(past=0))
    assert "before it can be computed" in apply(gm).declined[0].reason


def run_model(
    kind: str, options: PassOptions, level: str, dtype: torch.dtype = torch.float32
) -> tuple[Any, Any, torch.Tensor]:
    """Run 6 tokens after 20 in a one-layer model: (graph, (cache, eager's cache), difference)."""
    config = tiny_config(num_hidden_layers=1, indexer_types=["full"], first_k_dense_replace=1)
    model = tiny_model(config, dtype=dtype)
    make_cache = {
        "static": lambda: StaticCache(config, max_cache_len=64),
        "dynamic": lambda: DynamicCache(config=config),
        "paged": lambda: PagedCache(config, 2, 128, dtype=dtype),
        "paged_fp8": lambda: PagedCache(
            config, 2, 128, dtype=dtype, index_dtype=torch.float8_e4m3fn
        ),
    }[kind]
    ids = torch.randint(0, config.vocab_size, (2, 26), generator=torch.Generator().manual_seed(3))
    cache = make_cache()
    model(ids[:, :20], **{CACHE_ARGUMENT: cache})
    passes = (IndexerTopk(options), IndexerPrologue(options))
    output, captured = capture(
        model,
        ids[:, 20:],
        level=level,
        passes=passes,
        dynamo_stage=mark_indexer_topk,
        **{CACHE_ARGUMENT: cache},
    )
    expected_cache = make_cache()
    model(ids[:, :20], **{CACHE_ARGUMENT: expected_cache})
    expected = model(ids[:, 20:], **{CACHE_ARGUMENT: expected_cache}).logits
    return captured, (cache, expected_cache), output.logits - expected


@pytest.mark.parametrize(
    ("kind", "level"),
    [*itertools.product(["static", "paged"], ["plain", "inductor"]), ("dynamic", "plain")],
)
def test_unmodified_model_matches_once_a_full_layer(kind: str, level: str) -> None:
    captured, _, difference = run_model(kind, PassOptions(), level)
    assert captured.results["indexer_topk"].num_matches == 1
    assert captured.results["indexer_prologue"].num_matches == 1
    assert captured.results["indexer_prologue"].matched == ["model.layers.0.self_attn.indexer"]
    assert float(difference.abs().max()) < 2e-5


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("kind", "op", "stores"),
    [
        ("static", "glm.indexer_prologue_rows", ("aten.index_put", "aten.index_copy")),
        ("paged", "glm.indexer_prologue_paged", ("glm.paged_write",)),
    ],
)
def test_exact_tier_stores_the_keys_in_the_op(
    kind: str, op: str, stores: tuple[str, ...], level: str
) -> None:
    captured, caches, _ = run_model(kind, PassOptions(), level)
    before, after = count_ops(captured.before), count_ops(captured.after)
    assert after[op] == 1 and after["glm.indexer_prologue"] == 0
    # The stores of the latents stay.
    assert sum(after[name] for name in stores) == sum(before[name] for name in stores) - 1 > 0
    (call,) = [
        n
        for n in captured.after.graph.nodes
        if "auto_functionalized" in str(n.target) and f"{n.args[0]}" == f"{op}.default"
    ]
    (base,) = call.kwargs["_all_bases"]
    assert base.op == "placeholder"
    ends = captured.after.graph.find_nodes(op="call_function", target=torch.ops.aten.copy_.default)
    (kept,) = [n.args[1] for n in ends if n.args[0] is base]
    assert kept.args == (call, 2)
    name = "indexer_keys" if kind == "static" else "key_pages"
    keys, expected = (getattr(cache.layers[0], name) for cache in caches)
    torch.testing.assert_close(keys, expected)


def counted_step(module: TinyIndexer, tokens: int, index: Callable[..., Any]) -> Any:
    """(function, inputs): a step over a contiguous cache, its rows found by `index(first)`."""

    def run(*inputs: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        *step, keys, first = inputs
        return module(*step, lambda k: keys.index_copy_(1, index(first), k))[0], keys

    first = torch.tensor(9)
    return run, (*make_inputs(2, tokens).args(), torch.randn(2, 20, D), first)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("tokens", [1, 6])
@pytest.mark.parametrize(
    ("spelling", "is_stored"),
    [
        (lambda first, n: torch.arange(n) + first, True),
        (lambda first, n: first.view(1) + torch.arange(0, n), True),
        (lambda first, n: torch.arange(1, n + 1) + first, False),
        (lambda first, n: 2 * torch.arange(n) + first, False),
        (lambda first, n: torch.arange(n).flip(0) + first, False),
    ],
)
def test_rows_are_stored_in_the_op_where_they_follow_each_other(
    spelling: Callable[..., Any], is_stored: bool, tokens: int, level: str
) -> None:
    options = PassOptions()
    module = TinyIndexer()
    results = []
    for passes in ((), (IndexerTopk(options), IndexerPrologue(options))):
        torch.manual_seed(1)
        run, inputs = counted_step(module, tokens, lambda first: spelling(first, tokens))
        (selected, _), captured = capture(run, *inputs, level=level, passes=passes)
        results.append((selected, inputs[5]))
    assert torch.equal(results[0][0], results[1][0])
    torch.testing.assert_close(results[0][1], results[1][1])
    ops = count_ops(captured.after)
    assert ops["glm.indexer_prologue_rows"] == is_stored
    assert ops["glm.indexer_prologue"] == (not is_stored)


@pytest.mark.parametrize("level", LEVELS)
def test_fp8_tier_stores_the_keys_in_the_op(level: str) -> None:
    captured, caches, _ = run_model("paged_fp8", PassOptions(indexer_dtype="fp8"), level)
    assert captured.results["indexer_prologue"].num_matches == 1
    ops = count_ops(captured.after)
    assert ops["glm.indexer_prologue_fp8"] == ops["glm.indexer_scores_paged"] == 1
    assert ops["glm.paged_write_fp8"] == ops["glm.paged_gather_fp8"] == ops["glm.fp8_quant"] == 0
    pages, expected = (cache.layers[0].key_pages for cache in caches)
    assert torch.equal(pages, expected)


def test_fp8_tier_without_fp8_pages_says_what_it_needs() -> None:
    captured, _, difference = run_model("static", PassOptions(indexer_dtype="fp8"), "plain")
    for name in ("indexer_topk", "indexer_prologue"):
        result = captured.results[name]
        assert result.num_matches == 0
        assert [d.reason for d in result.declined] == [
            "indexer_dtype='fp8' needs PagedCache(index_dtype=torch.float8_e4m3fn)"
        ]
    assert float(difference.abs().max()) < 2e-5


def paged_step(
    module: TinyIndexer,
    dtype: torch.dtype,
    prepare: Callable[..., Any] = lambda lengths, table: (lengths, table),
) -> tuple[Callable[..., torch.Tensor], tuple[torch.Tensor, ...]]:
    """A step of 6 tokens after 70 over FP8 pages, and its inputs.

    Args:
        prepare: what the step does to lengths and block table before all else.
    """

    def run(*inputs: torch.Tensor) -> torch.Tensor:
        *step, pages, table, cached = inputs
        step[4], table = prepare(step[4], table)

        def store(k: torch.Tensor) -> torch.Tensor:
            torch.ops.glm.paged_write_fp8(pages, k, table, cached)
            return torch.ops.glm.paged_gather_fp8(pages, table, 128, D, dtype)

        return module(*step, store)[0]

    pages = torch.zeros(4, 64 * (D + 4), dtype=torch.uint8)
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    cached = torch.tensor([70, 70], dtype=torch.int32)
    torch.ops.glm.paged_write_fp8(pages, torch.randn(2, 70, D), table, torch.zeros_like(cached))
    return run, (*make_inputs(2, 6, 70, dtype).args(), pages, table, cached)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_fp8_tier_differs_from_the_exact_one_by_q_only(dtype: torch.dtype, level: str) -> None:
    """With the norm and the store inside the op or outside it, the selection is nearly the same."""
    options = PassOptions(indexer_dtype="fp8")
    module = TinyIndexer(dtype)
    stages = ((), (IndexerTopk(options),), (IndexerTopk(options), IndexerPrologue(options)))
    results = []
    for passes in stages:
        torch.manual_seed(1)
        run, inputs = paged_step(module, dtype)
        selected, captured = capture(run, *inputs, level=level, passes=passes)
        results.append((selected, inputs[5]))
        assert all(r.num_matches == 1 for r in captured.results.values())
    (exact, pages), *others = results
    keys = torch.ops.glm.paged_gather_fp8(pages, inputs[6], 128, D, torch.float32)
    for selected, other_pages in others:
        other_keys = torch.ops.glm.paged_gather_fp8(other_pages, inputs[6], 128, D, torch.float32)
        # A last bit of the norm may move a value to the next of e4m3's steps of an eighth.
        torch.testing.assert_close(other_keys, keys, atol=1e-3, rtol=0.13)
        rows = zip(exact.flatten(0, 1).tolist(), selected.flatten(0, 1).tolist())
        same = sum(len(set(a) & set(b)) for a, b in rows)
        assert same >= 0.85 * exact.numel()


def test_fp8_op_writes_the_buffer_itself() -> None:
    options = PassOptions(indexer_dtype="fp8")
    run, inputs = paged_step(TinyIndexer(), torch.float32)
    _, captured = capture(run, *inputs, passes=(IndexerTopk(options), IndexerPrologue(options)))
    (write,) = [n for n in captured.after.graph.nodes if "auto_functionalized" in str(n.target)]
    assert write.args[0] is torch.ops.glm.indexer_prologue_fp8.default
    (base,) = write.kwargs["_all_bases"]
    assert base.op == "placeholder"
    (copy,) = captured.after.graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy_.default
    )
    assert copy.args[0] is base
    assert copy.args[1].args == (write, 2)


class _BehindNoLinear(TinyIndexer):
    """Queries that are the step's input: the prologue may be its first kernel."""

    def project_q(self, q_resid: torch.Tensor) -> torch.Tensor:
        return q_resid.repeat(1, 1, H * D)[..., : H * D].unflatten(-1, (H, D))


class _GivenStarts(TinyIndexer):
    def starts(self, lengths: torch.Tensor) -> torch.Tensor:
        return lengths


class _MadeStarts(TinyIndexer):
    def starts(self, lengths: torch.Tensor) -> torch.Tensor:
        return lengths - 20


@pytest.mark.parametrize(
    ("prepare", "module", "is_early"),
    [
        (lambda lengths, table: (lengths, table), TinyIndexer, True),
        (lambda lengths, table: (lengths, table), _GivenStarts, True),
        (lambda lengths, table: (lengths, table), _MadeStarts, False),
        (lambda lengths, table: (lengths, table), _BehindNoLinear, False),
        (lambda lengths, table: (lengths + 1 - 1, table), TinyIndexer, False),
        (lambda lengths, table: (lengths.clone(), table), TinyIndexer, False),
        (lambda lengths, table: (lengths, table + 0), TinyIndexer, False),
        (lambda lengths, table: (lengths, table.clone()), TinyIndexer, False),
    ],
)
def test_windows_are_read_early_where_this_graph_has_not_made_them(
    prepare: Callable[..., Any], module: type[TinyIndexer], is_early: bool
) -> None:
    """Lengths, starts and block table must have been there before the graph's first linear."""
    options = PassOptions(indexer_dtype="fp8")
    run, inputs = paged_step(module(), torch.float32, prepare)
    _, captured = capture(run, *inputs, passes=(IndexerTopk(options), IndexerPrologue(options)))
    (scores,) = captured.after.graph.find_nodes(
        op="call_function", target=torch.ops.glm.indexer_scores_paged.default
    )
    assert named_args(scores)["early_windows"] is is_early
