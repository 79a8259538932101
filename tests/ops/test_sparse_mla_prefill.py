"""The CuTe kernel of sparse MLA for many rows: what it compiles to, and its numbers on a GPU."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_compile.ops.sparse_mla.reference import sparse_mla_reference
from tests.compile_only import compile_cute
from tests.ops.test_sparse_mla import KINDS, SCALE, Case, assert_close, make_case, oracle

pytestmark = pytest.mark.usefixtures("cute_gpu")

# (index, table) dtypes and the tokens of a page.
ARGUMENTS = [
    (torch.int32, None, None),
    (torch.int64, None, None),
    (torch.int32, None, 64),
    (torch.int32, torch.int32, 64),
    (torch.int64, torch.int64, 64),
]


def make_prefill_case(**keywords: Any) -> Case:
    settings = {
        "num_sequences": 2,
        "rows_per_sequence": 70,
        "num_heads": 64,
        "rank": 512,
        "rope_dim": 64,
        "num_tokens": 3000,
        "num_slots": 700,
        "device": "cuda",
    }
    return make_case(torch.bfloat16, **{**settings, **keywords})


def prefill(kind: str, case: Case, scale: float = SCALE) -> torch.Tensor:
    """The launcher itself."""
    from glm_compile.ops.sparse_mla.cute_prefill import sparse_mla_prefill_cute

    latents, ropes, indices, table = case.latents_BTL, case.ropes_BTP, case.indices_RK, None
    if kind != "contiguous":
        latents, ropes = case.pages[..., : case.rank], case.pages[..., case.rank :]
        indices, table = (indices, case.table) if kind == "table" else (case.slots_RK, None)
    return sparse_mla_prefill_cute(
        case.q_RHC,
        latents,
        ropes,
        indices,
        scale,
        table,
        case.rows_per_sequence,
        kind != "contiguous",
    )


def check_rows(got: torch.Tensor, case: Case, rows: list[int]) -> None:
    """Compare some rows with float64; all must be finite."""
    assert got.isfinite().all()
    for row in rows:
        sequence = row // case.rows_per_sequence
        part = Case(
            case.q_RHC[row : row + 1],
            case.latents_BTL[sequence : sequence + 1],
            case.ropes_BTP[sequence : sequence + 1],
            case.pages,
            case.table[sequence : sequence + 1],
            case.indices_RK[row : row + 1],
            1,
        )
        assert_close(got[row : row + 1], part)


# On a GPU -----------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_slots", [1, 47, 48, 49, 96, 300, 2047, 2048, 3001])
@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64(kind: str, num_slots: int) -> None:
    case = make_prefill_case(num_slots=num_slots)
    check_rows(prefill(kind, case), case, [0, 69, 70, 131, 132, 139])


@pytest.mark.gpu
@pytest.mark.parametrize("num_heads", [1, 8, 20, 32, 64])
@pytest.mark.parametrize("num_rows", [1, 131, 132, 133, 300])
def test_rows_and_heads(num_rows: int, num_heads: int) -> None:
    case = make_prefill_case(num_sequences=1, rows_per_sequence=num_rows, num_heads=num_heads)
    check_rows(prefill("table", case), case, [0, num_rows // 2, num_rows - 1])


@pytest.mark.gpu
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_slots_that_do_not_count(kind: str, index_dtype: torch.dtype) -> None:
    case = make_prefill_case()
    rows = case.indices_RK
    rows[0] = -1
    rows[1, 100:] = rows[1, 99]
    rows[2, torch.rand(700, device="cuda") < 0.7] = -1
    rows[3, ::50] = 2**31 - 1
    rows[4, :48] = -1
    rows[5, 48:] = -1
    rows[6, 1:] = -1
    rows[7] = rows[7, 3]
    rows[8, 650:] = -1
    rows[139] = -1
    case.latents_BTL[:, 0] = math.nan
    case.pages[case.table[:, 0].long(), 0] = math.nan
    rows[rows == 0] = -1
    case.indices_RK = rows.to(index_dtype)
    case.table = case.table.to(index_dtype)
    if index_dtype == torch.int64:
        case.indices_RK[9, ::7] = 2**40
        case.indices_RK[10, ::7] = -(2**40)
    got = prefill(kind, case)
    assert (got[[0, 139]] == 0).all()
    check_rows(got, case, [*range(11), 138, 139])


@pytest.mark.gpu
def test_pages_that_are_not_there() -> None:
    case = make_prefill_case(num_tokens=640)
    case.table[0, 3], case.table[1, 4] = -1, case.pages.shape[0]
    got = prefill("table", case)
    for sequence, page in ((0, 3), (1, 4)):
        rows = case.indices_RK.view(2, 70, -1)[sequence]
        rows[rows // 64 == page] = -1
        # Not what the kernel reads any more, only a page for the oracle.
        case.table[sequence, page] = 0
    check_rows(got, case, [0, 69, 70, 139])


@pytest.mark.gpu
@pytest.mark.parametrize("sharp", [0.01, 1.0, 100.0])
def test_maxima_that_rise_late_or_early(sharp: float) -> None:
    """Sums are rescaled, and whole tiles may count for next to nothing."""
    case = make_prefill_case(num_sequences=1, rows_per_sequence=8)
    case.q_RHC *= sharp
    for first in (0, 699, 350):
        high = case.indices_RK[:, first].long()
        case.latents_BTL[0, high] *= 4
    check_rows(prefill("contiguous", case), case, list(range(8)))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [-SCALE, 0.0])
def test_scales_that_are_not_positive(scale: float) -> None:
    case = make_prefill_case(num_sequences=1, rows_per_sequence=8)
    got = prefill("table", case, scale)
    case.q_RHC = -case.q_RHC if scale else torch.zeros_like(case.q_RHC)
    check_rows(got, case, list(range(8)))


@pytest.mark.gpu
def test_any_strides() -> None:
    case = make_prefill_case()
    expected = prefill("contiguous", case)
    wide = torch.full((2, 3100, 640), math.nan, dtype=torch.bfloat16, device="cuda")
    wide[:, 50:3050] = torch.cat([case.latents_BTL, case.ropes_BTP, case.ropes_BTP], -1)
    case.latents_BTL, case.ropes_BTP = wide[:, 50:3050, :512], wide[:, 50:3050, 512:576]
    case.q_RHC = case.q_RHC.transpose(0, 1).contiguous().transpose(0, 1)
    case.indices_RK = case.indices_RK.T.contiguous().T
    assert torch.equal(prefill("contiguous", case), expected)
    case.q_RHC = case.q_RHC.mT.contiguous().mT
    assert torch.equal(prefill("contiguous", case), expected)


@pytest.mark.gpu
def test_repeats_are_equal() -> None:
    case = make_prefill_case(num_slots=2048)
    first = prefill("table", case)
    for _ in range(20):
        assert torch.equal(prefill("table", case), first)


@pytest.mark.gpu
def test_indices_may_change_in_a_graph() -> None:
    case = make_prefill_case()
    prefill("table", case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            got = prefill("table", case)
    for stop in (700, 5, 0, 333):
        new = torch.randint(0, 3000, case.indices_RK.shape, device="cuda").sort(-1).values
        case.indices_RK.copy_(new)
        case.indices_RK[:, stop:] = -1
        got.fill_(math.nan)
        graph.replay()
        check_rows(got, case, [0, 71, 139])


@pytest.mark.gpu
@pytest.mark.big_memory
def test_offsets_beyond_32_bits() -> None:
    case = make_prefill_case(num_sequences=1, rows_per_sequence=2, num_slots=100)
    expected = prefill("slots", case)
    num_pages = 2**31 // (64 * 576) + 100
    pages = torch.empty(num_pages, 64, 576, dtype=torch.bfloat16, device="cuda")
    shift = num_pages - case.pages.shape[0]
    pages[shift:] = case.pages
    case.pages, case.table = pages, case.table + shift
    for kind in ("slots", "table"):
        assert torch.equal(prefill(kind, case), expected)


# Without a GPU ------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", KINDS)
def test_launch_hands_over_what_the_caller_gave(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The host's half: a stand-in for the kernel computes from the kernel's arguments."""
    pytest.importorskip("cutlass")
    from glm_compile.ops.sparse_mla import cute_prefill

    def compiled_stand_in(variant: Any, arch: str) -> Any:
        def launch(
            q: torch.Tensor,
            latents: torch.Tensor,
            ropes: torch.Tensor,
            indices: torch.Tensor,
            table: torch.Tensor | None,
            output: torch.Tensor,
            rows_per_sequence: int,
            scale: float,
            num_blocks: int,
        ) -> None:
            assert q.stride(2) == 1 and q.data_ptr() % 16 == 0
            assert variant.index_dtype == indices.dtype and scale > 0 and num_blocks == 1
            assert variant.table_dtype == (None if table is None else table.dtype)
            is_paged = variant.page_size is not None
            rest = (table, rows_per_sequence, is_paged)
            output.copy_(
                sparse_mla_reference(q, latents, ropes, indices, scale * math.log(2), *rest)
            )

        return launch

    monkeypatch.setattr(cute_prefill, "_compiled", compiled_stand_in)
    monkeypatch.setattr(cute_prefill, "arch_of", lambda device: "sm_90a")
    case = make_prefill_case(rows_per_sequence=2, num_slots=300, num_tokens=400, device="cpu")
    for q_RHC in (case.q_RHC, case.q_RHC.mT.contiguous().mT):
        case.q_RHC = q_RHC
        assert_close(prefill(kind, case), case)
    want = oracle(case)
    case.q_RHC = -case.q_RHC
    assert_close(prefill(kind, case, -SCALE), case, want)


