"""The penalty of each row against transformers' processor on that row's prefix."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import RepetitionPenaltyLogitsProcessor

from glm_compile.ops.repetition_penalty import note_tokens, repetition_penalty
from tests.compile_only import ARCHS, compile_triton

# Batch, rows, drafts before them, vocabulary.
CASES = [(1, 1, 0, 5), (3, 6, 0, 1025), (2, 1, 4, 97), (5, 3, 2, 1100)]


def make_call(batch_size: int, num_rows: int, num_drafts: int, vocab_size: int) -> dict[str, Any]:
    """Few different tokens; some are none of the vocabulary, and some columns do not count."""
    generator = torch.Generator().manual_seed(vocab_size)
    starts = torch.randint(4, 20, (batch_size,), generator=generator)
    text = torch.randint(-1, min(vocab_size, 9) + 1, (batch_size, 40), generator=generator)
    text[text == min(vocab_size, 9)] = vocab_size
    first = torch.randint(0, 24, (batch_size,), generator=generator)
    seen = torch.zeros(batch_size, vocab_size + 1, dtype=torch.bool)
    for b in range(batch_size):
        for token in text[b, first[b] : starts[b]].tolist():
            if 0 <= token < vocab_size:
                seen[b, token] = True
    return {
        "scores_BSV": torch.randn(batch_size, num_rows, vocab_size, generator=generator),
        "seen_BV": seen,
        "text_BW": text,
        "starts_B": starts,
        "first_B": first,
        "num_drafts": num_drafts,
        "penalty": 1.37,
    }


def check(call: dict[str, Any], backend: str, device: str = "cpu") -> None:
    moved = {n: v.to(device) if isinstance(v, torch.Tensor) else v for n, v in call.items()}
    got = repetition_penalty(**moved, backend=backend).cpu()
    scores = moved["scores_BSV"]  # torch on a GPU divides in another way
    processor = RepetitionPenaltyLogitsProcessor(call["penalty"])
    for b in range(scores.shape[0]):
        for s in range(scores.shape[1]):
            end = int(call["starts_B"][b]) + call["num_drafts"] + s
            prefix = call["text_BW"][b : b + 1, int(call["first_B"][b]) : end]
            prefix = prefix[(prefix >= 0) & (prefix < scores.shape[2])][None].to(device)
            expected = processor(prefix, scores[b : b + 1, s])[0].cpu()
            assert torch.equal(got[b, s], expected), (b, s)


def check_note(backend: str, device: str = "cpu") -> None:
    """A block whose tokens are noted is seen as text."""
    call = make_call(5, 1, 0, 50)
    tokens = call["text_BW"].gather(1, call["starts_B"][:, None] + torch.arange(5))
    kept = torch.tensor([0, 1, 3, 5, 2])
    seen = call["seen_BV"].to(device)
    where = [call["starts_B"].to(device), call["first_B"].to(device)]
    note_tokens(seen, tokens.to(device), kept.to(device), *where, backend=backend)
    call |= {"seen_BV": seen.cpu(), "starts_B": call["starts_B"] + kept}
    check(call, "reference")
    assert torch.equal(call["seen_BV"][0, :-1], make_call(5, 1, 0, 50)["seen_BV"][0, :-1])


@pytest.mark.parametrize("case", CASES)
def test_each_row_equals_transformers(case: Any) -> None:
    check(make_call(*case), "reference")


def test_noted_tokens_are_seen() -> None:
    check_note("reference")


def test_shapes_are_checked() -> None:
    call = make_call(2, 1, 0, 9)
    with pytest.raises(ValueError, match=r"seen \[B, V \+ 1\], got torch.float32 \(2, 1, 9\)"):
        repetition_penalty(**call | {"seen_BV": call["seen_BV"][:, 1:]})


def test_they_are_ops() -> None:
    call = make_call(2, 3, 1, 20)
    torch.library.opcheck(torch.ops.glm.repetition_penalty.default, tuple(call.values()))
    tokens, kept = torch.tensor([[3, 4], [5, 90]]), torch.tensor([2, 1])
    where = (call["starts_B"], call["first_B"])
    torch.library.opcheck(
        torch.ops.glm.note_tokens.default, (call["seen_BV"], tokens, kept, *where)
    )


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("starts_B", torch.tensor([5, 6], dtype=torch.int32), "starts must be int64"),
        ("first_B", torch.arange(4)[::2], r"first must be int64 .*strides"),
        ("penalty", 0.0, "penalty must be above 0"),
    ],
)
def test_arguments_are_checked(name: str, value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        repetition_penalty(**make_call(2, 1, 0, 9) | {name: value})


@pytest.mark.interpreter
@pytest.mark.parametrize("case", CASES)
def test_kernel_equals_transformers(case: Any) -> None:
    check(make_call(*case), "triton")


@pytest.mark.interpreter
def test_kernel_notes_tokens() -> None:
    check_note("triton")


@pytest.mark.gpu
def test_gpu_kernels_equal_transformers() -> None:
    for case in [*CASES, (64, 6, 0, 3000), (2, 6, 0, 154_880)]:
        check(make_call(*case), "triton", "cuda")
    check_note("triton", "cuda")


@pytest.mark.parametrize("arch", ARCHS)
def test_kernels_compile_without_spills(arch: str) -> None:
    from glm_compile.ops.repetition_penalty.triton_kernel import note_kernel, penalty_kernel

    scores = torch.empty(1, 6, 154_880, device="meta")
    seen = torch.empty(1, 154_881, dtype=torch.bool, device="meta")
    longs = torch.empty(64, dtype=torch.int64, device="meta")
    for kernel, arguments, sizes, num_warps in (
        (
            penalty_kernel,
            [
                scores,
                929_280,
                154_880,
                seen,
                154_881,
                longs,
                300,
                longs,
                longs,
                0,
                1.2,
                0.8,
                scores,
                154_880,
            ],
            {"BLOCK_V": 1024, "BY_INVERSE": True},
            4,
        ),
        (
            note_kernel,
            [seen, 154_881, longs, 6, longs, longs, longs, 154_880],
            {"S": 6, "BLOCK_S": 8},
            1,
        ),
    ):
        compiled = compile_triton(kernel, arguments, sizes, arch, num_warps=num_warps)
        assert compiled.stack_bytes == 0 and compiled.registers <= 64
