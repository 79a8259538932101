"""The norm that runs before a product which does not take it in.

Shape legend: M rows, K in features.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from glm_compile.ops.bf16_linear import bf16_linear
from glm_compile.ops.rms_norm import rms_norm
from glm_compile.ops.rms_norm.reference import rms_norm_reference
from glm_compile.ops.rms_norm_linear import rms_norm_linear

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
    from glm_compile.ops.rms_norm.triton_kernel import rms_norm_triton

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
    from glm_compile.ops._swiglu_triton import swiglu_triton

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
    from glm_compile.ops.rms_norm.triton_kernel import rms_norm_triton

    device = "cpu" if device == "interpreted" else device
    x = torch.randn(5, 64, device=device)[:, ::2]
    x[1] = 0
    weight = torch.rand(64, device=device)[::2]
    result = rms_norm_triton(x, weight, EPS)
    torch.testing.assert_close(result, rms_norm_reference(x, weight, EPS))
    assert not result[1].any()


def test_the_op_is_the_models_norm():
    x, weight = torch.randn(2, 3, 100).bfloat16(), torch.rand(100).bfloat16()
    module = GlmMoeDsaRMSNorm(100, eps=EPS).to(torch.bfloat16)
    module.weight.copy_(weight)
    assert torch.equal(rms_norm(x, weight, eps=EPS), module(x))
    torch.library.opcheck(torch.ops.glm.rms_norm.default, (x, weight, EPS, ""))


@pytest.mark.parametrize(
    ("x", "weight", "message"),
    [
        (torch.zeros(2, 8), torch.zeros(7), "weight .K. expected"),
        (torch.zeros(()), torch.zeros(8), "weight .K. expected"),
        (torch.zeros(2, 8), torch.zeros(8).half(), "one floating dtype"),
        (torch.zeros(2, 8).int(), torch.zeros(8).int(), "one floating dtype"),
    ],
)
def test_calls_that_cannot_be_are_refused(x, weight, message):
    with pytest.raises(ValueError, match=message):
        rms_norm(x, weight, eps=EPS)


def test_the_op_itself_refuses_a_weight_of_another_dtype():
    with pytest.raises(ValueError, match="one floating dtype"):
        torch.ops.glm.rms_norm(torch.zeros(2, 8).bfloat16(), torch.zeros(8), EPS, "")


def test_with_many_rows_no_program_starts_early(monkeypatch):
    from glm_compile.ops.rms_norm import triton_kernel

    seen = []

    class Kernel:
        def __getitem__(self, grid):
            return lambda *_args, **keywords: seen.append(
                (keywords["PDL"], "launch_pdl" in keywords)
            )

    monkeypatch.setattr(triton_kernel, "rms_norm_kernel", Kernel())
    monkeypatch.setattr(triton_kernel, "supports_pdl", lambda _device: True)
    for num_rows in (1, 64, 65):
        triton_kernel.rms_norm_triton(torch.zeros(num_rows, 8), torch.zeros(8), EPS)
    assert seen == [(True, True), (True, True), (False, False)]


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
def test_a_chain_under_capture_reads_what_was_written():
    x = torch.randn(6, 6144, device="cuda").bfloat16()
    weight = (torch.rand(6144, device="cuda") + 0.5).bfloat16()
    linear = (torch.randn(6144, 6144, device="cuda") / 78).bfloat16()

    def chain(backends):
        value = x
        for _ in range(4):
            normed = rms_norm(value, weight, eps=EPS, backend=backends[0])
            value = bf16_linear(normed, linear, residual=value, backend=backends[1])
        return value

    chain(("triton", "cute"))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = chain(("triton", "cute"))
    for _ in range(5):
        x.copy_(torch.randn_like(x))
        result.fill_(float("nan"))
        graph.replay()
        expected = chain(("reference", "reference"))
        torch.testing.assert_close(result, expected, rtol=2**-5, atol=2**-5)


@pytest.mark.gpu
def test_the_op_norms_many_rows_in_one_launch():
    x, weight = torch.randn(48, 64).bfloat16().cuda(), torch.rand(64).bfloat16().cuda()
    linear = torch.randn(24, 64).bfloat16().cuda()
    result = rms_norm_linear(x, weight, linear, eps=EPS, backend="triton")
    expected = rms_norm_linear(x, weight, linear, eps=EPS, backend="reference")
    torch.testing.assert_close(result, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(("num_columns", "block", "num_warps"), [(2048, 2048, 4), (6144, 8192, 16)])
def test_kernel_compiles_without_spilling(arch, num_columns, block, num_warps):
    from glm_compile.ops.rms_norm.triton_kernel import rms_norm_kernel
    from tests.compile_only import compile_triton

    x = torch.empty(4, num_columns + 736, dtype=torch.bfloat16, device="meta")[:, :num_columns]
    output = torch.empty(4, num_columns, dtype=torch.bfloat16, device="meta")
    arguments = [x, x.stride(0), output[0], 1, output, EPS]
    constants = {"K": num_columns, "BLOCK_K": block, "PDL": True}
    compiled = compile_triton(rms_norm_kernel, arguments, constants, arch, num_warps=num_warps)
    assert compiled.stack_bytes == 0
    assert compiled.registers <= 64
    # The norm's weight is read before the kernel ahead has ended, the rows after.
    wait = compiled.ptx.index("griddepcontrol.wait")
    assert "ld.global.v4" in compiled.ptx[:wait] and "ld.global.v4" in compiled.ptx[wait:]
    assert wait < compiled.ptx.index("griddepcontrol.launch_dependents")
