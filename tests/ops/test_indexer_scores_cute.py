"""The CuTe kernel of the indexer scores: what it compiles to, and its numbers on a GPU."""

from __future__ import annotations

import dataclasses
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_compile.ops import indexer_scores as op_module
from glm_compile.ops.bf16_linear import bf16_linear
from glm_compile.ops.fp8_quant import fp8_quant
from glm_compile.ops.indexer_scores import indexer_scores, indexer_scores_paged
from tests.compile_only import CompiledKernel, compile_cute
from tests.ops.test_indexer_scores import Case, call, make_case, oracle, to_fp8_pages

pytestmark = pytest.mark.usefixtures("cute_gpu")

ROOT = Path(__file__).parents[2]
PAGE, HEAD_DIM = 64, 128
KINDS = ("contiguous", "paged", "fp8")
# Of the sums of absolute products. The tensor core adds FP8 products with about 14 bits.
TOLERANCE = {"contiguous": 2**-21, "paged": 2**-21, "fp8": 2**-12}


def make_cute_case(**keywords: Any) -> Case:
    settings = {"head_dim": HEAD_DIM, "num_heads": 32, "num_queries": 6, "device": "cuda"}
    return make_case(torch.bfloat16, **{**settings, **keywords})


def with_garbage_beyond(case: Case) -> Case:
    """Entries beyond the lengths point nowhere; what follows a length in its page is NaN."""
    for b, lengths in enumerate(case.lengths_BS.tolist()):
        longest = max(0, *lengths)
        used = -(-longest // PAGE)
        garbage = torch.tensor([-7, 2**30, 2**31 - 1, -(2**31)], dtype=torch.int32)
        case.block_table[b, used:] = garbage.repeat(case.block_table.shape[1])[
            : case.block_table.shape[1] - used
        ]
        if longest % PAGE:
            page = case.block_table[b, used - 1]
            case.key_pages[page, longest % PAGE :] = math.nan
            case.k_BTD[b, longest:] = math.nan
    return case


def assert_close(got: torch.Tensor, case: Case, kind: str) -> None:
    inside = case.is_inside_BST
    want, sizes = oracle(kind, case)
    if inside.any():
        assert ((got.double() - want).abs() / sizes)[inside].max() <= TOLERANCE[kind]


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 63, 64, 65, 128, 777, 20_000])
@pytest.mark.parametrize("num_queries", [1, 6, 8, 21])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64(kind: str, num_queries: int, num_keys: int) -> None:
    case = make_cute_case(num_batch=1, num_queries=num_queries, num_keys=num_keys)
    case.lengths_BS.clamp_(min=1)
    case.lengths_BS[0, -1] = num_keys
    case = with_garbage_beyond(case)
    assert_close(call(kind, case, "cute"), case, kind)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_batch", "num_queries", "num_heads"),
    [(3, 6, 32), (5, 1, 32), (40, 2, 32), (2, 17, 32), (3, 5, 16), (2, 9, 64)],
)
@pytest.mark.parametrize("kind", KINDS)
def test_ragged_batches(kind: str, num_batch: int, num_queries: int, num_heads: int) -> None:
    case = make_cute_case(
        num_batch=num_batch, num_queries=num_queries, num_heads=num_heads, num_keys=1999
    )
    case.lengths_BS = torch.randint(0, 2000, case.lengths_BS.shape, device="cuda").int()
    case.lengths_BS[1] = 0
    case = with_garbage_beyond(case)
    assert_close(call(kind, case, "cute"), case, kind)


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_windows_and_mask(kind: str, index_dtype: torch.dtype) -> None:
    case = make_cute_case(num_queries=3, num_keys=1000)
    plain = call(kind, case, "cute")
    case.block_table = case.block_table.to(index_dtype)
    rows = [[0, 70, 1000], [-5, 9999, 666]]
    case.lengths_BS = torch.tensor(rows, dtype=index_dtype, device="cuda")
    starts = torch.tensor([[0, 5, 2000], [-3, 640, 65]], dtype=index_dtype, device="cuda")
    mask = torch.rand(2, 1, 1003, device="cuda") > 0.4
    got = call(kind, case, "cute", starts_BS=starts, key_mask=mask)
    position = torch.arange(1000, device="cuda")
    inside = (position < case.lengths_BS[..., None]) & (position >= starts[..., None])
    allowed = mask[..., :1000] & inside
    case.lengths_BS.fill_(1000)
    plain = call(kind, case, "cute")
    assert torch.equal(got[allowed], plain[allowed])
    assert (got[inside & ~allowed] == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize(("num_batch", "num_queries"), [(1, 1), (1, 6), (3, 6), (2, 19)])
@pytest.mark.parametrize("kind", ["paged", "fp8"])
def test_causal_lengths(kind: str, num_batch: int, num_queries: int) -> None:
    case = make_cute_case(num_batch=num_batch, num_queries=num_queries, num_keys=5000)
    want = call(kind, case, "cute")
    for index_dtype in (torch.int32, torch.int64):
        case.lengths_BS = case.lengths_BS.to(index_dtype)
        got = call(kind, case, "cute", is_causal=True)
        assert torch.equal(got[case.is_inside_BST], want[case.is_inside_BST])


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["paged", "fp8"])
def test_pages_that_the_kernel_ahead_writes(kind: str) -> None:
    """Pages, table and lengths are written just before the launch, which looks at them early."""
    case = make_cute_case(num_batch=1, num_keys=40_000)
    inside = case.is_inside_BST
    want = call(kind, case, "reference")
    table, lengths, pages = case.block_table, case.lengths_BS, case.key_pages
    for stale in (-1, 0, 2**31 - 1):
        case.block_table = torch.full_like(table, stale)
        case.lengths_BS, case.key_pages = torch.full_like(lengths, stale), torch.zeros_like(pages)
        torch.cuda.synchronize()
        case.key_pages.copy_(pages)
        case.lengths_BS.copy_(lengths)
        case.block_table.copy_(table)
        got = call(kind, case, "cute")
        _, sizes = oracle(kind, case)
        assert ((got - want).abs() / sizes)[inside].max() <= TOLERANCE[kind]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["paged", "fp8"])
