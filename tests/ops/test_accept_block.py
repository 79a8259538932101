"""Acceptance of a block against one token after the other; the kernel against the reference."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from glm_compile.ops.accept_block import FIRST_TOKEN, accept_block
from tests.compile_only import ARCHS, compile_triton

EOS = (7, 9)
NUM_RESULTS = 3
INTERPRETER = pytest.mark.interpreter


def make_call(
    batch_size: int, width: int, *, seed: int = 0, room: int = 2, is_greedy: bool = True
) -> dict[str, Any]:
    """Tokens of few values, so that drafts agree and sequences end; all kinds of budgets."""
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, generator=generator)

    predicted = integers(5, 10, batch_size, width)
    # A slice of the relay, as the loop gives it: its rows are not adjacent.
    relay = torch.cat([predicted[:, :1], predicted], dim=1)
    wrong = integers(0, 4, batch_size, width + 1) == 0
    drafts = torch.where(wrong, 3, relay)[:, 1:width]
    sampled = {
        "num_tokens_B": integers(1, width + 1, batch_size),
        "has_weight_B": integers(0, 2, batch_size).bool(),
    }
    return {
        "predicted_BS": predicted,
        "drafts_Bk": drafts,
        **({} if is_greedy else sampled),
        "eos_ids_E": torch.tensor([*EOS, *[-1] * 7]),
        "budget": torch.tensor(12),
        "prompt_width": torch.tensor(3),
        "text_BW": torch.full((batch_size, 3 + 12 + width + 1), -5),
        "counts_B": integers(0, 13, batch_size),
        "finished_B": integers(0, 4, batch_size) == 0,
        "kept_B": torch.full((batch_size,), -1),
        "tokens_BS": torch.full((batch_size, width + room), -2),
        "bonus_B": torch.full((batch_size,), -1),
        "row_B": torch.full((batch_size,), -1),
        "results_NBR": torch.full((NUM_RESULTS, batch_size, FIRST_TOKEN + width + room), -3),
        "turns_B": integers(0, 9, batch_size),
        "lengths_B": integers(0, 99, batch_size).int(),
    }


def check_by_hand(before: dict[str, Any], after: dict[str, Any]) -> None:
    """One row and one token after the other, as plain decoding would."""
    budget, start = int(before["budget"]), int(before["prompt_width"])
    for b, row in enumerate(before["predicted_BS"].tolist()):
        drafts = before["drafts_Bk"][b].tolist()
        agreeing = next((i for i, d in enumerate(drafts) if d != row[i]), len(drafts))
        accepted = int(before["num_tokens_B"][b]) if "num_tokens_B" in before else agreeing + 1
        count, is_finished = int(before["counts_B"][b]), bool(before["finished_B"][b])
        kept: list[int] = []
        for token in row[:accepted]:
            if is_finished or count + len(kept) >= budget:
                break
            kept.append(token)
            is_finished = token in EOS
        is_finished = is_finished or count + len(kept) >= budget
        is_drawn = bool(before["has_weight_B"][b]) if "has_weight_B" in before else True
        is_drawn = is_drawn or len(kept) < accepted
        last = max(len(kept) - 1, 0)
        assert int(after["kept_B"][b]) == len(kept)
        assert int(after["counts_B"][b]) == count + len(kept)
        assert bool(after["finished_B"][b]) == is_finished
        assert (int(after["row_B"][b]), int(after["bonus_B"][b])) == (last, row[last])
        assert after["tokens_BS"][b].tolist() == row + [-2] * 2
        facts = [len(kept), int(is_finished), int(is_drawn)]
        turn = int(before["turns_B"][b])
        assert int(after["turns_B"][b]) == turn + 1
        results = [[-3] * (len(facts) + len(row) + 2)] * NUM_RESULTS
        results[turn % NUM_RESULTS] = facts + row + [-3] * 2
        assert after["results_NBR"][:, b].tolist() == results
        if before["lengths_B"] is not None:
            assert int(after["lengths_B"][b]) == int(before["lengths_B"][b]) + len(kept)
        text = before["text_BW"][b].tolist()
        text[start + count : start + count + len(kept)] = kept
        assert after["text_BW"][b, :-1].tolist() == text[:-1]


def run(call: dict[str, Any], backend: str, device: str = "cpu") -> dict[str, Any]:
    """What a call leaves behind; its own tensors stay as they are."""
    # Not `clone` alone, which would make the drafts' rows adjacent.
    moved = {
        n: t if t is None else t.to(device) if device != "cpu" else t.clone()
        for n, t in call.items()
    }
    base = torch.cat([moved["drafts_Bk"][:, :1], moved["drafts_Bk"]], dim=1)
    moved["drafts_Bk"] = base[:, 1:] if call["drafts_Bk"].shape[1] else moved["drafts_Bk"]
    accept_block(**moved, backend=backend)
    return moved


CASES = [(1, 1), (1, 6), (5, 2), (64, 6), (37, 8), (3, 13)]


@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize(("batch_size", "width"), CASES)
def test_equals_one_token_at_a_time(batch_size: int, width: int, is_greedy: bool) -> None:
    for seed in range(4):
        call = make_call(batch_size, width, seed=seed, is_greedy=is_greedy)
        check_by_hand(call, run(call, "reference"))


def test_without_ids_that_end_a_sequence() -> None:
    call = make_call(8, 4) | {"eos_ids_E": torch.zeros(0, dtype=torch.long)}
    call["predicted_BS"][:] = 7
    call["drafts_Bk"] = torch.full((8, 3), 7)
    call["counts_B"][:] = torch.arange(8) + 5
    call["finished_B"][:] = False
    assert run(call, "reference")["kept_B"].tolist() == [4, 4, 4, 4, 3, 2, 1, 0]


@pytest.mark.parametrize("backend", ["reference", pytest.param("triton", marks=INTERPRETER)])
def test_without_lengths_and_with_the_bonus_token_beside_the_drafts(backend: str) -> None:
    call = make_call(5, 4) | {"lengths_B": None}
    relay = torch.cat([torch.full((5, 1), 77), call["drafts_Bk"]], dim=1)
    call |= {"drafts_Bk": relay[:, 1:], "bonus_B": relay[:, 0]}
    before = {name: None if t is None else t.clone() for name, t in call.items()}
    accept_block(**call, backend=backend)
    check_by_hand(before, call)


@pytest.mark.parametrize("is_greedy", [True, False])
def test_it_is_an_op(is_greedy: bool) -> None:
    """What it writes to is what its schema says."""
    call = {"num_tokens_B": None, "has_weight_B": None} | make_call(3, 4, is_greedy=is_greedy)
    names = (
        "predicted_BS", "drafts_Bk", "num_tokens_B", "has_weight_B", "eos_ids_E", "budget",
        "prompt_width", "text_BW", "counts_B", "finished_B", "kept_B", "tokens_BS", "bonus_B",
        "row_B", "results_NBR", "turns_B", "lengths_B",
    )  # fmt: skip
    torch.library.opcheck(torch.ops.glm.accept_block.default, tuple(call[name] for name in names))


def test_shapes_that_do_not_belong_together_are_refused() -> None:
    call = make_call(2, 3)
    with pytest.raises(ValueError, match="3 rows have 2 drafts"):
        accept_block(**call | {"drafts_Bk": call["drafts_Bk"][:, :1]})
    with pytest.raises(ValueError, match="no room for 3 tokens"):
        accept_block(**call | {"tokens_BS": call["tokens_BS"][:, :2]})


@INTERPRETER
@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize(("batch_size", "width"), CASES)
def test_kernel_equals_one_token_at_a_time(batch_size: int, width: int, is_greedy: bool) -> None:
    call = make_call(batch_size, width, is_greedy=is_greedy)
    check_by_hand(call, run(call, "triton"))


@INTERPRETER
def test_kernel_without_ids_that_end_a_sequence() -> None:
    call = make_call(8, 4) | {"eos_ids_E": torch.zeros(0, dtype=torch.long)}
    for backend in ("triton", "reference"):
        assert torch.equal(run(call, backend)["kept_B"], run(call, "reference")["kept_B"])


@pytest.mark.gpu
@pytest.mark.parametrize("is_greedy", [True, False])
@pytest.mark.parametrize(("batch_size", "width"), CASES)
def test_gpu_kernel_equals_one_token_at_a_time(
    batch_size: int, width: int, is_greedy: bool
) -> None:
    for seed in range(8):
        call = make_call(batch_size, width, seed=seed, is_greedy=is_greedy)
        after = {name: tensor.cpu() for name, tensor in run(call, "triton", "cuda").items()}
        check_by_hand(call, after)


@pytest.mark.gpu
def test_gpu_kernel_writes_to_memory_of_the_host() -> None:
    """Also from a graph, whose replays go round in it."""
    call = make_call(5, 6) | {"budget": torch.tensor(99)}
    moved = {name: tensor.cuda() for name, tensor in call.items()}
    moved["results_NBR"] = call["results_NBR"].pin_memory()
    accept_block(**moved)
    torch.cuda.synchronize()
    after = {name: tensor.cpu() for name, tensor in moved.items()}
    check_by_hand(call, after)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        accept_block(**moved)
    for _ in range(NUM_RESULTS + 1):
        before = {name: tensor.cpu().clone() for name, tensor in moved.items()}
        before["results_NBR"][:] = -3
        moved["results_NBR"][:] = -3
        graph.replay()
        torch.cuda.synchronize()
        check_by_hand(before, {name: tensor.cpu() for name, tensor in moved.items()})


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("is_greedy", [True, False])
def test_kernel_compiles(arch: str, is_greedy: bool) -> None:
    from glm_compile.ops.accept_block.triton_kernel import accept_block_kernel

    long = torch.empty(64, dtype=torch.long, device="meta")
    flag = torch.empty(64, dtype=torch.bool, device="meta")
    compiled = compile_triton(
        accept_block_kernel,
        [long, 6, long, 6, long, flag, long, 8, long, long, long, 300, long, flag, long, long, 6,
         long, 6, long, long, 576, 9, long, 4, torch.empty(64, dtype=torch.int32, device="meta")],
        {"S": 6, "FIRST": 3, "IS_GREEDY": is_greedy, "HAS_WEIGHT": not is_greedy, "ADVANCES": True,
         "BLOCK_S": 8, "BLOCK_E": 8, "PDL": True},
        arch,
        num_warps=1,
    )  # fmt: skip
    assert compiled.stack_bytes == 0
