"""From a Dynamo graph to a callable: mark, prove, split into layer kinds, compile each kind once.

    Dynamo graph -> attention marked, mask proven -> layer kinds -> per kind: functional ATen graph,
    passes, inner compiler -> a runner that calls the kinds in the program's order

What the model has is counted before anything is rewritten (`graph_facts`) and compared with what
the passes matched.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from glm_compile import inner, report
from glm_compile.capacity import watch_capacity
from glm_compile.errors import MatchError
from glm_compile.fx_passes import PARTS, make_passes
from glm_compile.fx_passes._dynamo_graph import (
    example_value,
    parameter_name,
    source_name,
)
from glm_compile.fx_passes.base import (
    Declined,
    GraphPass,
    MergeResult,
    No,
    PassOptions,
    PassResult,
)
from glm_compile.fx_passes.layer_kinds import (
    InputSource,
    LayerKind,
    LayerKinds,
    LayerUse,
    Step,
    split_layer_kinds,
)
from glm_compile.graph_facts import GraphFacts, module_name, read_facts
from glm_compile.options import PASS_NAMES, CompileOptions, fp8_cache_error
from glm_compile.report import CompileReport, GraphDump
from glm_compile.weights import MergeRecord, merge_groups

logger = logging.getLogger(__name__)

_WARNED: set[str] = set()
# Passes over the whole Dynamo graph, ahead of the split into kinds.
_DYNAMO_PASSES = frozenset(("mask", "moe_router", "moe_experts"))


def compile_graph(
    graph_module: fx.GraphModule,
    example_inputs: Sequence[Any],
    options: CompileOptions,
    *,
    is_analysis: bool = False,
) -> tuple[Callable[..., Any], CompileReport]:
    """Compile a Dynamo graph of the model.

    Args:
        graph_module: taken over.
        example_inputs: the graph's real inputs; its weights are laid out anew (`merge_weights`).
        options: the user's.
        is_analysis: only find out what would be replaced: nothing is compiled or laid out, nothing
            raised for a mismatch, and the callable must not be called.

    Returns:
        A callable with the graph's inputs and outputs, and the report.

    Raises:
        MatchError: in strict mode, when fewer or more regions matched than the model has.
        UnsupportedError: an option that this graph or machine cannot serve.
    """
    facts = read_facts(graph_module)
    job = _Job(options, facts, example_inputs, is_analysis)
    job.check_options()
    job.check_is_model()
    watch = watch_capacity(graph_module)
    job.rewrite_dynamo_graph(graph_module)
    kinds = job.split(graph_module)
    compiled = [job.compile_kind(kind) for kind in kinds.kinds]
    job.conclude()
    job.lay_out_weights()
    runner = kinds.make_runner(compiled)
    return runner if watch is None else watch.around(runner), job.report


class _Job:
    """One compilation: its options, what was found so far, its report."""

    def __init__(
        self,
        options: CompileOptions,
        facts: GraphFacts,
        example_inputs: Sequence[Any],
        is_analysis: bool,
    ) -> None:
        self.options = options
        self.facts = facts
        self.example_inputs = example_inputs
        self.is_analysis = is_analysis
        self.disabled = options.disabled
        self.device_type = _device_type(example_inputs)
        self.inner = inner.choose_inner(
            options.inner, is_explicit=options.is_inner_explicit, device_type=self.device_type
        )
        expected = facts.expected(self.disabled)
        self.report = CompileReport(
            title=facts.title,
            tier="fp8 (changes numbers)" if options.indexer_dtype == "fp8" else "exact",
            inner=self.inner,
            matches=dict.fromkeys(expected, 0),
            expected=expected,
        )
        self.pass_options = PassOptions(
            indexer_dtype=options.indexer_dtype,
            deterministic=options.deterministic,
            disable=self.disabled,
        )
        self.rewrites: list[_Rewrite] = []
        self.mismatched_kinds: list[str] = []

    def check_options(self) -> None:
        """Refuse the FP8 tier over a cache without FP8 index keys."""
        wants_fp8 = self.options.indexer_dtype == "fp8" and self.facts.num_indexers
        if wants_fp8 and not self.facts.has_fp8_keys:
            raise fp8_cache_error()

    def check_is_model(self) -> None:
        """Say so when the graph does not hold the model, or only a part without decoder layers."""
        if self.facts.holds_layers:
            return
        if self.facts.is_model_code:
            held = ", ".join(self.facts.classes) or "code around the layers"
            note = (
                f"this graph holds no decoder layer, only {held}: compiled without the indexer's "
                "passes. If the model was meant, a graph break cut it: use fullgraph=True to see "
                "where"
            )
            self.report.notes.append(note)
            if not self.is_analysis:
                _warn_once(note)
            return
        message = (
            "this graph is not one of glm_moe_dsa (GlmMoeDsaForCausalLM): no decoder layer, no "
            "indexer, no module of the model was found in it. The glm backend compiles this model "
            "family only; use another backend for other modules and for code around the model"
        )
        self.report.title = "not glm_moe_dsa"
        self.report.notes.append(message)
        if self.options.strict and not self.is_analysis:
            report.remember(self.report)
            raise MatchError(message, self.report)
        _warn_once(message)

    def rewrite_dynamo_graph(self, graph_module: fx.GraphModule) -> None:
        """Mark attention calls and replace the mask by what it means; then routers and experts."""
        if "mask" not in self.disabled and self.facts.holds_layers:
            self.rewrite_mask(graph_module)
        if not self.facts.num_routers and not self.facts.num_experts:
            return
        from glm_compile.fx_passes.moe_experts import moe_experts
        from glm_compile.fx_passes.moe_router import moe_router

        text = graph_text(graph_module)
        for name, rewrite in (("moe_router", moe_router), ("moe_experts", moe_experts)):
            if name not in self.disabled:
                before, result = text, rewrite(graph_module)
                text = graph_text(graph_module)
                self.report.graphs.append(GraphDump("model", name, before, text))
                self.report.matches[name] = result.num_matches
                self.report.add_declined(name, result.declined)

    def rewrite_mask(self, graph_module: fx.GraphModule) -> None:
        """Mark attention calls and replace the mask by what it means."""
        from glm_compile.fx_passes.mark_attention import mark_attention
        from glm_compile.fx_passes.mask import prove_mask

        before = graph_text(graph_module)
        marked = mark_attention(graph_module)
        after = graph_text(graph_module)
        self.report.graphs.append(GraphDump("model", "mark_attention", before, after))
        result = prove_mask(graph_module)
        self.report.graphs.append(GraphDump("model", "mask", after, graph_text(graph_module)))
        self.report.matches["mask"] = result.num_matches
        self.report.mask_route = result.route
        self.report.notes += result.notes
        self.report.add_declined("mask", [*marked.declined, *result.declined])
        if "sparse_mla" not in self.disabled:
            # Its pass never sees an attention call that is not one op.
            self.report.add_declined("sparse_mla", marked.declined)

    def split(self, graph_module: fx.GraphModule) -> LayerKinds:
        """Split into layer kinds, or take the whole graph as one and say why."""
        try:
            return split_layer_kinds(graph_module, self.example_inputs)
        except No as no:
            if self.facts.holds_layers:
                self.report.notes.append(f"compiled as one graph, not by layer kinds: {no}")
            return _whole(graph_module, self.example_inputs)

    def compile_kind(self, kind: LayerKind) -> Callable[..., Any]:
        """Compile one kind. After a mismatch in strict mode the others are only analysed."""
        rewrite = _Rewrite(kind, make_passes(self.pass_options))
        self.rewrites.append(rewrite)
        graph_module, inputs = kind.graph_module, kind.example_inputs
        if self.is_analysis or self.has_failed():
            return inner.analyze(graph_module, inputs, rewrite)
        expected = read_facts(graph_module).expected(self.disabled | _DYNAMO_PASSES)

        def rewrite_and_check(graph: fx.GraphModule) -> None:
            rewrite(graph)
            if self.options.strict and rewrite.counts() != expected:
                raise _Mismatch

        try:
            if self.inner == "eager":
                return inner.compile_with_eager(graph_module, inputs, rewrite_and_check)
            return inner.compile_with_inductor(
                graph_module,
                inputs,
                rewrite_and_check,
                static_inputs=[
                    i
                    for i in range(len(inputs))
                    if all(use.inputs[i].parameter is not None for use in kind.uses)
                ],
            )
        except _Mismatch:
            self.mismatched_kinds.append(rewrite.name)
            return inner.never_called

    def has_failed(self) -> bool:
        """Whether the compilation is known to end in a MatchError."""
        matches, expected = self.report.matches, self.report.expected
        is_off = any(matches.get(name, 0) != expected.get(name, 0) for name in _DYNAMO_PASSES)
        return self.options.strict and (is_off or bool(self.mismatched_kinds))

    def conclude(self) -> None:
        """Add up what the kinds matched; raise or warn if it is not what the model has."""
        for rewrite in self.rewrites:
            self.report.graphs.extend(rewrite.dumps)
            for result in rewrite.results:
                if result.name in PARTS:
                    self.report.add_declined(PARTS[result.name], rewrite.declined(result))
                    continue
                total = self.report.matches.get(result.name, 0)
                self.report.matches[result.name] = total + result.num_matches * rewrite.num_uses
                self.report.add_declined(result.name, rewrite.declined(result))
        if self.is_analysis:
            return
        report.remember(self.report)
        if self.report.ok and not self.has_failed():
            return
        counts = ", ".join(
            f"{name}: {self.report.matches.get(name, 0)} of {self.report.expected.get(name, 0)}"
            for name in self.report.mismatched
        )
        message = (
            f"the passes did not match what the {self.report.title} has ({counts or 'by kind: '}"
            f"{'' if counts else ', '.join(self.mismatched_kinds)})\n{self.report.table()}\n"
        )
        if self.options.strict:
            raise MatchError(
                f"{message}Nothing was changed. options={{'strict': False}} compiles what did "
                f"match; {{'disable': {tuple(self.report.mismatched)}}} leaves passes out",
                self.report,
            )
        _warn_once(message + "strict=False: what did not match runs as transformers wrote it")

    def lay_out_weights(self) -> None:
        """Make the weights of each merged linear, in every layer that uses its kind, one block."""
        if self.is_analysis:
            return
        record = MergeRecord()
        # At once: who holds a weight is looked for among all objects of the process.
        groups = [
            g for rewrite in self.rewrites for g in rewrite.weight_groups(self.example_inputs)
        ]
        merge_groups(groups, record)
        self.report.add_declined("merge_linears", record.left_alone)


class _Mismatch(Exception):
    """Raised between the passes and the inner compiler, to save the time of the latter."""


@dataclass
class _Rewrite:
    """The passes over one kind's functional graph, and what they found."""

    kind: LayerKind
    passes: Sequence[GraphPass]
    results: list[PassResult] = field(default_factory=list)
    dumps: list[GraphDump] = field(default_factory=list)
    placeholders: dict[str, int] = field(default_factory=dict)

    @property
    def num_uses(self) -> int:
        """Segments that run this kind."""
        return len(self.kind.uses)

    @property
    def name(self) -> str:
        """For dumps and messages."""
        return f"{self.kind.name} x{self.num_uses}"

    def __call__(self, graph_module: fx.GraphModule) -> None:
        self.results, self.dumps = [], []
        nodes = graph_module.graph.find_nodes(op="placeholder")
        self.placeholders = {node.name: i for i, node in enumerate(nodes)}
        text = graph_text(graph_module)
        for graph_pass in self.passes:
            before, result = text, graph_pass(graph_module)
            if result.num_matches:
                text = graph_text(graph_module)
            self.results.append(result)
            self.dumps.append(GraphDump(self.name, graph_pass.name, before, text))
        graph_module.graph.lint()
        graph_module.recompile()

    def counts(self) -> dict[str, int]:
        """Matches of one use, by report key."""
        found = {result.name: result.num_matches for result in self.results}
        return {name: found[name] for name in PASS_NAMES if name in found}

    def declined(self, result: PassResult) -> list[Declined]:
        """What a pass declined, for each layer that runs this kind."""
        first = self.kind.uses[0].layer
        entries = []
        for use in self.kind.uses:
            for entry in result.declined:
                where, reason = entry.where, entry.reason
                if first is not None and use.layer is not None:
                    where, reason = (
                        re.sub(rf"\b{re.escape(first)}(?!\d)", use.layer, text)
                        for text in (where, reason)
                    )
                entries.append(Declined(where, reason))
        return entries

    def weight_groups(self, arguments: Sequence[Any]) -> list[list[tuple[str, torch.Tensor]]]:
        """The real weights of each merged linear, per use, with their names."""
        groups = []
        for result in self.results:
            for names in result.groups if isinstance(result, MergeResult) else ():
                positions = [self.placeholders[name] for name in names]
                for use in self.kind.uses:
                    sources = [use.inputs[position] for position in positions]
                    if all(s.argument is not None for s in sources):
                        groups.append(
                            [
                                (module_name(s.parameter or s.name), arguments[s.argument])
                                for s in sources
                                if s.argument is not None
                            ]
                        )
        return groups


