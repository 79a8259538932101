"""The CuTe top-k: what it compiles to, and what it selects, on every path and its borders."""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from glm_compile.ops._dispatch import is_installed
from glm_compile.ops.topk import masked_topk, topk_plan, topk_select, tune
from glm_compile.ops.topk.config import CUTE_TABLE, MAX_CUTE_KEYS, Variant, default_variant
from glm_compile.ops.topk.reference import topk_select_reference
from tests.compile_only import compile_cute
from tests.ops import topk_oracle

pytestmark = pytest.mark.usefixtures("cute_gpu")

K = 2048
VARIANTS = list(dict.fromkeys(variant for _, part in CUTE_TABLE for variant in part))
needs_cute = pytest.mark.skipif(
    not (is_installed("cutlass") and is_installed("tvm_ffi")), reason="needs CuTe DSL"
)


def name_of(variant: Variant) -> str:
    v = variant
    shape = f"{v.cluster}x{v.num_threads}x{v.keys_per_thread}"
    return f"{v.source}-{shape}-{v.slice_keys}-{v.buffer_keys}"


# Table --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_rows", [1, 6, 7, 8, 16, 17, 33, 34, 66, 67, 2048])
def test_table_serves_every_length(num_rows: int) -> None:
    cutoffs = {variant.max_keys for variant in VARIANTS}
    for num_keys in sorted({1, *cutoffs, *(c - 1 for c in cutoffs), *(c + 1 for c in cutoffs)}):
        if num_keys <= MAX_CUTE_KEYS:
            assert default_variant(num_rows, num_keys).max_keys >= num_keys


def test_table_rises() -> None:
    for _, part in CUTE_TABLE:
        assert [v.max_keys for v in part] == sorted({v.max_keys for v in part})


def test_variant_refuses_what_does_not_fit() -> None:
    with pytest.raises(ValueError, match="a block holds 2048 keys, got slices of 4096"):
        Variant("registers", 1, 512, 4, 8, 4096)
    with pytest.raises(ValueError, match="the best 2048 and 32 candidates, got 2048"):
        Variant("registers", 1, 512, 8, 8, 4096, 2048)
    with pytest.raises(ValueError, match="the 256 keys that a warp loads at once, got 2303"):
        Variant("filtered", 1, 1024, 8, 8, 1 << 15, 2303)
    with pytest.raises(ValueError, match="bytes of shared memory do not fit"):
        Variant("filtered", 1, 512, 8, 8, 1 << 21, 8192, 8)


def test_tuning_starts_from_the_table() -> None:
    for shape in tune.SHAPES:
        num_rows, num_keys = map(int, shape.split("x"))
        found = tune.candidates(num_rows, num_keys)
        assert found[0] == default_variant(num_rows, num_keys)
        assert all(variant.max_keys >= num_keys for variant in found)
        assert len(set(found)) == len(found)


# Compile-only -------------------------------------------------------------------------------------


@needs_cute
@pytest.mark.compile_only
@pytest.mark.parametrize("variant", VARIANTS, ids=name_of)
def test_every_variant_of_the_table_fits_in_registers(variant: Variant, tmp_path: Path) -> None:
    check_compiles(variant, tmp_path)


@needs_cute
@pytest.mark.compile_only
@pytest.mark.parametrize(
    "changes",
    [
        {"has_starts": True, "has_table": True, "is_vector": False},
        {"has_plan": True, "repeat_last": True},
        {"is_causal": True, "repeat_last": True},
        {"has_starts": True, "has_table": True, "lengths_64": True, "starts_64": True}
        | {"table_64": True},
    ],
    ids=["starts-table-scalar", "plan-repeat", "causal-repeat", "int64"],
)
@pytest.mark.parametrize("shape", [(6, 8192), (6, 131_072), (6, 1_048_576), (200, 1_048_576)])
def test_arguments_fit_in_registers(
    shape: tuple[int, int], changes: dict[str, bool], tmp_path: Path
) -> None:
    check_compiles(replace(default_variant(*shape), **changes), tmp_path)


def check_compiles(variant: Variant, folder: Path) -> None:
    from glm_compile.ops.topk.cute_kernel import compile_variant

    def compile_for(options: str) -> Any:
        return compile_variant(variant, "sm_90a", options)

    kernel = compile_cute(compile_for, "sm_90a", folder)
    # Rows that are not aligned are loaded key by key, where a few registers may spill.
    assert kernel.stack_bytes <= (0 if variant.is_vector else 32)
    # As many as leave room for the blocks that are to share a multiprocessor.
    blocks = variant.blocks_per_processor
    assert kernel.registers * variant.num_threads * blocks <= 65536
    assert (variant.shared_bytes + 1024) * blocks <= 228 * 1024


