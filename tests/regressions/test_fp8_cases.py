"""Public bug reports on FP8 quantisation, by case id, at the level of the op."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from glm_compile.ops.fp8_quant import fp8_quant
from glm_compile.ops.indexer_scores import indexer_scores_paged

pytestmark = pytest.mark.newest_transformers

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
on_each_device = pytest.mark.parametrize("device", DEVICES)
each_scale = pytest.mark.parametrize("power_of_two_scale", [False, True])


@on_each_device
@each_scale
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-40, 1e-20])
def test_fp8_1_quiet_rows_stay_finite(value: float, power_of_two_scale: bool, device: str) -> None:
    x = torch.randn(3, 128, device=device)
    x[1] = value
    values, scale = fp8_quant(x, power_of_two_scale)
    assert scale.isfinite().all() and (scale > 0).all()
    assert (values[1].float() == 0).all()
    assert (values[0].float().abs() > 0).any()


@on_each_device
def test_fp8_2_power_of_two_scale_is_rounded_before_quantising(device: str) -> None:
    x = torch.randn(4, 128, device=device) * 3
    values, scale = fp8_quant(x, True)
    assert (scale.log2() == scale.log2().round()).all()
    assert (scale >= x.abs().amax(-1) / 448).all(), "rounded up, so that nothing clips"
    round_trip = values.float() * scale[:, None]
    assert ((round_trip - x).norm() / x.norm()).item() < 0.04


@on_each_device
def test_fp8_2_a_power_of_two_stays(device: str) -> None:
    x = torch.zeros(2, 16, device=device)
    x[0, 0], x[1, 0] = 448.0, 448.5
    _, scale = fp8_quant(x, True)
    assert scale.tolist() == [1.0, 2.0]


@on_each_device
@each_scale
def test_fp8_4_nan_propagates_and_infinity_saturates(power_of_two_scale: bool, device: str) -> None:
    x = torch.tensor([[math.nan, math.inf, 1e4, -math.inf, 100.0]], device=device)
    values, scale = fp8_quant(x, power_of_two_scale)
    got = values.float()[0]
    assert got[0].isnan()
    assert got[1] == 448 and got[3] == -448
    assert scale.isfinite().all()
    assert abs((got[2] * scale[0]).item() - 1e4) <= 1e4 / 16
    assert abs((got[4] * scale[0]).item() - 100.0) <= 100.0 / 16


@on_each_device
@pytest.mark.parametrize("head_dim", [32, 64, 128])
def test_fp8_5_every_head_dim(head_dim: int, device: str) -> None:
    """The page layout follows the head dim: 64 rows of D bytes, then 64 scales."""
    keys = torch.randn(3, 64, head_dim, device=device)
    values, scales = fp8_quant(keys)
    parts = [values.view(torch.uint8).flatten(1), scales.view(torch.uint8).flatten(1)]
    pages = torch.cat(parts, dim=1).contiguous()
    q, q_scale = fp8_quant(torch.randn(1, 16, head_dim, device=device))
    weights = torch.randn(1, 16, device=device) * q_scale
    table = torch.tensor([[2, 0, 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([192], device=device)
    dequantised = (values.double() * scales.double()[..., None])[table[0].long()].flatten(0, 1)
    products = torch.einsum("hd,td->ht", q[0].double(), dequantised).clamp(min=0)
    want = torch.einsum("h,ht->t", weights[0].double(), products)
    first = indexer_scores_paged(q, weights, pages, table, lengths, 192)
    # Hopper's tensor cores add FP8 products with 14 bits below the largest of 32 of them.
    sizes = torch.einsum("hd,td->ht", q[0].double().abs(), dequantised.abs())
    magnitude = torch.einsum("h,ht->t", weights[0].double().abs(), sizes)
    assert ((first[0].double() - want).abs() <= magnitude * 2**-11).all()
    for _ in range(20):
        assert torch.equal(indexer_scores_paged(q, weights, pages, table, lengths, 192), first)


def test_fp8_7_pages_of_another_format_are_refused() -> None:
    q, weights = torch.randn(1, 4, 32).to(torch.float8_e4m3fn), torch.randn(1, 4)
    table, lengths = torch.zeros(1, 1, dtype=torch.int32), torch.tensor([3])
    for pages, message in (
        (torch.zeros(1, 64, 32, dtype=torch.bfloat16), "key_pages must be uint8"),
        (torch.zeros(1, 64 * 32, dtype=torch.uint8), "a page of 32-wide keys has 2304 bytes"),
        (torch.zeros(1, 64, 36, dtype=torch.uint8), "must be uint8"),
    ):
        with pytest.raises(ValueError, match=message):
            indexer_scores_paged(q, weights, pages, table, lengths, 3)
    pages = torch.zeros(1, 64 * 36, dtype=torch.uint8)
    with pytest.raises(ValueError, match="need a float8_e4m3fn q"):
        indexer_scores_paged(q.bfloat16(), weights, pages, table, lengths, 3)


def test_int_1_page_times_page_bytes_beyond_32_bits(tmp_path: Path) -> None:
    """Near page 254,200 the byte offset of a page passes 2^31 (a sparse file holds the pages)."""
    num_pages, page_bytes = 254_301, 8448
    name = str(tmp_path / "pages")
    pages = torch.from_file(name, shared=True, size=num_pages * page_bytes, dtype=torch.uint8)
    pages = pages.view(num_pages, page_bytes)
    values, scales = fp8_quant(torch.randn(64, 128))
    pages[-1, :8192] = values.view(torch.uint8).flatten()
    pages[-1, 8192:] = scales.view(torch.uint8).flatten()
    q, q_scale = fp8_quant(torch.randn(1, 16, 128))
    table = torch.tensor([[num_pages - 1]])
    got = indexer_scores_paged(q, q_scale, pages, table, torch.tensor([64]), 64)
    dequantised = values.double() * scales.double()[:, None]
    products = torch.einsum("hd,td->ht", q[0].double(), dequantised).clamp(min=0)
    want = torch.einsum("h,ht->t", q_scale[0].double(), products)
    torch.testing.assert_close(got[0].double(), want, rtol=1e-5, atol=1e-5)
