"""indexer_topk: scores and selection become ops, near misses keep their graph with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx

from glm_compile.fx_passes.base import PassOptions
from glm_compile.fx_passes.indexer_topk import IndexerTopk
from tests.fx_passes.aten_graphs import LEVELS, count_ops, graph_text
from tests.fx_passes.tiny_indexer import D, H, TinyIndexer, make_inputs, trace, trace_indexer

pytestmark = pytest.mark.newest_transformers

DTYPES = (torch.float32, torch.bfloat16)


def apply(gm: fx.GraphModule, options: PassOptions | None = None) -> Any:
    result = IndexerTopk(options or PassOptions())(gm)
    gm.graph.lint()
    return result


def only_reason(module: TinyIndexer, *, level: str = "plain", **options: Any) -> str:
    """The reason why the one candidate is declined; the graph must stay as it was."""
    inputs = make_inputs(past=0, dtype=options.pop("dtype", torch.float32))
    gm, _ = trace_indexer(module, inputs, level=level)
    text = graph_text(gm)
    result = apply(gm, options.pop("pass_options", None))
    assert result.num_matches == 0
    assert graph_text(gm) == text
    (declined,) = result.declined
    return declined.reason


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (1, 6), (2, 1), (2, 6), (1, 48)])
@pytest.mark.parametrize("cache", ["none", "static", "dynamic"])
def test_scores_and_selection_become_ops_with_equal_results(
    level: str, dtype: torch.dtype, batch: int, tokens: int, cache: str
) -> None:
    past = 0 if cache == "none" else 9
    inputs = make_inputs(batch, tokens, past, dtype)
    keys = None
    if cache != "none":
        rows = past + tokens if cache == "static" else past
        keys = torch.randn(batch, rows, D, dtype=dtype)
    gm, flat = trace_indexer(
        TinyIndexer(dtype), inputs, level=level, cache=keys, dynamic_cache=cache == "dynamic"
    )
    selected, stored = gm(*flat)
    result = apply(gm)
    assert (result.num_matches, result.declined) == (1, [])
    ops = count_ops(gm)
    assert ops["glm.indexer_scores"] == ops["glm.topk_select"] == 1
    assert not any(ops[gone] for gone in ("aten.bmm", "aten.relu", "glm.masked_topk"))
    new_selected, new_stored = gm(*flat)
    assert torch.equal(selected, new_selected)
    assert torch.equal(stored, new_stored)
    text = graph_text(gm)
    assert apply(gm).num_matches == 0
    assert graph_text(gm) == text


@pytest.mark.parametrize("level", LEVELS)
def test_width_is_the_number_of_keys_where_there_are_fewer_than_k(level: str) -> None:
    inputs = make_inputs(2, 3, 0)
    gm, flat = trace_indexer(TinyIndexer(), inputs, level=level)
    before = gm(*flat)[0]
    assert apply(gm).num_matches == 1
    assert before.shape == (2, 3, 3)
    assert torch.equal(gm(*flat)[0], before)
    (select,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.topk_select.default)
    assert select.args[2] == 3


def test_starts_and_key_mask_reach_the_ops() -> None:
    inputs = make_inputs(2, 6, 0)
    key_mask = torch.rand(2, 1, 6) > 0.3
    gm, flat = trace_indexer(TinyIndexer(), inputs, key_mask=key_mask)
    before = gm(*flat)[0]
    assert apply(gm).num_matches == 1
    assert torch.equal(gm(*flat)[0], before)
    (scores,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.indexer_scores.default)
    assert scores.args[5] is not None


@pytest.mark.parametrize("scale", [0.25, 0.3, 1.0])
def test_scale_and_width_come_from_the_graph(scale: float) -> None:
    module = TinyIndexer()
    module.softmax_scale = scale
    gm, flat = trace_indexer(module, make_inputs(past=0))
    before = gm(*flat)[0]
    assert apply(gm).num_matches == 1
    (scores,) = gm.graph.find_nodes(op="call_function", target=torch.ops.glm.indexer_scores.default)
    assert scores.args[6] == pytest.approx(scale)
    assert torch.equal(gm(*flat)[0], before)


class ScaledAfterRelu(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.einsum("bshd,btd->bsht", q.float(), k.float())
        return F.relu(scores) * self.softmax_scale


class SummedByHand(TinyIndexer):
    def combine(self, weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return (weights.unsqueeze(-1) * scores).sum(dim=2)


class KeysFirst(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(k.float().unsqueeze(1), q.float().transpose(-1, -2))
        return F.relu(scores.transpose(-1, -2) * self.softmax_scale)


class WeightsLast(TinyIndexer):
    def combine(self, weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return torch.matmul(scores.transpose(-1, -2), weights.unsqueeze(-1)).squeeze(-1)


class ClampAtZero(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        return (scores / (1 / self.softmax_scale)).clamp_min(0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(("batch", "tokens"), [(1, 1), (2, 6)])
@pytest.mark.parametrize(
    "kind", [ScaledAfterRelu, SummedByHand, KeysFirst, WeightsLast, ClampAtZero]
)
def test_other_spellings_of_the_scores_are_found(
    kind: type[TinyIndexer], level: str, batch: int, tokens: int
) -> None:
    inputs = make_inputs(batch, tokens, 9)
    keys = torch.randn(batch, 9, D)
    gm, flat = trace_indexer(kind(), inputs, level=level, cache=keys, dynamic_cache=True)
    before = gm(*flat)[0]
    result = apply(gm)
    assert (result.num_matches, result.declined) == (1, [])
    assert torch.equal(gm(*flat)[0], before)


class NoRelu(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        return scores * self.softmax_scale


class LowPrecisionProducts(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q, k.transpose(-1, -2).unsqueeze(1))
        return F.relu(scores.float() * self.softmax_scale)


class NegativeScale(TinyIndexer):
    softmax_scale = -(D**-0.5)


class ScoresAlsoReturned(TinyIndexer):
    def finish(self, selected: torch.Tensor, k: torch.Tensor, scores: torch.Tensor) -> Any:
        return selected, k, scores.amax()

    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        self.seen = super().products(q, k)
        return self.seen


class ReluAlsoReturned(ScoresAlsoReturned):
    def finish(self, selected: torch.Tensor, k: torch.Tensor, scores: torch.Tensor) -> Any:
        return selected, k, self.seen.sum()


class LowPrecisionScores(TinyIndexer):
    def combine(self, weights: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return super().combine(weights, scores).to(torch.bfloat16)


class MixedUpRows(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        num_tokens = q.shape[1]
        q = q.view(q.shape[0], H, num_tokens, D).transpose(1, 2)
        return super().products(q, k)


class BiasBeforeRelu(TinyIndexer):
    def products(self, q: torch.Tensor, k: torch.Tensor) -> torch.Tensor:
        scores = torch.matmul(q.float(), k.transpose(-1, -2).float().unsqueeze(1))
        return F.relu(scores + 1.0)


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    ("kind", "dtype", "reason"),
    [
        (NoRelu, torch.float32, "no ReLU"),
        (LowPrecisionProducts, torch.bfloat16, "expected float32"),
        (NegativeScale, torch.float32, "expected a positive scale"),
        (ReluAlsoReturned, torch.float32, "also read by sum"),
        (LowPrecisionScores, torch.float32, "rounded to torch.bfloat16"),
        (MixedUpRows, torch.float32, "mix up rows, heads or keys"),
        (BiasBeforeRelu, torch.float32, "found relu of add"),
    ],
)
def test_near_misses_are_declined_and_left_alone(
    kind: type[TinyIndexer], dtype: torch.dtype, reason: str, level: str
) -> None:
    assert reason in only_reason(kind(dtype), dtype=dtype, level=level)


def test_scores_that_something_else_reads_stay() -> None:
    """The scores themselves are the marker's input; a second reader keeps them computed."""
    gm, flat = trace_indexer(ScoresAlsoReturned(), make_inputs(past=0))
    before = gm(*flat)
    result = apply(gm)
    assert result.num_matches == 0
    assert "index scores" in result.declined[0].reason
    assert torch.equal(before[2], gm(*flat)[2])


