"""Plain draws are those of torch, and rejection sampling keeps the target's distribution."""

from __future__ import annotations

import pytest
import torch

from glm_compile.generation.sampling import draw, has_weight, probabilities
from glm_compile.ops.rejection_sampling import reference
from tests.chi_square import chi_square_p

pytestmark = pytest.mark.newest_transformers


def test_draw_equals_multinomial() -> None:
    weights = torch.rand(64, 11)
    torch.manual_seed(3)
    expected = torch.multinomial(weights, 1).squeeze(1)
    torch.manual_seed(3)
    assert torch.equal(draw(weights), expected)


def test_draw_never_takes_a_zero_weight() -> None:
    weights = torch.tensor([0.0, 1e-30, 0.0]).expand(500, 3)
    assert (draw(weights) == 1).all()


def test_probabilities_are_float32() -> None:
    assert probabilities(torch.zeros(2, 4, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_drawn_token_has_a_weight_or_not() -> None:
    p = torch.tensor([[0.0, 1.0], [0.0, 0.0], [torch.nan, torch.nan]])
    assert has_weight(p, torch.tensor([1, 0, 1])).tolist() == [True, False, False]


def reject(
    p: torch.Tensor, q: torch.Tensor, drafts: torch.Tensor, coins: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Rejection with numbers of torch's generator."""
    coins = torch.rand(drafts.shape) if coins is None else coins
    noise = torch.empty(p.shape[0], p.shape[2]).exponential_(1)
    return reference.reject(p, q, drafts, coins, noise)[:2]


def _samples(
    target_logits: torch.Tensor, draft_logits: torch.Tensor, num_samples: int, num_drafts: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Blocks of independent positions: the target is the same whatever came before."""
    p = probabilities(target_logits).expand(num_samples, num_drafts + 1, -1)
    q = probabilities(draft_logits).expand(num_samples, num_drafts, -1)
    return reject(p, q, draw(q))


@pytest.mark.parametrize("num_drafts", [1, 3])
def test_every_position_follows_the_target(num_drafts: int) -> None:
    torch.manual_seed(0)
    target = torch.tensor([2.0, 1.5, 1.0, 0.5]) / 0.7
    num_samples = 4000
    tokens, counts = _samples(target, target.flip(0), num_samples, num_drafts)
    assert counts.float().mean() > 1.2
    for position in range(num_drafts + 1):
        emitted = tokens[counts > position, position]
        observed = torch.bincount(emitted, minlength=4)
        expected = probabilities(target) * len(emitted)
        assert chi_square_p(observed, expected) > 1e-3, position


def test_an_equal_draft_is_always_accepted() -> None:
    logits = torch.randn(9)
    tokens, counts = _samples(logits, logits, 300, 4)
    assert (counts == 5).all()
    assert tokens.shape == (300, 5)


def test_a_draft_that_the_target_excludes_is_never_accepted() -> None:
    p = torch.tensor([[[0.5, 0.5, 0.0], [0.5, 0.5, 0.0]]]).expand(200, 2, 3)
    q = torch.tensor([[[0.0, 0.0, 1.0]]]).expand(200, 1, 3)
    tokens, counts = reject(p, q, torch.full((200, 1), 2))
    assert (counts == 1).all() and (tokens[:, 0] != 2).all()


def test_the_correction_comes_from_the_residual() -> None:
    """p - q is positive at one token only, so a rejection must give that token."""
    p = torch.tensor([[[0.2, 0.3, 0.5], [1.0, 0.0, 0.0]]]).expand(500, 2, 3)
    q = torch.tensor([[[0.4, 0.6, 0.0]]]).expand(500, 1, 3)
    tokens, counts = reject(p, q, draw(q))
    rejected = counts == 1
    assert 100 < rejected.sum() < 400
    assert (tokens[rejected, 0] == 2).all()
    assert (tokens[~rejected, 1] == 0).all()


def test_coins_decide() -> None:
    p = torch.tensor([[[0.3, 0.7], [0.5, 0.5]]]).expand(2, 2, 2)
    q = torch.tensor([[[0.6, 0.4]]]).expand(2, 1, 2)
    drafts = torch.zeros(2, 1, dtype=torch.long)
    _, counts = reject(p, q, drafts, torch.tensor([[0.499], [0.5]]))
    assert counts.tolist() == [2, 1]


def test_equal_distributions_up_to_rounding_leave_a_valid_token() -> None:
    """A rejection with an empty residual falls back on the target."""
    p = torch.tensor([[[0.25, 0.75], [0.5, 0.5]]])
    tokens, counts = reject(p, p[:, :1], torch.tensor([[0]]), torch.tensor([[1.0]]))
    assert counts.tolist() == [1] and tokens[0, 0] in (0, 1)


def test_rows_are_independent() -> None:
    p = torch.zeros(2, 3, 4)
    p[0, :, 1] = 1
    p[1, 0, 1] = p[1, 1, 2] = p[1, 2, 3] = 1
    q = torch.zeros(2, 2, 4)
    q[:, 0, 1] = q[:, 1, 2] = 1
    tokens, counts = reject(p, q, torch.tensor([[1, 2], [1, 2]]))
    assert counts.tolist() == [2, 3]
    assert tokens[0, :2].tolist() == [1, 1] and tokens[1].tolist() == [1, 2, 3]
