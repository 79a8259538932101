"""Public bug reports on selection, by case id: TOPK-*, INT-1 and IDX-10 at the level of the op.

Every case runs through the reference on the CPU and, on a GPU, through the kernels. Long rows are
checked by torch.topk's sorted scores, bit for bit; short ones by Python's sort.
"""

from __future__ import annotations

import math
import re
from pathlib import Path

import pytest
import torch

from glm_compile.ops.topk import masked_topk, topk_select
from tests.ops import topk_oracle

pytestmark = pytest.mark.newest_transformers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)


def select(
    scores: torch.Tensor, k: int, device: str, lengths: torch.Tensor | None = None
) -> torch.Tensor:
    """Selection on `device`, returned on the CPU; without lengths every key is visible."""
    if lengths is None:
        lengths = torch.full((scores.shape[0],), scores.shape[1])
    return topk_select(scores.to(device), lengths.to(device), k).cpu()


def assert_exact(scores: torch.Tensor, k: int, device: str) -> None:
    lengths = torch.full((scores.shape[0],), scores.shape[1])
    topk_oracle.assert_same_scores_as_torch(select(scores, k, device), scores, lengths)


@on_each_device
@pytest.mark.parametrize("shape", [(4, 262_144), (33, 16_385)])
def test_topk_1_no_candidate_buffer_overflows(shape: tuple[int, int], device: str) -> None:
    scores = torch.randn(shape) if shape[0] == 4 else 1.0 + torch.rand(shape) * 0.245
    assert_exact(scores, 2048, device)


@on_each_device
def test_topk_1_nearly_equal_scores(device: str) -> None:
    scores = 1.0 + torch.rand(1, 16_448) * 1e-6
    assert_exact(scores, 2048, device)


@on_each_device
@pytest.mark.parametrize("num_ones", [0, 100, 2047, 2048, 8320])
def test_topk_2_ties_fill_every_valid_slot(num_ones: int, device: str) -> None:
    scores = torch.zeros(1, 8320)
    ones = torch.randperm(8320)[:num_ones].sort().values
    scores[0, ones] = 1.0
    selected = select(scores, 2048, device)[0]
    assert (selected >= 0).all() and selected.unique().numel() == 2048
    zeros = (scores[0] == 0).nonzero().flatten()
    want = torch.cat([ones[:2048], zeros[: max(0, 2048 - num_ones)]]).sort().values
    assert torch.equal(selected.long(), want)


@on_each_device
@pytest.mark.parametrize("sign", [1, -1])
def test_topk_3_nan_is_never_selected(sign: int, device: str) -> None:
    nan = torch.tensor([0x7FC00001 if sign > 0 else -1], dtype=torch.int32).view(torch.float32)
    scores = torch.randn(3, 8192)
    scores[0, 17] = nan
    scores[1] = nan
    scores[2, ::2] = nan
    selected = select(scores, 4200, device)
    assert 17 not in selected[0].tolist()
    assert (selected[1] == -1).all()
    assert torch.equal(selected[2, :4096].long(), torch.arange(1, 8192, 2))
    assert (selected[2, 4096:] == -1).all()


@on_each_device
@pytest.mark.parametrize(("num_keys", "k"), [(249, 2048), (1, 8)])
def test_topk_5_k_beyond_the_length(num_keys: int, k: int, device: str) -> None:
    scores = torch.randn(1, num_keys)
    selected = select(scores, k, device)
    assert torch.equal(selected[0, :num_keys].long(), torch.arange(num_keys))
    assert (selected[0, num_keys:] == -1).all()
    lengths = torch.tensor([[num_keys]], device=device)
    upstream = masked_topk(scores[None].to(device), lengths, k)
    assert upstream.shape == (1, 1, num_keys)


@on_each_device
@pytest.mark.parametrize("length", [2047, 2048, 2049])
def test_topk_6_one_order_around_k(length: int, device: str) -> None:
    scores = torch.randn(1, 4096)
    selected = select(scores, 2048, device, torch.tensor([length]))
    assert torch.equal(selected, topk_oracle.select(scores, [length], 2048))


@on_each_device
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_topk_7_padded_rows(index_dtype: torch.dtype, device: str) -> None:
    lengths = torch.tensor([-1, 0, 1, 5], dtype=index_dtype)
    scores = torch.randn(4, 8)
    selected = select(scores, 4, device, lengths)
    assert (selected[:2] == -1).all()
    assert selected[2].tolist() == [0, -1, -1, -1]
    assert torch.equal(selected, topk_oracle.select(scores, lengths.tolist(), 4))


