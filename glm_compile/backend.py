"""The entry point `glm` of `torch.compile`. Kept light: torch lists it without importing it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

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
    from glm_compile.errors import GlmCompileError
    from glm_compile.options import CompileOptions, check_mode
    from glm_compile.pipeline import compile_graph

    try:
        check_mode(mode)
        checked = CompileOptions.from_dict(options)
        _check_inference(graph_module, example_inputs)
    except (GlmCompileError, ValueError) as error:
        raise _as_backend_error(error) from None
    try:
        runner, report = compile_graph(graph_module, example_inputs, checked)
    except GlmCompileError as error:
        raise _as_backend_error(error) from None
    runner.report = report  # type: ignore[attr-defined]
    return runner


def _as_backend_error(error: Exception) -> Exception:
    """The same error, of a class that is also Dynamo's error of backends.

    Dynamo wraps what a backend raises, so that `except MatchError` around a compiled model would
    not catch one. What is a `BackendCompilerFailed` already passes as it is.
    """
    from torch._dynamo.exc import BackendCompilerFailed

    kind = type(error)
    names = {"__module__": kind.__module__, "__qualname__": kind.__qualname__}
    both: Any = type(kind.__name__, (kind, BackendCompilerFailed), names)
    raised: Exception = both.__new__(both)  # its classes disagree about __init__
    raised.__dict__.update(error.__dict__)
    raised.__dict__.update(backend_name="glm", inner_exception=error, first_useful_frame=None)
    raised.args = error.args
    return raised.with_traceback(error.__traceback__)


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
    if wanted:
        more = f" and {len(wanted) - 1} more" if len(wanted) > 1 else ""
        raise ValueError(
            "the glm backend compiles for inference only, and gradients are enabled while "
            f"{wanted[0]}{more} require them: call the model under torch.no_grad() or "
            "torch.inference_mode(), or model.requires_grad_(False)"
        )
