"""cached_lengths: which forms of a step's lengths are tokens cached before it, plus the row."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import make_fx

from glm_compile.fx_passes.index_lengths import cached_lengths

pytestmark = pytest.mark.newest_transformers

B, S = 3, 5

Form = Callable[[torch.Tensor, int], torch.Tensor]


def traced(form: Form, cached: torch.Tensor, tokens: int, **options: Any) -> fx.GraphModule:
    return make_fx(lambda counter: form(counter, tokens), tracing_mode="fake", **options)(cached)


def counter_of(graph_module: fx.GraphModule) -> fx.Node | None:
    (output,) = graph_module.graph.find_nodes(op="output")
    return cached_lengths(output.args[0])


def is_input(node: fx.Node | None) -> bool:
    return node is not None and node.op == "placeholder"


def as_the_mask_pass_does(counter: torch.Tensor, tokens: int) -> torch.Tensor:
    rows = torch.arange(tokens)[None] + counter[:, None] + 1
    return rows.expand(counter.shape[0], tokens).to(torch.int32).contiguous()


def the_other_way_round(counter: torch.Tensor, tokens: int) -> torch.Tensor:
    after = (counter.long() + 1).unsqueeze(1)
    return (after.expand(-1, tokens) + torch.arange(tokens)).view(-1).view(-1, tokens)


def transposed(counter: torch.Tensor, tokens: int) -> torch.Tensor:
    return (torch.arange(tokens)[:, None] + (counter + 1)).t()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("form", [as_the_mask_pass_does, the_other_way_round, transposed])
@pytest.mark.parametrize(("batch", "tokens"), [(B, S), (1, S), (B, 1), (1, 1), (S, S)])
def test_finds_the_counter(form: Form, batch: int, tokens: int, dtype: torch.dtype) -> None:
    graph_module = traced(form, torch.randint(0, 99, (batch,), dtype=dtype), tokens)
    assert is_input(counter_of(graph_module))


def test_finds_a_number_of_one_sequence() -> None:
    def selected(counter: torch.Tensor, tokens: int) -> torch.Tensor:
        return counter[0].unsqueeze(0).unsqueeze(1) + torch.arange(tokens)[None] + 1

    assert is_input(counter_of(traced(selected, torch.tensor([7]), S)))

    def of_no_axes(counter: torch.Tensor, tokens: int) -> torch.Tensor:
        return (torch.arange(tokens) + counter + 1)[None]

    assert is_input(counter_of(traced(of_no_axes, torch.tensor(7), S)))


@pytest.mark.parametrize("batch", [1, B])
def test_finds_the_counter_of_one_token(batch: int) -> None:
    """Whose row of steps has become a zero."""

    def one(counter: torch.Tensor, tokens: int) -> torch.Tensor:
        return (torch.zeros(1, tokens, dtype=torch.int64) + counter[:, None] + 1).to(torch.int32)

    assert is_input(counter_of(traced(one, torch.randint(0, 99, (batch,)), 1)))


def test_finds_the_counter_for_sizes_that_are_symbols() -> None:
    def lengths(counter: torch.Tensor, hidden: torch.Tensor) -> torch.Tensor:
        return as_the_mask_pass_does(counter, hidden.shape[1])

    graph_module = make_fx(lengths, tracing_mode="symbolic")(
        torch.randint(0, 9, (B,)), torch.randn(B, S)
    )
    (output,) = graph_module.graph.find_nodes(op="output")
    # A whole slice of it, which indexing makes of symbolic sizes, is the counter too.
    counter = cached_lengths(output.args[0])
    assert counter is not None and counter.name in ("counter_1", "slice_1")


NEAR_MISSES: dict[str, Form] = {
    "one more": lambda c, s: as_the_mask_pass_does(c, s) + 1,
    "one less": lambda c, s: torch.arange(s)[None] + c[:, None],
    "the same for all rows": lambda c, s: (c[:, None] + 1).expand(-1, s),
    "zero for all rows": lambda c, s: torch.zeros(1, s, dtype=torch.int64) + c[:, None] + 1,
    "twice the row": lambda c, s: as_the_mask_pass_does(c, s) + torch.arange(s),
    "twice the counter": lambda c, s: as_the_mask_pass_does(c, s) + c[:, None],
    "a multiple of the row": lambda c, s: torch.add(c[:, None] + 1, torch.arange(s), alpha=2),
    "a number a row": lambda c, s: c[None, :] + torch.arange(s)[:, None] + 1,
    "from another row on": lambda c, s: c[:, None] + torch.arange(2, s + 2) - 1,
    "of one of several": lambda c, s: (c[0] + torch.arange(s) + 1).expand(len(c), s),
    "bounded": lambda c, s: as_the_mask_pass_does(c, s).clamp(max=50),
    "fractions": lambda c, s: as_the_mask_pass_does(c, s).float().to(torch.int32),
    "rows from the last": lambda c, s: as_the_mask_pass_does(c, s).flip(1),
    "rows of all sequences": lambda c, s: (
        (c.repeat_interleave(s) + 1).view(-1, s) + torch.arange(s * len(c)).view(-1, s)
    ),
}


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_takes_no_other_form(name: str) -> None:
    # As many sequences as tokens: an axis in the wrong place has the right size.
    graph_module = traced(NEAR_MISSES[name], torch.randint(0, 99, (S,)), S)
    assert counter_of(graph_module) is None
