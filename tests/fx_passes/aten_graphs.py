"""Functional ATen graphs of models and small modules, as the passes see them.

Two levels: `plain` has no decompositions, `inductor` has Inductor's table. Both keep the mutations
of inputs inside the graph, as the pipeline does.
"""

from __future__ import annotations

import collections
import copy
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import fx
from torch._dynamo.backends.common import aot_autograd
from torch._inductor.decomposition import select_decomp_table

from glm_compile.fx_passes.base import GraphPass, PassResult

# Inductor's table is torch's: one version of transformers is enough for it.
LEVELS = ("plain", pytest.param("inductor", marks=pytest.mark.newest_transformers))


def decompositions(level: str) -> dict[Any, Callable]:
    return {} if level == "plain" else select_decomp_table()


@dataclass
class Captured:
    """One ATen graph.

    Attributes:
        before: the graph as AOTAutograd made it.
        after: the same after the passes.
        results: what the passes returned, by name.
        inputs: fake example inputs of the graph.
    """

    before: fx.GraphModule
    after: fx.GraphModule
    results: dict[str, PassResult]
    inputs: list[Any]


@dataclass
class Capture:
    """Backend for torch.compile: AOTAutograd, `passes`, then the graph runs as it is.

    Attributes:
        level: `plain` or `inductor`.
        passes: what runs on each ATen graph.
        dynamo_stage: edits the Dynamo graph first.
        graphs: what was compiled, in order.
    """

    level: str = "plain"
    passes: Sequence[GraphPass] = ()
    dynamo_stage: Callable[[fx.GraphModule], None] | None = None
    graphs: list[Captured] = field(default_factory=list)

    def __call__(self, gm: fx.GraphModule, inputs: list[Any], **_options: Any) -> Callable:
        if self.dynamo_stage is not None:
            self.dynamo_stage(gm)
        compiler = aot_autograd(
            fw_compiler=self._compile,
            inference_compiler=self._compile,
            decompositions=decompositions(self.level),
            keep_inference_input_mutations=True,
        )
        return compiler(gm, inputs)

    def _compile(self, gm: fx.GraphModule, inputs: list[Any]) -> Callable:
        before = fx.GraphModule(gm, copy.deepcopy(gm.graph))
        results = {p.name: p(gm) for p in self.passes}
        gm.graph.lint()
        gm.recompile()
        self.graphs.append(Captured(before, gm, results, list(inputs)))

        def run(args: list[Any]) -> Any:
            return gm(*args)

        run._boxed_call = True  # type: ignore[attr-defined]
        return run


def capture(
    fn: Callable,
    *args: Any,
    level: str = "plain",
    passes: Sequence[GraphPass] = (),
    dynamo_stage: Callable[[fx.GraphModule], None] | None = None,
    dynamic: bool | None = None,
    **kwargs: Any,
) -> tuple[Any, Captured]:
    """Compile and run `fn` once; return its output and its one ATen graph."""
    backend = Capture(level, passes, dynamo_stage)
    torch._dynamo.reset()
    output = torch.compile(fn, backend=backend, fullgraph=True, dynamic=dynamic)(*args, **kwargs)
    assert len(backend.graphs) == 1
    return output, backend.graphs[0]


def op_name(node: fx.Node) -> str:
    """`aten.mm.default`, `glm.topk_select.default`, `getitem`."""
    target = node.args[0] if "auto_functionalized" in str(node.target) else node.target
    return str(target) if not callable(target) or "." in str(target) else target.__name__


def count_ops(gm: fx.GraphModule) -> collections.Counter[str]:
    """How often each op occurs; a functionalized op counts under its own name."""
    names: collections.Counter[str] = collections.Counter()
    for node in gm.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            names[op_name(node).removesuffix(".default")] += 1
    return names


def graph_text(gm: fx.GraphModule) -> str:
    """The graph with placeholders, for comparing two runs of a pass."""
    return "\n".join(n.format_node() or "" for n in gm.graph.nodes)


def mark_indexer_topk(gm: fx.GraphModule) -> None:
    """Replace mask + topk + cast of every indexer in a Dynamo graph by glm.masked_topk.

    Stands in for the Dynamo stage where a test wants the passes alone: the mask goes in as the key
    mask and the lengths are all keys.
    """
    graph = gm.graph
    for node in list(graph.nodes):
        if node.op != "call_method" or node.target != "topk":
            continue
        if node.args[0].target not in ("masked_fill", operator.add):
            continue
        masked = node.args[0]
        (indices,) = list(node.users)
        if [u.target for u in indices.users] != ["to"]:
            continue
        (result,) = list(indices.users)
        scores, mask = masked.args[0], masked.args[1]
        with graph.inserting_before(result):
            if masked.target == "masked_fill":
                key_mask = mask.args[0]
            else:
                key_mask = graph.call_function(operator.eq, (mask, 0))
            batch, tokens, num_keys = (graph.call_method("size", (scores, d)) for d in range(3))
            lengths = graph.call_function(
                torch.full, ((batch, tokens), num_keys), {"dtype": torch.int32}
            )
            new = graph.call_function(
                torch.ops.glm.masked_topk.default,
                (scores, lengths, None, key_mask, node.args[1]),
            )
            # What scatters with a selection must find no -1 there.
            last = graph.call_function(torch.clamp, (graph.call_method("amax", (new, -1, True)), 0))
            filled = graph.call_function(
                torch.where, (graph.call_function(operator.lt, (new, 0)), last, new)
            )
        new.meta = dict(result.meta)
        result.replace_all_uses_with(filled)
        for dead in (result, indices, node, masked):
            graph.erase_node(dead)
    gm.recompile()
