"""The absorbed products of latent attention against float64: torch's own error is the yardstick.

Shape legend: B batch, S query tokens, R = B * S rows, H heads, N nope dim of a query, P rope dim,
L rank of the latent, V value dim.
"""

from __future__ import annotations

import itertools
import re

import pytest
import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import apply_rotary_pos_emb_interleave
from transformers.models.llama.modeling_llama import apply_rotary_pos_emb

from glm_compile.ops.mla_absorb import absorb_query, project_values

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (H, N, P, L, V): odd everywhere; nothing to copy; the release's for one head; a small model's.
SIZES = [(3, 7, 5, 9, 11), (1, 16, 0, 33, 1), (1, 192, 64, 512, 256), (4, 24, 8, 32, 16)]


def make_inputs(rows, sizes, dtype=torch.bfloat16, device="cpu"):
    """(q_nope, q_rot, o, weight): the queries as a model cuts them out of one product."""
    H, N, P, L, V = sizes

    def random(*shape):
        return torch.randn(*shape, device=device).to(dtype)

    q_nope, q_rot = random(*rows, H, N + P).split([N, P], -1)
    weight = random(H * (N + V), L) / L**0.5
    return q_nope, q_rot, random(*rows, H, L), weight


def oracles(q_nope, q_rot, o, weight):
    """Both products in float64, head by head."""
    num_heads, num_nope = q_nope.shape[-2:]
    per_head = weight.shape[0] // num_heads
    queries, values = [], []
    for head in range(num_heads):
        w_uk, w_uv = weight[head * per_head :][:per_head].double().tensor_split([num_nope])
        queries.append(torch.cat([q_nope[..., head, :].double() @ w_uk, q_rot[..., head, :]], -1))
        values.append(o[..., head, :].double() @ w_uv.T)
    return torch.stack(queries, -2), torch.stack(values, -2)


def library(q_nope, q_rot, o, weight):
    """Both products as plain torch has them, in the same dtype."""
    num_heads, num_nope = q_nope.shape[-2:]
    weights = weight.view(num_heads, -1, weight.shape[1])
    w_uk, w_uv = weights[:, :num_nope], weights[:, num_nope:]
    absorbed = torch.einsum("...hn,hnl->...hl", q_nope, w_uk)
    return torch.cat([absorbed, q_rot], -1), torch.einsum("...hl,hvl->...hv", o, w_uv)


def run(inputs, backend=None):
    """Both ops."""
    q_nope, q_rot, o, weight = inputs
    num_values = weight.shape[0] // q_nope.shape[-2] - q_nope.shape[-1]
    return (
        absorb_query(q_nope, q_rot, weight, backend=backend),
        project_values(o, weight, num_values=num_values, backend=backend),
    )


def check(inputs, backend=None):
    """Both ops with errors like the library's."""
    return check_outputs(run(inputs, backend), inputs)


def check_outputs(outputs, inputs):
    """Errors at most twice the library's, mean and largest, plus half a digit.

    A digit of float32 is that of the summands: the order of a sum shows where it cancels out.
    """
    _, q_rot, _, weight = inputs
    least = 1.0 if weight.dtype == torch.float32 else 2.0**-6
    for output, plain, expected in zip(outputs, library(*inputs), oracles(*inputs), strict=True):
        assert output.is_contiguous() and output.dtype == plain.dtype
        assert output.shape == plain.shape
        if not output.numel():
            continue
        digit = expected.abs().clamp_min(least) * torch.finfo(weight.dtype).eps
        error = (output.double() - expected).abs() / digit
        plain_error = (plain.double() - expected).abs() / digit
        assert error.mean() <= 2 * plain_error.mean() + 0.05
        assert error.max() <= 2 * plain_error.max() + 0.5
    rank = weight.shape[1]
    assert torch.equal(outputs[0][..., rank:], q_rot)
    return outputs


