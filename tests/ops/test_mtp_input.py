"""The MTP layer's input against transformers' own norm on each half."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_compile.ops.mtp_input import mtp_input
from tests.compile_only import ARCHS, compile_triton

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
INTERPRETER = pytest.mark.interpreter
# batch, tokens, columns
CASES = [(1, 1, 64), (3, 6, 100), (2, 5, 1536)]


def make_call(
    batch_size: int, num_tokens: int, num_columns: int, dtype: torch.dtype
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(num_columns + num_tokens)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    ids = torch.randint(0, 33, (batch_size, num_tokens + 2), generator=generator)
    return {
        "ids_BS": ids[:, 1:-1],
        "hidden_BSC": 3 * normal(num_tokens, batch_size, num_columns).transpose(0, 1),
        "embedding_VC": normal(33, num_columns),
        "embedding_norm_C": 1 + normal(num_columns) / 4,
        "hidden_norm_C": 1 + normal(num_columns) / 4,
        "eps": 1e-5,
    }


def expected(call: dict[str, Any]) -> torch.Tensor:
    """Row after row through transformers' module."""
    from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

    def norm(weight: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        module = GlmMoeDsaRMSNorm(weight.numel(), call["eps"]).to(weight.dtype)
        module.weight.data = weight
        return module(x).detach()

    rows = []
    for b, ids in enumerate(call["ids_BS"].tolist()):
        for s in range(len(ids)):
            embedded = norm(call["embedding_norm_C"], call["embedding_VC"][ids[s]])
            hidden = norm(call["hidden_norm_C"], call["hidden_BSC"][b, s])
            rows.append(torch.cat([embedded, hidden]))
    return torch.stack(rows).view(*call["ids_BS"].shape, -1)


def check(call: dict[str, Any], backend: str | None, device: str = "cpu") -> None:
    moved = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    got = mtp_input(**moved, backend=backend)
    assert got.is_contiguous()
    # One unit in the last place of either rounding, where the sum's order differs.
    tolerance = {torch.float32: 1e-6, torch.bfloat16: 1e-2, torch.float16: 1.5e-3}[got.dtype]
    torch.testing.assert_close(got.cpu(), expected(call), rtol=tolerance, atol=1e-6)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", CASES)
@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=INTERPRETER)])
def test_equals_the_modules(backend: str, shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    call = make_call(*shape, dtype)
    check(call, backend)
    if backend == "reference":
        assert torch.equal(mtp_input(**call), expected(call))


def test_op_passes_opcheck() -> None:
    call = make_call(2, 3, 16, torch.float32)
    torch.library.opcheck(torch.ops.glm.mtp_input.default, tuple(call.values()))


def test_what_it_refuses() -> None:
    call = make_call(2, 3, 16, torch.float32)
    for wrong, message in (
        ({"ids_BS": call["ids_BS"][:, :2]}, r"expected ids \[B, S\] and hidden"),
        ({"hidden_norm_C": torch.ones(15)}, "must have the 16 columns"),
        ({"hidden_norm_C": torch.ones(16, dtype=torch.float16)}, "one dtype of float32"),
        ({"ids_BS": call["ids_BS"].int()}, "expected int64 ids"),
    ):
        with pytest.raises(ValueError, match=f"mtp_input: .*{message}"):
            mtp_input(**call | wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [*CASES, (8, 6, 6144), (1, 1, 6144)])
def test_gpu_kernel(shape: tuple[int, int, int], dtype: torch.dtype) -> None:
    check(make_call(*shape, dtype), "triton", "cuda")


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_compiles(arch: str) -> None:
    from glm_compile.ops.mtp_input.triton_kernel import mtp_input_kernel

    long = torch.empty(64, dtype=torch.long, device="meta")
    wide = torch.empty(64, 6144, dtype=torch.bfloat16, device="meta")
    compiled = compile_triton(
        mtp_input_kernel,
        [long, 6, 1, wide, 6 * 6144, 6144, 1, wide, wide, wide, 1e-5, wide, 6],
        {"C": 6144, "BLOCK_C": 8192, "PDL": True},
        arch,
        num_warps=8,
    )
    assert compiled.stack_bytes == 0
    assert "griddepcontrol.wait" in compiled.ptx
    # A norm's weight, and a token's embedding or a hidden state: 16 bytes a load.
    assert compiled.ptx.count("ld.global.v4.b32") == 2 * 4
    assert "ld.global.b16" not in compiled.ptx and "st.global.b16" not in compiled.ptx
