"""Latents on their way to the cache: transformers' numbers, in the right rows and nowhere else.

Shape legend: B batch, S tokens of the step, L rank of the latent, P rope dim.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import (
    GlmMoeDsaRMSNorm,
    apply_rotary_pos_emb_interleave,
)
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from glm_compile.ops.indexer_prologue import (
    Latents,
    indexer_prologue_fp8,
    indexer_prologue_paged,
)
from glm_compile.ops.latent_write import latent_write
from glm_compile.ops.paged_cache import key_page_bytes
from tests.ops.test_indexer_prologue import TRITON_DEVICES, _to
from tests.ops.test_indexer_prologue import make_inputs as make_indexer_inputs

EPS = 1e-5
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# Sequence 1 has no second page.
TABLE = torch.tensor([[4, 1], [2, -1]], dtype=torch.int32)
# Lengths before a step of five tokens: over a page's end, over the table's, before the beginning.
LENGTHS = [(62, 61), (126, 0), (-2, 3)]


def make_inputs(B=2, S=5, L=512, P=64, dtype=torch.bfloat16, cos_batch=None, gap=0):
    """(latents, ropes, weight, eps, cos, sin): views of one product, as a merged linear's.

    Args:
        gap: rows between sequences.
    """
    merged = torch.randn(B, S + gap, 32 + L + P + 24).to(dtype)[:, :S, 32:-24]
    latents, ropes = merged.split([L, P], -1)
    angles = torch.randn(cos_batch or B, S, P // 2).repeat(1, 1, 2)
    weight = (torch.rand(L) + 0.5).to(dtype)
    return latents, ropes, weight, EPS, angles.cos().to(dtype), angles.sin().to(dtype)


def upstream_rows(latents, ropes, weight, eps, cos, sin, interleaved):
    """What transformers caches, by its own modules and functions."""
    norm = GlmMoeDsaRMSNorm(latents.shape[-1], eps).to(weight.dtype).requires_grad_(False)
    norm.weight.copy_(weight)
    rope = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
    turned = rope(ropes[:, None], ropes[:, None], cos, sin)[1][:, 0]
    return torch.cat([norm(latents), turned], -1)


def expected_pages(before, rows, lengths):
    expected = before.clone()
    for b, s in np.ndindex(*rows.shape[:2]):
        position = int(lengths[b]) + s
        page = int(TABLE[b, position // 64]) if 0 <= position < 128 else -1
        if page >= 0:
            expected[page, position % 64] = rows[b, s]
    return expected


def store(device, inputs, lengths, interleaved=True, backend=None):
    """(pages before, pages after)."""
    latents, ropes, *_ = inputs
    width = latents.shape[-1] + ropes.shape[-1]
    pages = torch.randn(6, 64, width).to(device, latents.dtype)
    before = pages.clone()
    latent_write(
        *_to(device, inputs),
        interleaved=interleaved,
        pages=pages,
        block_table=TABLE.to(device),
        lengths_B=torch.tensor(lengths, device=device),
        backend=backend,
    )
    return before.cpu(), pages.cpu()


@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("sizes", [{}, {"L": 20, "P": 6, "cos_batch": 1}, {"S": 0}])
def test_rows_are_transformers_own(lengths, dtype, interleaved, sizes):
    inputs = make_inputs(dtype=dtype, **sizes)
    before, after = store("cpu", inputs, lengths, interleaved)
    rows = upstream_rows(*inputs, interleaved)
    assert torch.equal(after, expected_pages(before, rows, lengths))


def check_rows(after, before, inputs, lengths, interleaved):
    """Ropes bit for bit; a norm sums in another order: an ulp of the row's own dtype."""
    rank, dtype = inputs[0].shape[-1], inputs[0].dtype
    expected = expected_pages(before, upstream_rows(*inputs, interleaved), lengths)
    assert torch.equal(after[..., rank:], expected[..., rank:])
    tolerance = max(2 * torch.finfo(dtype).eps, 1e-6)
    torch.testing.assert_close(
        after[..., :rank].float(), expected[..., :rank].float(), rtol=tolerance, atol=1e-6
    )
    if dtype != torch.float32:
        assert (after != expected).float().mean() < 0.02


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(
    ("sizes", "lengths", "dtype"),
    [
        ({}, LENGTHS[0], torch.bfloat16),
        ({}, LENGTHS[1], torch.float32),
        ({"L": 20, "P": 6, "cos_batch": 1, "gap": 3}, LENGTHS[2], torch.bfloat16),
        ({"L": 130, "P": 96}, LENGTHS[0], torch.float16),
        ({"L": 130, "P": 96}, LENGTHS[1], torch.bfloat16),
        ({"S": 0}, LENGTHS[0], torch.bfloat16),
        ({"B": 0}, LENGTHS[0], torch.bfloat16),
    ],
)
def test_triton_rows(device, lengths, dtype, interleaved, sizes):
    inputs = make_inputs(dtype=dtype, **sizes)
    if sizes.get("B") == 0:
        inputs = (*inputs[:4], *(table[:0] for table in inputs[4:]))
        return latent_write(
            *_to(device, inputs),
            pages=torch.zeros(1, 64, 576, dtype=dtype, device=device),
            block_table=TABLE[:0].to(device),
            lengths_B=torch.zeros(0, dtype=torch.int64, device=device),
            backend="triton",
        )
    before, after = store(device, inputs, lengths, interleaved, "triton")
    check_rows(after, before, inputs, lengths, interleaved)


