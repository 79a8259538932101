"""The CuTe kernel of sparse MLA for few rows: what it compiles to, and its numbers on a GPU."""

from __future__ import annotations

import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_compile.ops import sparse_mla as op_module
from glm_compile.ops.sparse_mla import sparse_mla
from glm_compile.ops.sparse_mla.config import (
    CUTE_CLUSTERS,
    MAX_SPLITS,
    PAIR_TOKENS,
    cluster_size,
    split_size,
)
from glm_compile.ops.sparse_mla.reference import sparse_mla_reference
from tests.compile_only import CompiledKernel, compile_cute
from tests.ops.test_sparse_mla import KINDS, SCALE, Case, assert_close, call, make_case, oracle

SPLITS = ({"split_tokens": 64}, {"split_tokens": 128})

pytestmark = pytest.mark.usefixtures("cute_gpu")


def make_cute_case(**keywords: Any) -> Case:
    settings = {
        "num_heads": 64,
        "rank": 512,
        "rope_dim": 64,
        "num_tokens": 5000,
        "num_slots": 2048,
        "device": "cuda",
    }
    return make_case(torch.bfloat16, **{**settings, **keywords})


def decode(kind: str, case: Case, **keywords: Any) -> torch.Tensor:
    """The launcher itself."""
    from glm_compile.ops.sparse_mla.cute_decode import sparse_mla_decode_cute

    latents, ropes, indices, table = case.latents_BTL, case.ropes_BTP, case.indices_RK, None
    if kind != "contiguous":
        latents, ropes = case.pages[..., : case.rank], case.pages[..., case.rank :]
        indices, table = (indices, case.table) if kind == "table" else (case.slots_RK, None)
    return sparse_mla_decode_cute(
        case.q_RHC,
        latents,
        ropes,
        indices,
        SCALE,
        table,
        case.rows_per_sequence,
        kind != "contiguous",
        **keywords,
    )


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [1, 63, 64, 65, 300, 2047, 2048, 3000])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64(kind: str, num_slots: int) -> None:
    case = make_cute_case(num_slots=num_slots)
    assert_close(decode(kind, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("num_sequences", "rows_per_sequence", "num_heads"),
    [(1, 1, 64), (6, 1, 64), (1, 6, 32), (2, 8, 8), (3, 11, 64), (5, 13, 20), (40, 2, 64)],
)
def test_rows_and_heads(num_sequences: int, rows_per_sequence: int, num_heads: int) -> None:
    case = make_cute_case(
        num_sequences=num_sequences, rows_per_sequence=rows_per_sequence, num_heads=num_heads
    )
    for kind in KINDS:
        assert_close(decode(kind, case), case)


@pytest.mark.gpu
@pytest.mark.parametrize("ways", [*({"cluster": 1 << n} for n in range(5)), *SPLITS], ids=str)
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_ignored_slots_in_every_split(ways: dict[str, int], index_dtype: torch.dtype) -> None:
    case = make_cute_case(num_sequences=2, rows_per_sequence=2)
    rows = case.indices_RK
    rows[0] = -1
    rows[1, 100:] = rows[1, 99]
    rows[2, torch.rand(2048, device="cuda") < 0.7] = -1
    rows[3, ::50] = 2**31 - 1
    # Position 0 is where a careless kernel looks for what counts for nothing.
    rows[rows == 0] = -1
    case.latents_BTL[:, 0] = math.nan
    case.pages[case.table[:, 0].long(), 0] = math.nan
    case.indices_RK = rows.to(index_dtype)
    case.table = case.table.to(index_dtype)
    for kind in ("contiguous", "table"):
        got = decode(kind, case, **ways)
        assert (got[0] == 0).all()
        assert_close(got, case)


@pytest.mark.gpu
@pytest.mark.parametrize("sharp", [0.01, 1.0, 100.0])
@pytest.mark.parametrize("ways", [*({"cluster": n} for n in (1, 4, 16)), *SPLITS], ids=str)
def test_maxima_that_rise_late_or_early(ways: dict[str, int], sharp: float) -> None:
    """Sums are rescaled, and whole blocks may count for next to nothing."""
    case = make_cute_case(num_sequences=1, rows_per_sequence=2)
    case.q_RHC *= sharp
    for first in (0, 2047, 1000):
        high = case.indices_RK[:, first].long()
        case.latents_BTL[0, high] *= 4
    assert_close(decode("contiguous", case, **ways), case)


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [1, 64, 65, 1000, 2048])
@pytest.mark.parametrize("ways", SPLITS, ids=str)
@pytest.mark.parametrize(("num_rows", "num_heads"), [(1, 64), (3, 8), (9, 33)])
def test_parts_in_memory(
    num_rows: int, num_heads: int, ways: dict[str, int], num_slots: int
) -> None:
    case = make_cute_case(
        num_sequences=1, rows_per_sequence=num_rows, num_heads=num_heads, num_slots=num_slots
    )
    for kind in KINDS:
        assert_close(decode(kind, case, **ways), case)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 6, 16, 64])
