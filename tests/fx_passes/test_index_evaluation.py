"""Formulas of index tensors that a model's mask tests do not reach."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import fx

from glm_compile.fx_passes._dynamo_graph import op_name
from glm_compile.fx_passes.index_algebra import Lin
from glm_compile.fx_passes.index_evaluation import Evaluator

pytestmark = pytest.mark.newest_transformers


def evaluate(function: Callable[[torch.Tensor], torch.Tensor], name: str) -> tuple[fx.Node, Lin]:
    """The last node of that name in Dynamo's graph, and its value."""
    graphs: list[fx.GraphModule] = []

    def backend(graph_module: fx.GraphModule, _inputs: list[torch.Tensor]) -> Callable:
        graphs.append(graph_module)
        return graph_module.forward

    torch.compile(function, backend=backend, fullgraph=True)(torch.zeros(8))
    node = [node for node in graphs[0].graph.nodes if op_name(node) == name][-1]
    value = Evaluator().value(node)
    assert isinstance(value, Lin)
    return node, value


@pytest.mark.parametrize("offset", [0, 2])
def test_a_gather_moves_the_index(offset: int) -> None:
    def shifted(x: torch.Tensor) -> torch.Tensor:
        positions = torch.arange(8)
        return positions[torch.arange(8 - offset) + offset].sum() + x

    _node, value = evaluate(shifted, "getitem")
    assert value == Lin(offset, ((0, 1),))


def test_a_gather_that_wraps_around_is_not_linear() -> None:
    """positions - 1 begins with -1, the last position."""
    node, value = evaluate(lambda x: torch.arange(8)[torch.arange(8) - 1] + x, "getitem")
    assert [leaf for (leaf, _entries), _factor in value.leaves] == [node]