@pytest.mark.gpu
def test_error_is_that_of_the_roundings():
    """Against float64: half an ulp of each of three roundings."""
    inputs = make_inputs(B=1, S=64, dtype=torch.bfloat16)
    latents, _, weight, *_ = inputs
    pages = torch.zeros(1, 64, 576, dtype=torch.bfloat16, device="cuda")
    table, lengths = (torch.zeros(shape, dtype=torch.int32, device="cuda") for shape in ((1, 1), 1))
    latent_write(*_to("cuda", inputs), pages=pages, block_table=table, lengths_B=lengths)
    x = latents.double()
    exact = x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt() * weight.double()
    error = (pages[:, :, :512].cpu().double() - exact).abs() / exact.abs().clamp_min(1e-6)
    assert error.max() <= 2 * 2.0**-8


# With the indexer's keys -----------------------------------------------------------------------


def call_both(device, is_fp8, dtype, lengths, is_interleaved, sizes, backend, **indexer_options):
    """(q, weights, keys before, keys, latents before, latents, inputs of both)."""
    sizes = {"B": 2, "S": 5, "dtype": dtype, **sizes}
    indexer = make_indexer_inputs(H=6, **sizes)
    inputs = (*make_inputs(**sizes)[:4], *indexer[6:])
    if is_fp8:
        keys = torch.randint(0, 256, (6, key_page_bytes(128)), dtype=torch.uint8)
    else:
        keys = torch.randn(6, 64, 128).to(dtype)
    pages = torch.randn(6, 64, 512 + 64).to(dtype)
    keys_before, before = keys.clone(), pages.clone()
    keys, pages = keys.to(device), pages.to(device)
    latents, ropes, weight, eps = _to(device, inputs[:4])
    prologue = indexer_prologue_fp8 if is_fp8 else indexer_prologue_paged
    where = {
        "key_pages": keys,
        "block_table": TABLE.to(device),
        "lengths_B": torch.tensor(lengths, device=device),
    }
    q, weights = prologue(
        *_to(device, indexer),
        **where,
        **indexer_options,
        latents=Latents(latents, ropes, weight, eps, is_interleaved, pages),
        backend=backend,
    )
    return q.cpu(), weights.cpu(), keys_before, keys.cpu(), before, pages.cpu(), indexer, inputs


