"""Kernels under compute-sanitizer, on cases small enough for it: bad addresses, races, barriers.

What is expected is computed on the CPU: cuBLAS's products of bf16 break off under racecheck.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

pytestmark = [pytest.mark.gpu, pytest.mark.slow, pytest.mark.usefixtures("cute_gpu")]
ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Script:
    """A program to run under the tool.

    Attributes:
        kernels: what the names of the kernels to look at have in common.
        code: checks its results against the reference, so that what is looked at did run.
        tools: that follow what the kernels do. Racecheck knows no barriers that asynchronous stores
            to a peer arrive at (clusters of top-k and of sparse MLA), and counts an arrival for the
            lane alone, which `test_what_racecheck_follows` shows (sparse MLA for many rows, stages
            of a linear that are filled again). Of sparse MLA's single blocks it reports factors
            that one group stores before it arrives at a named barrier, and that the other reads
            after it has waited there, as PTX allows.
    """

    kernels: str
    code: str
    tools: tuple[str, ...] = ("memcheck", "racecheck", "synccheck")


TOPK = """
import torch
from glm_compile.ops.topk.config import Variant
from glm_compile.ops.topk.cute_kernel import topk_select_cute
from glm_compile.ops.topk.reference import topk_select_reference

for variant in VARIANTS:
    num_keys = min(variant.max_keys, 8000)
    rows = torch.stack([torch.randn(num_keys), torch.ones(num_keys), torch.arange(num_keys)])
    scores = rows.float().cuda()
    lengths = torch.tensor([num_keys, num_keys - 5, num_keys], device="cuda")
    got = topk_select_cute(scores, lengths, 500, variant=variant)
    assert torch.equal(got, topk_select_reference(scores, lengths, 500)), variant
    cached = torch.tensor([77], dtype=torch.int32, device="cuda")
    arguments = (scores, cached, 500, None, None, None, 3, 64, True, True)
    got = topk_select_cute(*arguments, variant=variant)
    assert torch.equal(got, topk_select_reference(*arguments)), variant
"""

TOPK_BLOCKS = """
    Variant("registers", 1, 256, 4, 8, 1024),
    Variant("filtered", 1, 256, 4, 8, 8192, 3072, 4),
"""
TOPK_CLUSTERS = """
    Variant("registers", 4, 256, 4, 8, 1024),
    Variant("registers", 4, 256, 4, 8, 1024, 2080),
    Variant("filtered", 4, 256, 4, 8, 2048, 3072, 4),
"""

LINEAR = """
import torch
from glm_compile.ops.bf16_linear.config import StreamConfig
from glm_compile.ops.bf16_linear.cute_kernel import bf16_linear_cute, counters_of
from glm_compile.ops.rms_norm_linear.reference import rms_norm_reference, swiglu_reference

for num_rows, shape, config, has_norm, has_swiglu in CASES:
    weight = (torch.randn(shape) / shape[1] ** 0.5).bfloat16()
    x = torch.randn(num_rows, shape[1]).bfloat16()
    norm_weight = (torch.rand(shape[1]) + 0.5).bfloat16()
    want = (rms_norm_reference(x, norm_weight, 1e-5) if has_norm else x).double()
    want = want @ weight.double().T
    want = swiglu_reference(want) if has_swiglu else want
    norm = norm_weight.cuda() if has_norm else None
    counters = counters_of(weight.cuda().device)
    counters.of_stream.clear()
    got = bf16_linear_cute(
        x.cuda(), weight.cuda(), None, None, norm, 1e-5, config=config, has_swiglu=has_swiglu
    )
    assert (got.cpu() - want).abs().max() <= 2**-6 * want.abs().max()
    assert bool(counters.of_stream) == config.is_dynamic, "whether tiles are drawn"
"""
# Sums of a cluster, norms, SwiGLU, tiles that are turned; no stage is filled twice.
LINEAR_SPLITS = """
    (6, (96, 2048), StreamConfig(8, 512, cluster=4), False, False),
    (16, (200, 1000), StreamConfig(40, 512, cluster=2), False, False),
    (1, (64, 2048), StreamConfig(16, 256, cluster=8), False, False),
    (16, (100, 1024), StreamConfig(48, 512, cluster=2, late=True), False, False),
    (6, (96, 2048), StreamConfig(40, 512, cluster=2), True, False),
    (3, (90, 1000), StreamConfig(24, 512), True, True),
    (11, (96, 2048), StreamConfig(24, 512), False, True),
    (16, (96, 1024), StreamConfig(48, 512, cluster=2, is_turned=True), False, False),
"""
# Rings that are filled again; tiles are drawn only then.
LINEAR_RINGS = """
    (6, (64, 6144), StreamConfig(24, 512), True, True),
    (6, (7000, 2048), StreamConfig(24, 512, is_dynamic=True), False, False),
    (6, (7000, 2048), StreamConfig(24, 512, is_dynamic=True), True, True),
