"""Forbidden n-grams against a loop over the prefixes of a block."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from glm_compile.ops.forbid_ngrams import forbid_ngrams
from tests.compile_only import ARCHS, compile_triton

VOCAB = 11
INTERPRETER = pytest.mark.interpreter
BACKENDS = ["reference", pytest.param("triton", marks=INTERPRETER)]


def make_call(size: int, is_text: bool, num_rows: int = 3, width: int = 40) -> dict[str, Any]:
    """Tokens of few values, some of them outside the vocabulary; short prefixes among the rows."""
    generator = torch.Generator().manual_seed(size)
    text = torch.randint(0, 3, (4, width), generator=generator)
    text[1, 5] = text[2, 7] = -1
    text[3, ::4] = VOCAB + 3
    if is_text:
        ngrams = text.unfold(1, size, 1)
    else:
        ngrams = torch.randint(0, 3, (4, 6, size), generator=generator)
        ngrams[0, 2] = -(1 << 40)
        ngrams[1, 3, -1] = VOCAB
    return {
        "scores_BSV": torch.randn(4, num_rows, VOCAB, generator=generator),
        "ngrams_BNG": ngrams,
        "text_BW": text,
        "starts_B": torch.tensor([width - num_rows - 1, 20, 1, 9]),
        "num_drafts": 1,
        "is_text": is_text,
    }


def by_hand(call: dict[str, Any]) -> torch.Tensor:
    scores = call["scores_BSV"].clone()
    size = call["ngrams_BNG"].shape[2]
    for b in range(len(scores)):
        for s in range(scores.shape[1]):
            end = int(call["starts_B"][b]) + call["num_drafts"] + s
            prefix = call["text_BW"][b, :end].tolist()
            ngrams = call["ngrams_BNG"][b].tolist()
            if call["is_text"]:
                ngrams = [prefix[i : i + size] for i in range(len(prefix) - size + 1)]
            if len(prefix) < size - 1:
                continue
            tail = prefix[len(prefix) - size + 1 :]
            for ngram in ngrams:
                if ngram[:-1] == tail and 0 <= ngram[-1] < VOCAB:
                    scores[b, s, ngram[-1]] = -math.inf
    return scores


def check(call: dict[str, Any], backend: str | None, device: str = "cpu") -> None:
    moved = {n: t.to(device) if isinstance(t, torch.Tensor) else t for n, t in call.items()}
    if call["is_text"]:
        moved["ngrams_BNG"] = moved["text_BW"].unfold(1, call["ngrams_BNG"].shape[2], 1)
    # Any strides.
    moved["starts_B"] = torch.stack([moved["starts_B"], moved["starts_B"] * 0], dim=1)[:, 0]
    before = moved["scores_BSV"].clone()
    got = forbid_ngrams(**moved, backend=backend)
    assert torch.equal(got.cpu(), by_hand(call)) and got.is_contiguous()
    assert torch.equal(moved["scores_BSV"], before)


@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
@pytest.mark.parametrize("backend", BACKENDS)
def test_tokens_are_struck_as_by_hand(backend: str, size: int, is_text: bool) -> None:
    check(make_call(size, is_text), backend)


@pytest.mark.parametrize("backend", BACKENDS)
def test_more_columns_than_a_program_looks_at(backend: str) -> None:
    call = make_call(2, True, num_rows=2, width=2500)
    call["scores_BSV"] = call["scores_BSV"].transpose(0, 1).contiguous().transpose(0, 1)
    check(call, backend)


def test_op_passes_opcheck() -> None:
    torch.library.opcheck(torch.ops.glm.forbid_ngrams.default, tuple(make_call(2, True).values()))


def test_what_it_refuses() -> None:
    call = make_call(2, False)
    for wrong, message in (
        ({"scores_BSV": call["scores_BSV"].double()}, "scores in float32"),
        ({"starts_B": call["starts_B"].int()}, "starts must be int64"),
        ({"starts_B": call["starts_B"][:2]}, r"expected scores \[B, S, V\]"),
        ({"ngrams_BNG": call["ngrams_BNG"][..., :0]}, "n-grams of a token or more"),
    ):
        with pytest.raises(ValueError, match=f"forbid_ngrams: .*{message}"):
            forbid_ngrams(**call | wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("is_text", [True, False])
@pytest.mark.parametrize("size", [1, 2, 3, 6])
def test_gpu_kernel(size: int, is_text: bool) -> None:
    check(make_call(size, is_text), "triton", "cuda")
    check(make_call(size, True, width=5000), "triton", "cuda")


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("is_text", [True, False])
def test_kernel_compiles(arch: str, is_text: bool) -> None:
    from glm_compile.ops.forbid_ngrams.triton_kernel import forbid_ngrams_kernel

    long = torch.empty(64, dtype=torch.long, device="meta")
    scores = torch.empty(64, device="meta")
    compiled = compile_triton(
        forbid_ngrams_kernel,
        [scores, long, 4096, 1, 1, 4094, long, 4096, long, 0, 6, 154_880],
        {"SIZE": 3, "IS_TEXT": is_text, "BLOCK_N": 1024},
        arch,
        num_warps=4,
    )
    assert compiled.stack_bytes == 0
