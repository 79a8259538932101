"""Templates of transformers' modules: what fits a line, and what only looks like it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from glm_compile.fx_passes.base import No
from glm_compile.fx_passes.moe_templates import Match

TEMPLATE = """
    scores = sigmoid(x)
    total = add(scores, scores)
    scaled = mul(total, K)
"""


def match(function: Callable[[torch.Tensor], torch.Tensor]) -> Match:
    graph = fx.symbolic_trace(function).graph
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    return Match("sum", TEMPLATE, ["x"], ["scaled"], nodes)


def own(x: torch.Tensor) -> torch.Tensor:
    scores = torch.sigmoid(x)
    return torch.mul(torch.add(scores, scores), 2.5)


def test_names_stand_for_nodes_and_words_for_constants():
    found = match(own)
    assert set(found.nodes) == {"x", "scores", "total", "scaled"}
    assert found.constants == {"K": 2.5}


def number_for_a_line(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(torch.add(torch.sigmoid(x), 3.0), 2.5)


def other_line(x: torch.Tensor) -> torch.Tensor:
    return torch.mul(torch.add(torch.sigmoid(x), x), 2.5)


def other_operation(x: torch.Tensor) -> torch.Tensor:
    scores = torch.sigmoid(x)
    return torch.mul(torch.sub(scores, scores), 2.5)


@pytest.mark.parametrize("function", [number_for_a_line, other_line, other_operation])
def test_what_departs_from_a_line_is_named(function):
    with pytest.raises(No, match=r"expected add\(scores, scores\), found"):
        match(function)
