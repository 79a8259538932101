"""The norm that runs before a product which does not take it in.

Shape legend: M rows, K in features.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from glm_compile.ops.rms_norm_linear import rms_norm_linear
from glm_compile.ops.rms_norm_linear.reference import rms_norm_reference

DEVICES = [
    pytest.param("interpreted", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]
EPS = 1e-5


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("rows", [(1,), (2, 3), (37,), (0,)])
@pytest.mark.parametrize("num_columns", [2048, 100, 1])
def test_equals_the_models_norm(device, dtype, rows, num_columns):
    from glm_compile.ops.rms_norm_linear.triton_kernel import rms_norm_triton

    device = "cpu" if device == "interpreted" else device
    x = (torch.randn(*rows, num_columns + 24) * 3).to(dtype)[..., 8 : num_columns + 8]
    module = GlmMoeDsaRMSNorm(num_columns, eps=EPS).to(dtype)
    module.weight.copy_(torch.rand(num_columns) + 0.5)
    result = rms_norm_triton(x.to(device), module.weight.to(device), EPS)
    expected = module(x)
    assert result.dtype == dtype and result.shape == x.shape
    # The squares are summed in another order: rarely the next value of the dtype.
    tolerance = 2**-7 if dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(result.cpu(), expected, rtol=tolerance, atol=1e-6)
    if dtype == torch.bfloat16 and x.numel() >= 1000:
        assert (result.cpu() != expected).float().mean() < 0.02


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("rows", [(1,), (2, 3), (0,)])
@pytest.mark.parametrize("num_columns", [2048, 100, 1])
def test_swiglu_equals_separate_calls(device, rows, num_columns):
    from glm_compile.ops.rms_norm_linear.triton_kernel import swiglu_triton

    device = "cpu" if device == "interpreted" else device
    product = (torch.randn(*rows, 2 * num_columns) * 3).bfloat16()
    product[..., :1] = 90.0
    gate, up = product.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    result = swiglu_triton(product.to(device))
    assert result.shape == expected.shape and result.is_contiguous()
    torch.testing.assert_close(result.cpu(), expected, rtol=2**-7, atol=1e-6)


@pytest.mark.parametrize("device", DEVICES)
def test_columns_with_gaps_and_rows_of_zeros(device):
    from glm_compile.ops.rms_norm_linear.triton_kernel import rms_norm_triton

    device = "cpu" if device == "interpreted" else device
    x = torch.randn(5, 64, device=device)[:, ::2]
    x[1] = 0
    weight = torch.rand(64, device=device)[::2]
    result = rms_norm_triton(x, weight, EPS)
    torch.testing.assert_close(result, rms_norm_reference(x, weight, EPS))
    assert not result[1].any()


@pytest.mark.gpu
def test_the_op_norms_many_rows_in_one_launch():
    x, weight = torch.randn(48, 64).bfloat16().cuda(), torch.rand(64).bfloat16().cuda()
    linear = torch.randn(24, 64).bfloat16().cuda()
    result = rms_norm_linear(x, weight, linear, eps=EPS, backend="triton")
    expected = rms_norm_linear(x, weight, linear, eps=EPS, backend="reference")
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernel_compiles_without_spilling(arch):
    from glm_compile.ops.rms_norm_linear.triton_kernel import rms_norm_kernel
    from tests.compile_only import compile_triton

    x = torch.empty(4, 2784, dtype=torch.bfloat16, device="meta")[:, :2048]
    output = torch.empty(4, 2048, dtype=torch.bfloat16, device="meta")
    arguments = [x, x.stride(0), output[0], 1, output, EPS]
    compiled = compile_triton(
        rms_norm_kernel, arguments, {"K": 2048, "BLOCK_K": 2048}, arch, num_warps=4
    )
    assert compiled.stack_bytes == 0
    assert compiled.registers <= 64
    assert "ld.global.v4" in compiled.ptx
