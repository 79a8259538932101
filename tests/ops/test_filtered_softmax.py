"""filtered_softmax against transformers' warpers, and against exact sums where rounding decides."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers.generation.logits_process import (
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from glm_compile.ops.filtered_softmax import filtered_softmax
from tests.compile_only import ARCHS, compile_triton

SETTINGS = [
    (1.0, 0, 1.0),
    (0.7, 0, 1.0),
    (1.3, 5, 1.0),
    (1.0, 0, 0.6),
    (0.7, 50, 0.95),
    (2.0, 1, 0.9),
    (1.0, 700, 0.3),
    (1.0, 40, 0.0),
    (0.01, 9, 0.99),
    (1.0, 10**6, 0.999),
]
KINDS = ("normal", "ties", "flat", "equal", "few", "peak")


def make_scores(kind: str, num_rows: int, vocab_size: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(num_rows, vocab_size, generator=generator) * 3
    if kind == "ties":
        scores = (scores * 2).round() / 2
    elif kind == "flat":
        scores = scores * 1e-3 - 8
    elif kind == "equal":
        scores = torch.zeros(num_rows, vocab_size)
    elif kind == "few":
        scores[torch.rand(scores.shape, generator=generator) < 0.9] = -torch.inf
        scores[:, 0] = -0.0
    elif kind == "peak":
        scores[:, vocab_size // 3] = 90.0
    return scores


def transformers_softmax(
    scores: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> torch.Tensor:
    if temperature != 1:
        scores = TemperatureLogitsWarper(temperature)(None, scores)
    if top_k:
        scores = TopKLogitsWarper(top_k)(None, scores)
    if top_p < 1:
        scores = TopPLogitsWarper(top_p)(None, scores)
    return scores.softmax(-1)


def check_exactly(
    probs: torch.Tensor, scores: torch.Tensor, temperature: float, top_k: int, top_p: float
) -> None:
    """The contract in float64, row by row; tokens at the edge may go either way."""
    # Divided where they are: torch on a GPU rounds in another way.
    for got, x in zip(probs.cpu().double(), (scores.float() / temperature).cpu()):
        kth = x.topk(min(top_k, len(x)))[0][-1] if top_k else -torch.inf
        weights = torch.where(x >= kth, (x - x.max()).double().exp(), 0.0)
        weights /= weights.sum()
        # Largest first, and of equal ones the highest id.
        order = torch.sort(x.flip(0), descending=True, stable=True).indices
        order = len(x) - 1 - order
        before = weights[order].cumsum(0) - weights[order]
        margin = 1e-6
        must = order[(before < top_p - margin) | (torch.arange(len(x)) == 0)]
        may = order[(before < top_p + margin) | (torch.arange(len(x)) == 0)]
        kept = got > 0
        tiny = weights < 1e-11
        assert kept[must][~tiny[must]].all()
        allowed = torch.zeros(len(x), dtype=torch.bool)
        allowed[may] = True
        assert not (kept & ~allowed).any()
        expected = torch.where(kept, weights, 0.0)
        torch.testing.assert_close(got, expected / expected.sum(), rtol=3e-6, atol=1e-11)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_transformers(kind: str, settings: Any) -> None:
    scores = make_scores(kind, 3, 997)
    got = filtered_softmax(scores, *settings)
    expected = transformers_softmax(scores, *settings)
    if kind in ("ties", "equal", "few"):
        # Which of equal scores go is left to its sort; sums then have another order.
        got_sorted, expected_sorted = got.sort(dim=-1).values, expected.sort(dim=-1).values
        torch.testing.assert_close(got_sorted, expected_sorted, rtol=1e-6, atol=0)
    else:
        assert torch.equal(got, expected)
    check_exactly(got, scores, *settings)


def test_half_precision_and_strides() -> None:
    scores = make_scores("normal", 997, 4).bfloat16().t()
    got = filtered_softmax(scores, 0.7, 50, 0.9)
    assert torch.equal(got, transformers_softmax(scores.float(), 0.7, 50, 0.9))


def nothing_to_draw(vocab_size: int) -> torch.Tensor:
    scores = make_scores("normal", 4, vocab_size)
    scores[0, 5] = torch.nan
    scores[1, -1] = torch.inf
    scores[2] = -torch.inf
    return scores


@pytest.mark.parametrize("settings", SETTINGS[:5], ids=str)
def test_rows_without_a_distribution_are_nan(settings: Any) -> None:
    probs = filtered_softmax(nothing_to_draw(50), *settings)
    assert probs.isnan().all(dim=1).tolist() == [True, True, True, False]


def test_what_is_out_of_range_is_refused() -> None:
    scores = torch.zeros(2, 5)
    for settings in ((0.0, 0, 1.0), (1.0, -1, 1.0), (1.0, 0, 1.5), (float("nan"), 0, 1.0)):
        with pytest.raises(ValueError, match="temperature must be above 0"):
            filtered_softmax(scores, *settings)
    with pytest.raises(ValueError, match=r"float16 \[R, V\], got torch.float64"):
        filtered_softmax(scores.double())


def test_it_is_an_op() -> None:
    for scores in (make_scores("normal", 3, 40), make_scores("normal", 40, 3).t()):
        torch.library.opcheck(torch.ops.glm.filtered_softmax.default, (scores, 0.7, 5, 0.9))


def test_it_is_an_op_that_compiles() -> None:
    scores = make_scores("normal", 3, 40)
    compiled = torch.compile(filtered_softmax, backend="aot_eager", fullgraph=True)
    assert torch.equal(compiled(scores, 0.7, 5, 0.9), filtered_softmax(scores, 0.7, 5, 0.9))


# -- the kernel -----------------------------------------------------------------------------------


def check_kernel(
    device: str, sizes: list[tuple[int, int]], kinds: Any = KINDS, settings_of: Any = None
) -> None:
    for kind in kinds:
        for num_rows, vocab_size in sizes:
            scores = make_scores(kind, num_rows, vocab_size, seed=vocab_size)
            for dtype in (torch.float32, torch.bfloat16):
                given = scores.to(device, dtype)
                for settings in settings_of(dtype) if settings_of else SETTINGS:
                    got = filtered_softmax(given, *settings, backend="triton")
                    check_exactly(got, given, *settings)
                    if given.is_cuda:
                        again = filtered_softmax(given, *settings, backend="triton")
                        assert torch.equal(got, again)


def check_kernel_without_distribution(device: str) -> None:
    for settings in SETTINGS[1:5:2]:
        scores = nothing_to_draw(1500).to(device)
        probs = filtered_softmax(scores, *settings, backend="triton")
        assert probs.isnan().all(dim=1).tolist() == [True, True, True, False]
        check_exactly(probs[3:], scores[3:], *settings)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["ties", "few"])
def test_kernel_keeps_the_contract(kind: str) -> None:
    few = {torch.float32: [(0.7, 50, 0.95)], torch.bfloat16: [(1.0, 0, 0.6), (1.3, 5, 1.0)]}
    check_kernel("cpu", [(1, 1100)], [kind], few.__getitem__)


@pytest.mark.interpreter
def test_kernel_where_top_p_rounds_to_one() -> None:
    scores = make_scores("flat", 1, 20_000)
    probs = filtered_softmax(scores, 1.0, 15_000, 1 - 1e-8, backend="triton")
    expected = scores >= scores.topk(15_000)[0][:, -1:]
    assert int(((probs > 0) != expected).sum()) <= 1


@pytest.mark.interpreter
def test_kernel_on_rows_without_a_distribution() -> None:
    check_kernel_without_distribution("cpu")


@pytest.mark.gpu
def test_gpu_kernel_keeps_the_contract() -> None:
    check_kernel("cuda", [(1, 5), (3, 1024), (2, 5000)])
    check_kernel_without_distribution("cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernel_at_full_width(kind: str) -> None:
    check_kernel("cuda", [(2, 154_880)], [kind])


@pytest.mark.gpu
def test_gpu_kernel_in_a_graph() -> None:
    scores = make_scores("normal", 3, 4000).cuda()
    filtered_softmax(scores, 0.7, 50, 0.9)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = filtered_softmax(scores, 0.7, 50, 0.9)
    for seed in range(3):
        scores.copy_(make_scores("normal", 3, 4000, seed))
        graph.replay()
        assert torch.equal(got, filtered_softmax(scores, 0.7, 50, 0.9))


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_spills(arch: str) -> None:
    from glm_compile.ops.filtered_softmax import triton_kernel as kernels

    scores = torch.empty(1, 154_880, dtype=torch.bfloat16, device="meta")
    workspace = torch.empty(1, 500, dtype=torch.int64, device="meta")
    ties = torch.empty(1, 152, dtype=torch.int32, device="meta")
    probs = torch.empty(1, 154_880, device="meta")
    arguments = [scores, 154_880, 1, 0.7, 1 / 0.7, workspace, 500, 50, 0.95, 154_880]
    block = {"BLOCK_V": 1024, "BY_INVERSE": True}
    for step, before in (
        ((1, 16, 256), (1, 24, 256)),
        ((2, 22, 32), (2, 27, 32)),
        ((2, 27, 32), (1, 0, 256)),
    ):
        names = {"KIND": step[0], "SHIFT": step[1], "NUM_BINS": step[2], "STATE": 300}
        names |= dict(zip(("KIND_BEFORE", "SHIFT_BEFORE", "BINS_BEFORE"), before))
        compiled = compile_triton(
            kernels.weigh_kernel, arguments, names | block | {"BEFORE": 1, "FINDS_LARGEST": False},
            arch, num_warps=4,
        )  # fmt: skip
        assert compiled.stack_bytes == 0 and compiled.registers <= 128
    before = {"BEFORE": 1, "KIND_BEFORE": 2, "SHIFT_BEFORE": 0, "BINS_BEFORE": 4}
    for kernel, rest, names in (
        (kernels.tie_kernel, [ties], {}),
        (kernels.write_kernel, [ties, probs], {"HAS_TOP_P": True, "BLOCK_N": 256}),
    ):
        compiled = compile_triton(
            kernel, [*arguments, *rest], before | block | names, arch, num_warps=4
        )
        assert compiled.stack_bytes == 0 and compiled.registers <= 128