"""

MOE_LAYER = """
from glm_compile.ops.moe import moe_layer
from tests.ops.test_moe_layer import check_error, make_inputs

for tokens, sizes in CASES:
    inputs, residual = make_inputs(tokens, *sizes)
    moved = [part if isinstance(part, int) else part.cuda() for part in inputs]
    output = moe_layer(*moved, residual_MC=residual.cuda(), scale=2.5, backend="cute")
    check_error(output.cpu(), inputs, residual)
"""

# No block fills a stage of its ring twice, even if it draws all tiles.
MOE_FEW = MOE_LAYER.replace("CASES", "((1, (3, 64, 24, 2)),)")
MOE_MANY = MOE_LAYER.replace("CASES", "((1, (3, 64, 24, 2)), (6, (20, 520, 40, 8)))")

SCRIPTS = {
    "topk": Script(
        "TopkKernel",
        TOPK.replace("VARIANTS", f"[{TOPK_BLOCKS}{TOPK_CLUSTERS}]"),
        ("memcheck", "synccheck"),
    ),
    "topk_blocks": Script(
        "TopkKernel", TOPK.replace("VARIANTS", f"[{TOPK_BLOCKS}]"), ("racecheck",)
    ),
    "indexer_scores": Script(
        "IndexerScoresKernel",
        """
import torch
from tests.ops.test_indexer_scores import call
from tests.ops.test_indexer_scores_cute import KINDS, assert_close, make_cute_case

for kind in KINDS:
    for num_batch, num_queries in ((1, 6), (3, 9)):
        case = make_cute_case(num_batch=num_batch, num_queries=num_queries, num_keys=333)
        assert_close(call(kind, case, "cute"), case, kind)
        if kind != "contiguous":
            assert_close(call(kind, case, "cute", is_causal=True), case, kind)
""",
    ),
    "bf16_linear": Script(
        "Bf16LinearKernel",
        """
import torch
from glm_compile.ops.bf16_linear import bf16_linear

for num_rows, shape in ((1, (200, 1024)), (6, (100, 1000)), (16, (2784, 512))):
    weight = torch.randn(shape, dtype=torch.bfloat16, device="cuda")
    x = torch.randn(num_rows, shape[1], dtype=torch.bfloat16, device="cuda")
    got = bf16_linear(x, weight, backend="cute")
    want = x.double() @ weight.double().T
    assert (got.double() - want).abs().max() <= 2**-7 * want.abs().max()
""",
    ),
    "bf16_linear_splits": Script("Bf16LinearKernel", LINEAR.replace("CASES", f"[{LINEAR_SPLITS}]")),
    "bf16_linear_rings": Script(
        "Bf16LinearKernel",
        LINEAR.replace("CASES", f"[{LINEAR_RINGS}]"),
        ("memcheck", "synccheck"),
    ),
    "moe_experts": Script(
        "GateUpKernel",
        """
from glm_compile.ops.moe import moe_experts
from tests.ops.test_moe import check_error, make_inputs

for tokens, sizes, ids in ((1, (3, 64, 24, 2), "topk"), (7, (5, 520, 40, 8), "any")):
    inputs = make_inputs(tokens, *sizes, ids=ids)
    output = moe_experts(*(part.cuda() for part in inputs), backend="cute")
    check_error(output.cpu(), *inputs)
""",
    ),
    "moe_layer_logits": Script("LogitsKernel", MOE_MANY),
    "moe_layer_gate_up": Script("GateUpKernel", MOE_MANY, ("memcheck", "synccheck")),
    "moe_layer_gate_up_few": Script("GateUpKernel", MOE_FEW, ("racecheck",)),
    "moe_layer_down": Script("DownKernel", MOE_MANY, ("memcheck", "synccheck")),
    "moe_layer_down_few": Script("DownKernel", MOE_FEW, ("racecheck",)),
    "moe_layer_sum": Script("SumKernel", MOE_MANY),
    "mla_absorb": Script(
        "MlaAbsorbKernel",
        """
from tests.ops.test_mla_absorb import check_outputs, check_rotation, make_inputs, run

for rows, sizes in (((1,), (3, 32, 6, 64, 48)), ((2, 5), (8, 192, 64, 512, 256))):
    inputs = make_inputs(rows, sizes)
    parts = [part.cuda() for part in inputs]
    check_outputs([output.cpu() for output in run(parts, "cute")], inputs)
    check_rotation(parts, "cute")
""",
    ),
    "latent_write": Script(
        "latent_write",
        """
from tests.ops.test_latent_write import LENGTHS, check_rows, make_inputs, store

for sizes, lengths in (({}, LENGTHS[0]), ({"L": 130, "P": 6, "gap": 2}, LENGTHS[2])):
    inputs = make_inputs(**sizes)
    before, after = store("cuda", inputs, lengths, True, "triton")
    check_rows(after, before, inputs, lengths, True)