def graph_text(graph_module: fx.GraphModule) -> str:
    """One line a node: name, dtype and shape, call."""
    lines = []
    for node in graph_module.graph.nodes:
        value = node.meta.get("val", example_value(node))
        kind = ""
        if isinstance(value, torch.Tensor):
            kind = f": {str(value.dtype).removeprefix('torch.')}{list(value.shape)}"
        if node.op == "placeholder":
            source = parameter_name(node) or source_name(node) or ""
            lines.append(f"{node.name}{kind} = input {source}".rstrip())
        elif node.op == "output":
            lines.append(f"return {node.args[0]}")
        else:
            arguments = [str(a) for a in node.args]
            arguments += [f"{name}={value}" for name, value in node.kwargs.items()]
            target = node.target
            if not isinstance(target, str | torch._ops.OpOverload):
                target = getattr(target, "__name__", target)
            lines.append(f"{node.name}{kind} = {target}({', '.join(arguments)})")
    return "\n".join(lines)


def _whole(graph_module: fx.GraphModule, example_inputs: Sequence[Any]) -> LayerKinds:
    """The graph as one kind with one use."""
    placeholders = graph_module.graph.find_nodes(op="placeholder")
    inputs = [
        example_value(node) if example_value(node) is not None else example_inputs[i]
        for i, node in enumerate(placeholders)
    ]
    sources = tuple(
        InputSource(node.name, i, parameter_name(node), source_name(node))
        for i, node in enumerate(placeholders)
    )
    results = graph_module.graph.output_node().args[0]
    num_results = len(results) if isinstance(results, tuple | list) else 1
    first = len(placeholders)
    slots = tuple(range(first, first + num_results))
    return LayerKinds(
        kinds=[LayerKind(0, graph_module, inputs, [LayerUse(None, sources)])],
        steps=[Step(0, tuple(range(first)), slots, ())],
        num_arguments=first,
        num_slots=first + num_results,
        results=tuple((slot, None) for slot in slots),
    )


def _device_type(values: Sequence[Any]) -> str:
    devices = {v.device.type for v in values if isinstance(v, torch.Tensor)}
    return next(iter(sorted(devices - {"cpu", "meta"})), "cpu")


def _warn_once(message: str) -> None:
    if message not in _WARNED:
        _WARNED.add(message)
        logger.warning("%s", message)
