"""The counter-based generator: published outputs, distributions, and keys that do not meet."""

from __future__ import annotations

import torch

from glm_compile.ops.rejection_sampling import Purpose, draw_token
from glm_compile.ops.rejection_sampling.random_numbers import (
    GAMMA,
    exponential,
    exponential_of,
    mix,
    position_keys,
    row_keys,
    uniform,
)
from tests.chi_square import chi_square_p


def test_outputs_of_splitmix64() -> None:
    """The first ones for seed 1234567, as its reference implementation gives them."""
    states = 1234567 + torch.arange(1, 6) * GAMMA
    assert [value % 2**64 for value in mix(states).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


def keys(num_rows: int = 4, num_positions: int = 5000, seed: int = 11) -> list[torch.Tensor]:
    rows_B = row_keys(torch.tensor(seed), num_rows)
    positions = torch.arange(num_positions).expand(num_rows, -1)
    return [position_keys(rows_B, positions, purpose) for purpose in Purpose]


def test_keys_of_rows_positions_purposes_and_seeds_differ() -> None:
    every = torch.cat([k.flatten() for seed in range(3) for k in keys(num_positions=50, seed=seed)])
    assert len(every.unique()) == every.numel()


def test_uniform_numbers() -> None:
    for values in map(uniform, keys()):
        assert values.dtype == torch.float32 and values.min() >= 0 and values.max() < 1
        bins = torch.bincount((values * 50).long().flatten(), minlength=50)
        assert chi_square_p(bins, torch.full((50,), values.numel() / 50)) > 1e-3


def test_numbers_of_neighbours_are_independent() -> None:
    """Rows, positions and purposes next to each other, in a 10 by 10 table."""
    coins = [(uniform(k) * 10).long() for k in keys()]
    pairs = [
        (coins[0][0], coins[0][1]),
        (coins[0][:, :-1].flatten(), coins[0][:, 1:].flatten()),
        (coins[0].flatten(), coins[1].flatten()),
        (coins[1].flatten(), coins[2].flatten()),
    ]
    for left, right in pairs:
        table = torch.bincount(left * 10 + right, minlength=100)
        assert chi_square_p(table, torch.full((100,), len(left) / 100)) > 1e-3


def test_exponential_numbers() -> None:
    values = exponential(keys(1, 2000)[0], 7)
    assert values.shape == (1, 2000, 7)
    assert values.min() > 0 and values.max() < 38
    bins = torch.bincount((values.neg().exp() * 40).long().flatten(), minlength=40)
    assert chi_square_p(bins, torch.full((40,), values.numel() / 40)) > 1e-3


def test_bits_at_both_ends_are_finite_and_positive() -> None:
    """All bits of a number set, or none: a race needs a quotient."""
    noise = exponential_of(torch.tensor([-1, 0]))
    assert noise.isfinite().all() and (noise > 0).all()


def test_draws_follow_the_weights() -> None:
    weights = torch.tensor([0.5, 0.25, 0.15, 0.1, 0.0])
    row_key = row_keys(torch.tensor(11), 1).expand(4000)
    drawn = draw_token(weights.expand(4000, -1), row_key, torch.arange(4000), Purpose.DRAFT)
    assert chi_square_p(torch.bincount(drawn, minlength=5)[:4], weights[:4] * 4000) > 1e-3
    assert (drawn != 4).all()
