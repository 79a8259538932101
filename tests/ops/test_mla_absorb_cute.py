"""The streaming kernel of the absorbed products: what it compiles to, and its numbers on a GPU.

Shape legend: B batch, S query tokens, R = B * S rows, H heads, N nope dim of a query, P rope dim,
L rank of the latent, V value dim.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from glm_compile.ops.mla_absorb import absorb_query, project_values
from glm_compile.ops.mla_absorb.config import (
    MAX_FEW_ROWS,
    has_early_dependents,
    query_tile,
    value_tile,
)
from tests.ops.test_mla_absorb import check, make_inputs, oracles, spread_apart

pytestmark = pytest.mark.usefixtures("cute_gpu")

# (H, N, P, L, V): the release's over 1, 2, 4 and 8 devices; small; nothing to copy; 16 warps.
RELEASE = (64, 192, 64, 512, 256)
SIZES = [
    RELEASE,
    (32, 192, 64, 512, 256),
    (16, 192, 64, 512, 256),
    (8, 192, 64, 512, 256),
    (3, 32, 6, 64, 48),
    (2, 512, 0, 1024, 16),
]


def test_tiles_divide_the_matrices():
    for H, _, _, L, V in SIZES:
        assert L % query_tile(H, L) == 0 and query_tile(H, L) % 64 == 0
        assert V % value_tile(H, V) == 0 and value_tile(H, V) % 16 == 0


@pytest.mark.parametrize("tile", [16, 32, 48, 64, 128])
def test_sums_of_a_tile_lie_apart(tile):
    pytest.importorskip("cutlass")
    from glm_compile.ops.mla_absorb.cute_kernel import MlaAbsorbKernel, Variant

    kernel = MlaAbsorbKernel(Variant(512, tile * 3, tile, False, row_blocks=2))
    offsets = [kernel._sum_offset(row, f) for row in range(16) for f in range(tile)]
    assert sorted(offsets) == [4 * i for i in range(16 * tile)]
    assert max(offsets) < kernel.part_bytes
    # Two adjacent features of a row are read at once.
    assert all(kernel._sum_offset(3, f) + 4 == kernel._sum_offset(3, f + 1) for f in (0, 6, 14))


@pytest.mark.parametrize(
    "change, reason",
    [
        ("float16", "takes bfloat16, got torch.float16"),
        ("N", "multiple of 32 up to 512, got 24"),
        ("P", "rope dim must be even, got 5"),
        ("L", "rank must be a multiple of 64, got 72"),
        ("V", "value dim must be a multiple of 16, got 40"),
        ("wide L", "rank must be at most 1024, got 1088"),
        ("weight", "dense and start at multiples of 16 bytes"),
        ("rows", "start at multiples of"),
    ],
)
def test_refused_with_a_reason(change, reason):
    sizes = {"N": (1, 24, 6, 64, 48), "P": (1, 32, 5, 64, 48), "L": (1, 32, 6, 72, 48)}
    sizes |= {"V": (1, 32, 6, 64, 40), "wide L": (1, 32, 6, 1088, 48)}
    q_nope, q_rot, o, weight = make_inputs((2,), sizes.get(change, SIZES[4]))
    if change == "float16":
        q_nope, q_rot, o, weight = (t.half() for t in (q_nope, q_rot, o, weight))
    elif change == "weight":
        weight = weight.T.contiguous().T
    elif change == "rows":
        q_nope, o = q_nope.mT.contiguous().mT, o.mT.contiguous().mT
    refused = 0
    num_values = weight.shape[0] // q_nope.shape[-2] - q_nope.shape[-1]
    for call in (
        lambda: absorb_query(q_nope, q_rot, weight, backend="cute"),
        lambda: project_values(o, weight, num_values=num_values, backend="cute"),
    ):
        with pytest.raises(ValueError, match=r"backend 'cute' cannot run this call: ") as error:
            call()
        refused += reason in str(error.value)
    assert refused == (1 if change in ("N", "P", "V", "wide L") else 2)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("row_blocks", [1, 2])
@pytest.mark.parametrize(
    ("sizes", "rotation"),
    [
        *((sizes, None) for sizes in (RELEASE, SIZES[3], SIZES[4], SIZES[5])),
        (RELEASE, "interleaved"),
        (SIZES[4], "half split"),
    ],
)
def test_compiles_without_spilling(sizes, rotation, row_blocks, arch, tmp_path):
    pytest.importorskip("cutlass")
    from glm_compile.ops.mla_absorb.cute_kernel import MlaAbsorbKernel, Variant, compile_variant
    from tests.compile_only import compile_cute

    H, N, P, L, V = sizes
    early = {"lets_in_early": has_early_dependents(H)}
    query = Variant(N, L, query_tile(H, L), True, row_blocks, P, rotation, **early)
    values = Variant(L, V, value_tile(H, V), False, row_blocks, **early)
    for name, variant in {"query": query, "values": values}.items():
        if name == "values" and rotation is not None:
            continue
        folder = tmp_path / name
        folder.mkdir()
        compiled = compile_cute(
            lambda more, v=variant: compile_variant(v, arch, more), arch, folder
        )
        kernel = MlaAbsorbKernel(variant)
        assert compiled.stack_bytes == 0
        assert compiled.registers * kernel.num_threads <= 65536
        assert variant.num_warps * kernel.part_bytes + 1024 <= 227 * 1024
        # A warp's sums have room where its part of the matrix was.
        assert kernel.num_rows * variant.tile * 4 <= kernel.part_bytes
        assert "mma.sync.aligned.m16n8k16" in compiled.ptx
        assert ("ldmatrix" in compiled.ptx) == variant.is_transposed
        assert ("mul.rn.bf16x2" in compiled.ptx) == (variant.rotation is not None)
        # The matrix is asked for before the kernels ahead have ended.
        wait = compiled.ptx.index("griddepcontrol.wait")
        assert compiled.ptx.index("cp.async.bulk.tensor") < wait
        let_in = compiled.ptx.index("griddepcontrol.launch_dependents")
        assert (let_in < wait) == variant.lets_in_early


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("rows", [(1,), (6,), (8,), (2, 5), (16,), (3, 11), (0,)])
def test_error_is_that_of_the_library(rows, sizes):
    # What is left in shared memory from here is NaN, and must not be multiplied.
    nan = make_inputs((16,), sizes, device="cuda")
    nan[3].fill_(float("nan"))
    num_values = sizes[4]
    absorb_query(*nan[:2], nan[3], backend="cute")
    project_values(nan[2], nan[3], num_values=num_values, backend="cute")
    check(make_inputs(rows, sizes, device="cuda"), "cute")


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [(6,), (2, 3)])
def test_transposed_queries_and_cut_weights(rows):
    q_nope, q_rot, o, weight = make_inputs(rows, RELEASE, device="cuda")
    expected = check((q_nope, q_rot, o, weight), "cute")
    apart, rot_apart, _, _ = spread_apart(q_nope, q_rot, o, weight)
    wide = weight.new_full((weight.shape[0] + 8, 1024), float("nan"))
    wide[8:, 512:] = weight
    wide = wide[8:, 512:]
    odd = q_rot.new_empty((*q_rot.shape, 3))[..., 1].copy_(q_rot)
    for rot in (rot_apart, odd):
        assert torch.equal(absorb_query(apart, rot, wide, backend="cute"), expected[0])
    assert torch.equal(project_values(o, wide, num_values=256, backend="cute"), expected[1])
    one = [tensor[..., 2:3, :, :] for tensor in (apart, rot_apart)]
    assert torch.equal(absorb_query(*one, wide, backend="cute"), expected[0][..., 2:3, :, :])


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", SIZES)
def test_rows_do_not_depend_on_their_number_nor_on_the_run(sizes):
    q_nope, q_rot, o, weight = make_inputs((33,), sizes, device="cuda")
    num_values = sizes[4]

    def both(rows):
        return (
            absorb_query(q_nope[rows], q_rot[rows], weight, backend="cute"),
            project_values(o[rows], weight, num_values=num_values, backend="cute"),
        )

    whole = both(slice(None))
    for _ in range(20):
        assert all(map(torch.equal, both(slice(None)), whole))
    for rows in (slice(1), slice(7), slice(8), slice(9), slice(16), slice(17), slice(9, 12)):
        assert all(torch.equal(part, of[rows]) for part, of in zip(both(rows), whole, strict=True))


@pytest.mark.gpu
def test_nan_stays_in_its_row_and_head():
    q_nope, q_rot, o, weight = make_inputs((6,), RELEASE, device="cuda")
    q_nope[1, 2, 0] = o[0, 1, 3] = float("nan")
    queries = absorb_query(q_nope, q_rot, weight, backend="cute")
    values = project_values(o, weight, num_values=256, backend="cute")
    assert queries[1, 2, :512].isnan().all() and queries.isnan().sum() == 512
    assert values[0, 1].isnan().all() and values.isnan().sum() == 256


@pytest.mark.gpu
@pytest.mark.parametrize("backend", [None, "triton"])
def test_capture_and_replay_of_a_chain(backend):
    """Each product feeds the next: a kernel that started too early would read what is not there."""
    q_nope, q_rot, _, weight = make_inputs((6,), RELEASE, device="cuda")
    # So that what goes through the chain neither fades nor grows.
    weight *= 1.3

    def chain():
        nope, links = q_nope, []
        for _ in range(8):
            absorbed = absorb_query(nope, q_rot, weight, backend=backend)
            values = project_values(absorbed[..., :512], weight, num_values=256, backend=backend)
            links.append((nope, absorbed, values))
            nope = values[..., :192]
        return links

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        links = chain()
    for _ in range(3):
        q_nope.copy_(torch.randn_like(q_nope))
        for _, absorbed, values in links:
            absorbed.fill_(float("nan"))
            values.fill_(float("nan"))
        graph.replay()
        for nope, absorbed, values in links:
            expected = oracles(nope, q_rot, absorbed[..., :512], weight)
            for output, wanted in zip((absorbed, values), expected, strict=True):
                torch.testing.assert_close(output.double(), wanted, rtol=0.01, atol=0.02)


@pytest.mark.gpu
def test_many_rows_go_to_the_library(monkeypatch):
    import glm_compile.ops.mla_absorb.cute_kernel as kernel

    def refuse(*_args):
        raise AssertionError("the kernel for few rows ran")

    monkeypatch.setattr(kernel, "absorb_query_cute", refuse)
    q_nope, q_rot, _, weight = make_inputs((MAX_FEW_ROWS + 1,), RELEASE, device="cuda")
    absorb_query(q_nope, q_rot, weight)
    with pytest.raises(AssertionError, match="few rows"):
        absorb_query(q_nope[:-1], q_rot[:-1], weight)


FIRST_CALL_IN_A_CAPTURE = """
import torch
from glm_compile.ops.mla_absorb import absorb_query, project_values
from tests.ops.test_mla_absorb import make_inputs, oracles

q_nope, q_rot, o, weight = inputs = make_inputs((6,), (64, 192, 64, 512, 256), device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    queries = absorb_query(q_nope, q_rot, weight, backend="cute")
    values = project_values(o, weight, num_values=256, backend="cute")
graph.replay()
for output, expected in zip((queries, values), oracles(*inputs)):
    torch.testing.assert_close(output.double(), expected, rtol=0.01, atol=0.01)
"""


@pytest.mark.gpu
def test_first_call_may_be_inside_a_capture():
    command = [sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE]
    root = Path(__file__).parents[2]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, check=False, cwd=root
    )
    assert done.returncode == 0, done.stderr[-2000:]