""",
    ),
    "sparse_mla_decode": Script(
        "SparseMlaKernel",
        """
from tests.ops.test_sparse_mla import assert_close
from tests.ops.test_sparse_mla_cute import decode, make_cute_case

for kind, cluster, num_slots in (("contiguous", 1, 60), ("table", 1, 300), ("slots", 4, 200)):
    case = make_cute_case(
        num_sequences=1, rows_per_sequence=2, num_tokens=300, num_slots=num_slots, device="cpu"
    )
    case.indices_RK[0, 5] = -1
    case.indices_RK[1, 50:] = case.indices_RK[1, 49]
    assert_close(decode(kind, case.to("cuda"), cluster=cluster).cpu(), case)
""",
        ("memcheck", "synccheck"),
    ),
    "sparse_mla_prefill": Script(
        "SparseMlaPrefillKernel",
        """
from tests.ops.test_sparse_mla import KINDS
from tests.ops.test_sparse_mla_prefill import check_rows, make_prefill_case, prefill

for kind in KINDS:
    case = make_prefill_case(rows_per_sequence=2, num_tokens=300, num_slots=150)
    case.indices_RK[1] = -1
    case.indices_RK[2, 50:] = case.indices_RK[2, 49]
    check_rows(prefill(kind, case), case, [0, 1, 2, 3])
""",
        ("memcheck", "synccheck"),
    ),
    "indexer_prologue": Script(
        "indexer_prologue",
        """
import torch
from glm_compile.ops.indexer_prologue import Latents, indexer_prologue_fp8
from glm_compile.ops.paged_cache import PAGE_SIZE

def run(backend):
    torch.manual_seed(3)
    q = torch.randn(2, 3, 32, 128).bfloat16().cuda()
    k, gates = torch.randn(2, 3, 128).bfloat16().cuda(), torch.randn(2, 3, 32).bfloat16().cuda()
    cos, sin = torch.rand(2, 3, 64).bfloat16().cuda(), torch.rand(2, 3, 64).bfloat16().cuda()
    norm = torch.ones(128).bfloat16().cuda(), torch.zeros(128).bfloat16().cuda()
    pages = torch.zeros(4, PAGE_SIZE * 132, dtype=torch.uint8, device="cuda")
    latents, ropes = torch.randn(2, 3, 576).bfloat16().cuda().split([512, 64], -1)
    weight = torch.ones(512).bfloat16().cuda()
    latent_pages = torch.zeros(4, PAGE_SIZE, 576).bfloat16().cuda()
    latents = Latents(latents, ropes, weight, 1e-6, True, latent_pages)
    table = torch.tensor([[2, 0], [1, -1]], dtype=torch.int32, device="cuda")
    lengths = torch.tensor([62, 63], dtype=torch.int32, device="cuda")
    keywords = {"gate_scale": 0.2, "key_pages": pages, "block_table": table, "lengths_B": lengths}
    q, weights = indexer_prologue_fp8(
        q, k, gates, *norm, 1e-6, cos, sin, latents=latents, backend=backend, **keywords
    )
    return q.view(torch.uint8), weights, pages, latent_pages

for got, want in zip(run("triton"), run("reference")):
    assert got.shape == want.shape and (got != want).float().mean() < 0.01
""",
    ),
}


def sanitize(tool: str, kernels: str, code: str) -> subprocess.CompletedProcess[str]:
    """Run a program under one of the tools, which look at the kernels of this name."""
    if (sanitizer := shutil.which("compute-sanitizer")) is None:
        pytest.skip("compute-sanitizer is not installed")
    # Compilers ask the driver for what it may not have; those answers are no errors of kernels.
    options = ["--tool", tool, "--error-exitcode", "9", "--report-api-errors", "no"]
    options += ["--kernel-name", f"kernel_substring={kernels}"]
    command = [sanitizer, *options, sys.executable, "-c", code]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=300, check=False, cwd=ROOT
    )


@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_sanitizer_finds_nothing(name: str, tool: str) -> None:
    script = SCRIPTS[name]
    if tool not in script.tools:
        pytest.skip(f"{tool} does not follow what {script.kernels} does")
    done = sanitize(tool, script.kernels, script.code)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


@pytest.mark.parametrize(
    ("way", "is_followed"),
    [("block", True), ("lanes", True), ("lane", False), ("arrive", True)],
)
def test_what_racecheck_follows(way: str, is_followed: bool) -> None:
    """Right handovers between two warps. A lane's arrival at an mbarrier for its warp, which has
    met before, is none to racecheck; where a newer tool follows it, this fails: then give it the
    kernels that are left out.
    """
    code = f"from tests.ops.handover_kernels import hand_over\nhand_over({way!r})"
    done = sanitize("racecheck", "HandoverKernel", code)
    output = done.stdout[-3000:] + done.stderr[-1000:]
    assert "Traceback" not in output, output
    assert ("Race reported" not in output) == is_followed, output