def test_nothing_to_do_launches_nothing() -> None:
    pytest.importorskip("cutlass")
    case = make_prefill_case(rows_per_sequence=1, num_slots=3, num_tokens=5, device="cpu")
    case.indices_RK = case.indices_RK[:, :0]
    assert (prefill("table", case) == 0).all()
    case.q_RHC, case.indices_RK = case.q_RHC[:0], case.indices_RK[:0]
    assert prefill("table", case).shape == (0, 64, 512)


@pytest.mark.compile_only
@pytest.mark.parametrize(("index_dtype", "table_dtype", "page_size"), ARGUMENTS)
def test_compiles_without_spilling(
    index_dtype: torch.dtype,
    table_dtype: torch.dtype | None,
    page_size: int | None,
    tmp_path: Path,
) -> None:
    pytest.importorskip("cutlass")
    from glm_compile.ops.sparse_mla.cute_prefill import (
        SparseMlaPrefillKernel,
        Variant,
        compile_variant,
    )

    variant = Variant(index_dtype, table_dtype, page_size)
    kernel = compile_cute(
        lambda options: compile_variant(variant, "sm_90a", options), "sm_90a", tmp_path
    )
    launcher = SparseMlaPrefillKernel(variant)
    # Registers move between the warps afterwards; 128 a thread is what 512 threads start with.
    assert kernel.stack_bytes == 0 and kernel.registers == 65536 // launcher.num_threads
    moved = [int(n) for n in re.findall(r"setmaxnreg\.\w+\.sync\.aligned\.u32\s+(\d+)", kernel.ptx)]
    assert len(moved) == 3 and sum(moved) + max(moved) == 512
    products = re.findall(
        r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", kernel.ptx
    )
    # Keys: 576 / 16 steps. Values: a tile's steps for each 128 of a group's 256 columns.
    assert products.count(str(variant.tile)) == 36
    assert products.count("128") == variant.tile // 16 * 2
    copies = re.findall(r"cp\.async\.cg\.shared\.global", kernel.ptx)
    assert len(copies) == variant.tile // 16 * 9
    assert launcher.shared_bytes <= 227 * 1024