def make_tables(q_rot, num_batch_rows=None):
    """cos and sin of random angles for such queries."""
    *rows, _, num_rotated = q_rot.shape
    if num_batch_rows is not None:
        rows[0] = num_batch_rows
    angles = torch.randn(*rows, num_rotated // 2).repeat(*[1] * len(rows), 2)
    return [table.to(q_rot.device, q_rot.dtype) for table in (angles.cos(), angles.sin())]


def check_rotation(inputs, backend=None):
    """Both styles: the product as without a rotation, and the bits of transformers behind it."""
    q_nope, q_rot, _, weight = inputs
    # On the CPU: race checkers break on the library's bf16 products.
    alone = absorb_query(q_nope.cpu(), q_rot.cpu(), weight.cpu(), backend="reference").to(weight)
    rank = weight.shape[1]
    batches = [None, 1] if q_rot.dim() == 4 else [None]
    for interleaved, num_batch_rows in itertools.product((True, False), batches):
        cos, sin = make_tables(q_rot, num_batch_rows)
        options = {"cos": cos, "sin": sin, "interleaved": interleaved}
        output = absorb_query(q_nope, q_rot, weight, **options, backend=backend)
        assert output.is_contiguous() and output.shape == alone.shape
        tolerance = max(2 * torch.finfo(weight.dtype).eps, 1e-5)
        torch.testing.assert_close(
            output[..., :rank], alone[..., :rank], rtol=tolerance, atol=tolerance
        )
        rope = apply_rotary_pos_emb_interleave if interleaved else apply_rotary_pos_emb
        # On the CPU, where nothing contracts products and sums.
        turned = rope(q_rot.cpu(), q_rot.cpu(), cos.cpu(), sin.cpu(), unsqueeze_dim=-2)[0]
        actual = output[..., rank:].cpu()
        if weight.dtype == torch.float32 and weight.is_cuda:
            torch.testing.assert_close(actual, turned, rtol=1e-6, atol=1e-6)
        else:
            assert torch.equal(actual, turned)


ROTATED_SIZES = [(3, 7, 6, 9, 11), (4, 24, 8, 32, 16), (1, 16, 0, 33, 1)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", ROTATED_SIZES)
@pytest.mark.parametrize("rows", [(6,), (2, 3), (0,), (1, 17)])
def test_rotation_has_the_bits_of_transformers(rows, sizes, dtype):
    check_rotation(make_inputs(rows, sizes, dtype))


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [(2, 3), (0,), (17,)])
@pytest.mark.parametrize("backend", ["triton", "library"])
def test_triton_rotation(backend, rows, dtype):
    for sizes in ROTATED_SIZES[:2]:
        check_rotation(make_inputs(rows, sizes, dtype), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [ROTATED_SIZES[0], (64, 192, 64, 512, 256)])
@pytest.mark.parametrize("rows", [(6,), (2, 3), (0,), (1, 33)])
@pytest.mark.parametrize("backend", [None, "triton", "library"])
def test_rotation_on_a_gpu(backend, rows, sizes, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    check_rotation(make_inputs(rows, sizes, dtype, "cuda"), backend)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [(64, 192, 64, 512, 256), (3, 32, 6, 64, 48)])
@pytest.mark.parametrize("rows", [(1,), (2, 5), (16,), (3, 11)])
def test_streaming_kernel_rotates(rows, sizes):
    pytest.importorskip("cutlass")
    inputs = make_inputs(rows, sizes, device="cuda")
    check_rotation(inputs, "cute")
    q_nope, q_rot, _, _ = spread_apart(*inputs)
    check_rotation((q_nope, q_rot, None, inputs[3]), "cute")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [(1,), (6,), (17,), (2, 3), (0,), (2, 0)])
def test_error_is_that_of_the_library(rows, sizes, dtype):
    check(make_inputs(rows, sizes, dtype))


def spread_apart(q_nope, q_rot, o, weight):
    """The same values: queries transposed from [B, H, S, *], the rest with gaps, all offset."""

    def transposed(tensor):
        return tensor.transpose(-2, -3).contiguous().transpose(-2, -3)

    wide = weight.new_full((weight.shape[0] + 1, weight.shape[1] + 3), float("nan"))
    wide[1:, 3:] = weight
    with_gaps = o.new_full((*o.shape, 2), float("nan"))
    with_gaps[..., 1] = o
    return transposed(q_nope), transposed(q_rot), with_gaps[..., 1], wide[1:, 3:]


@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_any_strides(rows):
    inputs = make_inputs(rows, SIZES[0], torch.float32)
    expected = check(inputs)
    for output, straight in zip(check(spread_apart(*inputs)), expected, strict=True):
        torch.testing.assert_close(output, straight)


