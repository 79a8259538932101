"""The entry point `glm` of `torch.compile`, which lists it without importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from glm_compile.early import check_calls_of, check_options, refuse_gradients
from glm_compile.errors import GlmCompileError, as_backend_error

if TYPE_CHECKING:
    from torch import fx

    from glm_compile.options import CompileOptions


def glm(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    *,
    options: Mapping[str, Any] | CompileOptions | None = None,
    mode: str | None = None,
) -> Callable[..., Any]:
    """Compile a graph that Dynamo captured of a GLM model.

    Args:
        graph_module: Dynamo's graph, taken over.
        example_inputs: its inputs.
        options: `CompileOptions` or its dict form.
        mode: None or "default".

    Returns:
        The compiled callable; its attribute `report` is the CompileReport.

    Raises:
        ValueError: an unknown option or mode, or gradients that are asked for.
        MatchError: the graph is not of a GLM model, or the passes did not match what it has.
    """
    from glm_compile.pipeline import compile_graph

    check_calls_of(glm)  # again, because torch._dynamo.reset forgets it
    try:
        checked = check_options({"options": options, "mode": mode})
        _check_inference(graph_module, example_inputs)
    except (GlmCompileError, ValueError) as error:
        raise as_backend_error(error) from None
    try:
        runner, report = compile_graph(graph_module, example_inputs, checked)
    except GlmCompileError as error:
        raise as_backend_error(error) from None
    runner.report = report  # type: ignore[attr-defined]
    return runner


def _check_inference(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Refuse a graph whose gradients are recorded: the passes are for inference."""
    import torch

    if not torch.is_grad_enabled():
        return
    names = [node.name for node in graph_module.graph.find_nodes(op="placeholder")]
    wanted = [
        name
        for name, value in zip(names, example_inputs)
        if isinstance(value, torch.Tensor) and value.requires_grad
    ]
    refuse_gradients(wanted)


check_calls_of(glm)
