"""topk_select, topk_plan and masked_topk against Python's sort and torch.topk."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies

from glm_compile.ops._cute import why_no_cute
from glm_compile.ops.topk import masked_topk, topk_plan, topk_select
from glm_compile.ops.topk.config import TopkConfig, default_config
from tests.compile_only import ARCHS, compile_triton
from tests.ops import topk_oracle

K = 16


def full(scores: torch.Tensor) -> torch.Tensor:
    """Lengths that let every row see all its keys."""
    return torch.full((scores.shape[0],), scores.shape[1], dtype=torch.int32)


# Contract -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("num_keys", [1, K - 1, K, K + 1, 4 * K + 3])
def test_selects_what_sorting_selects(num_keys: int, dtype: torch.dtype) -> None:
    scores = topk_oracle.adversarial_rows(num_keys).to(dtype)
    got = topk_select(scores, full(scores), K)
    assert torch.equal(got, topk_oracle.select(scores, full(scores).tolist(), K))


@pytest.mark.parametrize("num_rows", [1, 37, 199])
def test_each_row_keeps_its_own_window(num_rows: int) -> None:
    num_keys = 71
    scores = torch.randint(-4, 5, (num_rows, num_keys)).float()
    lengths = torch.randint(-3, num_keys + 20, (num_rows,))
    starts = torch.randint(-3, num_keys + 3, (num_rows,), dtype=torch.int32)
    got = topk_select(scores, lengths, K, starts_R=starts)
    assert torch.equal(got, topk_oracle.select(scores, lengths.tolist(), K, starts.tolist()))


def test_scores_outside_the_window_are_not_looked_at() -> None:
    scores = torch.randn(2, 50)
    poisoned = scores.clone()
    poisoned[:, :5] = math.inf
    poisoned[:, 40:] = math.nan
    poisoned[1, 45:] = math.inf
    starts, lengths = torch.tensor([5, 5]), torch.tensor([40, 40])
    got = topk_select(poisoned, lengths, K, starts_R=starts)
    assert torch.equal(got, topk_select(scores, lengths, K, starts_R=starts))
    assert got.min() >= 5 and got.max() < 40


@pytest.mark.parametrize("num_keys", [2047, 2048, 2049, 8192, 40_000])
def test_selected_scores_equal_torch_topk_bit_for_bit(num_keys: int) -> None:
    for scores in (
        torch.randn(2, num_keys),
        torch.randn(2, num_keys).clamp(min=0),
        torch.randn(2, num_keys).bfloat16(),
    ):
        got = topk_select(scores, full(scores), 2048)
        topk_oracle.assert_same_scores_as_torch(got, scores, full(scores))


def test_a_row_does_not_depend_on_its_batch() -> None:
    scores = torch.randn(6, 300).bfloat16()
    together = topk_select(scores, full(scores), K)
    for r in range(6):
        alone = topk_select(scores[r : r + 1], full(scores)[:1], K)
        assert torch.equal(alone[0], together[r])


def test_any_strides() -> None:
    scores = torch.randn(5, 90)
    want = topk_select(scores, full(scores), K)
    padded = torch.full((5, 97), math.inf)
    padded[:, 7:] = scores
    for view in (scores.T.contiguous().T, padded[:, 7:], scores.repeat_interleave(2, 1)[:, ::2]):
        assert not view.is_contiguous()
        assert torch.equal(topk_select(view, full(view), K), want)
    lengths = torch.tensor(90).expand(5)
    assert torch.equal(topk_select(scores, lengths, K), want)
    one_row = scores[:1].expand(5, 90)
    assert torch.equal(topk_select(one_row, full(one_row), K), want[:1].expand(5, K))


@pytest.mark.parametrize("shape", [(0, 8), (3, 0), (0, 0)])
def test_empty_sizes(shape: tuple[int, int]) -> None:
    scores = torch.empty(shape)
    got = topk_select(scores, full(scores) + 5, 4)
    assert got.dtype == torch.int32
    assert torch.equal(got, torch.full((shape[0], 4), -1, dtype=torch.int32))


def test_result_is_contiguous_and_new() -> None:
    scores = torch.randn(3, 9)
    first, second = (topk_select(scores, full(scores), 4) for _ in range(2))
    assert first.is_contiguous()
    assert first.data_ptr() != second.data_ptr()


@pytest.mark.parametrize("order", ["identity", "permuted"])
@pytest.mark.parametrize("page_size", [1, 16, 64])
@pytest.mark.parametrize("rows_per_sequence", [1, 3])
def test_block_table_gives_physical_slots(
    order: str, page_size: int, rows_per_sequence: int
) -> None:
    num_sequences, num_keys = 2, 150
    num_pages = -(-num_keys // page_size)
    pages = num_sequences * num_pages
    table = torch.arange(pages) if order == "identity" else torch.randperm(pages)
    table = table.reshape(num_sequences, num_pages).int()
    scores = torch.randn(num_sequences * rows_per_sequence, num_keys)
    lengths = torch.randint(0, num_keys, (scores.shape[0],))
    keywords: dict[str, Any] = {"rows_per_sequence": rows_per_sequence, "page_size": page_size}
    got = topk_select(scores, lengths, K, block_table=table, **keywords)
    positions = topk_oracle.select(scores, lengths.tolist(), K)
    assert torch.equal(got, topk_oracle.to_slots(positions, table, rows_per_sequence, page_size))
    if order == "identity":
        assert torch.equal(got[:rows_per_sequence], positions[:rows_per_sequence])


def test_positions_without_a_page_give_minus_one_in_their_place() -> None:
    scores = torch.arange(40).float().reshape(1, 40)
    table = torch.tensor([[5, -1]], dtype=torch.int32)
    got = topk_select(scores, full(scores), 30, block_table=table, page_size=16)
    want = [5 * 16 + p for p in range(10, 16)] + [-1] * 24
    assert got.tolist() == [want]
    no_pages = topk_select(scores, full(scores), 3, block_table=table[:, :0])
    assert no_pages.tolist() == [[-1, -1, -1]]


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_plan_changes_nothing(index_dtype: torch.dtype) -> None:
    scores = torch.randn(5, 60)
    lengths = torch.tensor([-4, 0, 9, 60, 99], dtype=index_dtype)
    starts = torch.tensor([0, 0, 4, -9, 70], dtype=index_dtype)
    plan = topk_plan(lengths, K, starts_R=starts)
    assert plan.dtype == torch.int32
    got = topk_select(scores, lengths, K, starts_R=starts, plan=plan)
    assert torch.equal(got, topk_select(scores, lengths, K, starts_R=starts))
    assert torch.equal(got, topk_oracle.select(scores, lengths.tolist(), K, starts.tolist()))


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("rows_per_sequence", [1, 6])
def test_causal_lengths_grow_by_a_token_a_row(
    index_dtype: torch.dtype, rows_per_sequence: int
) -> None:
    scores = torch.randn(5 * rows_per_sequence, 60)
    cached = torch.tensor([0, -4, 37, 58, torch.iinfo(index_dtype).max - 7], dtype=index_dtype)
    got = topk_select(scores, cached, K, rows_per_sequence=rows_per_sequence, is_causal=True)
    lengths = [c + s + 1 for c in cached.tolist() for s in range(rows_per_sequence)]
    assert torch.equal(got, topk_oracle.select(scores, lengths, K))


@pytest.mark.parametrize("num_keys", [0, 1, K - 1, K, K + 1, 70])
def test_repeats_the_last_position_instead_of_minus_one(num_keys: int) -> None:
    scores = topk_oracle.adversarial_rows(num_keys)
    for lengths in (full(scores), full(scores) // 3):
        want = topk_oracle.select(scores, lengths.tolist(), K)
        got = topk_select(scores, lengths, K, repeat_last=True)
        assert torch.equal(got, topk_oracle.repeat_last(want))
        batch, width = (scores[None], lengths[None], K), min(K, num_keys)
        if width:
            masked = masked_topk(*batch, repeat_last=True)
            assert torch.equal(masked[0], topk_oracle.repeat_last(want[:, :width]))


@hypothesis.settings(deadline=None, max_examples=60)
@hypothesis.given(
    row=strategies.lists(strategies.floats(width=32), min_size=1, max_size=40),
    start=strategies.integers(-5, 45),
    length=strategies.integers(-5, 45),
    k=strategies.integers(1, 45),
)
def test_any_row_of_floats(row: list[float], start: int, length: int, k: int) -> None:
    got = topk_select(
        torch.tensor([row]), torch.tensor([length]), k, starts_R=torch.tensor([start])
    )
    assert got.tolist() == [topk_oracle.select_row(row, start, length, k)]


# Validation ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"scores_RT": torch.ones(2, 4, dtype=torch.int64)}, "scores must be .*, got torch.int64"),
        ({"scores_RT": torch.ones(4)}, r"scores must be \[R, T\], got shape \(4,\)"),
        ({"k": 0}, "k must be at least 1, got 0"),
        ({"lengths_R": torch.ones(2)}, "lengths must be int32 or int64, got torch.float32"),
        ({"lengths_R": torch.ones(3, dtype=torch.int32)}, "lengths must hold one value a row"),
        ({"starts_R": torch.ones(1, dtype=torch.int32)}, "starts must hold one value a row"),
        ({"plan": torch.ones(3, 2, dtype=torch.int32)}, "plan must be topk_plan's for 2 rows"),
        ({"plan": torch.ones(2, dtype=torch.int32)}, "plan must be topk_plan's for 2 rows"),
        ({"plan": torch.ones((), dtype=torch.int32)}, "plan must be topk_plan's for 2 rows"),
        ({"block_table": torch.ones(2, 4)}, "block_table must be int32 or int64"),
        ({"block_table": torch.ones(2, dtype=torch.int32)}, "block_table must be"),
        ({"block_table": torch.ones(3, 1, dtype=torch.int32)}, "3 sequences of 1 rows expected"),
        ({"rows_per_sequence": 0}, ".* must be at least 1, got 0 and 64"),
        ({"is_causal": True, "rows_per_sequence": 3}, "causal lengths need whole .* of 3 rows"),
        ({"is_causal": True, "rows_per_sequence": 2}, r"lengths .* shape \(1,\), got \(2,\)"),
        (
            {"block_table": torch.ones(2, 1, dtype=torch.int32), "repeat_last": True},
            "repeat_last repeats a position, .* leave one of them out",
        ),
        ({"backend": "cuda"}, "unknown backend 'cuda'; this op has 'cute', 'triton', 'reference'"),
        ({"backend": "triton"}, "backend 'triton' cannot run this call: .*CUDA"),
        (
            {"backend": "cute", "scores_RT": torch.ones(2, 4).bfloat16()},
            "backend 'cute' cannot run this call: scores must be float32, got torch.bfloat16",
        ),
        ({"backend": "cute", "k": 2049}, "backend 'cute' cannot run .* at most 2048, got 2049"),
        (
            {"backend": "cute", "scores_RT": torch.ones(1, 1).expand(2, 2**21 + 1)},
            "backend 'cute' cannot run .* 2097152 of them, got 2097153",
        ),
        (
            {"backend": "cute", "scores_RT": torch.ones(4, 2).T},
            "backend 'cute' cannot run .* must be adjacent, got stride 2",
        ),
        ({"backend": "cute"}, "backend 'cute' cannot run this call: .*CU"),
    ],
)
def test_refuses_wrong_arguments(changes: dict[str, Any], message: str) -> None:
    arguments: dict[str, Any] = {
        "scores_RT": torch.ones(2, 4),
        "lengths_R": torch.ones(2, dtype=torch.int32),
        "k": 2,
        **changes,
    }
    with pytest.raises(ValueError, match=f"topk: {message}"):
        topk_select(**arguments)


# Op registration and compilation ------------------------------------------------------------------


def test_ops_pass_opcheck() -> None:
    scores, lengths = torch.randn(4, 30), torch.tensor([3, 30, 0, 11])
    starts, table = torch.tensor([0, 2, 0, 1]), torch.arange(8, dtype=torch.int32).reshape(2, 4)
    check = torch.library.opcheck
    select = torch.ops.glm.topk_select.default
    check(select, (scores, lengths, 8, None, None, None, 1, 64, False, True, ""))
    turned = scores.T.contiguous().T
    check(select, (turned, lengths, 8, starts, None, table, 2, 16, False, False, "reference"))
    check(select, (scores, lengths[:2], 8, starts, None, None, 2, 64, True, True, ""))
    check(torch.ops.glm.topk_plan.default, (lengths, 8, starts))
    masked = torch.ops.glm.masked_topk.default
    batch = scores.reshape(2, 2, 30)
    mask = torch.rand(2, 1, 32) > 0.5
    check(masked, (batch, lengths.reshape(2, 2), starts.reshape(2, 2), mask, 8))
    check(masked, (batch, lengths.reshape(2, 2), None, None, 64))
    check(masked, (batch, lengths.reshape(2, 2), None, mask, 8, True))


def test_compiles_once_for_every_number_of_keys() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def both(scores: torch.Tensor, lengths: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        plan = topk_plan(lengths, 8)
        selected = topk_select(scores, lengths, 8, plan=plan)
        return selected, masked_topk(scores[:, None], lengths[:, None], 8)

    compiled = torch.compile(both, backend=counter, fullgraph=True)
    for num_keys in (20, 5, 21, 64):
        scores, lengths = torch.randn(3, num_keys), torch.tensor([3, num_keys, 0])
        torch._dynamo.mark_dynamic(scores, 1)
        selected, masked = compiled(scores, lengths)
        assert torch.equal(selected, topk_oracle.select(scores, lengths.tolist(), 8))
        assert masked.shape == (3, 1, min(8, num_keys))
    assert counter.frame_count == 1


# masked_topk --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "mask_shape", [None, (1, 1, 50), (2, 1, 53), (2, 3, 50), (1, 3, 50), (50,)]
)
@pytest.mark.parametrize("has_starts", [False, True])
def test_masked_topk(mask_shape: tuple[int, ...] | None, has_starts: bool) -> None:
    scores = torch.randn(2, 3, 50)
    lengths = torch.tensor([[50, 3, 0], [7, 20, 60]])
    starts = torch.tensor([[0, 1, 0], [9, 2, 30]]) if has_starts else None
    key_mask = None if mask_shape is None else torch.rand(mask_shape) > 0.6
    got = masked_topk(scores, lengths, 8, starts_BS=starts, key_mask=key_mask)

    allowed = scores.clone()
    if key_mask is not None:
        allowed[~key_mask[..., :50].expand(2, 3, 50)] = -math.inf
    want = topk_oracle.select(
        allowed.reshape(6, 50),
        lengths.flatten().tolist(),
        8,
        None if starts is None else starts.flatten().tolist(),
    )
    assert torch.equal(got, want.reshape(2, 3, 8))


def test_masked_topk_equals_transformers_selection() -> None:
    scores = torch.randn(2, 4, 40)
    lengths = torch.arange(37, 41).expand(2, 4)
    is_seen = torch.arange(40) < lengths[..., None]
    eager = scores.masked_fill(~is_seen, -math.inf).topk(8, dim=-1).indices.int()
    got = masked_topk(scores, lengths, 8)
    assert torch.equal(got, eager.sort(dim=-1).values)


@pytest.mark.parametrize("num_keys", [0, 5, 8, 9])
def test_masked_topk_is_as_wide_as_transformers(num_keys: int) -> None:
    lengths = torch.full((2, 1), num_keys)
    got = masked_topk(torch.randn(2, 1, num_keys), lengths, 8)
    assert got.shape == (2, 1, min(8, num_keys))


def test_masked_topk_refuses_a_mask_that_does_not_fit() -> None:
    with pytest.raises(ValueError, match=r"topk: key_mask must broadcast to \(2, 3, 9\)"):
        masked_topk(
            torch.ones(2, 3, 9),
            torch.ones(2, 3, dtype=torch.int32),
            4,
            key_mask=torch.ones(2, 3, 8, dtype=torch.bool),
        )


# Kernel -------------------------------------------------------------------------------------------


def run_kernel(scores: torch.Tensor, lengths: torch.Tensor, k: int, **keywords: Any) -> Any:
    from glm_compile.ops.topk.triton_kernel import topk_select_triton

    return topk_select_triton(scores, lengths, k, **keywords)


@pytest.mark.interpreter
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("k", [8, 96])
def test_kernel_on_adversarial_rows(k: int, num_slices: int) -> None:
    scores = topk_oracle.adversarial_rows(90)
    got = run_kernel(scores, full(scores), k, config=TopkConfig(64, 4, num_slices))
    assert torch.equal(got, topk_oracle.select(scores, full(scores).tolist(), k))


@pytest.mark.interpreter
@pytest.mark.parametrize("num_slices", [1, 2])
@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
def test_kernel_windows_and_pages(num_slices: int, index_dtype: torch.dtype) -> None:
    scores = torch.randint(-3, 4, (8, 70)).bfloat16().T.contiguous().T
    lengths = torch.tensor([-5, 0, 1, 7, 8, 9, 70, 99], dtype=index_dtype)
    starts = torch.tensor([0, 0, 0, 7, 3, -4, 60, 5], dtype=index_dtype)
    table = torch.randperm(20).reshape(4, 5).int()
    table[1, 1] = -1
    config = TopkConfig(32, 4, num_slices)
    want = topk_oracle.select(scores, lengths.tolist(), 8, starts.tolist())
    for plan in (None, topk_plan(lengths, 8, starts_R=starts)):
        got = run_kernel(scores, lengths, 8, starts_R=starts, plan=plan, config=config)
        assert torch.equal(got, want)
    keywords: dict[str, Any] = {"block_table": table, "rows_per_sequence": 2, "page_size": 16}
    got = run_kernel(scores, lengths, 8, starts_R=starts, config=config, **keywords)
    assert torch.equal(got, topk_oracle.to_slots(want, table, 2, 16))


@pytest.mark.interpreter
@pytest.mark.parametrize("num_slices", [1, 4])
def test_kernel_repeats_the_last_position(num_slices: int) -> None:
    scores = topk_oracle.adversarial_rows(90)[:21]
    cached = torch.tensor([-9, 0, 5, 38, 84, 86, 2**31 - 2], dtype=torch.int32)
    lengths = [c + s + 1 for c in cached.tolist() for s in range(3)]
    config = TopkConfig(16, 4, num_slices)
    keywords: dict[str, Any] = {"rows_per_sequence": 3, "is_causal": True, "config": config}
    for k in (7, 100):
        want = topk_oracle.select(scores, lengths, k)
        assert torch.equal(run_kernel(scores, cached, k, **keywords), want)
        got = run_kernel(scores, cached, k, repeat_last=True, **keywords)
        assert torch.equal(got, topk_oracle.repeat_last(want))


@pytest.mark.interpreter
@pytest.mark.parametrize("num_slices", [1, 2])
def test_kernel_row_offsets_are_64_bit(tmp_path: Path, num_slices: int) -> None:
    """Two rows 2^31 + 64 elements apart, in a sparse file: a 32-bit offset reads elsewhere."""
    stride = 2**31 + 64
    far = torch.from_file(str(tmp_path / "scores"), shared=True, size=stride + 64)
    scores = far.as_strided((2, 40), (stride, 1))
    scores.copy_(torch.randn(2, 40))
    got = run_kernel(scores, full(scores), 8, config=TopkConfig(64, 4, num_slices))
    assert torch.equal(got, topk_oracle.select(scores, [40, 40], 8))


@pytest.mark.interpreter
def test_dispatch_takes_the_kernel_where_it_can() -> None:
    scores = torch.randn(2, 20)
    got = topk_select(scores, full(scores), 4, backend="triton")
    assert torch.equal(got, topk_select(scores, full(scores), 4, backend="reference"))


def test_config_splits_only_long_rows_of_small_batches() -> None:
    assert default_config(6, 8192, 132).num_slices == 1
    assert default_config(6, 131_072, 132).num_slices == 32
    assert default_config(64, 131_072, 132).num_slices == 4
    assert default_config(4096, 1_048_576, 132).num_slices == 1
    with pytest.raises(ValueError, match="topk: block must be a power of two"):
        TopkConfig(block=32768, num_warps=8, num_slices=1)
    with pytest.raises(ValueError, match="topk: num_slices must be a power of two"):
        TopkConfig(block=2048, num_warps=8, num_slices=3)


def kernel_arguments(num_keys: int, paged: bool) -> tuple[list[Any], list[Any], list[Any]]:
    """(row, scratch, table) arguments of the kernels for 6 rows, as the launcher passes them."""

    def empty(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    rows = [empty(6, num_keys, dtype=torch.float32), num_keys, 1, empty(6), 1, None, 0, None, 6]
    scratch = [empty(6, 4, 32, 256), empty(6, 4, 3), empty(6, 32)]
    table = [empty(1, 2048), 2048, 1, 2048] if paged else [None, 0, 0, 0]
    return rows, scratch, table


@pytest.mark.compile_only
@pytest.mark.parametrize("paged", [False, True])
@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_fit_in_registers(arch: str, paged: bool) -> None:
    from glm_compile.ops.topk import triton_kernel

    rows, scratch, table = kernel_arguments(131_072, paged)
    end = [torch.empty(6, 2048, dtype=torch.int32, device="meta"), 131_072, 2048]
    config = default_config(6, 131_072, 132)
    shape = {"BLOCK": config.block, "IS_CAUSAL": True}
    slices = {**shape, "NUM_SLICES": config.num_slices}
    output = {"PAGE_SIZE": 64, "REPEAT_LAST": not paged}
    compiled = [
        compile_triton(kernel, arguments, constexprs, arch, num_warps=config.num_warps)
        for kernel, arguments, constexprs in (
            (triton_kernel.topk_row_kernel, [*rows, *table, *end], {**shape, **output}),
            (
                triton_kernel.topk_histogram_kernel,
                [*rows, *scratch, *end[1:]],
                {**slices, "ROUND": 3},
            ),
            (
                triton_kernel.topk_compact_kernel,
                [*rows, *scratch, *table, *end],
                {**slices, **output},
            ),
        )
    ]
    for kernel in compiled:
        assert kernel.stack_bytes == 0
        assert kernel.registers <= 96
        assert kernel.shared_bytes <= 48 * 1024


@pytest.mark.compile_only
def test_one_kernel_serves_every_length() -> None:
    """No specialization on sizes: batch, keys, k and row stride leave the binary as it is."""
    from glm_compile.ops.topk.triton_kernel import topk_row_kernel

    def compiled(num_keys: int, k: int) -> bytes:
        rows, _, table = kernel_arguments(num_keys, paged=False)
        end = [torch.empty(6, k, dtype=torch.int32, device="meta"), num_keys, k]
        constexprs = {"BLOCK": 2048, "PAGE_SIZE": 64}
        return compile_triton(topk_row_kernel, [*rows, *table, *end], constexprs, "sm_90a").cubin

    assert len({compiled(t, k) for t, k in ((1, 1), (1000, 8), (1024, 2048), (1025, 16))}) == 1


# GPU ----------------------------------------------------------------------------------------------


def skip_without(backend: str) -> None:
    """Skip where the GPU or the install lacks the backend."""
    if backend == "cute" and (reason := why_no_cute(torch.empty(0, device="cuda"))):
        pytest.skip(reason)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cute"])
@pytest.mark.parametrize("num_keys", [1, 2047, 2048, 2049, 8192, 16_385, 40_003, 131_072])
def test_gpu_kernel_on_adversarial_rows(num_keys: int, backend: str) -> None:
    skip_without(backend)
    scores = topk_oracle.adversarial_rows(num_keys).cuda()
    lengths = full(scores).cuda()
    got = topk_select(scores, lengths, 2048, backend=backend)
    assert torch.equal(got, topk_select(scores, lengths, 2048, backend="reference"))


@pytest.mark.gpu
@pytest.mark.parametrize("num_slices", [1, 2, 32])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gpu_kernel_windows_and_pages(dtype: torch.dtype, num_slices: int) -> None:
    from glm_compile.ops.topk.reference import topk_select_reference

    scores = torch.randn(24, 20_000, device="cuda").to(dtype)
    lengths = torch.randint(-9, 25_000, (24,), device="cuda")
    starts = torch.randint(-9, 9_000, (24,), device="cuda")
    table = torch.randperm(4 * 320, device="cuda").reshape(4, 320).int()
    config = TopkConfig(2048, 8, num_slices)
    for scores_view in (scores, scores.T.contiguous().T, scores[:, 1:19_998]):
        for keywords in ({}, {"block_table": table, "rows_per_sequence": 6}):
            got = run_kernel(scores_view, lengths, 2048, starts_R=starts, config=config, **keywords)
            want = topk_select_reference(scores_view, lengths, 2048, starts, **keywords)
            assert torch.equal(got, want)


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cute"])
@pytest.mark.parametrize("num_keys", [8192, 131_072])
def test_gpu_repeats_are_bitwise_equal(num_keys: int, backend: str) -> None:
    skip_without(backend)
    scores = torch.randn(6, num_keys, device="cuda").bfloat16().float()
    lengths = full(scores).cuda()
    want = topk_select(scores, lengths, 2048, backend=backend)
    for _ in range(20):
        assert torch.equal(topk_select(scores, lengths, 2048, backend=backend), want)
    alone = topk_select(scores[2:3], lengths[:1], 2048, backend=backend)
    assert torch.equal(alone, want[2:3])


@pytest.mark.gpu
@pytest.mark.parametrize("backend", ["triton", "cute"])
@pytest.mark.parametrize("num_keys", [8192, 131_072])
def test_gpu_graph_replays_with_new_scores_and_lengths(num_keys: int, backend: str) -> None:
    skip_without(backend)
    scores = torch.randn(6, num_keys, device="cuda")
    lengths = full(scores).cuda()

    def select() -> torch.Tensor:
        plan = topk_plan(lengths, 2048)
        return topk_select(scores, lengths, 2048, plan=plan, backend=backend)

    select()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        selected = select()
    for length in (num_keys, 3000, 5, 0):
        scores.copy_(torch.randn(6, num_keys))
        lengths.fill_(length)
        graph.replay()
        assert torch.equal(selected, topk_select(scores, lengths, 2048, backend="reference"))


@pytest.mark.gpu
def test_gpu_does_not_wait_for_the_host() -> None:
    scores, lengths = torch.randn(6, 40_000, device="cuda"), torch.full((6,), 40_000).cuda()
    topk_select(scores, lengths, 2048)
    torch.cuda.set_sync_debug_mode("error")
    try:
        topk_select(scores, lengths, 2048, plan=topk_plan(lengths, 2048))
    finally:
        torch.cuda.set_sync_debug_mode("default")
