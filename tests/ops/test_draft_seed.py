"""The rows of a draft seed against a loop over the selection."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_compile.ops.draft_seed import draft_seed
from tests.compile_only import ARCHS, compile_triton

INTERPRETER = pytest.mark.interpreter
SELECTIONS = [
    [0, 3, 63, 64, 127, 128],
    [5, 5, 5, 70, 70, -1],
    [-1, -1, 4, 4, 9, 200],
    [-1, 2**31 - 1, -7, 130, -1, -1],
    [129, 0, 0, 129, 129, 1],
    [2, 65, 65, 130, 3, 3],
]
LENGTHS = [129, 129, 129, 100, 130, 66]


def make_call(
    num_tokens: int | None = None, dtype: torch.dtype = torch.float32, width: int = 72
) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    topk, lengths = torch.tensor(SELECTIONS), torch.tensor(LENGTHS)
    if num_tokens is not None:
        topk = torch.randint(-3, 140, (3, num_tokens), generator=generator).sort(dim=1).values
        lengths = torch.tensor([150, 60, 0])
    batch_size = len(topk)
    pages = torch.randn(3 * batch_size + 1, 64, width, generator=generator).to(dtype)
    table = torch.randperm(3 * batch_size, generator=generator).view(batch_size, 3)[:, :3]
    table[1, 1] = -1 if num_tokens is None else table[1, 1]
    return {
        "pages": pages,
        "topk_BSK": topk.int()[:, None],
        "block_table_BP": table.int(),
        "lengths_B": lengths.int(),
    }


def by_hand(call: dict[str, Any]) -> tuple[torch.Tensor, list[list[int]]]:
    pages, table = call["pages"], call["block_table_BP"].tolist()
    row = call.get("row_B")
    topk, lengths = call["topk_BSK"][:, 0], call["lengths_B"]
    if row is not None:
        topk, lengths = call["topk_BSK"][torch.arange(len(row)), row], lengths + row + 1
    values, places = [], []
    for b, selection in enumerate(topk.tolist()):
        length, rows, counting = int(lengths[b]), [], []
        for k, position in enumerate(selection):
            is_new = k == 0 or selection[k - 1] != position
            row = torch.zeros_like(pages[0, 0])
            if 0 <= position < min(length, 64 * len(table[b])) and is_new:
                page = table[b][position // 64]
                if 0 <= page < len(pages):
                    row = pages[page, position % 64]
                    counting.append(k)
            rows.append(row)
        values.append(torch.stack(rows))
        stands_for = []
        for k in range(len(selection)):
            before = [c for c in counting if c <= k]
            stands_for.append(before[-1] if before else counting[0] if counting else 0)
        places.append(stands_for)
    return torch.stack(values), places


def check(call: dict[str, Any], backend: str | None, device: str = "cpu") -> None:
    values, places = draft_seed(**{n: t.to(device) for n, t in call.items()}, backend=backend)
    want_values, want_places = by_hand(call)
    assert torch.equal(values.cpu(), want_values)
    assert places.dtype == torch.int32 and places.tolist() == want_places


BACKENDS = ["reference", pytest.param("triton", marks=INTERPRETER)]


@pytest.mark.parametrize("backend", BACKENDS)
def test_what_counts(backend: str) -> None:
    check(make_call(), backend)


@pytest.mark.parametrize("num_tokens", [1, 17, 250])
@pytest.mark.parametrize("backend", BACKENDS)
def test_any_number_of_places(backend: str, num_tokens: int) -> None:
    call = make_call(num_tokens, torch.bfloat16, 576 if num_tokens == 17 else 40)
    check(call, backend)
    # The selection of one row of a block, as the MTP layer hands it over.
    topk_BSK = torch.cat([call["topk_BSK"] + n for n in (-1, 0, 3)], dim=1).long()
    row_B = torch.tensor([[2, 0, 1], [0, 1, 2]]).T[:, 0]
    for dtype in (torch.int64, torch.int32):
        check(call | {"topk_BSK": topk_BSK, "row_B": row_B.to(dtype)}, backend)


def test_no_page_is_read_for_what_does_not_count() -> None:
    call = make_call()
    call["pages"][:] = torch.nan
    values, _ = draft_seed(**call | {"lengths_B": torch.zeros(len(SELECTIONS))[:].int()})
    assert (values == 0).all()


def test_op_passes_opcheck() -> None:
    call = tuple(make_call().values())
    for row in (None, torch.zeros(len(SELECTIONS), dtype=torch.long)):
        torch.library.opcheck(torch.ops.glm.draft_seed.default, (*call, row))


def test_what_it_refuses() -> None:
    call = make_call()
    for wrong, message in (
        ({"pages": call["pages"][:, :32]}, r"pages must be \[pages, 64, X\]"),
        ({"lengths_B": call["lengths_B"][:2]}, "lengths"),
        ({"row_B": torch.zeros(len(SELECTIONS))}, "rows must be int32 or int64"),
        ({"topk_BSK": call["topk_BSK"].float()}, "positions must be int32 or int64"),
    ):
        with pytest.raises(ValueError, match=f"draft_seed: .*{message}"):
            draft_seed(**call | wrong)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_table_without_pages(backend: str) -> None:
    call = make_call(17)
    check(call | {"block_table_BP": call["block_table_BP"][:, :0]}, backend)


@pytest.mark.gpu
@pytest.mark.parametrize("num_tokens", [None, 1, 250, 2048])
def test_gpu_kernel(num_tokens: int | None) -> None:
    check(make_call(num_tokens, torch.bfloat16, 576), "triton", "cuda")


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
def test_kernel_compiles(arch: str) -> None:
    from glm_compile.ops.draft_seed.triton_kernel import draft_seed_kernel

    pages = torch.empty(64, 64, 576, dtype=torch.bfloat16, device="meta")
    integers = torch.empty(64, dtype=torch.int32, device="meta")
    compiled = compile_triton(
        draft_seed_kernel,
        [pages, 64 * 576, 576, integers, 2048, 2048, 1, integers, 2048, 2048, 2048, integers,
         torch.empty(64, dtype=torch.int64, device="meta"), pages, integers],
        {"K": 2048, "X": 576, "PAGE": 64, "BLOCK_K": 16, "BLOCK_X": 64, "ALL_K": 2048,
         "HAS_ROW": True, "PDL": True},
        arch,
        num_warps=4,
    )  # fmt: skip
    assert compiled.stack_bytes == 0
    # 16 bytes a load and a store.
    assert "ld.global.v4.b32" in compiled.ptx and "st.global.v4.b32" in compiled.ptx