@pytest.mark.parametrize(
    ("device", "backend"),
    [
        ("cpu", "reference"),
        pytest.param("cpu", "triton", marks=pytest.mark.interpreter),
        pytest.param("cuda", "triton", marks=pytest.mark.gpu),
    ],
)
@pytest.mark.parametrize("is_fp8", [False, True])
@pytest.mark.parametrize(
    ("dtype", "lengths", "interleaved"),
    [(torch.float32, LENGTHS[0], True), (torch.bfloat16, LENGTHS[1], False)],
)
def test_one_launch_stores_what_two_ops_store(device, backend, is_fp8, dtype, lengths, interleaved):
    options = {"interleaved": not interleaved, "gate_scale": 0.25}
    q, weights, keys_before, keys, before, pages, indexer, inputs = call_both(
        device, is_fp8, dtype, lengths, interleaved, {"cos_batch": 1}, backend, **options
    )
    check_rows(pages, before, inputs, lengths, interleaved)
    alone = keys_before.to(device)
    prologue = indexer_prologue_fp8 if is_fp8 else indexer_prologue_paged
    expected = prologue(
        *_to(device, indexer),
        **options,
        key_pages=alone,
        block_table=TABLE.to(device),
        lengths_B=torch.tensor(lengths, device=device),
        backend=backend,
    )
    assert torch.equal(q.view(torch.uint8), expected[0].cpu().view(torch.uint8))
    assert torch.equal(weights, expected[1].cpu())
    assert torch.equal(keys, alone.cpu())


def test_opcheck():
    pages, where = torch.zeros(6, 64, 576).bfloat16(), (TABLE, torch.tensor([62, 0]))
    inputs = make_inputs()
    ops = torch.ops.glm
    torch.library.opcheck(ops.latent_write.default, (*inputs, True, pages, *where, ""))
    indexer = make_indexer_inputs(S=5)
    latents = (*inputs[:4], False, pages)
    for op, keys in (
        (ops.attention_prologue_paged, torch.zeros(6, 64, 128).bfloat16()),
        (ops.attention_prologue_fp8, torch.zeros(6, key_page_bytes(128), dtype=torch.uint8)),
    ):
        torch.library.opcheck(op.default, (*indexer, True, 0.25, keys, *where, *latents, ""))


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"latents": lambda x: x[0]}, r"latents \[B, S, L\] and ropes \[B, S, P\]"),
        ({"ropes": lambda x: x[:, 1:]}, r"latents \[B, S, L\] and ropes \[B, S, P\]"),
        ({"ropes": lambda x: x.float()}, "one floating dtype"),
        ({"weight": lambda x: x[1:]}, r"norm weight must be \[512\]"),
        ({"cos": lambda x: x[:, :2]}, r"cos and sin must be \[2 or 1, 5, 64\]"),
        ({"pages": lambda x: x[..., 1:]}, r"pages \[pages, 64, 576\] expected"),
        ({"lengths": lambda x: x[1:]}, r"block table \[2, P\] and lengths \[2\]"),
        ({"lengths": lambda x: x.float()}, "lengths must be int32 or int64"),
    ],
)
def test_wrong_arguments_are_named(change, reason):
    latents, ropes, weight, eps, cos, sin = make_inputs()
    values = {"latents": latents, "ropes": ropes, "weight": weight, "cos": cos}
    values |= {"pages": torch.zeros(6, 64, 576).bfloat16(), "lengths": torch.tensor([0, 0])}
    values |= {name: edit(values[name]) for name, edit in change.items()}
    with pytest.raises(ValueError, match=reason):
        latent_write(
            *(values["latents"], values["ropes"], values["weight"], eps, values["cos"], sin),
            pages=values["pages"],
            block_table=TABLE,
            lengths_B=values["lengths"],
        )


def test_latents_of_other_tokens_than_the_keys_are_named():
    pages, latents = torch.zeros(6, 64, 576).bfloat16(), make_inputs(S=5)
    with pytest.raises(ValueError, match=r"cos and sin must be"):
        indexer_prologue_paged(
            *make_indexer_inputs(S=4),
            gate_scale=1.0,
            key_pages=torch.zeros(6, 64, 128).bfloat16(),
            block_table=TABLE,
            lengths_B=torch.tensor([0, 0]),
            latents=Latents(*latents[:4], True, pages),
        )