@needs_cute
@pytest.mark.compile_only
def test_equal_scores_are_counted_by_the_hardware(tmp_path: Path) -> None:
    """A constant row hits one bin: adding a literal 1 sums over a warp in one instruction."""
    import triton

    from glm_compile.ops.topk.cute_kernel import compile_variant

    disassembler = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    if not disassembler.exists():
        pytest.skip("Triton came without nvdisasm")
    variant = default_variant(6, 8192)
    kernel = compile_cute(lambda o: compile_variant(variant, "sm_90a", o), "sm_90a", tmp_path)
    (tmp_path / "cubin").write_bytes(kernel.cubin)
    command = [str(disassembler), "-c", str(tmp_path / "cubin")]
    sass = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert sass.count("ATOMS.POPC.INC") >= variant.keys_per_thread


# GPU ----------------------------------------------------------------------------------------------


def misleading_sample(num_keys: int, blocks: int = 16) -> torch.Tensor:
    """The first keys of each slice are high, and too few: a bound made from them is too high."""
    row = torch.randn(num_keys) - 100
    slice_keys = -(-num_keys // (32 * blocks)) * 32
    for first in range(0, num_keys, slice_keys):
        row[first : first + 64] += 200
    return row


def unsampled(num_keys: int) -> torch.Tensor:
    """Where samples are taken scores are low, elsewhere they rise: most keys pass every bound."""
    position = torch.arange(num_keys)
    return torch.where(position % 2048 < 128, -100.0, position / max(num_keys, 1))


ROWS: dict[str, Callable[[int], torch.Tensor]] = {
    **topk_oracle.ADVERSARIAL,
    "consecutive floats": lambda n: 1 + torch.randint(0, 3000, (n,)) * 2.0**-23,
    "large": lambda n: torch.randn(n) * 1e30,
    "small": lambda n: torch.randn(n) * 1e-30,
    "misleading sample": misleading_sample,
    "unsampled": unsampled,
    "descending noise": lambda n: torch.randn(n) - torch.arange(n) / max(n, 1) * 9,
    "ascending noise": lambda n: torch.randn(n) + torch.arange(n) / max(n, 1) * 9,
}


def hard_rows(num_rows: int, num_keys: int) -> torch.Tensor:
    """Rows of every kind in a random order, fresh ones in each run."""
    seed = torch.seed() % 2**31
    # Shown where a test fails, to make its rows again.
    print(f"hard_rows: torch.manual_seed({seed})")  # noqa: T201
    torch.manual_seed(seed)
    makers = list(ROWS.values())
    used = [makers[i](num_keys) for i in torch.randperm(len(makers))[:num_rows].tolist()]
    rows = [used[r % len(used)] for r in range(num_rows)]
    return torch.stack(rows).cuda()


def border_lengths(num_rows: int, num_keys: int) -> torch.Tensor:
    """Lengths around k and around each path's longest row; row 0 sees all keys."""
    borders = {K} | {variant.max_keys for variant in VARIANTS}
    around = [b + d for b in borders for d in (-1, 0, 1) if b + d <= num_keys]
    choices = torch.tensor([num_keys, num_keys, 0, 1, -5, num_keys + 7, *around])
    lengths = choices[torch.randint(len(choices), (num_rows,))]
    lengths[:1] = num_keys
    return lengths.int().cuda()


def check(scores: torch.Tensor, lengths: torch.Tensor, k: int = K, **keywords: Any) -> torch.Tensor:
    """Compare with the integer reference; return the selection."""
    got = topk_select(scores, lengths, k, backend="cute", **keywords)
    starts = keywords.pop("starts_R", None)
    keywords.pop("plan", None)
    want = topk_select_reference(scores, lengths, k, starts, **keywords)
    wrong = (got != want).any(dim=1).nonzero().flatten().tolist()
    assert not wrong, f"rows {wrong} of {tuple(scores.shape)}, lengths {lengths.tolist()}"
    return got


PART_ROWS = (6, 16, 50, 70)


@pytest.mark.gpu
@pytest.mark.parametrize("part", range(len(CUTE_TABLE)))
def test_gpu_every_variant_selects_what_the_reference_does(part: int) -> None:
    num_rows = PART_ROWS[part]
    for variant in CUTE_TABLE[part][1]:
        num_keys = variant.max_keys
        assert default_variant(num_rows, num_keys) == variant
        for _ in range(4 if part == 0 else 1):
            check(hard_rows(num_rows, num_keys), border_lengths(num_rows, num_keys))


@pytest.mark.gpu
@pytest.mark.parametrize("cutoff", [variant.max_keys for variant in CUTE_TABLE[0][1][:-1]])
def test_gpu_rows_next_to_a_cutoff(cutoff: int) -> None:
    for num_keys in (cutoff - 1, cutoff + 1):
        check(hard_rows(7, num_keys), border_lengths(7, num_keys))


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [8192, 131_072, 262_144, 1_048_576])
def test_gpu_one_row_of_each_kind(num_keys: int) -> None:
    for make in ROWS.values():
        scores = make(num_keys)[None].cuda()
        check(scores, torch.tensor([num_keys], device="cuda"))


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(6, 2500), (200, 2500), (6, 90_000), (6, 300_000), (70, 20_000)])
def test_gpu_windows_pages_and_layouts(shape: tuple[int, int]) -> None:
    num_rows, num_keys = shape
    padded = torch.full((num_rows, num_keys + 12), math.inf, device="cuda")
    lengths = torch.randint(-9, num_keys + 99, (num_rows,), device="cuda")
    starts = torch.randint(-9, num_keys // 2, (num_rows,), device="cuda")
    starts[-1] = num_keys
    num_pages = num_keys // 64 - 1
    table = torch.randperm(num_rows // 2 * num_pages, device="cuda").reshape(-1, num_pages)
    table[:, ::7] = -1
    pages: dict[str, Any] = {"rows_per_sequence": 2, "page_size": 64}
    views = (padded[:, 4:-8], padded[:, 1:-11], padded[:, : num_keys - 3])
    for i, scores in enumerate(views):
        scores.copy_(hard_rows(*scores.shape))
        index = torch.int32 if i == 0 else torch.int64
        some, first, line = lengths.to(index), starts.to(index), table.to(index)
        if index == torch.int64:
            # Cut to 32 bits before they are compared, these would be 5 and 7.
            some[0], first[1] = -(2**32) + 5, -(2**32) + 7
        check(scores, some, starts_R=first, block_table=line, **pages)
        if i < 2:
            check(scores, some, starts_R=first, plan=topk_plan(some, K, starts_R=first))
    no_pages = topk_select(views[0], lengths, 3, block_table=table[:, :0], backend="cute", **pages)
    assert (no_pages == -1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [700, 2500, 8192, 90_000, 131_072, 262_144, 2**20 + 64])
@pytest.mark.parametrize("num_rows", [6, 72])
def test_gpu_repeated_positions_and_causal_lengths(num_rows: int, num_keys: int) -> None:
    if num_rows * num_keys > 2**25:
        num_rows = 12
    scores = hard_rows(num_rows, num_keys)
    scores[1::4] = -math.inf
    scores[2::4, 900:] = math.nan
    lengths = border_lengths(num_rows, num_keys)
    lengths[1::3] = torch.randint(0, K, lengths[1::3].shape, device="cuda").int()
    check(scores, lengths, repeat_last=True)
    check(scores, lengths, plan=topk_plan(lengths, K), repeat_last=True)
    check(scores, lengths, 7, repeat_last=True)
    for index_dtype in (torch.int32, torch.int64):
        cached = lengths[: num_rows // 3].to(index_dtype)
        causal: dict[str, Any] = {"rows_per_sequence": 3, "is_causal": True}
        check(scores, cached, **causal)
        check(scores, cached, repeat_last=True, **causal)


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [2**20 - 1, 2**20, 2**20 + 1, 2**20 + 64, 2**21 - 1, 2**21])
def test_gpu_rows_of_more_than_a_million(num_keys: int) -> None:
    lengths = torch.full((7,), num_keys, dtype=torch.int32, device="cuda")
    lengths[3:] = torch.tensor([2**20 - 1, 2**20, 2**20 + 1, num_keys - 1])
    check(hard_rows(7, num_keys), lengths)


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [5000, 300_000])
def test_gpu_scores_outside_the_window_do_not_matter(num_keys: int) -> None:
    scores = torch.randn(6, num_keys, device="cuda")
    poisoned = scores.clone()
    poisoned[:, :70], poisoned[:, -99:] = math.inf, math.nan
    poisoned[3:, -50:] = math.inf
    starts = torch.full((6,), 70, device="cuda")
    lengths = torch.full((6,), num_keys - 99, device="cuda")
    got = check(poisoned, lengths, starts_R=starts)
    assert torch.equal(got, check(scores, lengths, starts_R=starts))


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [0, 1, 2, 3, 5, 31, 63, 64, K - 1, K, K + 1])
def test_gpu_short_rows(num_keys: int) -> None:
    for num_rows in (1, 6, 70):
        scores = hard_rows(num_rows, num_keys) if num_keys else torch.empty(num_rows, 0).cuda()
        check(scores, torch.full((num_rows,), num_keys, device="cuda"))
        check(scores, torch.full((num_rows,), num_keys, device="cuda"), 3)


