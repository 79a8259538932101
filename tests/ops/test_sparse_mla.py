"""sparse_mla and sparse_mla_contiguous against a loop over rows and slots in float64."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from glm_compile.ops.sparse_mla import sparse_mla, sparse_mla_contiguous
from glm_compile.ops.sparse_mla.config import TritonConfig, default_triton_config
from tests.compile_only import ARCHS, compile_triton

PAGE = 64
KINDS = ("contiguous", "table", "slots")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
SCALE = 0.11


@dataclass
class Case:
    """Random inputs of all kinds of cache, with the same tokens in each.

    Attributes:
        q_RHC: queries.
        latents_BTL, ropes_BTP: the contiguous cache.
        pages: the paged cache; positions without a token are NaN.
        table: [B, pages of a sequence].
        indices_RK: positions.
        rows_per_sequence: rows of a sequence.
    """

    q_RHC: torch.Tensor
    latents_BTL: torch.Tensor
    ropes_BTP: torch.Tensor
    pages: torch.Tensor
    table: torch.Tensor
    indices_RK: torch.Tensor
    rows_per_sequence: int

    @property
    def rank(self) -> int:
        return self.latents_BTL.shape[2]

    def to(self, device: str) -> Case:
        parts = {name: value for name, value in vars(self).items() if name != "rows_per_sequence"}
        return replace(self, **{name: part.to(device) for name, part in parts.items()})

    @property
    def slots_RK(self) -> torch.Tensor:
        """Physical slots of the indices; what is no position stays as it is."""
        index = self.indices_RK.long()
        sequence = torch.arange(index.shape[0], device=index.device) // self.rows_per_sequence
        num_tokens = self.latents_BTL.shape[1]
        is_position = (index >= 0) & (index < num_tokens)
        page = self.table[sequence].long().gather(1, index.clamp(0, num_tokens - 1) // PAGE)
        slot = torch.where(is_position, page * PAGE + index % PAGE, index)
        beyond = self.pages.shape[0] * PAGE
        return torch.where(index >= num_tokens, beyond + index, slot).to(self.indices_RK.dtype)


def make_case(
    dtype: torch.dtype = torch.float32,
    *,
    num_sequences: int = 2,
    rows_per_sequence: int = 3,
    num_heads: int = 5,
    rank: int = 48,
    rope_dim: int = 16,
    num_tokens: int = 150,
    num_slots: int = 37,
    device: str = "cpu",
) -> Case:
    num_rows = num_sequences * rows_per_sequence
    q = torch.randn(num_rows, num_heads, rank + rope_dim, device=device).to(dtype)
    latents = torch.randn(num_sequences, num_tokens, rank, device=device).to(dtype)
    ropes = torch.randn(num_sequences, num_tokens, rope_dim, device=device).to(dtype)
    pages_each = -(-num_tokens // PAGE)
    num_pages = num_sequences * pages_each + 3
    table = torch.randperm(num_pages, device=device)[: num_sequences * pages_each]
    table = table.reshape(num_sequences, pages_each).int()
    pages = torch.full((num_pages, PAGE, rank + rope_dim), math.nan, dtype=dtype, device=device)
    for b in range(num_sequences):
        for p in range(pages_each):
            stop = min(PAGE, num_tokens - p * PAGE)
            there = slice(p * PAGE, p * PAGE + stop)
            pages[table[b, p], :stop] = torch.cat([latents[b, there], ropes[b, there]], -1)
    width = min(num_slots, num_tokens)
    order = torch.rand(num_rows, num_tokens, device=device).argsort(-1)[:, :width]
    indices = torch.full((num_rows, num_slots), -1, dtype=torch.int32, device=device)
    indices[:, :width] = order.sort(-1).values
    return Case(q, latents, ropes, pages, table, indices, rows_per_sequence)


def call(kind: str, case: Case, backend: str | None = None) -> torch.Tensor:
    if kind == "contiguous":
        return sparse_mla_contiguous(
            case.q_RHC,
            case.latents_BTL,
            case.ropes_BTP,
            case.indices_RK,
            SCALE,
            rows_per_sequence=case.rows_per_sequence,
            backend=backend,
        )
    return sparse_mla(
        case.q_RHC,
        case.pages,
        case.indices_RK if kind == "table" else case.slots_RK,
        SCALE,
        kv_lora_rank=case.rank,
        block_table=case.table if kind == "table" else None,
        rows_per_sequence=case.rows_per_sequence,
        backend=backend,
    )


def counted(case: Case, row: int) -> list[int]:
    """The positions of a row that count."""
    indices = case.indices_RK[row].tolist()
    return [
        index
        for k, index in enumerate(indices)
        if 0 <= index < case.latents_BTL.shape[1] and (k == 0 or index != indices[k - 1])
    ]


def by_row(case: Case, dtype: torch.dtype) -> torch.Tensor:
    """Row by row in torch: matmul, softmax in fp32 at least, matmul; zeros where nothing counts."""
    num_rows, num_heads, _ = case.q_RHC.shape
    attended = torch.zeros(num_rows, num_heads, case.rank, dtype=dtype, device=case.q_RHC.device)
    for r in range(num_rows):
        if kept := counted(case, r):
            sequence = r // case.rows_per_sequence
            value_KL = case.latents_BTL[sequence, kept].to(dtype)
            key_KC = torch.cat([value_KL, case.ropes_BTP[sequence, kept].to(dtype)], -1)
            score_HK = case.q_RHC[r].to(dtype) @ key_KC.T * SCALE
            wide = torch.promote_types(dtype, torch.float32)
            attended[r] = score_HK.softmax(-1, dtype=wide).to(dtype) @ value_KL
    return attended


def oracle(case: Case) -> torch.Tensor:
    return by_row(case, torch.float64)


def assert_close(got: torch.Tensor, case: Case, want: torch.Tensor | None = None) -> None:
    """At most twice the error of plain torch in the same dtype."""
    want = oracle(case) if want is None else want
    assert got.dtype == case.q_RHC.dtype and got.is_contiguous()
    error = (got.double() - want).abs().max().item()
    of_torch = (by_row(case, case.q_RHC.dtype).double() - want).abs().max().item()
    assert error <= 2 * of_torch + 1e-6, (error, of_torch)


# Contract -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    ("num_tokens", "num_slots", "num_heads"), [(1, 1, 1), (150, 37, 5), (64, 64, 8), (65, 100, 3)]
)
def test_equals_float64(
    num_tokens: int, num_slots: int, num_heads: int, kind: str, dtype: torch.dtype
) -> None:
    case = make_case(dtype, num_tokens=num_tokens, num_slots=num_slots, num_heads=num_heads)
    assert_close(call(kind, case), case)


@pytest.mark.parametrize("kind", KINDS)
def test_repeated_negative_and_outside_indices_count_for_nothing(kind: str) -> None:
    case = make_case(num_tokens=150, num_slots=37)
    want = oracle(case)
    rows = case.indices_RK.clone()
    padded = torch.cat([rows[:, :1].expand(-1, 4), rows], 1)
    padded = torch.cat([padded, rows[:, -1:].expand(-1, 3)], 1)
    outside = torch.tensor([-1, 192, -7, 2**31 - 1, -(2**31), 192]).int().expand(len(rows), -1)
    padded = torch.cat([outside, padded, outside], 1)
    case.indices_RK = padded
    if kind == "slots":
        # Physical slots beyond the pages; int32 would wrap around when it adds the pages to them.
        case.indices_RK = padded.long()
    assert_close(call(kind, case), case, want)


@pytest.mark.parametrize("kind", KINDS)
def test_equal_indices_apart_count_each(kind: str) -> None:
    case = make_case(num_sequences=1, rows_per_sequence=1, num_slots=3)
    case.indices_RK = torch.tensor([[7, 9, 7]], dtype=torch.int32)
    assert_close(call(kind, case), case)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_rows_without_a_valid_slot_are_zero(kind: str, dtype: torch.dtype) -> None:
    case = make_case(dtype)
    case.indices_RK[1] = -1
    got = call(kind, case)
    assert (got[1] == 0).all() and (got[0] != 0).any()
    assert_close(got, case)


@pytest.mark.parametrize("kind", KINDS)
def test_ignored_tokens_may_be_nan(kind: str) -> None:
    case = make_case()
    want = call(kind, case)
    unused = torch.ones(2, 150, dtype=torch.bool)
    for r, indices in enumerate(case.indices_RK.long()):
        unused[r // 3, indices] = False
    case.latents_BTL[unused] = math.nan
    case.ropes_BTP[unused] = math.nan
    # Slots 0 and -1 are where a careless kernel looks for what counts for nothing.
    case.indices_RK = torch.cat([case.indices_RK, torch.full((6, 2), -1)], 1).int()
    assert torch.equal(call(kind, case), want)


def test_pages_may_be_missing() -> None:
    case = make_case()
    case.table[1, 1] = -1
    got = call("table", case)
    inside = (case.indices_RK >= 64) & (case.indices_RK < 128)
    inside[:3] = False
    case.indices_RK = case.indices_RK.masked_fill(inside, -1)
    assert_close(got, case)
    case.table[1, 1] = len(case.pages)
    assert torch.equal(call("table", case), got)
    case.table = case.table[:, :2]
    got = call("table", case)
    case.indices_RK = case.indices_RK.masked_fill(case.indices_RK >= 128, -1)
    assert_close(got, case)


@pytest.mark.parametrize("kind", KINDS)
def test_takes_any_strides_and_int64(kind: str) -> None:
    case = make_case()
    want = call(kind, case)
    q = case.q_RHC.transpose(0, 1).contiguous().transpose(0, 1)
    latents = torch.cat([case.latents_BTL, case.latents_BTL], 2)[..., :48]
    ropes = torch.cat([case.ropes_BTP] * 3, 2)[..., 16:32].transpose(0, 1).contiguous()
    changed = replace(
        case,
        q_RHC=q,
        latents_BTL=latents,
        ropes_BTP=ropes.transpose(0, 1),
        pages=torch.cat([case.pages, case.pages], 2)[..., :64],
        table=case.table.long().T.contiguous().T,
        indices_RK=case.indices_RK.long().T.contiguous().T,
    )
    assert torch.equal(call(kind, changed), want)


@pytest.mark.parametrize("kind", KINDS)
def test_no_rows_no_slots_no_tokens(kind: str) -> None:
    case = make_case()
    none = replace(case, q_RHC=case.q_RHC[:0], indices_RK=case.indices_RK[:0])
    none = replace(none, latents_BTL=case.latents_BTL[:0], ropes_BTP=case.ropes_BTP[:0])
    none.table = case.table[:0]
    assert call(kind, none).shape == (0, 5, 48)
    assert (call(kind, replace(case, indices_RK=case.indices_RK[:, :0])) == 0).all()
    if kind == "contiguous":
        empty = replace(case, latents_BTL=case.latents_BTL[:, :0], ropes_BTP=case.ropes_BTP[:, :0])
        assert (call(kind, empty) == 0).all()
    elif kind == "table":
        assert (call(kind, replace(case, table=case.table[:, :0])) == 0).all()


def test_many_rows_are_taken_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    from glm_compile.ops.sparse_mla import reference

    case = make_case(num_sequences=2, rows_per_sequence=7)
    want = [call(kind, case) for kind in KINDS]
    monkeypatch.setattr(reference, "_CHUNK_VALUES", 5 * 37 * 64)
    for kind, whole in zip(KINDS, want, strict=True):
        assert torch.allclose(call(kind, case), whole, rtol=1e-5, atol=1e-6)


def test_rank_is_all_but_64_columns_unless_told() -> None:
    case = make_case(rank=32, rope_dim=64)
    got = sparse_mla(case.q_RHC, case.pages, case.slots_RK, SCALE)
    assert torch.equal(got, call("slots", case))


def test_refuses_what_it_was_not_made_for() -> None:
    case = make_case()
    q, pages, slots = case.q_RHC, case.pages, case.slots_RK

    def paged(*changes: Any, **keywords: Any) -> Any:
        arguments = [q, pages, slots, SCALE]
        for at, value in changes:
            arguments[at] = value
        return lambda: sparse_mla(*arguments, **{"kv_lora_rank": 48, **keywords})

    def contiguous(*changes: Any, **keywords: Any) -> Any:
        arguments = [q, case.latents_BTL, case.ropes_BTP, case.indices_RK, SCALE]
        for at, value in changes:
            arguments[at] = value
        return lambda: sparse_mla_contiguous(*arguments, **{"rows_per_sequence": 3, **keywords})

    transposed = case.latents_BTL.mT.contiguous().mT
    for wrong, reason in (
        (paged((0, q.double())), "q must be float32, bfloat16 or float16"),
        (paged((0, q[0])), r"q must be .* \[R, H, C\]"),
        (paged((2, slots.float())), "indices must be int32 or int64"),
        (paged((2, slots[1:])), r"indices must be \[6, K\]"),
        (paged((1, pages.bfloat16())), "latent_pages must have q's dtype"),
        (paged((1, pages[:, :32])), r"latent_pages must be \[pages, 64, 64\]"),
        (paged(kv_lora_rank=65), "kv_lora_rank must be between 1 and the 64 columns"),
        (paged(kv_lora_rank=None), "kv_lora_rank must be between 1 and the 64 columns"),
        (paged(block_table=case.table), "2 sequences of 1 rows expected, got 6"),
        (paged(block_table=case.table.float()), "block_table must be int32 or int64"),
        (paged(backend="cudnn"), "unknown backend 'cudnn'"),
        (contiguous((1, case.latents_BTL[:, 1:])), "must hold the same tokens"),
        (contiguous((1, case.latents_BTL[..., 1:])), "must be as wide as q, 64, got 47 and 16"),
        (contiguous((1, transposed)), "last axis of latents must be contiguous"),
        (contiguous((2, case.ropes_BTP.half())), "ropes must have q's dtype"),
        (contiguous((1, case.latents_BTL[0])), "expected latents"),
        (contiguous(rows_per_sequence=2), "2 sequences of 2 rows expected, got 6"),
    ):
        with pytest.raises(ValueError, match=f"^sparse_mla(_contiguous)?: .*{reason}"):
            wrong()


@pytest.mark.parametrize("kind", KINDS)
def test_registration_is_sound(kind: str) -> None:
    case = make_case()
    ops = torch.ops.glm
    if kind == "contiguous":
        arguments: tuple = (case.q_RHC, case.latents_BTL, case.ropes_BTP, case.indices_RK)
        torch.library.opcheck(ops.sparse_mla_contiguous.default, (*arguments, SCALE, 3, ""))
        return
    table = case.table if kind == "table" else None
    indices = case.indices_RK if kind == "table" else case.slots_RK
    rest = (SCALE, 48, table, 3, "")
    torch.library.opcheck(ops.sparse_mla.default, (case.q_RHC, case.pages, indices, *rest))


def test_compiles_with_symbolic_sizes() -> None:
    def run(case_q: torch.Tensor, latents: torch.Tensor, ropes: torch.Tensor, indices: Any) -> Any:
        return sparse_mla_contiguous(case_q, latents, ropes, indices, SCALE, rows_per_sequence=3)

    compiled = torch.compile(run, backend="aot_eager", dynamic=True, fullgraph=True)
    for num_tokens, num_slots in ((150, 37), (99, 20), (301, 64)):
        case = make_case(num_tokens=num_tokens, num_slots=num_slots)
        arguments = (case.q_RHC, case.latents_BTL, case.ropes_BTP, case.indices_RK)
        assert torch.equal(compiled(*arguments), call("contiguous", case))


# Triton -------------------------------------------------------------------------------------------

INTERPRETED = TritonConfig(block_heads=16, block_tokens=16, num_splits=1, num_warps=4, num_stages=1)


def run_triton(kind: str, case: Case, config: TritonConfig) -> torch.Tensor:
    from glm_compile.ops.sparse_mla.triton_kernel import sparse_mla_triton

    latents, ropes, indices, table = case.latents_BTL, case.ropes_BTP, case.indices_RK, None
    if kind != "contiguous":
        latents, ropes = case.pages[..., : case.rank], case.pages[..., case.rank :]
        indices, table = (indices, case.table) if kind == "table" else (case.slots_RK, None)
    is_paged = kind != "contiguous"
    return sparse_mla_triton(
        case.q_RHC,
        latents,
        ropes,
        indices,
        SCALE,
        table,
        case.rows_per_sequence,
        is_paged,
        config=config,
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("num_splits", [1, 2, 4])
@pytest.mark.parametrize("kind", KINDS)
def test_triton_in_the_interpreter(kind: str, num_splits: int) -> None:
    case = make_case(num_slots=41, num_heads=5)
    case.indices_RK[1] = -1
    case.indices_RK[2, 30:] = case.indices_RK[2, 29]
    case.indices_RK[3, :3] = torch.tensor([-9, 192, 2**31 - 1])
    case.table[1, 1] = -1
    if kind == "slots":
        case.table[1, 1] = case.pages.shape[0]
        case.indices_RK = case.indices_RK.long()
    got = run_triton(kind, case, replace(INTERPRETED, num_splits=num_splits))
    if kind != "contiguous":
        inside = (case.indices_RK >= 64) & (case.indices_RK < 128)
        inside[:3] = False
        case.indices_RK = case.indices_RK.masked_fill(inside, -1)
    assert_close(got, case)
    assert (got[1] == 0).all()


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("num_heads", "rank", "rope_dim"), [(4, 64, 16), (17, 96, 32), (64, 64, 64)]
)
def test_triton_takes_any_sizes(
    num_heads: int, rank: int, rope_dim: int, dtype: torch.dtype
) -> None:
    case = make_case(dtype, num_heads=num_heads, rank=rank, rope_dim=rope_dim, num_slots=70)
    config = default_triton_config(6, num_heads, 70, rank, case.q_RHC.element_size(), 4)
    assert_close(run_triton("table", case, config), case)
    case.q_RHC = case.q_RHC.transpose(0, 1).contiguous().transpose(0, 1)
    case.indices_RK = case.indices_RK.T.contiguous().T
    assert_close(run_triton("contiguous", case, config), case)


@pytest.mark.parametrize(
    ("num_rows", "num_heads"), [(1, 64), (6, 64), (6, 8), (64, 32), (2048, 64)]
)
@pytest.mark.parametrize("element_bytes", [2, 4])
def test_triton_splits_fill_the_device(num_rows: int, num_heads: int, element_bytes: int) -> None:
    config = default_triton_config(num_rows, num_heads, 2048, 512, element_bytes, 132)
    programs = num_rows * -(-num_heads // config.block_heads) * config.num_splits
    assert programs >= 96 or config.num_splits * 128 >= 2048
    assert config.num_splits == 1 or programs <= 4 * 132


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize(
    ("dtype", "num_heads", "rank", "kind"),
    [
        (torch.bfloat16, 64, 512, "table"),
        (torch.bfloat16, 8, 512, "contiguous"),
        (torch.float16, 4, 64, "slots"),
        (torch.float32, 64, 512, "contiguous"),
    ],
)
def test_triton_compiles_without_spills(
    dtype: torch.dtype, num_heads: int, rank: int, kind: str, arch: str
) -> None:
    pytest.importorskip("triton")
    from glm_compile.ops.sparse_mla.triton_kernel import combine_kernel, sparse_mla_kernel

    def meta(*shape: int, dtype: torch.dtype = dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    width = rank + 64
    config = default_triton_config(6, num_heads, 2048, rank, dtype.itemsize, 132)
    splits = config.num_splits
    assert splits > 1
    parts = meta(6, num_heads, splits, rank, dtype=torch.float32)
    stats = meta(6, num_heads, splits, 2, dtype=torch.float32)
    pages = (meta(4096, 64, width), 64 * width, width, 1)
    table = meta(1, 2048, dtype=torch.int32) if kind == "table" else None
    kernel = compile_triton(
        sparse_mla_kernel,
        [
            *(meta(6, num_heads, width), num_heads * width, width, 1),
            *pages,
            *pages,
            *(meta(6, 2048, dtype=torch.int32), 2048, 1),
            *((table, 2048, 1) if table is not None else (None, 0, 0)),
            2048,
            parts,
            stats,
            0.1,
            2048,
            4096,
            64,
            6,
        ],
        {
            "H": num_heads,
            "L": rank,
            "P": 64,
            "IS_PAGED": kind != "contiguous",
            "NUM_SPLITS": splits,
            "BLOCK_H": config.block_heads,
            "BLOCK_L": rank,
            "BLOCK_P": 64,
            "BLOCK_K": config.block_tokens,
        },
        arch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )
    assert kernel.stack_bytes == 0 and kernel.registers <= 255
    assert kernel.shared_bytes <= 227 * 1024
    combine = compile_triton(
        combine_kernel,
        [parts, stats, meta(6, num_heads, rank)],
        {"L": rank, "NUM_SPLITS": splits, "BLOCK_L": rank},
        arch,
    )
    assert combine.stack_bytes == 0