@pytest.mark.gpu
@pytest.mark.parametrize("is_fp8", [False, True])
def test_capture_and_replay_of_a_chain(is_fp8):
    """A kernel that started too early would store what is not there yet, or read it too early."""
    S, H = 6, 32
    indexer = _to("cuda", make_indexer_inputs(B=1, S=S, H=H))
    latents, ropes, weight, eps = _to("cuda", make_inputs(B=1, S=S)[:4])
    pages = torch.zeros(8, 1, 64, 576, dtype=torch.bfloat16, device="cuda")
    keys = torch.zeros(1, key_page_bytes(128), dtype=torch.uint8, device="cuda")
    if not is_fp8:
        keys = torch.zeros(1, 64, 128, dtype=torch.bfloat16, device="cuda")
    table = torch.zeros(1, 1, dtype=torch.int32, device="cuda")
    lengths = torch.tensor([3], dtype=torch.int32, device="cuda")
    prologue = indexer_prologue_fp8 if is_fp8 else indexer_prologue_paged
    where = {"block_table": table, "lengths_B": lengths}

    def chain():
        """Each launch takes what the one before has stored."""
        new, turned = latents, ropes
        for i in range(8):
            if i % 2:
                step = (new, turned, weight, eps, *indexer[6:])
                latent_write(*step, pages=pages[i], **where)
            else:
                more = Latents(new, turned, weight, eps, True, pages[i])
                prologue(*indexer, gate_scale=0.25, key_pages=keys, latents=more, **where)
            new, turned = pages[i][:, 3 : 3 + S].split([512, 64], -1)

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain()
    for _ in range(3):
        latents.copy_(torch.randn_like(latents))
        pages.fill_(float("nan"))
        graph.replay()
        new, turned = latents, ropes
        for i in range(8):
            rows = upstream_rows(
                *(x.cpu() for x in (new, turned, weight)),
                eps,
                *(x.cpu() for x in indexer[6:]),
                True,
            )
            stored = pages[i][:, 3 : 3 + S].cpu()
            torch.testing.assert_close(stored.float(), rows.float(), rtol=2**-6, atol=1e-3)
            new, turned = pages[i][:, 3 : 3 + S].split([512, 64], -1)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize("has_pdl", [True, False])
def test_kernel_compiles_without_spilling(arch, interleaved, has_pdl):
    import triton.language as tl

    from glm_compile.ops.latent_write.triton_kernel import latent_write_kernel
    from tests.compile_only import compile_triton

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    merged, cos, pages = meta(1, 6, 2624), meta(1, 6, 64), meta(9, 64, 576)
    latents, ropes = merged[..., 2048:2560], merged[..., 2560:]
    compiled = compile_triton(
        latent_write_kernel,
        [
            *(latents, *latents.stride(), ropes, *ropes.stride(), meta(512), EPS),
            *(cos, *cos.stride(), cos, *cos.stride(), pages, *pages.stride()),
            *(meta(1, 9, dtype=torch.int32), 9, 9, meta(1, dtype=torch.int32), 6),
        ],
        {
            "L": 512,
            "P": 64,
            "BLOCK_L": 512,
            "BLOCK_P": 64,
            "INTERLEAVED": interleaved,
            "ROUND_TO": tl.bfloat16,
            "IN_ORDER": True,
            "PDL": has_pdl,
        },
        arch,
        num_warps=2,
        enable_fp_fusion=False,
        launch_pdl=has_pdl,
    )
    assert compiled.stack_bytes == 0 and compiled.registers <= 72
    assert compiled.ptx.count("griddepcontrol.wait") == has_pdl
    if has_pdl:
        let_in = compiled.ptx.index("griddepcontrol.launch_dependents")
        assert let_in < compiled.ptx.index("griddepcontrol.wait")