@pytest.mark.gpu
@pytest.mark.parametrize("k", [1, 7, 512, K - 1, K])
@pytest.mark.parametrize("shape", [(6, 20_000), (6, 300_000), (70, 40_000)])
def test_gpu_any_k(shape: tuple[int, int], k: int) -> None:
    check(hard_rows(*shape), border_lengths(*shape), k)


@pytest.mark.gpu
def test_gpu_small_rows_against_sorting() -> None:
    scores = hard_rows(25, 3000)
    lengths = torch.randint(0, 3001, (25,), device="cuda")
    for k in (1, 40, K):
        got = topk_select(scores, lengths, k, backend="cute")
        assert torch.equal(got.cpu(), topk_oracle.select(scores, lengths.tolist(), k))


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [5000, 70_000])
def test_gpu_a_row_does_not_depend_on_its_batch(num_keys: int) -> None:
    scores = hard_rows(200, num_keys)
    lengths = border_lengths(200, num_keys)
    want = check(scores, lengths)
    for num_rows in (0, 1, 6, 7, 17, 70):
        got = topk_select(scores[:num_rows], lengths[:num_rows], K, backend="cute")
        assert torch.equal(got, want[:num_rows])


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 8192), (6, 131_072), (6, 300_000), (70, 70_000)])
def test_gpu_repeats_are_bitwise_equal(shape: tuple[int, int]) -> None:
    scores, lengths = hard_rows(*shape), border_lengths(*shape)
    want = check(scores, lengths)
    for _ in range(20):
        assert torch.equal(topk_select(scores, lengths, K, backend="cute"), want)


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [8192, 131_072])
def test_gpu_backends_agree(num_keys: int) -> None:
    scores = hard_rows(len(ROWS), num_keys)
    lengths = border_lengths(len(ROWS), num_keys)
    want = check(scores, lengths)
    assert torch.equal(topk_select(scores, lengths, K, backend="triton"), want)
    assert torch.equal(topk_select(scores, lengths, K), want)
    assert torch.equal(masked_topk(scores[None], lengths[None], K)[0], want)