@pytest.mark.parametrize(
    ("wanted", "dtype", "matches"),
    [
        ("bf16", torch.bfloat16, 1),
        ("fp32", torch.float32, 1),
        ("auto", torch.bfloat16, 1),
        ("bf16", torch.float32, 0),
        ("fp32", torch.bfloat16, 0),
        ("fp8", torch.bfloat16, 0),
    ],
)
def test_a_forced_tier_must_be_the_models_own(
    wanted: str, dtype: torch.dtype, matches: int
) -> None:
    gm, _ = trace_indexer(TinyIndexer(dtype), make_inputs(past=0, dtype=dtype))
    result = apply(gm, PassOptions(indexer_dtype=wanted))
    assert result.num_matches == matches
    if wanted == "fp8":
        assert result.declined[0].reason == (
            "indexer_dtype='fp8' needs PagedCache(index_dtype=torch.float8_e4m3fn)"
        )
    elif not matches:
        assert f"indexer_dtype='{wanted}' asks for" in result.declined[0].reason


def paged_function(
    module: TinyIndexer, num_tokens: int, max_len: int, fp8: bool, dtype: torch.dtype
) -> Any:
    """One step over a page tensor that is read (the write is another test's matter)."""

    def run(
        pages: torch.Tensor,
        table: torch.Tensor,
        q: torch.Tensor,
        weights: torch.Tensor,
        lengths: Any,
    ) -> torch.Tensor:
        if fp8:
            keys = torch.ops.glm.paged_gather_fp8(pages, table, max_len, D, dtype)
        else:
            keys = torch.ops.glm.paged_gather(pages, table, max_len)
        scores = module.combine(weights, module.products(q, keys))
        return torch.ops.glm.masked_topk(scores, lengths, None, None, 5)

    return run