@on_each_device
def test_topk_8_ties_go_to_the_lowest_position_every_time(device: str) -> None:
    row = torch.randn(1, 131_072).bfloat16()
    batch = torch.cat([torch.randn(3, 131_072).bfloat16(), row, torch.zeros(2, 131_072).bfloat16()])
    selected = select(row, 2048, device)
    assert torch.equal(selected, topk_oracle.select(row, [131_072], 2048))
    for _ in range(20 if device == "cuda" else 2):
        assert torch.equal(select(row, 2048, device), selected)
    assert torch.equal(select(batch, 2048, device)[3:4], selected)


@on_each_device
def test_topk_11_short_rows_say_so(device: str) -> None:
    """What attention gets: valid positions first, then -1, and all -1 for a row without keys."""
    selected = select(torch.randn(3, 64), 48, device, torch.tensor([0, 5, 64]))
    assert (selected[0] == -1).all()
    assert selected[1].tolist() == [0, 1, 2, 3, 4] + [-1] * 43
    assert (selected[2] >= 0).all()


@on_each_device
def test_topk_13_fewer_finite_scores_than_k(device: str) -> None:
    scores = torch.full((1, 4096), -math.inf)
    finite = torch.randperm(4096)[:10].sort().values
    scores[0, finite] = torch.randn(10)
    selected = select(scores, 64, device)
    assert torch.equal(selected[0, :10].long(), finite)
    assert (selected[0, 10:] == -1).all()


@on_each_device
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_idx_10_masked_positions_are_never_selected(dtype: torch.dtype, device: str) -> None:
    """Left padding of 5 of 6, and a row that sees nothing at all."""
    scores = torch.randn(2, 1, 6).to(dtype)
    scores[0, 0, :5] = torch.finfo(dtype).max
    key_mask = torch.tensor([[[False] * 5 + [True]], [[False] * 6]])
    arguments = scores.to(device), torch.full((2, 1), 6).to(device), 4
    selected = masked_topk(*arguments, key_mask=key_mask.to(device)).cpu()
    assert selected[:, 0].tolist() == [[5, -1, -1, -1], [-1] * 4]


def test_int_1_row_offsets_beyond_32_bits(tmp_path: Path) -> None:
    """Rows 2^31 + 64 elements apart, in a sparse file."""
    stride = 2**31 + 64
    far = torch.from_file(str(tmp_path / "scores"), shared=True, size=stride + 512)
    scores = far.as_strided((2, 500), (stride, 1))
    scores.copy_(torch.randn(2, 500))
    scores[1, 321] = 100.0
    selected = select(scores, 8, "cpu")
    assert 321 in selected[1].tolist()
    assert torch.equal(selected, topk_oracle.select(scores, [500, 500], 8))


@pytest.mark.compile_only
@pytest.mark.parametrize("kernel_name", ["topk_row_kernel", "topk_histogram_kernel"])
def test_int_1_kernels_widen_the_row_before_multiplying(kernel_name: str) -> None:
    from glm_compile.ops.topk import triton_kernel
    from tests.compile_only import compile_triton
    from tests.ops.test_topk import kernel_arguments

    rows, scratch, table = kernel_arguments(1_048_576, paged=False)
    constexprs = {"BLOCK": 2048}
    if kernel_name == "topk_row_kernel":
        arguments = [*rows, *table, torch.empty(1, dtype=torch.int32, device="meta"), 1, 1]
        constexprs["PAGE_SIZE"] = 64
    else:
        arguments = [*rows, *scratch, 1, 1]
        constexprs |= {"ROUND": 0, "NUM_SLICES": 32}
    kernel = getattr(triton_kernel, kernel_name)
    dialect = compile_triton(kernel, arguments, constexprs, "sm_90a").ttgir
    assert "arith.extsi %stride_row : i32 to i64" in dialect
    assert not re.search(r"arith\.muli [^\n]*%stride_row,? [^\n]*: i32", dialect)


@pytest.mark.gpu
@pytest.mark.big_memory
@pytest.mark.parametrize("num_rows", [4096, 2049])
def test_topk_12_and_int_1_more_than_2_to_the_31_elements(num_rows: int) -> None:
    num_keys = 1_048_576
    scores = torch.zeros(num_rows, num_keys, device="cuda")
    planted = torch.tensor([7, 500_000, num_keys - 1], device="cuda")
    scores[-1, planted] = 5.0
    lengths = torch.full((num_rows,), num_keys, device="cuda")
    selected = topk_select(scores, lengths, 2048)
    assert torch.isin(planted, selected[-1].long()).all()
    assert torch.equal(selected[0].long(), torch.arange(2048, device="cuda"))
