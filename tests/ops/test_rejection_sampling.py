"""Rejection sampling: distributions, exact noise, and the kernel against the reference."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import pytest
import torch

from glm_compile.ops.rejection_sampling import Purpose, draw_token, rejection_sample
from glm_compile.ops.rejection_sampling.random_numbers import exponential_of, row_keys
from glm_compile.ops.rejection_sampling.reference import reject
from tests.chi_square import chi_square_p
from tests.compile_only import ARCHS, compile_triton


def make_call(
    batch_size: int, num_drafts: int, vocab_size: int, *, seed: int = 0, zeros: float = 0.3
) -> dict[str, torch.Tensor]:
    """Drafts drawn from q, p near q and with tokens that only one of them has."""
    generator = torch.Generator().manual_seed(seed)

    def scores(rows: int) -> torch.Tensor:
        values = torch.randn(batch_size, rows, vocab_size, generator=generator) * 2
        gone = torch.rand(values.shape, generator=generator) < zeros
        gone[..., vocab_size // 2] = False
        return values.masked_fill(gone, -torch.inf)

    q = scores(num_drafts).softmax(-1)
    p = scores(1 + num_drafts).softmax(-1)
    p[:, :num_drafts] = 0.5 * p[:, :num_drafts] + 0.5 * q
    p[: batch_size // 3, :num_drafts] = q[: batch_size // 3]
    drafts = torch.zeros(batch_size, num_drafts + 1, dtype=torch.long)
    if num_drafts:
        drawn = torch.multinomial(q.flatten(0, 1), 1, generator=generator)
        drafts[:, 1:] = drawn.view(batch_size, num_drafts)
    return {
        "p_BSV": p,
        "q_BkV": q,
        "drafts_Bk": drafts[:, 1:],  # as the relay has them: not contiguous
        "row_keys_B": row_keys(torch.tensor(seed + 7), batch_size),
        "positions_B": torch.randint(0, 3000, (batch_size,), generator=generator),
    }


CASES = [(1, 0, 5), (1, 5, 1024), (3, 1, 1025), (7, 5, 3001), (37, 2, 97), (2, 7, 2048)]


def assert_same(got: Any, expected: Any) -> None:
    for ours, theirs in zip(got, expected):
        assert ours.dtype == theirs.dtype and torch.equal(ours.cpu(), theirs.cpu())


def all_cases_agree(device: str, num_seeds: int) -> None:
    accepted = set()
    for case in CASES:
        for seed in range(num_seeds):
            call = make_call(*case, seed=seed)
            expected = rejection_sample(**call, backend="reference")
            weights = call["p_BSV"][:, -1]
            call = {name: t.to(device) for name, t in call.items()}
            assert_same(rejection_sample(**call, backend="triton"), expected)
            apart = {n: torch.stack([call[n]] * 2, 1)[:, 0] for n in ("row_keys_B", "positions_B")}
            assert_same(rejection_sample(**call | apart, backend="triton"), expected)
            accepted |= set(expected[1].tolist())
            call = {name: call[name] for name in ("row_keys_B", "positions_B")}
            drawn = [
                draw_token(
                    p.to(call["row_keys_B"].device),
                    *call.values(),
                    Purpose.DRAFT,
                    offset=4,
                    backend=b,
                )
                for b, p in (("triton", weights), ("reference", weights))
            ]
            assert torch.equal(*drawn)
    assert accepted >= {1, 2, 3}


# -- what it does ---------------------------------------------------------------------------------


@pytest.mark.parametrize("num_drafts", [0, 1, 3])
def test_every_position_follows_the_target(num_drafts: int) -> None:
    """The target is the same whatever came before; drafts come from another distribution."""
    p = torch.tensor([0.4, 0.3, 0.2, 0.1, 0.0])
    q = torch.tensor([0.1, 0.2, 0.2, 0.3, 0.2])
    count = 4000
    keys = row_keys(torch.tensor(5), count)
    positions = torch.arange(count) % 50
    q_BV = q.expand(count, -1)
    drafts = [draw_token(q_BV, keys, positions, Purpose.DRAFT, offset=i) for i in range(num_drafts)]
    tokens, counts, has_weight = rejection_sample(
        p.expand(count, num_drafts + 1, -1),
        q.expand(count, num_drafts, -1),
        torch.stack(drafts, dim=1) if drafts else torch.zeros(count, 0, dtype=torch.long),
        keys,
        positions,
    )
    assert has_weight.all()
    for place in range(num_drafts + 1):
        emitted = tokens[counts > place, place]
        observed = torch.bincount(emitted, minlength=5)
        assert observed[4] == 0
        assert chi_square_p(observed[:4], p[:4] * len(emitted)) > 1e-3, place
    if num_drafts:  # the overlap of the two distributions
        rate = float((counts > 1).float().mean())
        assert abs(rate - 0.6) < 4 * math.sqrt(0.24 / count)


def test_an_offset_is_added_to_the_positions() -> None:
    p = torch.rand(50, 9)
    keys, positions = row_keys(torch.tensor(1), 50), torch.arange(50)
    drawn = draw_token(p, keys, positions, Purpose.TOKEN, offset=3)
    assert torch.equal(drawn, draw_token(p, keys, positions + 3, Purpose.TOKEN))


def test_one_draw_after_the_other_is_independent() -> None:
    """Positions of one sequence, and the purposes of one position."""
    p = torch.full((4000, 4), 0.25)
    keys = row_keys(torch.tensor(1), 1).expand(4000)
    positions = torch.arange(4000)
    first = draw_token(p, keys, positions, Purpose.TOKEN)
    other = draw_token(p, keys, positions, Purpose.DRAFT)
    for left, right in ((first[:-1], first[1:]), (first, other)):
        table = torch.bincount(left * 4 + right, minlength=16)
        assert chi_square_p(table, torch.full((16,), len(left) / 16)) > 1e-3


@pytest.mark.parametrize("is_first", [True, False])
def test_nothing_left_of_the_target_gives_the_target(is_first: bool) -> None:
    """p and q may agree up to rounding where a draft was rejected."""
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    noise = torch.tensor([[1.0, 0.1] if is_first else [0.1, 1.0]])
    tokens, counts, _ = reject(p, p[:, :1], torch.tensor([[0]]), torch.tensor([[1.0]]), noise)
    assert counts.tolist() == [1] and tokens[0, 0] == (1 if is_first else 0)


def test_a_row_without_a_distribution_is_told() -> None:
    p = torch.tensor([[0.0, 0.0], [torch.nan, torch.nan], [0.0, 1.0]])[:, None]
    call = make_call(3, 0, 2) | {"p_BSV": p, "q_BkV": p[:, :0]}
    tokens, _, has_weight = rejection_sample(**call)
    assert has_weight.tolist() == [False, False, True]
    assert tokens.flatten().tolist() == [0, 0, 1]


def test_noise_is_the_logarithm_of_exact_fractions() -> None:
    """-log(1 - (n + 1/2) / 2^53) to three parts in 2^24, from the smallest to the largest."""
    numbers = [0, 1, 2, 77, 2**20 + 1, 2**29, 2**52 - 1, 2**52, 2**52 + 1, 2**53 - 2, 2**53 - 1]
    numbers += [2**53 - 2**i for i in range(2, 53, 7)]
    numbers += torch.randint(0, 2**53, (300,)).tolist()
    signed = [(n << 11) - (1 << 64 if n >= 2**52 else 0) for n in numbers]
    noise = exponential_of(torch.tensor(signed)).tolist()
    for n, value in zip(numbers, noise):
        u = Fraction(2 * n + 1, 2**54)
        exact = -math.log1p(-float(u)) if u < 0.5 else -math.log(float(1 - u))
        assert abs(value - exact) <= 3 * 2.0**-24 * exact, n


def test_shapes_and_dtypes_are_checked() -> None:
    call = make_call(2, 3, 9)
    with pytest.raises(ValueError, match=r"belongs to drafts \(2, 3\)"):
        rejection_sample(**call | {"drafts_Bk": call["drafts_Bk"][:, :2]})
    with pytest.raises(ValueError, match="p must be float32"):
        rejection_sample(**call | {"p_BSV": call["p_BSV"].double()})
    with pytest.raises(ValueError, match=r"positions must be int64 \[2\]"):
        rejection_sample(**call | {"positions_B": call["positions_B"].int()})
    with pytest.raises(ValueError, match="drafts must be int64"):
        rejection_sample(**call | {"drafts_Bk": call["drafts_Bk"].int()})
    with pytest.raises(ValueError, match="draw_token: p must be float32"):
        p, keys = torch.zeros(2, 3).half(), call["row_keys_B"]
        draw_token(p, keys, call["positions_B"], Purpose.TOKEN)


def test_it_is_an_op() -> None:
    for num_drafts in (0, 2):
        call = make_call(3, num_drafts, 40)
        arguments = list(call.values())
        if not num_drafts:
            arguments[1:3] = None, None
        torch.library.opcheck(torch.ops.glm.rejection_sample.default, (*arguments, 0, 0))


def test_it_is_an_op_that_compiles() -> None:
    call = make_call(3, 2, 40)
    expected = rejection_sample(**call)
    compiled = torch.compile(rejection_sample, backend="aot_eager", fullgraph=True)
    assert_same(compiled(**call), expected)


# -- the kernel -----------------------------------------------------------------------------------


@pytest.mark.interpreter
def test_kernel_equals_the_reference() -> None:
    all_cases_agree("cpu", 1)


@pytest.mark.interpreter
def test_kernel_tells_of_a_row_without_a_distribution() -> None:
    p = torch.tensor([[0.0] * 1100, [torch.nan] * 1100, [0.0] * 1099 + [1.0]])[:, None]
    call = make_call(3, 0, 1100) | {"p_BSV": p, "q_BkV": p[:, :0]}
    assert_same(
        rejection_sample(**call, backend="triton"), rejection_sample(**call, backend="reference")
    )


@pytest.mark.gpu
def test_gpu_kernel_equals_the_reference() -> None:
    """Bit for bit: the noise is made of operations that are rounded once."""
    all_cases_agree("cuda", 5)


@pytest.mark.gpu
@pytest.mark.parametrize("batch_size", [1, 64])
def test_gpu_kernel_at_full_width(batch_size: int) -> None:
    for seed in range(2):
        call = make_call(batch_size, 5, 154_880, seed=seed)
        call = {name: t.cuda() for name, t in call.items()}
        assert_same(
            rejection_sample(**call, backend="triton"),
            rejection_sample(**call, backend="reference"),
        )


@pytest.mark.gpu
def test_gpu_draws_in_a_graph() -> None:
    """A replay draws what the counters say, not what the capture drew."""
    call = {name: t.cuda() for name, t in make_call(4, 3, 2000).items()}
    rejection_sample(**call)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        got = rejection_sample(**call)
    for step in range(3):
        call["positions_B"].add_(step)
        graph.replay()
        assert_same(got, rejection_sample(**call, backend="reference"))


@pytest.mark.parametrize("arch", ARCHS)
@pytest.mark.parametrize("num_drafts", [0, 5])
def test_kernels_compile_without_spills(arch: str, num_drafts: int) -> None:
    from glm_compile.ops.rejection_sampling.triton_kernel import decide_kernel, race_kernel

    p = torch.empty(1, 6, 154_880, device="meta")
    ids = torch.empty(8, dtype=torch.int32, device="meta")
    longs = torch.empty(8, dtype=torch.int64, device="meta")
    flags = torch.empty(8, dtype=torch.bool, device="meta")
    inputs = [p, 929_280, 154_880, p, 774_400, 154_880, longs, 6, 1, longs, longs, 0]
    sizes = {"K": num_drafts, "BLOCK_K": 8 if num_drafts else 2}
    race = compile_triton(
        race_kernel, [*inputs, 0, p, ids, 154_880, 152], sizes | {"BLOCK_V": 1024}, arch,
        num_warps=4, enable_fp_fusion=False,
    )  # fmt: skip
    decide = compile_triton(
        decide_kernel, [*inputs, p, ids, 152, longs, longs, flags], sizes | {"BLOCK_N": 256}, arch,
        num_warps=1, enable_fp_fusion=False,
    )  # fmt: skip
    for kernel in (race, decide):
        assert kernel.stack_bytes == 0 and kernel.registers <= 128
        assert "fma.rn.f32" not in kernel.ptx