def test_positions_without_a_page_score_minus_infinity(kind: str) -> None:
    case = make_cute_case(num_keys=190)
    case.lengths_BS.fill_(190)
    want = call(kind, case, "cute")
    case.block_table[1, 1] = -1
    case.block_table = case.block_table[:, :2]
    got = call(kind, case, "cute")
    assert torch.equal(got[0, :, :128], want[0, :, :128])
    assert torch.equal(got[1, :, :64], want[1, :, :64])
    assert (got[1, :, 64:] == -math.inf).all() and (got[0, :, 128:] == -math.inf).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_nan_and_infinity_spread_as_in_the_reference(kind: str) -> None:
    case = make_cute_case(num_keys=150)
    case.lengths_BS.fill_(150)
    want = call(kind, case, "cute")
    case.k_BTD[1, 70] = math.nan
    case.key_pages[case.block_table[1, 1].long(), 6] = math.nan
    got = call(kind, case, "cute")
    assert got[1, :, 70].isnan().all()
    got[1, :, 70] = want[1, :, 70]
    assert torch.equal(got, want)
    case.weights_BSH[0, 2, 5] = math.inf
    got, want = call(kind, case, "cute"), call(kind, case, "reference")
    assert torch.equal(got[0, 2].isnan(), want[0, 2].isnan())
    assert torch.equal(got[0, 2].isposinf(), want[0, 2].isposinf())


@pytest.mark.gpu
def test_takes_strided_inputs_and_bfloat16_weights() -> None:
    case = make_cute_case(num_keys=500)
    case.weights_BSH = case.weights_BSH.bfloat16()
    want = call("contiguous", case, "cute")
    case.q_BSHD = case.q_BSHD.transpose(1, 2).contiguous().transpose(1, 2)
    case.k_BTD = torch.cat([case.k_BTD, case.k_BTD], 2)[..., HEAD_DIM:]
    case.weights_BSH = case.weights_BSH.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    case.lengths_BS = case.lengths_BS.T.contiguous().T
    inside = case.is_inside_BST
    assert torch.equal(call("contiguous", case, "cute")[inside], want[inside])
    case.k_BTD = case.k_BTD.transpose(1, 2).contiguous().transpose(1, 2)
    with pytest.raises(ValueError, match="bulk copies need keys whose last axis is contiguous"):
        call("contiguous", case, "cute")


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [8192, 130_000])
@pytest.mark.parametrize("kind", KINDS)
def test_repeats_are_equal(kind: str, num_keys: int) -> None:
    case = make_cute_case(num_keys=num_keys)
    first = call(kind, case, "cute")
    inside = case.is_inside_BST
    for _ in range(20):
        assert torch.equal(call(kind, case, "cute")[inside], first[inside])