def test_no_weight_and_no_query_is_copied(monkeypatch):
    """The library's batched product gets views of everything, and writes to the output itself."""
    q_nope, q_rot, o, weight = make_inputs((2, 3), SIZES[2])
    seen = []

    def bmm(a, b, *, out):
        seen.append((a, b, out))
        return out.zero_()

    monkeypatch.setattr(torch, "bmm", bmm)
    queries = absorb_query(q_nope, q_rot, weight, backend="reference")
    values = project_values(o, weight, num_values=256, backend="reference")

    def memory(tensor):
        return tensor.untyped_storage().data_ptr()

    (a, b, out), (c, d, result) = seen
    assert (memory(a), memory(b), memory(out)) == tuple(map(memory, (q_nope, weight, queries)))
    assert (memory(c), memory(d), memory(result)) == tuple(map(memory, (o, weight, values)))


def test_nan_stays_in_its_row_and_head():
    q_nope, q_rot, o, weight = make_inputs((3,), SIZES[0])
    q_nope[1, 2, 0] = o[0, 1, 3] = float("nan")
    queries, values = absorb_query(q_nope, q_rot, weight), project_values(o, weight, num_values=11)
    assert queries[1, 2, :9].isnan().all() and queries.isnan().sum() == 9
    assert values[0, 1].isnan().all() and values.isnan().sum() == 11


def test_opcheck():
    for rows in ((6,), (2, 3)):
        q_nope, q_rot, o, weight = make_inputs(rows, SIZES[0])
        ops = torch.ops.glm
        tables = make_tables(q_rot[..., :4])
        for part, cos, sin in ((q_rot, None, None), (q_rot[..., :4], *tables)):
            call = (q_nope, part, weight, cos, sin, True, o, "")
            torch.library.opcheck(ops.mla_absorb_query.default, call)
        torch.library.opcheck(ops.mla_project_values.default, (o, weight, 11, ""))


def test_compiles_once_for_all_row_counts():
    from torch._dynamo.testing import CompileCounter

    H, N, P, L, V = SIZES[3]
    weight = torch.randn(H * (N + V), L)

    def step(q):
        absorbed = absorb_query(q[..., :N], q[..., N:], weight)
        return project_values(absorbed[..., :L], weight, num_values=V) * 2

    counter = CompileCounter()
    counted = torch.compile(step, backend=counter, fullgraph=True)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for S in (6, 5, 17):
        q = torch.randn(1, S, H, N + P)
        torch._dynamo.mark_dynamic(q, 1)
        torch.testing.assert_close(compiled(q), step(q))
        counted(q)
    assert counter.frame_count == 1


@pytest.mark.parametrize(
    "change, reason",
    [
        (lambda n, r, o, w: (n[0], r[0], o, w), r"q_nope \[R, H, N\] and q_rot \[R, H, P\]"),
        (lambda n, r, o, w: (n, r[:1], o, w), "same rows and heads"),
        (lambda n, r, o, w: (n.float(), r, o, w), "q_nope torch.float32, q_rot torch.bfloat16"),
        (lambda n, r, o, w: (n, r, o, w[:-1]), "N = 7, got 53 rows"),
        (lambda n, r, o, w: (n, r, o, w[:18]), "N = 7, got 18 rows"),
    ],
)
def test_wrong_queries_are_named(change, reason):
    q_nope, q_rot, _, weight = change(*make_inputs((2,), SIZES[0]))
    with pytest.raises(ValueError, match=f"absorb_query: .*{reason}"):
        absorb_query(q_nope, q_rot, weight)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda cos, sin: (cos, None), "cos and sin go together, got only cos"),
        (lambda cos, sin: (cos.float(), sin), "cos torch.float32"),
        (lambda cos, sin: (cos, sin[:, :2]), r"must be \[2, 3, 8\] .*or of one batch row"),
        (lambda cos, sin: (cos[..., :6], sin[..., :6]), r"cos and sin must be \[2, 3, 8\]"),
    ],
)
def test_wrong_tables_are_named(change, reason):
    q_nope, q_rot, _, weight = make_inputs((2, 3), SIZES[3])
    cos, sin = change(*make_tables(q_rot))
    with pytest.raises(ValueError, match=f"absorb_query: .*{reason}"):
        absorb_query(q_nope, q_rot, weight, cos=cos, sin=sin)


