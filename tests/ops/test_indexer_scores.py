"""indexer_scores and indexer_scores_paged against float64 and against transformers' own lines."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_compile.ops.fp8_quant import fp8_quant
from glm_compile.ops.indexer_scores import indexer_scores, indexer_scores_paged
from glm_compile.ops.indexer_scores import reference as reference_module
from tests.compile_only import ARCHS, CompiledKernel, compile_triton

PAGE = 64
MODEL_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
KINDS = ("contiguous", "paged", "fp8")


@dataclass
class Case:
    """One call: the keys both as one tensor and as pages, everything in the model's dtype."""

    q_BSHD: torch.Tensor
    weights_BSH: torch.Tensor
    k_BTD: torch.Tensor
    key_pages: torch.Tensor
    block_table: torch.Tensor
    lengths_BS: torch.Tensor

    @property
    def is_inside_BST(self) -> torch.Tensor:
        position = torch.arange(self.k_BTD.shape[1], device=self.k_BTD.device)
        return position < self.lengths_BS[..., None]


def make_case(
    dtype: torch.dtype = torch.float32,
    *,
    num_batch: int = 2,
    num_queries: int = 3,
    num_heads: int = 16,
    head_dim: int = 32,
    num_keys: int = 150,
    identity: bool = False,
    device: str = "cpu",
) -> Case:
    pages_per_sequence = -(-num_keys // PAGE) + 1
    num_pages = num_batch * pages_per_sequence
    order = torch.arange(num_pages) if identity else torch.randperm(num_pages)
    table = order.reshape(num_batch, pages_per_sequence)
    key_pages = torch.randn(num_pages, PAGE, head_dim).to(dtype)
    last = torch.randint(num_keys // 2, num_keys, (num_batch, 1)) + 1 - num_queries
    return Case(
        q_BSHD=torch.randn(num_batch, num_queries, num_heads, head_dim).to(device, dtype),
        weights_BSH=(torch.randn(num_batch, num_queries, num_heads) * num_heads**-0.5).to(device),
        k_BTD=key_pages[table].flatten(1, 2)[:, :num_keys].to(device),
        key_pages=key_pages.to(device),
        block_table=table.int().to(device),
        lengths_BS=(last + torch.arange(num_queries)).int().to(device),
    )


def to_fp8_pages(key_pages: torch.Tensor) -> torch.Tensor:
    """The released layout: 64 rows of e4m3 bytes, then 64 fp32 scales."""
    values, scales = fp8_quant(key_pages)
    parts = [values.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)]
    return torch.cat(parts, dim=1).contiguous()


def call(kind: str, case: Case, backend: str | None = None, **keywords: Any) -> torch.Tensor:
    """Scores [B, S, T] of the case; `starts_BS` and `key_mask` pass through."""
    num_batch, num_queries, num_heads, head_dim = case.q_BSHD.shape
    num_keys = case.k_BTD.shape[1]
    if kind == "contiguous":
        return indexer_scores(
            case.q_BSHD,
            case.weights_BSH,
            case.k_BTD,
            case.lengths_BS,
            backend=backend,
            **keywords,
        )
    starts_BS = keywords.pop("starts_BS", None)
    # make_case's rows see one key more each.
    lengths = case.lengths_BS[:, 0] - 1 if keywords.get("is_causal") else case.lengths_BS
    q, weights, key_pages = case.q_BSHD, case.weights_BSH * head_dim**-0.5, case.key_pages
    if kind == "fp8":
        q, q_scale = fp8_quant(q)
        weights, key_pages = weights * q_scale, to_fp8_pages(key_pages)
    scores = indexer_scores_paged(
        q.reshape(-1, num_heads, head_dim),
        weights.reshape(-1, num_heads),
        key_pages,
        case.block_table,
        lengths.reshape(-1),
        num_keys,
        starts_R=None if starts_BS is None else starts_BS.reshape(-1),
        rows_per_sequence=num_queries,
        backend=backend,
        **keywords,
    )
    return scores.reshape(num_batch, num_queries, num_keys)


def oracle(kind: str, case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """(scores, size of the sums behind them) in float64, of the dequantised values where FP8."""
    q, k = case.q_BSHD.double(), case.k_BTD.double()
    if kind == "fp8":
        q_values, q_scale = fp8_quant(case.q_BSHD)
        k_values, k_scale = fp8_quant(case.k_BTD)
        q = q_values.double() * q_scale.double()[..., None]
        k = k_values.double() * k_scale.double()[..., None]
    scale, weights = case.q_BSHD.shape[-1] ** -0.5, case.weights_BSH.double()
    products = (torch.einsum("bshd,btd->bsht", q, k) * scale).clamp(min=0)
    sizes = torch.einsum("bshd,btd->bsht", q.abs(), k.abs()) * scale
    return (
        torch.einsum("bsh,bsht->bst", weights, products),
        torch.einsum("bsh,bsht->bst", weights.abs(), sizes),
    )


def assert_close(got: torch.Tensor, case: Case, kind: str) -> None:
    """Inside the windows, within a few fp32 roundings of the sums."""
    inside = case.is_inside_BST
    want, sizes = oracle(kind, case)
    assert ((got.double() - want).abs() / sizes)[inside].max() <= 4 * 2**-24


# Numbers ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("identity", [True, False])
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_equals_float64(kind: str, dtype: torch.dtype, identity: bool) -> None:
    case = make_case(dtype, identity=identity)
    assert_close(call(kind, case), case, kind)


@pytest.mark.parametrize("num_keys", [1, 63, 64, 65, 199])
@pytest.mark.parametrize("num_queries", [1, 6])
@pytest.mark.parametrize("kind", KINDS)
def test_awkward_sizes(kind: str, num_queries: int, num_keys: int) -> None:
    case = make_case(num_batch=3, num_queries=num_queries, num_heads=5, num_keys=num_keys)
    case.lengths_BS = case.lengths_BS.clamp(min=1)
    assert_close(call(kind, case), case, kind)


def test_exact_tier_equals_transformers_bit_for_bit() -> None:
    case = make_case(torch.bfloat16, head_dim=128)
    case.lengths_BS = torch.full_like(case.lengths_BS, 150)
    scores = torch.matmul(case.q_BSHD.float(), case.k_BTD.transpose(-1, -2).float().unsqueeze(1))
    scores = torch.nn.functional.relu(scores * 128**-0.5)
    want = torch.matmul(case.weights_BSH.unsqueeze(-2), scores).squeeze(-2)
    assert torch.equal(call("contiguous", case), want)


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_do_not_show(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case()
    whole = call(kind, case)
    monkeypatch.setattr(reference_module, "_CHUNK_ELEMENTS", 1)
    torch.testing.assert_close(call(kind, case), whole, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_keys_score_nan_and_touch_no_other(kind: str) -> None:
    case = make_case()
    want = call(kind, case)
    # Position 70 of sequence 1: page 1, row 6.
    case.k_BTD[1, 70, 3] = math.nan
    case.key_pages[case.block_table[1, 1], 6, 3] = math.nan
    got = call(kind, case)
    assert got[1, :, 70].isnan().all()
    got[1, :, 70] = want[1, :, 70]
    assert torch.equal(got, want)


# Windows, masks, pages ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask_shape", [(1, 1, 150), (2, 1, 155), (2, 3, 150), (1, 3, 151), (150,), (2, 1, 1)]
)
@pytest.mark.parametrize("kind", KINDS)
def test_key_mask_gives_minus_infinity(kind: str, mask_shape: tuple[int, ...]) -> None:
    case = make_case()
    key_mask = torch.rand(mask_shape) > 0.4
    if len(mask_shape) == 3 and mask_shape[0] == 1:
        # Stride 0, as an expanded padding mask has.
        key_mask = key_mask.expand(2, *mask_shape[1:])
    got, plain = call(kind, case, key_mask=key_mask), call(kind, case)
    allowed = key_mask[..., :150].expand(2, 3, 150) & case.is_inside_BST
    assert torch.equal(got[allowed], plain[allowed])
    assert (got[~allowed & case.is_inside_BST] == -math.inf).all()


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("kind", KINDS)
def test_windows(kind: str, index_dtype: torch.dtype) -> None:
    case = make_case()
    plain = call(kind, case)
    starts = torch.tensor([[0, 5, 200], [-3, 64, 65]], dtype=index_dtype)
    case.lengths_BS = torch.tensor([[0, 70, 150], [-5, 999, 66]], dtype=index_dtype)
    got = call(kind, case, starts_BS=starts)
    inside = case.is_inside_BST & (torch.arange(150) >= starts[..., None])
    case.lengths_BS = torch.full((2, 3), 150)
    plain = call(kind, case)
    assert torch.equal(got[inside], plain[inside])
    assert (got[~inside] == -math.inf).all()


def test_pages_beyond_the_length_are_not_looked_up() -> None:
    case = make_case(num_keys=150)
    want = call("fp8", case)
    case.lengths_BS.clamp_(max=64)
    case.block_table[:, 1:] = -1
    got = call("fp8", case)
    inside = case.is_inside_BST
    assert torch.equal(got[inside], want[inside])


def test_positions_without_a_page_score_minus_infinity() -> None:
    case = make_case(num_keys=190)
    case.lengths_BS = torch.full((2, 3), 190)
    want = call("paged", case)
    case.block_table[1, 1] = -1
    case.block_table = case.block_table[:, :2]
    got = call("paged", case)
    # The CPU's products of other shapes are summed in another order.
    torch.testing.assert_close(got[0, :, :128], want[0, :, :128], rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1, :, :64], want[1, :, :64], rtol=1e-5, atol=1e-5)
    assert (got[1, :, 64:] == -math.inf).all() and (got[0, :, 128:] == -math.inf).all()


@pytest.mark.parametrize("kind", KINDS)
def test_each_sequence_equals_its_own_run(kind: str) -> None:
    case = make_case(num_batch=3)
    together = call(kind, case)
    for b in range(3):
        one = {name: value[b : b + 1] for name, value in case.__dict__.items()}
        alone = call(kind, Case(**{**one, "key_pages": case.key_pages}))
        torch.testing.assert_close(alone[0], together[b], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(kind: str) -> None:
    case = make_case()
    want = call(kind, case)
    case.q_BSHD = case.q_BSHD.permute(3, 2, 0, 1).contiguous().permute(2, 3, 1, 0)
    case.k_BTD = case.k_BTD.transpose(1, 2).contiguous().transpose(1, 2)
    case.weights_BSH = case.weights_BSH.permute(2, 0, 1).contiguous().permute(1, 2, 0)
    case.lengths_BS = case.lengths_BS.T.contiguous().T
    torch.testing.assert_close(call(kind, case), want, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("kind", "sizes"),
    [
        ("contiguous", (0, 3, 8)),
        ("contiguous", (2, 0, 8)),
        ("contiguous", (2, 3, 0)),
        ("paged", (0, 3, 8)),
        ("paged", (2, 3, 0)),
    ],
)
def test_empty_sizes(kind: str, sizes: tuple[int, int, int]) -> None:
    num_batch, num_queries, num_keys = sizes
    case = make_case()
    cut = {name: value[:num_batch] for name, value in case.__dict__.items()}
    case = Case(**{**cut, "key_pages": case.key_pages})
    case.q_BSHD, case.weights_BSH = case.q_BSHD[:, :num_queries], case.weights_BSH[:, :num_queries]
    case.lengths_BS, case.k_BTD = case.lengths_BS[:, :num_queries], case.k_BTD[:, :num_keys]
    assert call(kind, case).shape == sizes


# Validation ---------------------------------------------------------------------------------------


def test_contiguous_refuses_wrong_arguments() -> None:
    case = make_case()
    good = {
        "q_BSHD": case.q_BSHD,
        "weights_BSH": case.weights_BSH,
        "k_BTD": case.k_BTD,
        "lengths_BS": case.lengths_BS,
    }
    for changes, message in (
        ({"q_BSHD": case.q_BSHD[0]}, r"expected q \[B, S, H, D\]"),
        ({"k_BTD": case.k_BTD.bfloat16()}, "q and k must share .* got torch.float32 and torch.bf"),
        ({"k_BTD": case.k_BTD[:1]}, r"k must be \[2, T, 32\], got"),
        ({"weights_BSH": case.weights_BSH[:, :1]}, r"weights must be \[2, 3, 16\], got"),
        ({"lengths_BS": case.lengths_BS[:1]}, "lengths must hold one value a row"),
        ({"starts_BS": case.lengths_BS.float()}, "starts must be int32 or int64"),
        ({"key_mask": torch.ones(2, 3, 149, dtype=torch.bool)}, "key_mask must broadcast"),
        ({"backend": "triton"}, "backend 'triton' cannot run this call: .*CUDA"),
    ):
        with pytest.raises(ValueError, match=f"indexer_scores: {message}"):
            indexer_scores(**{**good, **changes})


@pytest.mark.parametrize("kind", ["paged", "fp8"])
def test_causal_lengths_are_those_of_the_rows(kind: str) -> None:
    case = make_case()
    assert torch.equal(call(kind, case, is_causal=True), call(kind, case))


def test_paged_refuses_wrong_arguments() -> None:
    case = make_case()
    good = {
        "q_fp8_RHD": fp8_quant(case.q_BSHD)[0].flatten(0, 1),
        "weights_RH": case.weights_BSH.flatten(0, 1),
        "key_pages": to_fp8_pages(case.key_pages),
        "block_table": case.block_table,
        "lengths_R": case.lengths_BS.flatten(),
        "max_len": 150,
        "rows_per_sequence": 3,
    }
    indexer_scores_paged(**good)
    for changes, message in (
        ({"q_fp8_RHD": case.q_BSHD.flatten(0, 1)}, "FP8 key pages need a float8_e4m3fn q"),
        ({"key_pages": case.key_pages}, "key_pages must be uint8, or .* as q, got"),
        ({"key_pages": good["key_pages"][:, :-4]}, "a page of 32-wide keys has 2304 bytes"),
        ({"key_pages": good["key_pages"][:0]}, "key_pages must hold at least one page"),
        ({"block_table": case.block_table.float()}, "block_table must be int32 or int64"),
        ({"rows_per_sequence": 2}, "2 sequences of 2 rows expected, got 6 rows"),
        ({"weights_RH": case.weights_BSH[0]}, r"weights must be \[6, 16\], got"),
        ({"lengths_R": case.lengths_BS}, "lengths must hold one value a row"),
        ({"is_causal": True}, r"lengths must .* shape \(2,\), got \(6,\)"),
    ):
        with pytest.raises(ValueError, match=f"indexer_scores_paged: {message}"):
            indexer_scores_paged(**{**good, **changes})


# Op registration and compilation ------------------------------------------------------------------


def test_ops_pass_opcheck() -> None:
    case = make_case()
    mask, starts = torch.ones(1, 1, 150, dtype=torch.bool), torch.zeros_like(case.lengths_BS)
    torch.library.opcheck(
        torch.ops.glm.indexer_scores.default,
        (case.q_BSHD, case.weights_BSH, case.k_BTD, case.lengths_BS, starts, mask, 0.1, ""),
    )
    rows = [t.flatten(0, 1) for t in (case.q_BSHD, case.weights_BSH)]
    lengths = case.lengths_BS.flatten()
    paged = torch.ops.glm.indexer_scores_paged.default
    windows = (150, None, mask, 3, False, False, "reference")
    torch.library.opcheck(paged, (*rows, case.key_pages, case.block_table, lengths, *windows))
    q8 = fp8_quant(rows[0])[0]
    fp8_pages = to_fp8_pages(case.key_pages)
    # The schema test compares its inputs, which torch cannot do for FP8 on the CPU.
    torch.library.opcheck(
        paged,
        (q8, rows[1], fp8_pages, case.block_table, lengths[:2], 150, None, None, 3, True, True, ""),
        test_utils=("test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic"),
    )


def test_compiles_once_for_every_number_of_keys() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")
    case = make_case()

    def both(keys: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        contiguous = indexer_scores(case.q_BSHD, case.weights_BSH, keys, case.lengths_BS)
        paged = indexer_scores_paged(
            case.q_BSHD.flatten(0, 1),
            case.weights_BSH.flatten(0, 1),
            case.key_pages,
            case.block_table,
            case.lengths_BS.flatten(),
            keys.shape[1],
            rows_per_sequence=3,
        )
        return contiguous, paged

    compiled = torch.compile(both, backend=counter, fullgraph=True)
    for num_keys in (150, 149, 70, 5):
        keys = case.k_BTD[:, :num_keys].clone()
        torch._dynamo.mark_dynamic(keys, 1)
        for got, want in zip(compiled(keys), both(keys)):
            assert torch.equal(got, want)
    assert counter.frame_count == 1


# Kernel -------------------------------------------------------------------------------------------


def assert_kernel_equals_reference(kind: str, case: Case, **keywords: Any) -> None:
    got = call(kind, case, "triton", **keywords)
    want = call(kind, case, "reference", **keywords)
    inside = case.is_inside_BST
    if "starts_BS" in keywords:
        position = torch.arange(case.k_BTD.shape[1], device=got.device)
        inside = inside & (position >= keywords["starts_BS"][..., None])
    # FP8 products on Hopper keep about 14 bits of the sum.
    tolerance = 2e-3 if kind == "fp8" and got.is_cuda else 1e-5
    torch.testing.assert_close(got[inside], want[inside], rtol=tolerance, atol=tolerance)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_equals_reference(kind: str, dtype: torch.dtype) -> None:
    case = make_case(dtype, num_queries=9, num_heads=5, head_dim=40)
    assert_kernel_equals_reference(kind, case)
    starts = torch.randint(-3, 140, (2, 9))
    assert_kernel_equals_reference(
        kind, case, starts_BS=starts, key_mask=torch.rand(2, 1, 155) > 0.3
    )


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", ["paged", "fp8"])
def test_kernel_causal_lengths(kind: str) -> None:
    case = make_case(num_queries=9, num_heads=5, head_dim=40)
    assert_kernel_equals_reference(kind, case, is_causal=True)
    case.lengths_BS = torch.tensor([[2**31 - 5], [-6]], dtype=torch.int32) + torch.arange(9)
    assert_kernel_equals_reference(kind, case, is_causal=True)


@pytest.mark.interpreter
@pytest.mark.parametrize("kind", KINDS)
def test_kernel_windows_strides_and_nan(kind: str) -> None:
    case = make_case()
    case.k_BTD[1, 7, 3] = math.nan
    case.key_pages[case.block_table[1, 0], 7, 3] = math.nan
    case.q_BSHD = case.q_BSHD.transpose(1, 2).contiguous().transpose(1, 2)
    case.k_BTD = case.k_BTD.transpose(0, 1).contiguous().transpose(0, 1)
    case.lengths_BS = torch.tensor([[0, 70, 150], [-5, 999, 66]])
    got, want = call(kind, case, "triton"), call(kind, case, "reference")
    inside = case.is_inside_BST
    torch.testing.assert_close(got[inside], want[inside], rtol=1e-5, atol=1e-5, equal_nan=True)
    assert got[1, 1:, 7].isnan().all()


@pytest.mark.interpreter
@pytest.mark.parametrize("num_keys", [0, 40])
def test_kernel_takes_empty_sizes(num_keys: int) -> None:
    case = make_case(num_keys=40)
    case.k_BTD = case.k_BTD[:, :num_keys]
    assert call("fp8", case, "triton").shape == (2, 3, num_keys)
    q, weights = case.q_BSHD[:0].flatten(0, 1), case.weights_BSH[:0].flatten(0, 1)
    table, lengths = case.block_table[:0], case.lengths_BS[:0].flatten()
    scores = indexer_scores_paged(
        q, weights, case.key_pages, table, lengths, 40, rows_per_sequence=3, backend="triton"
    )
    assert scores.shape == (0, 40)


@pytest.mark.interpreter
def test_kernel_takes_missing_pages() -> None:
    case = make_case(num_keys=190)
    case.lengths_BS = torch.full((2, 3), 190)
    case.block_table[1, 1] = -1
    case.block_table = case.block_table[:, :2]
    assert_kernel_equals_reference("fp8", case)
    assert_kernel_equals_reference("paged", case)


@pytest.mark.interpreter
def test_kernel_page_offsets_are_64_bit(tmp_path: Path) -> None:
    """Page 254,300 of 8448 bytes starts beyond 2^31 (a sparse file holds them)."""
    num_pages, page_bytes = 254_301, 8448
    name = str(tmp_path / "pages")
    pages = torch.from_file(name, shared=True, size=num_pages * page_bytes, dtype=torch.uint8)
    pages = pages.view(num_pages, page_bytes)
    pages[-1] = to_fp8_pages(torch.randn(1, 64, 128))[0]
    q, q_scale = fp8_quant(torch.randn(2, 16, 128))
    weights = torch.randn(2, 16) * q_scale
    lengths = torch.tensor([64, 60])

    def scores(key_pages: torch.Tensor, page: int, backend: str) -> torch.Tensor:
        table = torch.tensor([[page]])
        return indexer_scores_paged(
            q, weights, key_pages, table, lengths, 64, rows_per_sequence=2, backend=backend
        )[0]

    want = scores(pages[-1:].clone(), 0, "reference")
    assert torch.equal(scores(pages, num_pages - 1, "reference"), want)
    torch.testing.assert_close(scores(pages, num_pages - 1, "triton"), want, rtol=1e-5, atol=1e-5)


def compile_kernel(
    arch: str, kind: str, *, has_bounds: bool, num_keys: int = 131_072
) -> CompiledKernel:
    """The kernel of 6 rows; `has_bounds` adds starts and a key mask."""
    from glm_compile.ops.indexer_scores import triton_kernel
    from glm_compile.ops.indexer_scores.config import default_config

    def empty(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    dtype = {"fp8": torch.float8_e4m3fn, "fp32": torch.float32}.get(kind, torch.bfloat16)
    is_paged = kind in ("fp8", "paged")
    rows, heads, dim, columns = 6, 32, 128, num_keys // PAGE
    key_strides = {"fp8": (8448, dim), "paged": (PAGE * dim, dim)}.get(kind, (num_keys * dim, dim))
    config = default_config(dtype.itemsize)
    arguments = [
        *(empty(1, rows, heads, dim, dtype=dtype), rows * heads * dim, heads * dim, dim),
        *(empty(1, rows, heads), rows * heads, heads, 1),
        *(empty(64, PAGE, dim, dtype=dtype), *key_strides),
        *((empty(64, PAGE), 2112) if kind == "fp8" else (None, 0)),
        *(
            (empty(1, columns, dtype=torch.int32), columns, 1, columns)
            if is_paged
            else (None, 0, 0, 0)
        ),
        *(empty(1, rows, dtype=torch.int32), rows, 1),
        *((empty(1, rows, dtype=torch.int64), rows, 1) if has_bounds else (None, 0, 0)),
        *((empty(1, 1, num_keys, dtype=torch.uint8), 0, 0, 1) if has_bounds else (None, 0, 0, 0)),
        *(empty(1, rows, num_keys), rows, num_keys, dim**-0.5),
    ]
    constexprs = {
        "H": heads,
        "D": dim,
        "BLOCK_H": heads,
        "BLOCK_D": dim,
        "BLOCK_T": config.block_keys,
        "ROWS": config.rows_per_program,
    }
    return compile_triton(
        triton_kernel.indexer_scores_kernel,
        arguments,
        constexprs,
        arch,
        num_warps=config.num_warps,
        num_stages=config.num_stages,
    )


@pytest.mark.compile_only
@pytest.mark.parametrize("has_bounds", [False, True])
@pytest.mark.parametrize("kind", ["contiguous", "paged", "fp8", "fp32"])
@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_uses_tensor_cores_and_fits_in_registers(
    arch: str, kind: str, has_bounds: bool
) -> None:
    compiled = compile_kernel(arch, kind, has_bounds=has_bounds)
    assert compiled.stack_bytes == 0
    assert compiled.registers <= 128
    assert compiled.shared_bytes <= 64 * 1024
    if kind != "fp32":
        instruction = {"sm_90a": "wgmma.mma_async", "sm_100a": "tcgen05.mma"}[arch]
        assert instruction in compiled.ptx


@pytest.mark.compile_only
def test_one_kernel_serves_every_length() -> None:
    binaries = {
        compile_kernel("sm_90a", "fp8", has_bounds=False, num_keys=t).cubin for t in (1000, 1024)
    }
    assert len(binaries) == 1


# GPU ----------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [1, 64, 129, 5000])
@pytest.mark.parametrize("num_queries", [1, 6, 11])
@pytest.mark.parametrize("dtype", MODEL_DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_kernel_equals_reference(
    kind: str, dtype: torch.dtype, num_queries: int, num_keys: int
) -> None:
    case = make_case(
        dtype,
        num_queries=num_queries,
        num_heads=32,
        head_dim=128,
        num_keys=num_keys,
        device="cuda",
    )
    case.lengths_BS = case.lengths_BS.clamp(min=1)
    assert_kernel_equals_reference(kind, case)
    starts = torch.randint(-3, num_keys, (2, num_queries), device="cuda")
    mask = torch.rand(2, 1, num_keys + 3, device="cuda") > 0.3
    assert_kernel_equals_reference(kind, case, starts_BS=starts, key_mask=mask)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [32, 64, 128])
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_repeats_are_bitwise_equal(kind: str, head_dim: int) -> None:
    case = make_case(torch.bfloat16, num_queries=6, head_dim=head_dim, num_keys=4096, device="cuda")
    inside = case.is_inside_BST
    want = call(kind, case, "triton")[inside]
    for _ in range(20):
        assert torch.equal(call(kind, case, "triton")[inside], want)


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_gpu_graph_replays_with_new_lengths(kind: str) -> None:
    case = make_case(torch.bfloat16, num_queries=6, num_keys=4096, device="cuda")
    call(kind, case)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        scores = call(kind, case)
    for length in (4096, 100, 0):
        case.lengths_BS.fill_(length)
        case.q_BSHD.copy_(torch.randn(case.q_BSHD.shape))
        graph.replay()
        inside = case.is_inside_BST
        assert torch.equal(scores[inside], call(kind, case)[inside])