def paged_inputs(fp8: bool, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    table = torch.tensor([[2, 0], [3, 1]], dtype=torch.int32)
    if fp8:
        pages = torch.zeros(4, 64 * (D + 4), dtype=torch.uint8)
        torch.ops.glm.paged_write_fp8(
            pages, torch.randn(2, 128, D), table, torch.zeros(2, dtype=torch.int32)
        )
    else:
        pages = torch.randn(4, 64, D, dtype=dtype)
    lengths = torch.randint(20, 128, (2, 6), dtype=torch.int32)
    return pages, table, torch.randn(2, 6, H, D, dtype=dtype), torch.randn(2, 6, H), lengths


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_paged_keys_are_scored_where_they_lie(level: str, dtype: torch.dtype) -> None:
    inputs = paged_inputs(False, dtype)
    gm = trace(paged_function(TinyIndexer(), 6, 128, False, dtype), *inputs, level=level)
    before = gm(*inputs)
    assert apply(gm).num_matches == 1
    ops = count_ops(gm)
    assert ops["glm.indexer_scores_paged"] == 1
    assert ops["glm.paged_gather"] == 0
    assert torch.equal(gm(*inputs), before)


def test_pages_in_another_dtype_are_declined() -> None:
    inputs = list(paged_inputs(False, torch.float32))
    inputs[0] = inputs[0].to(torch.bfloat16)
    gm = trace(paged_function(TinyIndexer(), 6, 128, False, torch.float32), *inputs)
    assert "torch.bfloat16 and queries torch.float32" in apply(gm).declined[0].reason


@pytest.mark.parametrize("level", LEVELS)
def test_fp8_keys_need_the_fp8_tier_and_the_tier_fp8_keys(level: str) -> None:
    dtype = torch.bfloat16
    inputs = paged_inputs(True, dtype)
    run = paged_function(TinyIndexer(), 6, 128, True, dtype)
    gm = trace(run, *inputs, level=level)
    assert "exact tier, which needs them in the model's dtype" in apply(gm).declined[0].reason
    before = gm(*inputs)
    assert apply(gm, PassOptions(indexer_dtype="fp8")).num_matches == 1
    ops = count_ops(gm)
    assert ops["glm.fp8_quant"] == ops["glm.indexer_scores_paged"] == 1
    assert ops["glm.paged_gather_fp8"] == 0
    # q's 3 mantissa bits move scores by a few percent: most of a row's 5 of up to 128 stay.
    after = gm(*inputs)
    same = sum(
        len(set(a.tolist()) & set(b.tolist()))
        for a, b in zip(before.flatten(0, 1), after.flatten(0, 1))
    )
    assert same >= 0.8 * before.numel()