@pytest.mark.parametrize(
    "change, num_values, reason",
    [
        (lambda o, w: (o[0], w), 11, r"o \[R, H, L\]"),
        (lambda o, w: (o.double(), w.double()), 11, "float32, bfloat16 or float16, got o torch.f"),
        (lambda o, w: (o[..., :8], w), 11, "share the rank L, got 8 and 9"),
        (lambda o, w: (o, w), 19, "V = 19, got 54 rows"),
        (lambda o, w: (o, w), 0, "num_values must be at least 1"),
        (lambda o, w: (o[:, :0], w), 1, "at least one head"),
    ],
)
def test_wrong_values_are_named(change, num_values, reason):
    _, _, o, weight = make_inputs((2,), SIZES[0])
    o, weight = change(o, weight)
    with pytest.raises(ValueError, match=f"project_values: .*{reason}"):
        project_values(o, weight, num_values=num_values)


@pytest.mark.parametrize("backend", ["triton", "cute"])
def test_forced_backend_without_a_gpu_says_why(backend):
    q_nope, q_rot, o, weight = make_inputs((2,), SIZES[2])
    reason = "CUDA tensors|not installed|not complete"
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this call: .*{reason}"):
        absorb_query(q_nope, q_rot, weight, backend=backend)
    with pytest.raises(ValueError, match=f"backend '{backend}' cannot run this call: .*{reason}"):
        project_values(o, weight, num_values=256, backend=backend)


@pytest.mark.interpreter
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [SIZES[0], SIZES[1], (2, 72, 5, 130, 70)])
@pytest.mark.parametrize("rows", [(1,), (2, 3), (0,), (1, 17)])
def test_triton_error_is_that_of_the_library(rows, sizes, dtype):
    check(make_inputs(rows, sizes, dtype), backend="triton")


@pytest.mark.interpreter
def test_triton_takes_any_strides():
    inputs = make_inputs((2, 3), SIZES[0], torch.float32)
    expected = check(inputs, backend="triton")
    for output, straight in zip(check(spread_apart(*inputs), "triton"), expected, strict=True):
        assert torch.equal(output, straight)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("product", ["query", "values"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_triton_compiles_without_spilling(arch, product, dtype):
    pytest.importorskip("triton")
    from glm_compile.ops.mla_absorb.triton_kernel import BLOCK_R, block_sizes, mla_absorb_kernel
    from tests.compile_only import compile_triton

    def meta(*shape):
        return torch.empty(shape, dtype=dtype, device="meta")

    x, cos = meta(1, 6, 64, 256), meta(1, 6, 64)
    weight = meta(64, 448, 512)
    if product == "query":
        x, weight, copied = x[..., :192], weight[:, :192].transpose(1, 2), x[..., 192:]
    else:
        x, weight, copied = meta(1, 6, 64, 512), weight[:, 192:], None
    _, num_features, num_reduced = weight.shape
    width = num_features + (64 if copied is not None else 0)
    block_f, block_k = block_sizes(num_features, num_reduced, dtype.itemsize)
    compiled = compile_triton(
        mla_absorb_kernel,
        (
            *(x, *x.stride(), weight, *weight.stride()),
            *(copied, *(copied.stride() if copied is not None else (0, 0, 0, 0))),
            *((cos, *cos.stride()) * 2 if copied is not None else (None, 0, 0, 0) * 2),
            *(meta(6, 64, width), 64 * width, width, 6, 6),
        ),
        {
            "K": num_reduced,
            "F": num_features,
            "P": width - num_features,
            "BLOCK_R": BLOCK_R,
            "BLOCK_F": block_f,
            "BLOCK_K": block_k,
            "BLOCK_P": 64,
            "ROTATED": copied is not None,
            "INTERLEAVED": True,
        },
        arch,
        num_warps=4,
        num_stages=4,
    )
    assert compiled.stack_bytes == 0
    assert compiled.registers <= 128
    if dtype == torch.bfloat16:
        assert "mma" in compiled.ptx
    else:  # each step's sums are a chain of their own, which starts from zero
        (dot,) = re.findall(r"tt\.dot .*", compiled.ttgir)
        assert re.search(r", %cst\w* :", dot)
    assert "cp.async.cg.shared.global" in compiled.ptx


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sizes", [SIZES[0], (64, 192, 64, 512, 256)])
@pytest.mark.parametrize("rows", [(6,), (2, 3), (0,), (1, 33)])
@pytest.mark.parametrize("backend", [None, "triton", "reference"])
def test_error_is_that_of_the_library_on_a_gpu(backend, rows, sizes, dtype):
    torch.backends.cuda.matmul.allow_tf32 = False
    check(make_inputs(rows, sizes, dtype, "cuda"), backend)