def test_repeats_are_equal(num_rows: int) -> None:
    case = make_cute_case(num_sequences=1, rows_per_sequence=num_rows)
    first = decode("table", case)
    for _ in range(20):
        assert torch.equal(decode("table", case), first)


@pytest.mark.gpu
@pytest.mark.parametrize("num_rows", [1, 6, 40])
def test_indices_may_change_in_a_graph(num_rows: int) -> None:
    case = make_cute_case(num_sequences=1, rows_per_sequence=num_rows)
    decode("table", case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            got = decode("table", case)
    for stop in (2048, 5, 0, 777):
        case.indices_RK[:] = torch.randint(0, 5000, (num_rows, 2048), device="cuda").sort(-1).values
        case.indices_RK[:, stop:] = -1
        got.fill_(math.nan)
        graph.replay()
        assert_close(got, case)


@pytest.mark.gpu
def test_is_what_runs_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_cute_case()
    want = decode("table", case)

    def run(*_args: Any) -> torch.Tensor:
        raise AssertionError("another backend ran")

    for name in ("_TRITON", "_REFERENCE"):
        monkeypatch.setattr(op_module, name, replace(getattr(op_module, name), run=run))
    assert torch.equal(call("table", case), want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_triton_on_a_gpu(kind: str) -> None:
    for dtype, num_heads, rank in (
        (torch.bfloat16, 64, 512),
        (torch.float16, 8, 512),
        (torch.float32, 4, 64),
    ):
        case = make_case(
            dtype,
            num_heads=num_heads,
            rank=rank,
            rope_dim=64,
            num_slots=700,
            device="cuda",
            num_tokens=3000,
        )
        case.indices_RK[1] = -1
        case.indices_RK[2, 90:] = case.indices_RK[2, 89]
        assert_close(call(kind, case, "triton"), case)


# Without a GPU ------------------------------------------------------------------------------------


def test_refuses_with_a_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    small = {"rank": 512, "rope_dim": 64, "num_slots": 5}
    good = make_case(torch.bfloat16, **small)
    with pytest.raises(ValueError, match="backend 'cute' cannot run this call: "):
        call("contiguous", good, "cute")
    monkeypatch.setattr(op_module, "why_no_cute", lambda *tensors: None)
    odd = torch.cat([good.latents_BTL, good.latents_BTL[..., :1]], 2)[..., :512]
    room = torch.cat([good.ropes_BTP.flatten()[:1], good.ropes_BTP.flatten()])
    for case, reason in (
        (make_case(torch.float16, **small), "written for bfloat16, got torch.float16"),
        (make_case(torch.bfloat16), "written for 512 and 64 values a token, got 48 and 16"),
        (make_case(torch.bfloat16, **small, num_heads=65), "at most 64 heads, got 65"),
        (replace(good, latents_BTL=odd), "latents must be contiguous in the last axis"),
        (replace(good, ropes_BTP=room[1:].view(good.ropes_BTP.shape)), "ropes must be"),
    ):
        with pytest.raises(ValueError, match=f"'cute' cannot run this call: .*{reason}"):
            call("contiguous", case, "cute")
    pages = good.pages.view(-1, 32, 576)
    with pytest.raises(ValueError, match="written for pages of 64 tokens, got 32"):
        sparse_mla(good.q_RHC, pages, good.slots_RK, SCALE, page_size=32, backend="cute")


@pytest.mark.parametrize("kind", KINDS)
def test_launch_hands_over_what_the_caller_gave(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's half: a stand-in for the kernel computes from the kernel's arguments."""
    pytest.importorskip("cutlass")
    from glm_compile.ops.sparse_mla import cute_decode

    def compiled_stand_in(variant: Any, arch: str) -> Any:
        def launch(
            q: torch.Tensor,
            latents: torch.Tensor,
            ropes: torch.Tensor,
            indices: torch.Tensor,
            table: torch.Tensor | None,
            attended: torch.Tensor,
            parts: torch.Tensor | None,
            part_stats: torch.Tensor | None,
            scale: float,
            rows_per_sequence: int,
            num_pairs: int,
        ) -> None:
            assert q.is_contiguous() and q.data_ptr() % 16 == 0
            assert variant.num_heads == q.shape[1] and variant.index_dtype == indices.dtype
            assert variant.table_dtype == (None if table is None else table.dtype)
            each = variant.split_tokens or variant.cluster * PAIR_TOKENS
            num_each = num_pairs
            if variant.split_tokens:
                assert parts is not None and part_stats is not None and num_pairs == 1
                num_each = parts.shape[1]
                assert parts.shape == (len(q), num_each, 64 * 512)
                assert part_stats.shape == (len(q), num_each, 64, 2)
            assert (num_each - 1) * each < indices.shape[1] <= num_each * each
            attended.copy_(
                sparse_mla_reference(
                    q,
                    latents,
                    ropes,
                    indices,
                    scale * math.log(2),
                    table,
                    rows_per_sequence,
                    variant.is_paged,
                )
            )

        return launch

    monkeypatch.setattr(op_module, "why_no_cute", lambda *tensors: None)
    monkeypatch.setattr(cute_decode, "_compiled", compiled_stand_in)
    monkeypatch.setattr(cute_decode, "arch_of", lambda device: "sm_90a")
    for num_slots in (300, 1500):
        case = make_case(
            torch.bfloat16, rank=512, rope_dim=64, num_slots=num_slots, num_tokens=1600
        )
        case.q_RHC = case.q_RHC.transpose(0, 1).contiguous().transpose(0, 1)
        case.indices_RK = case.indices_RK.long()
        assert_close(call(kind, case, "cute"), case, oracle(case))


@pytest.mark.parametrize(("num_rows", "wanted"), [(1, "few"), (132, "few"), (133, "many")])
def test_many_rows_have_a_kernel_of_their_own(
    num_rows: int, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("cutlass")
    from glm_compile.ops.sparse_mla import cute_decode, cute_prefill

    ran = []

    def stand_in(name: str) -> Any:
        def run(q: torch.Tensor, *args: Any) -> torch.Tensor:
            ran.append(name)
            return q[..., :512].contiguous()

        return run

    monkeypatch.setattr(op_module, "why_no_cute", lambda *tensors: None)
    monkeypatch.setattr(cute_decode, "sparse_mla_decode_cute", stand_in("few"))
    monkeypatch.setattr(cute_prefill, "sparse_mla_prefill_cute", stand_in("many"))
    q = torch.zeros(num_rows, 8, 576, dtype=torch.bfloat16)
    pages = torch.zeros(2, 64, 576, dtype=torch.bfloat16)
    sparse_mla(q, pages, torch.zeros(num_rows, 4, dtype=torch.int32), SCALE)
    assert ran == [wanted]


def test_clusters_are_no_larger_than_the_tokens_need() -> None:
    sizes = [size for _, size in CUTE_CLUSTERS]
    assert sizes == sorted(sizes, reverse=True)
    for num_rows in (1, 6, 7, 8, 14, 15, 64, 2048):
        assert cluster_size(num_rows, 1) == 1
        for num_slots in (1, 128, 129, 1024, 1025, 2048, 5000):
            size = cluster_size(num_rows, num_slots)
            assert size == 1 or size * PAIR_TOKENS < 2 * num_slots
    assert cluster_size(6, 2048) * 6 <= 132


def test_parts_in_memory_are_more_than_a_cluster_could_have() -> None:
    for num_rows in (1, 2, 4, 5, 64):
        for num_slots in (1, 300, 1024, 1025, 2048, 2049, 9000):
            tokens = split_size(num_rows, num_slots)
            assert not tokens or 16 < -(-num_slots // tokens) <= MAX_SPLITS
    assert split_size(1, 2048) == 64 and split_size(1, 1024) == split_size(64, 2048) == 0


def variants() -> dict[str, Any]:
    pytest.importorskip("cutlass")
    from glm_compile.ops.sparse_mla.cute_decode import Variant

    return {
        "6 rows": Variant(cluster=16, is_single=True),
        "14 rows, slots": Variant(cluster=8, table_dtype=None, index_dtype=torch.int64),
        "66 rows, 8 heads, contiguous": Variant(
            cluster=2, num_heads=8, table_dtype=None, is_paged=False
        ),
        "a row": Variant(cluster=1, is_single=True, split_tokens=64),
        "a row, 8 heads, contiguous": Variant(
            cluster=1,
            is_single=True,
            split_tokens=128,
            num_heads=8,
            table_dtype=None,
            is_paged=False,
        ),
        "more rows": Variant(cluster=1, index_dtype=torch.int64, table_dtype=torch.int64),
    }


def compiled(variant: Any, folder: Path) -> CompiledKernel:
    from glm_compile.ops.sparse_mla.cute_decode import compile_variant

    return compile_cute(
        lambda options: compile_variant(variant, "sm_90a", options), "sm_90a", folder
    )


@pytest.mark.compile_only
@pytest.mark.parametrize(
    "name",
    [
        "6 rows",
        "14 rows, slots",
        "66 rows, 8 heads, contiguous",
        "a row",
        "a row, 8 heads, contiguous",
        "more rows",
    ],
)
def test_compiles_without_spills(name: str, tmp_path: Path) -> None:
    variant = variants()[name]
    kernel = compiled(variant, tmp_path)
    assert kernel.stack_bytes == 0 and kernel.registers <= 255
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", kernel.ptx
    )
    # A half's keys in 576 / 16 steps and its values in 64 / 16, wherever the code has them: before
    # or in a warpgroup's loop, and for the last half behind it.
    halves = 1 if variant.split_tokens == 64 else 2 if variant.is_single else 3
    assert products.count("64") == 36 * halves
    columns = sum(int(width) for width in products if width != "64")
    assert columns == 256 * 4 * {1: 1, 2: 3, 3: 6}[halves]
    # A query once a cluster; a token's 9 tiles for 8 tokens a warp in two turns.
    assert ("multicast::cluster" in kernel.ptx) == (variant.cluster > 1)
    copies = len(re.findall(r"cp\.async\.cg\.shared\.global", kernel.ptx))
    assert copies == 2 * 9 * {1: 1, 2: 2, 3: 6}[halves]
