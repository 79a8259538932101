"""Compilers that take one layer kind: AOTAutograd, the rewrite of the functional graph, then code.

`rewrite(graph_module)` edits the functional ATen graph in place. It runs at every compilation: the
AOTAutograd cache, which would skip it, is off for these calls. Inductor's own cache is keyed on the
graph after the rewrite and on the sources of this package's ops and passes, so it stays on.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import inspect
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, cast

import torch
from torch import fx

from glm_compile.errors import UnsupportedError

logger = logging.getLogger(__name__)

Rewrite = Callable[[fx.GraphModule], None]
Compiled = Callable[..., Sequence[Any]]


def compile_with_inductor(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    rewrite: Rewrite,
    *,
    static_inputs: Sequence[int] = (),
) -> Compiled:
    """Compile through `compile_fx`, which keeps mutations of inputs in the graph.

    Args:
        graph_module: taken over; returns a tuple.
        example_inputs: real or fake tensors and symbolic integers.
        rewrite: applied between AOTAutograd and code generation.
        static_inputs: positions of weights, whose alignment need not be looked at in each call.
    """
    from torch._inductor import config
    from torch._inductor.compile_fx import compile_fx, compile_fx_inner

    def inner_compile(
        graph: fx.GraphModule, inputs: Sequence[Any], *args: Any, **kwargs: Any
    ) -> Any:
        rewrite(graph)
        if len(inputs) == len(example_inputs):
            known = kwargs.get("static_input_idxs") or ()
            kwargs["static_input_idxs"] = sorted({*known, *static_inputs})
        return compile_fx_inner(graph, inputs, *args, **kwargs)

    patches = {
        "post_grad_custom_pre_pass": _source_key(config.post_grad_custom_pre_pass),
        # Whoever wants a CUDA graph captures whole steps, not one kind that writes a cache.
        "triton.cudagraphs": False,
        "freezing": False,
        # A benchmark on the device decides which products it pads, each its own copy of the input:
        # before `rewrite`, which would see readers of one input or not, from run to run.
        "shape_padding": False,
    }
    with _without_autograd_cache():
        compiled: Any = compile_fx(
            graph_module, list(example_inputs), inner_compile=inner_compile, config_patches=patches
        )
    return cast(Compiled, compiled)


def compile_with_eager(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], rewrite: Rewrite
) -> Compiled:
    """Run the rewritten graph node by node, with the writes into inputs done in place."""

    def finish(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        rewrite(graph)
        reinplace(graph, inputs)
        return graph.forward

    return _aot(graph_module, example_inputs, finish)


def analyze(
    graph_module: fx.GraphModule, example_inputs: Sequence[Any], rewrite: Rewrite
) -> Compiled:
    """Rewrite the functional graph and compile nothing; the result must not be called."""

    def finish(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        rewrite(graph)
        return never_called

    return _aot(graph_module, example_inputs, finish)


def reinplace(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> None:
    """Turn functional writes into inputs back into writes in place, as Inductor does.

    AOTAutograd makes `x.index_copy_()` a fresh tensor and a copy of all of it at the end, and wraps
    a mutating op so that it clones what it writes: a step would copy every cache.
    """
    from torch._guards import detect_fake_mode
    from torch._inductor.fx_passes import post_grad
    from torch._inductor.fx_passes.reinplace import reinplace_inplaceable_ops
    from torch._inductor.fx_utils import FakeTensorUpdater
    from torch._inductor.virtualized import V

    values = [n.meta["val"] for n in graph_module.graph.nodes if "val" in n.meta]
    fake_mode = detect_fake_mode([*example_inputs, *values])
    # torch 2.11 takes the graph where later versions take the module.
    takes_module = "gm" in inspect.signature(FakeTensorUpdater.__init__).parameters
    with V.set_fake_mode(fake_mode):
        target: Any = graph_module if takes_module else graph_module.graph
        reinplace_inplaceable_ops(FakeTensorUpdater(target), graph_module.graph)
        post_grad.decompose_auto_functionalized(graph_module.graph)
    for node in graph_module.graph.find_nodes(
        op="call_function", target=torch.ops.aten.copy_.default
    ):
        if node.args[0] is node.args[1] and not node.users:
            graph_module.graph.erase_node(node)
    graph_module.graph.eliminate_dead_code()
    graph_module.recompile()


@functools.cache
def why_no_inductor(device_type: str) -> str | None:
    """Reason why Inductor cannot generate code for the device, or None. Looks at the CPU only."""
    if device_type != "cpu":
        return None
    from torch._inductor import cpp_builder, exc

    try:
        cpp_builder.get_cpp_compiler()
    except (exc.InvalidCxxCompiler, RuntimeError) as error:
        return f"no C++ compiler found ({type(error).__name__})"
    return None


@functools.cache
def _warn_passes_only(reason: str) -> None:
    logger.warning(
        "inner compiler: %s, so graphs run node by node (inner='eager'); install a C++ compiler "
        "for generated code, or choose inner='eager' to say that this is meant",
        reason,
    )


def choose_inner(inner: str, *, is_explicit: bool, device_type: str) -> str:
    """Return the inner compiler to use: `inner`, or `eager` where nobody asked and it cannot run.

    Raises:
        UnsupportedError: Inductor was asked for and has no C++ compiler.
    """
    if inner != "inductor" or (reason := why_no_inductor(device_type)) is None:
        return str(inner)
    if is_explicit:
        raise UnsupportedError(
            f"option 'inner': 'inductor' cannot compile for the CPU here: {reason}; install one "
            "or use inner='eager'"
        )
    _warn_passes_only(reason)
    return "eager"


def _aot(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    finish: Callable[[fx.GraphModule, Sequence[Any]], Compiled],
) -> Compiled:
    from functorch.compile import make_boxed_func
    from torch._decomp import get_decompositions
    from torch._dynamo.backends.common import aot_autograd

    def compile_graph(graph: fx.GraphModule, inputs: Sequence[Any]) -> Compiled:
        return make_boxed_func(finish(graph, inputs))

    compiler = aot_autograd(
        fw_compiler=compile_graph,
        inference_compiler=compile_graph,
        # The one op that a static cache writes with and that reinplacing does not know.
        decompositions=get_decompositions([torch.ops.aten.index_copy]),
        keep_inference_input_mutations=True,
    )
    with _without_autograd_cache():
        return compiler(graph_module, list(example_inputs))


def never_called(*_args: Any) -> Sequence[Any]:
    """Stand in for a graph that was not compiled."""
    raise AssertionError("an analysed graph was run")


def _without_autograd_cache() -> contextlib.AbstractContextManager[None]:
    from torch._functorch import config

    return config.patch(enable_autograd_cache=False)


@functools.cache
def source_hash() -> str:
    """Hash of the sources of this package's ops and passes."""
    from glm_compile import fx_passes, ops

    digest = hashlib.sha256()
    for package in (ops, fx_passes):
        root = Path(str(package.__file__)).parent
        for path in sorted(root.rglob("*.py")):
            digest.update(str(path.relative_to(root)).encode())
            digest.update(path.read_bytes())
    return digest.hexdigest()


def _source_key(user_pass: Any) -> Any:
    """Custom pass that does what the user's own does, and puts our sources into the cache key."""
    from torch._inductor.custom_graph_pass import CustomGraphPass

    class SourceKey(CustomGraphPass):
        def __call__(self, graph: fx.Graph) -> None:
            if user_pass is not None:
                user_pass(graph)

        def uuid(self) -> Any:
            if user_pass is None:
                return source_hash()
            own = user_pass.uuid() if hasattr(user_pass, "uuid") else None
            return None if own is None else (source_hash(), own)

    return SourceKey()
