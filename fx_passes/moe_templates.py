"""Calls of transformers' own modules in a Dynamo graph, compared line by line with a template.

A template has a line a node: `name = operation(arguments)`. An argument is the name of an earlier
line or of an input, a number, `_` for anything, or a word for a constant that the graph decides
(`K`); keywords are spelled out. Operations separated by a bar are alternatives: Dynamo records
an operator as another method where a default device is set. Numbers that are no
tensors (sizes) are left out. So a hook, an adapter or another configuration is seen where it
departs from what transformers writes.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes._dynamo_graph import example_value, op_name
from glm_compile.fx_passes.base import No, clean_path

_MODELING = "transformers.models.glm_moe_dsa.modeling_glm_moe_dsa"


def module_calls(graph: fx.Graph, class_name: str) -> list[tuple[str, list[fx.Node]]]:
    """(module path, nodes in order) of each call of a class of transformers' model file."""
    calls: dict[str, tuple[str, list[fx.Node]]] = {}
    for node in graph.nodes:
        if node.op not in ("call_function", "call_method"):
            continue
        for key, (path, module_class) in (node.meta.get("nn_module_stack") or {}).items():
            if _full_name(module_class) == f"{_MODELING}.{class_name}":
                calls.setdefault(key, (clean_path(path), []))[1].append(node)
                break
    return list(calls.values())


def _full_name(module_class: Any) -> str:
    if isinstance(module_class, str):
        return module_class
    return f"{module_class.__module__}.{module_class.__qualname__}"


def is_size(node: fx.Node) -> bool:
    """Whether a node's value is a number."""
    return isinstance(example_value(node), int | torch.SymInt)


def erase(graph: fx.Graph, nodes: Sequence[fx.Node]) -> None:
    """Erase a replaced call, but not sizes: Dynamo computes them once, and others may read them."""
    for node in reversed(nodes):
        if not node.users:
            graph.erase_node(node)


class Match:
    """What the names and words of a template stand for in one call.

    Attributes:
        nodes: by the name of an input or a line.
        constants: by word.

    Raises:
        No: the call does something else; the message says where it departs.
    """

    def __init__(
        self, what: str, template: str, inputs: Iterable[str], results: Iterable[str], nodes: Any
    ) -> None:
        """Compare the nodes of a call.

        Args:
            what: the module in messages.
            template: see the module.
            inputs: names that stand for nodes from outside.
            results: names of lines that may be read from outside.
            nodes: all of the call, in order.
        """
        self.what = what
        self.inputs = frozenset(inputs)
        self.nodes: dict[str, fx.Node] = {}
        self.constants: dict[str, Any] = {}
        lines = [line.strip() for line in template.strip().splitlines()]
        tensors = [node for node in nodes if not is_size(node)]
        for node, line in zip(tensors, lines, strict=False):
            self._match(node, line)
        if len(tensors) != len(lines):
            extra = tensors[len(lines) :]
            found = f"{op_name(extra[0])} follows ({extra[0]})" if extra else "less is computed"
            raise No(f"not transformers' own {what}: {found}. Hooks and adapters are not replaced")
        self._check_readers(nodes, tensors, {self.nodes[name] for name in results})

    def _check_readers(
        self, nodes: Sequence[fx.Node], tensors: Sequence[fx.Node], results: set[fx.Node]
    ) -> None:
        inside, of_call = set(tensors), set(nodes)
        for node in nodes:
            is_free = node not in inside and not any(n in inside for n in node.all_input_nodes)
            if is_free or node in results:
                continue
            if any(user not in of_call for user in node.users):
                raise No(f"{node}, computed within the {self.what}, is read outside of it")

    def _match(self, node: fx.Node, line: str) -> None:
        parsed = re.fullmatch(r"(\w+) = ([\w|]+)\((.*)\)", line)
        assert parsed is not None, line
        name, operations, arguments = parsed.groups()
        wanted = [_keyword_and_text(argument) for argument in arguments.split(", ")]
        given: list[tuple[str, Any]] = [("", value) for value in node.args]
        given += [(key, value) for key, value in node.kwargs.items() if value is not None]
        found = op_name(node).rpartition("::")[2].removesuffix("_default")
        fits = found in operations.split("|") and len(wanted) == len(given)
        if not fits or not all(map(self._fits, given, wanted)):
            raise No(
                f"not transformers' own {self.what}: expected {line.partition(' = ')[2]}, found "
                f"{_text(node)}. Hooks, adapters and other configurations are not replaced"
            )
        self.nodes[name] = node

    def _fits(self, given: tuple[str, Any], wanted: tuple[str, str]) -> bool:
        (key, value), (wanted_key, text) = given, wanted
        if key != wanted_key:
            return False
        if text == "_":
            return True
        if isinstance(value, fx.Node):
            if text in self.inputs:
                return self.nodes.setdefault(text, value) is value
            return self.nodes.get(text) is value
        if text in self.inputs or text in self.nodes:
            return False  # a number where a tensor is expected
        try:
            return bool(value == _NUMBERS[text] if text in _NUMBERS else value == float(text))
        except ValueError:  # a word
            return bool(self.constants.setdefault(text, value) == value)


_NUMBERS = {
    "int32": torch.int32,
    "float32": torch.float32,
    "True": True,
    "False": False,
}


def _keyword_and_text(argument: str) -> tuple[str, str]:
    key, separator, text = argument.partition("=")
    return (key, text) if separator else ("", key)


def _text(node: fx.Node) -> str:
    arguments = [str(value) for value in node.args]
    arguments += [f"{key}={value}" for key, value in node.kwargs.items() if value is not None]
    return f"{op_name(node)}({', '.join(arguments)})"
