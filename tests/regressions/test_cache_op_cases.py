"""Published faults of paged caches and FP8 keys, at the level of the ops.

Shape legend: B batch, S tokens of the step, X row width, D head dim.
"""

from __future__ import annotations

import pytest
import torch

from glm_compile.ops.indexer_prologue import indexer_prologue_fp8
from glm_compile.ops.paged_cache import (
    key_page_bytes,
    paged_gather,
    paged_gather_fp8,
    paged_write,
    paged_write_fp8,
)
from tests.ops.test_indexer_prologue import make_inputs

pytestmark = pytest.mark.newest_transformers


def test_cache_1_token_t_is_in_page_t_div_64_row_t_mod_64():
    """A sequence that begins at page 3 writes nothing elsewhere, whatever its flat slots are."""
    table = torch.tensor([[3, 5, 4]], dtype=torch.int32)
    pages = torch.zeros(8, 64, 2)
    tokens = torch.arange(1.0, 151.0)
    paged_write(pages, tokens[None, :, None].expand(1, 150, 2), table, torch.tensor([0]))
    for t in range(150):
        assert pages[int(table[0, t // 64]), t % 64].tolist() == [t + 1, t + 1]
    assert int(pages.count_nonzero()) == 300


def test_cache_1_fp8_page_holds_values_then_scales():
    table = torch.tensor([[3, 5]], dtype=torch.int32)
    pages = torch.zeros(8, key_page_bytes(128), dtype=torch.uint8)
    assert pages.shape[1] == 8448
    keys = torch.randn(1, 70, 128)
    paged_write_fp8(pages, keys, table, torch.tensor([0]))
    for t in (0, 1, 63, 64, 69):
        page, row = int(table[0, t // 64]), t % 64
        scale = pages[page, 8192 + 4 * row : 8196 + 4 * row].view(torch.float32)
        torch.testing.assert_close(scale, keys[0, t].abs().amax()[None] / 448)
        values = pages[page, 128 * row : 128 * row + 128].view(torch.float8_e4m3fn).float()
        torch.testing.assert_close(values * scale, keys[0, t], rtol=0.07, atol=0.01)
    assert not pages[[0, 1, 2, 4, 6, 7]].any()
    assert not pages[5, 6 * 128 : 8192].any() and not pages[5, 8192 + 24 :].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("value", [0.0, 1e-40, -1e-30, 1e-6])
def test_fp8_1_quiet_keys_have_a_finite_positive_scale(dtype, value):
    table = torch.zeros(1, 1, dtype=torch.int32)
    pages = torch.full((1, key_page_bytes(128)), 0xFF, dtype=torch.uint8)
    keys = torch.full((1, 2, 128), value).to(dtype)
    keys[0, 1] = torch.randn(128).to(dtype)
    paged_write_fp8(pages, keys, table, torch.tensor([5]))
    scales = pages[0, 8192 + 20 : 8192 + 28].view(torch.float32)
    assert scales.isfinite().all() and (scales > 0).all()
    rows = paged_gather_fp8(pages, table, 7, head_dim=128, dtype=torch.float32)
    assert rows[0, 5].isfinite().all()
    torch.testing.assert_close(rows[0, 5], keys[0, 0].float(), rtol=0.07, atol=1e-8)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_int_1_last_pages_of_a_cache_beyond_32_bits(device):
    """Page 254,201 begins past 2^31 bytes. Only the pages written are touched, lazily mapped."""
    num_pages = 254_210
    pages = torch.empty(num_pages, 8448, dtype=torch.uint8, device=device)
    assert pages.numel() > 2**31
    table = torch.tensor([[num_pages - 1]], dtype=torch.int32, device=device)
    lengths = torch.tensor([0], device=device)
    keys = torch.randn(1, 64, 128, device=device)
    paged_write_fp8(pages, keys, table, lengths)
    rows = paged_gather_fp8(pages, table, 64, head_dim=128, dtype=torch.float32)
    torch.testing.assert_close(rows, keys, rtol=0.07, atol=0.02)
    latents = pages.view(torch.bfloat16).view(num_pages, 64, 66)
    new = torch.randn(1, 64, 66, device=device).bfloat16()
    paged_write(latents, new, table, lengths)
    assert torch.equal(paged_gather(latents, table, 64), new)

    inputs = make_inputs(B=1, S=64)
    inputs = [x.to(device) if isinstance(x, torch.Tensor) else x for x in inputs]
    rest = {"gate_scale": 1.0, "lengths_B": lengths}
    indexer_prologue_fp8(*inputs, key_pages=pages, block_table=table, **rest)
    few = torch.empty(1, 8448, dtype=torch.uint8, device=device)
    indexer_prologue_fp8(*inputs, key_pages=few, block_table=torch.zeros_like(table), **rest)
    assert torch.equal(pages[-1], few[0])


def test_comp_17_kernels_are_not_compiled_again_for_a_batch_or_a_length():
    """Sizes and strides that change from step to step are never specialized, not even 1 or 16."""
    pytest.importorskip("triton")
    from glm_compile.ops.bf16_linear.triton_kernel import bf16_linear_kernel
    from glm_compile.ops.indexer_prologue import triton_kernel as prologue
    from glm_compile.ops.latent_write.triton_kernel import latent_write_kernel
    from glm_compile.ops.paged_cache import triton_kernel as cache

    changing = {"num_rows", "num_steps", "num_columns", "max_len", "stride_table", "stride_new_b"}
    changing |= {f"stride_{name}b" for name in "qkgcslr"}
    kernels = [
        bf16_linear_kernel,
        prologue.indexer_prologue_kernel,
        latent_write_kernel,
        cache.paged_write_kernel,
        cache.paged_gather_kernel,
        cache.paged_write_fp8_kernel,
        cache.paged_gather_fp8_kernel,
    ]
    seen = set()
    for kernel in kernels:
        for parameter in kernel.params:
            if parameter.name in changing:
                seen.add(parameter.name)
                assert parameter.do_not_specialize, f"{kernel}: {parameter.name}"
                assert not parameter.is_constexpr
    assert seen == changing