@pytest.mark.gpu
def test_gpu_the_only_row_may_have_any_stride() -> None:
    scores = torch.randn(3, 5003, device="cuda")
    for view in (scores[1:2], scores[1:2, 1:], scores.T.contiguous().T[:, :1], scores[:, 7:8]):
        check(view, torch.full((view.shape[0],), view.shape[1], device="cuda"))
    odd = scores.as_strided((1, 4000), (7, 1))
    check(odd, torch.tensor([4000], device="cuda"))
    same = scores[:1].expand(6, 5003)
    check(same, torch.tensor(5003, device="cuda").expand(6))


@pytest.mark.gpu
@pytest.mark.parametrize("num_keys", [8192, 131_072, 300_000])
def test_gpu_graph_replays_with_new_scores_and_lengths(num_keys: int) -> None:
    scores = torch.randn(6, num_keys, device="cuda")
    lengths = torch.full((6,), num_keys, dtype=torch.int32, device="cuda")
    topk_select(scores, lengths, K, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = topk_select(scores, lengths, K, backend="cute")
    for length in (num_keys, 3000, K, 5, 0):
        scores.copy_(hard_rows(6, num_keys))
        lengths.fill_(length)
        selected.fill_(7)
        graph.replay()
        assert torch.equal(selected, topk_select_reference(scores, lengths, K))


FIRST_CALL_IN_A_CAPTURE = """
import torch
from glm_compile.ops.topk import topk_select
scores = torch.randn(6, 9000, device="cuda")
lengths = torch.full((6,), 9000, device="cuda")
graph = torch.cuda.CUDAGraph()
with torch.cuda.graph(graph):
    selected = topk_select(scores, lengths, 2048, backend="cute")
graph.replay()
assert torch.equal(selected, topk_select(scores, lengths, 2048, backend="reference"))
"""


@pytest.mark.gpu
def test_gpu_first_call_may_be_inside_a_capture() -> None:
    command = [sys.executable, "-c", FIRST_CALL_IN_A_CAPTURE]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