@pytest.mark.gpu
@pytest.mark.parametrize(("num_batch", "num_queries"), [(1, 6), (4, 6)])
def test_lengths_may_change_in_a_graph(num_batch: int, num_queries: int) -> None:
    case = make_cute_case(num_batch=num_batch, num_queries=num_queries, num_keys=9000)
    weights = case.weights_BSH.flatten(0, 1) * HEAD_DIM**-0.5
    tensors = (case.q_BSHD.flatten(0, 1), weights, case.key_pages)

    def run() -> torch.Tensor:
        return indexer_scores_paged(
            *tensors,
            case.block_table,
            case.lengths_BS.view(-1),
            9000,
            rows_per_sequence=num_queries,
            backend="cute",
        )

    case.lengths_BS = case.lengths_BS.contiguous()
    run()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = run()
    for longest in (9000, 5, 64, 4097, 0, 8999):
        scores.fill_(math.nan)
        case.lengths_BS.copy_(torch.randint(0, longest + 1, case.lengths_BS.shape))
        graph.replay()
        want = call("paged", case, "reference")
        inside = case.is_inside_BST
        got = scores.view_as(want)[inside]
        torch.testing.assert_close(got, want[inside], rtol=1e-4, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("has_starts", [False, True])
@pytest.mark.parametrize(("num_batch", "num_queries"), [(1, 6), (1, 17), (3, 5)])
def test_early_windows_are_those_of_the_replay(
    num_batch: int, num_queries: int, has_starts: bool
) -> None:
    """Changed ahead of a linear, the scores just behind it, and something else there before."""
    case = make_cute_case(num_batch=num_batch, num_queries=num_queries, num_keys=9000)
    q, weights = case.q_BSHD.flatten(0, 1), case.weights_BSH.flatten(0, 1) * HEAD_DIM**-0.5
    lengths, table = case.lengths_BS.contiguous().view(-1), case.block_table
    starts = torch.zeros_like(lengths) if has_starts else None
    windows = [lengths, table, *([] if starts is None else [starts])]
    sources = [window.clone() for window in windows]
    x, matrix = (torch.randn(n, 2048, device="cuda").bfloat16() for n in (6, 4096))

    def run(**early: bool) -> torch.Tensor:
        rows = {"starts_R": starts, "rows_per_sequence": num_queries, "backend": "cute"}
        given = (q, weights, case.key_pages, table, lengths, 9000)
        return indexer_scores_paged(*given, **rows, **early)

    def step() -> torch.Tensor:
        for window, source in zip(windows, sources, strict=True):
            window.copy_(source)
        bf16_linear(x, matrix, backend="cute")
        return run(early_windows=True)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        early = step()
    for longest in (9000, 1, 64, 4097, 8999):
        sources[0].copy_(torch.randint(0, longest + 1, lengths.shape))
        sources[1].copy_(table[:, torch.randperm(table.shape[1], device="cuda")])
        if starts is not None:
            sources[2].copy_(torch.randint(0, longest + 1, starts.shape))
        for window in windows:
            window.zero_()
        graph.replay()
        position = torch.arange(9000, device="cuda")
        inside = position < lengths[:, None]
        if starts is not None:
            inside &= position >= starts[:, None]
        assert torch.equal(early[inside], run()[inside])


FIRST_CALL_IN_A_CAPTURE = """
import torch
from tests.ops.test_indexer_scores import call
from tests.ops.test_indexer_scores_cute import assert_close, make_cute_case
case = make_cute_case(num_keys=700)
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    scores = call("paged", case, "cute")
graph.replay()
assert_close(scores, case, "paged")
"""


@pytest.mark.gpu
def test_first_call_may_be_inside_a_capture() -> None:
    command = [sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=ROOT
    )
    assert done.returncode == 0, done.stderr[-2000:]


@pytest.mark.gpu
@pytest.mark.big_memory
@pytest.mark.parametrize("kind", ["paged", "fp8"])
def test_pages_and_scores_beyond_32_bits(kind: str) -> None:
    """Pages that start beyond 2^31 bytes or elements, and more than 2^31 scores."""
    num_rows, num_keys, num_pages = 2049, 1 << 20, (1 << 31) // (PAGE * HEAD_DIM) + 100
    case = make_cute_case(num_batch=1, num_queries=6, num_keys=640)
    few = case.key_pages[case.block_table[0].long()]
    few = to_fp8_pages(few) if kind == "fp8" else few
    far = torch.zeros(num_pages, *few.shape[1:], dtype=few.dtype, device="cuda")
    far[-len(few) :] = few
    q, weights = case.q_BSHD[0], case.weights_BSH[0] * HEAD_DIM**-0.5
    if kind == "fp8":
        q, q_scale = fp8_quant(q)
        weights = weights * q_scale

    def run(pages: torch.Tensor, table: torch.Tensor, rows: int, keys: int) -> torch.Tensor:
        repeats = -(-rows // 6)
        many = q.view(torch.uint8).repeat(repeats, 1, 1)[:rows].view(q.dtype)
        lengths = torch.full((rows,), keys, dtype=torch.int32, device="cuda")
        return indexer_scores_paged(
            many,
            weights.repeat(repeats, 1)[:rows],
            pages,
            table.int()[None],
            lengths,
            keys,
            rows_per_sequence=rows,
            backend="cute",
        )

    near = torch.arange(len(few), device="cuda")
    want = run(few, near, 6, 640)
    last = near + num_pages - len(few)
    assert torch.equal(run(far, last, 6, 640), want)
    table = last[:10].repeat(num_keys // 640 + 1)[: num_keys // PAGE]
    got = run(far, table, num_rows, num_keys)
    assert got.numel() > 2**31
    start = num_keys // 640 * 640 - 640
    for row in (0, num_rows - 1):
        assert torch.equal(got[row, start : start + 640], want[row % 6])


@pytest.mark.gpu
@pytest.mark.big_memory
def test_contiguous_keys_beyond_32_bits() -> None:
    num_keys = 2**31 // HEAD_DIM + 1000
    case = make_cute_case(num_batch=1, num_queries=2, num_keys=500)
    keys = torch.zeros(1, num_keys, HEAD_DIM, dtype=torch.bfloat16, device="cuda")
    keys[0, -500:] = case.k_BTD[0]
    lengths = torch.full((1, 2), num_keys, device="cuda")
    got = indexer_scores(case.q_BSHD, case.weights_BSH, keys, lengths, backend="cute")
    case.lengths_BS.fill_(500)
    assert torch.equal(got[..., -500:], call("contiguous", case, "cute"))
    assert (got[..., :-500] == 0).all()


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_goes_first(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_args: Any) -> torch.Tensor:
        raise AssertionError("another backend ran")

    for name in ("_TRITON", "_REFERENCE", "_PAGED_TRITON", "_PAGED_REFERENCE"):
        other = dataclasses.replace(getattr(op_module, name), run=run)
        monkeypatch.setattr(op_module, name, other)
    call(kind, make_cute_case())


@pytest.mark.gpu
def test_queries_may_start_anywhere() -> None:
    case = make_cute_case()
    room = torch.cat([case.q_BSHD.flatten()[:1], case.q_BSHD.flatten()])
    moved = dataclasses.replace(case, q_BSHD=room[1:].view(case.q_BSHD.shape))
    assert moved.q_BSHD.data_ptr() % 16
    inside = case.is_inside_BST
    assert torch.equal(call("paged", moved, "cute")[inside], call("paged", case, "cute")[inside])


# Without a GPU ------------------------------------------------------------------------------------


def test_refuses_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    good = make_case(torch.bfloat16, head_dim=HEAD_DIM)
    with pytest.raises(ValueError, match="backend 'cute' cannot run this call: "):
        call("contiguous", good, "cute")
    monkeypatch.setattr(op_module, "why_no_cute", lambda *tensors: None)
    transposed = good.k_BTD.transpose(1, 2).contiguous().transpose(1, 2)
    odd = torch.cat([good.k_BTD, good.k_BTD[..., :1]], 2)[..., :HEAD_DIM]
    for case, reason in (
        (make_case(torch.float32, head_dim=HEAD_DIM), "float32 products do not run"),
        (make_case(torch.bfloat16), "written for 16, 32, 64 heads of 128, got 16 of 32"),
        (make_case(torch.bfloat16, head_dim=HEAD_DIM, num_heads=5), "got 5 of 128"),
        (dataclasses.replace(good, k_BTD=transposed), "keys whose last axis is contiguous"),
        (dataclasses.replace(good, k_BTD=odd), "rows start at multiples of 16 bytes"),
        (dataclasses.replace(good, k_BTD=good.k_BTD[:1].expand(2, -1, -1)), "got strides"),
        (dataclasses.replace(good, weights_BSH=good.weights_BSH.double()), "weights must be"),
    ):
        with pytest.raises(ValueError, match=f"'cute' cannot run this call: .*{reason}"):
            call("contiguous", case, "cute")


@pytest.mark.parametrize("num_queries", [1, 6, 17])
@pytest.mark.parametrize("kind", KINDS)
def test_launch_hands_over_what_the_caller_gave(
    kind: str, num_queries: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The host's half: a stand-in for the kernel computes from the kernel's arguments."""
    pytest.importorskip("cutlass")
    from glm_compile.ops.indexer_scores import cute_kernel

    def compiled_stand_in(variant: Any, arch: str) -> Any:
        def launch(
            q: torch.Tensor,
            weights: torch.Tensor,
            keys: torch.Tensor,
            table: torch.Tensor | None,
            lengths: torch.Tensor,
            starts: torch.Tensor | None,
            mask: torch.Tensor | None,
            scores: torch.Tensor,
            num_queries: int,
            num_tiles: int,
            softmax_scale: float,
            num_blocks: int,
        ) -> None:
            tensors = (weights, table, lengths, starts)
            dtypes = (variant.weight_dtype, variant.table_dtype, variant.length_dtype)
            assert 1 <= num_blocks <= 132
            num_sequences = scores.shape[0] // num_queries
            assert num_tiles == num_sequences * -(-num_queries // variant.num_rows)
            if variant.has_weight_pairs:
                assert weights.stride(1) == 1 and not weights.stride(0) % 2
                assert weights.dtype == torch.float32 and not weights.data_ptr() % 8
            for tensor, dtype in zip(tensors, (*dtypes, variant.start_dtype), strict=True):
                assert (tensor is None and dtype is None) or tensor.dtype == dtype
            assert q.is_contiguous() and variant.num_rows * variant.num_heads <= 256
            q = q.view(variant.key_dtype).view(-1, variant.num_heads, HEAD_DIM)
            mask = None if mask is None else mask.bool()
            if table is None:
                rows = (-1, num_queries)
                scores.copy_(
                    op_module.indexer_scores_reference(
                        q.unflatten(0, rows),
                        weights.unflatten(0, rows),
                        keys,
                        lengths.unflatten(0, rows),
                        None if starts is None else starts.unflatten(0, rows),
                        mask,
                        softmax_scale,
                    ).flatten(0, 1)
                )
                return
            assert softmax_scale == 1.0
            windows = (lengths, scores.shape[1], starts, mask, num_queries, variant.is_causal)
            scores.copy_(
                op_module.indexer_scores_paged_reference(q, weights, keys, table, *windows)
            )

        return launch

    monkeypatch.setattr(op_module, "why_no_cute", lambda *tensors: None)
    monkeypatch.setattr(cute_kernel, "_compiled", compiled_stand_in)
    monkeypatch.setattr(cute_kernel, "num_multiprocessors", lambda device: 132)
    monkeypatch.setattr(cute_kernel, "arch_of", lambda device: "sm_90a")
    case = make_case(torch.bfloat16, head_dim=HEAD_DIM, num_queries=num_queries, num_heads=32)
    case.q_BSHD = case.q_BSHD.transpose(1, 2).contiguous().transpose(1, 2)
    case.lengths_BS = case.lengths_BS.T.contiguous().T
    keywords = {
        "starts_BS": torch.randint(0, 60, case.lengths_BS.shape),
        "key_mask": torch.rand(2, 1, 155) > 0.4,
    }
    all_given: list[dict[str, Any]] = [{}, keywords]
    if kind != "contiguous":
        all_given.append({"is_causal": True})
        all_given.append({"early_windows": True})
    for given in all_given:
        assert torch.equal(
            call(kind, case, "cute", **given), call(kind, case, "reference", **given)
        )


def test_goes_first_only_where_it_was_measured() -> None:
    case = make_case(torch.bfloat16)
    for dtype, first in (
        (torch.float8_e4m3fn, "cute"),
        (torch.bfloat16, "cute"),
        (torch.float16, "triton"),
        (torch.float32, "triton"),
    ):
        q = case.q_BSHD.to(dtype)
        assert op_module._paged_backends(q)[0].name == op_module._backends(q)[0].name == first


@pytest.mark.parametrize("num_heads", [16, 32, 64])
def test_tiles_are_full_or_alike(num_heads: int) -> None:
    pytest.importorskip("cutlass")
    from glm_compile.ops.indexer_scores.cute_kernel import rows_of_tile

    most = min(8, 256 // num_heads)
    for num_queries in range(1, 200):
        rows = rows_of_tile(num_queries, num_heads)
        assert 1 <= rows <= most
        assert -(-num_queries // rows) == -(-num_queries // most)


def variants() -> dict[str, Any]:
    pytest.importorskip("cutlass")
    from glm_compile.ops.indexer_scores.cute_kernel import Variant

    fp8 = Variant(torch.float8_e4m3fn, num_heads=32, num_rows=6)
    exact = Variant(torch.bfloat16, num_heads=32, num_rows=6)
    return {
        "fp8": fp8,
        "fp8, pairs of weights": dataclasses.replace(fp8, has_weight_pairs=True),
        "fp8, one row": dataclasses.replace(fp8, num_rows=1),
        "fp8, 8 rows": dataclasses.replace(fp8, num_rows=8),
        "fp8, everything": dataclasses.replace(
            fp8, num_rows=5, has_mask=True, start_dtype=torch.int64, length_dtype=torch.int64
        ),
        "fp8, causal": dataclasses.replace(fp8, has_weight_pairs=True, is_causal=True),
        "fp8, early": dataclasses.replace(
            fp8, has_weight_pairs=True, is_causal=True, has_early_windows=True
        ),
        "bf16": exact,
        "bf16, early": dataclasses.replace(exact, length_dtype=torch.int64, has_early_windows=True),
        "bf16, prefill": dataclasses.replace(exact, num_rows=8, has_weight_pairs=True),
        "bf16, contiguous": dataclasses.replace(
            exact, table_dtype=None, weight_dtype=torch.bfloat16, has_mask=True
        ),
        "fp16, 64 heads": dataclasses.replace(
            exact, key_dtype=torch.float16, num_heads=64, num_rows=4
        ),
    }


def compiled(variant: Any, folder: Path) -> CompiledKernel:
    from glm_compile.ops.indexer_scores.cute_kernel import compile_variant

    return compile_cute(
        lambda options: compile_variant(variant, "sm_90a", options), "sm_90a", folder
    )


@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_refuses_too_few_pages_in_flight(num_stages: int) -> None:
    """A warpgroup with one page of room would wait for the next one before it gives that back."""
    variant = dataclasses.replace(variants()["fp8"], num_stages=num_stages)
    from glm_compile.ops.indexer_scores.cute_kernel import IndexerScoresKernel

    with pytest.raises(ValueError, match=f"4 pages in flight are the least, got {num_stages}"):
        IndexerScoresKernel(variant)
    assert IndexerScoresKernel(dataclasses.replace(variant, num_stages=4)).num_stages == 4


@pytest.mark.compile_only
@pytest.mark.parametrize(
    "name",
    [
        "fp8",
        "fp8, pairs of weights",
        "fp8, one row",
        "fp8, 8 rows",
        "fp8, everything",
        "fp8, causal",
        "fp8, early",
        "bf16",
        "bf16, early",
        "bf16, prefill",
        "bf16, contiguous",
        "fp16, 64 heads",
    ],
)
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    variant = variants()[name]
    kernel = compiled(variant, tmp_path)
    assert kernel.stack_bytes == 0
    # One tile a page, 32 bytes of a key a step; of wide FP8 tiles one half and then the other. The
    # first page's first half comes before the loop, the last page's second one behind it.
    kind = {torch.float8_e4m3fn: r"k32\.f32\.e4m3\.e4m3", torch.bfloat16: r"k16\.f32\.bf16\.bf16"}
    operation = kind.get(variant.key_dtype, r"k16\.f32\.f16\.f16")
    products = re.findall(rf"wgmma\.mma_async\.sync\.aligned\.m64n(\d+){operation}", kernel.ptx)
    order = [variant.num_columns] * 2
    if variant.is_fp8 and variant.num_columns > 128:
        first, second = -(-variant.num_rows // 2), variant.num_rows // 2
        order = [rows * variant.num_heads for rows in (first, second, first, second)]
    assert products == [str(n) for n in order for _ in range(4 if variant.is_fp8 else 8)]
    # Once in the loop and once for the last page.
    assert kernel.ptx.count("max.NaN.f32") == 2 * (variant.num_rows * variant.num_heads // 2)
    # Of the loops and branches before, none comes from another kernel's data.
    before = kernel.ptx[: kernel.ptx.index("griddepcontrol.wait")]
    assert ("ld.global" in before) == variant.has_early_windows
    pairs = variant.num_rows * variant.num_heads // 8
    assert kernel.ptx.count("ld.global.v2.f32") == 2 * pairs * variant.has_weight_pairs
