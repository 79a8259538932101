"""What the passes on Dynamo graphs share: sources, values, purity, module floats.

A Dynamo graph holds torch functions and methods as the program called them, with mutation, and
keeps in `node.meta` what ATen loses: `example_value` (a fake tensor or a symbolic number),
`nn_module_stack`, and for inputs the expression that the value came from.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Container
from typing import Any

import torch
from torch import fx

from glm_compile.fx_passes.base import clean_path


def example_value(node: fx.Node) -> Any:
    """Fake tensor, symbolic number or constant that `node` had while Dynamo traced, or None."""
    return node.meta.get("example_value")


def source_name(node: fx.Node) -> str | None:
    """Python expression of a graph input (`L['self']._modules['model']...`), or None."""
    source = getattr(node, "_dynamo_source", None)
    if source is None and (argument := node.meta.get("grapharg")) is not None:
        source = argument.source
    if source is None:
        return None
    name = source.name
    return name() if callable(name) else name


def parameter_name(node: fx.Node) -> str | None:
    """`state_dict()` name of a parameter or buffer input, from the compiled module's root."""
    name = source_name(node)
    if name is None or not ("._parameters[" in name or "._buffers[" in name):
        return None
    return clean_path(re.sub(r"\._(?:modules|parameters|buffers)\['([^']+)'\]", r".\1", name))


def is_pure(node: fx.Node) -> bool:
    """Whether an unused node may go.

    FX takes every method call for pure, so `graph.eliminate_dead_code()` without this test deletes
    the writes into a cache (`add_`, `index_copy_`, `copy_`).
    """
    if node.op in ("placeholder", "output") or node.is_impure():
        return False
    if node.op == "call_method":
        return not is_inplace_name(str(node.target))
    if node.op == "call_function":
        if node.target is operator.setitem or node.kwargs.get("out") is not None:
            return False
        schema = getattr(node.target, "_schema", None)
        if schema is not None:
            return not schema.is_mutable
        name = getattr(node.target, "__name__", "")
        module = getattr(node.target, "__module__", "") or ""
        if module in ("_operator", "operator"):
            return not (name.startswith("i") and hasattr(operator, f"__{name}__")) or name in (
                "invert",
                "index",
                "is_",
                "is_not",
                "indexOf",
            )
        return not (is_inplace_name(name) or name in _STATEFUL or "autocast" in name)
    return node.op == "get_attr"


_STATEFUL = frozenset(("_log_api_usage_once", "_set_grad_enabled", "manual_seed"))


def is_inplace_name(name: str) -> bool:
    """`add_` and the like, but not `__and__`."""
    return name.endswith("_") and not name.endswith("__")


def mutated_inputs(node: fx.Node) -> list[fx.Node]:
    """Nodes whose memory `node` writes itself."""
    if node.op == "call_method" and (
        is_inplace_name(str(node.target)) or node.target == "__setitem__"
    ):
        return [a for a in node.args[:1] if isinstance(a, fx.Node)]
    if node.op != "call_function":
        return []
    written: list[Any] = []
    out = node.kwargs.get("out")
    written.extend(out if isinstance(out, list | tuple) else [out])
    schema = getattr(node.target, "_schema", None)
    if schema is not None:
        for position, argument in enumerate(schema.arguments):
            if argument.alias_info is not None and argument.alias_info.is_write:
                value = (
                    node.args[position]
                    if position < len(node.args)
                    else node.kwargs.get(argument.name)
                )
                written.extend(value if isinstance(value, list | tuple) else [value])
    elif not is_pure(node) and getattr(node.target, "__name__", "") not in _STATEFUL:
        first = node.args[0] if node.args else None
        written.extend(first if isinstance(first, list | tuple) else [first])
    return [a for a in written if isinstance(a, fx.Node)]


def storage_key(node: fx.Node) -> int | None:
    """Equal for nodes whose values share memory; None for what is no tensor."""
    value = example_value(node)
    if not isinstance(value, torch.Tensor):
        return None
    return value.untyped_storage()._cdata


def eliminate_dead_code(graph: fx.Graph, keep: Container[fx.Node | None] = ()) -> int:
    """Erase unused pure nodes that are not in `keep`, and return how many went."""
    erased = 0
    for node in reversed(list(graph.nodes)):
        if not node.users and node not in keep and is_pure(node):
            graph.erase_node(node)
            erased += 1
    return erased


def specialize_module_floats(graph_module: fx.GraphModule) -> int:
    """Turn floats of modules back into constants, as without `dynamic=True`; returns how many.

    `torch.compile(..., dynamic=True)` makes tensor inputs of attributes such as `softmax_scale` and
    reads them by `item()`. Asking the symbol for its value is what Dynamo itself does when a float
    has to be constant: it adds the guard, so a module whose attribute changes is compiled again.
    """
    from torch.fx.experimental.symbolic_shapes import guard_scalar

    replaced = 0
    for node in list(graph_module.graph.nodes):
        if node.op != "placeholder" or not _is_module_float(node):
            continue
        for user in list(node.users):
            if user.op != "call_method" or user.target != "item":
                continue
            value = example_value(user)
            if not isinstance(value, float | torch.SymFloat):
                continue
            user.replace_all_uses_with(guard_scalar(value))
            graph_module.graph.erase_node(user)
            replaced += 1
    return replaced


def _is_module_float(node: fx.Node) -> bool:
    source = getattr(node, "_dynamo_source", None)
    if source is None and (argument := node.meta.get("grapharg")) is not None:
        source = argument.source
    value = example_value(node)
    if source is None or not isinstance(value, torch.Tensor):
        return False
    if type(source).__name__ != "FloatTensorSource" and (
        value.dim() != 0 or value.dtype != torch.float64 or value.device.type != "cpu"
    ):
        return False
    guard_source = source.guard_source
    guard_source = guard_source() if callable(guard_source) else guard_source
    return "NN_MODULE" in str(guard_source)


def op_name(node: fx.Node) -> str:
    """Name of the function or method: `add` for `torch.add`, `operator.add` and `Tensor.add`."""
    if node.op == "call_method":
        name = str(node.target)
    elif node.op == "call_function":
        target: Any = node.target
        schema = getattr(target, "_schema", None)
        name = schema.name if schema is not None else getattr(target, "__name__", "")
        if schema is not None:
            name = name.removeprefix("aten::")
    else:
        return ""
    if name.startswith("__") and name.endswith("__"):
        name = name.strip("_")
        name = {"and": "and_", "or": "or_", "not": "not_"}.get(name, name)
    return name


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """The argument that a call got by position or by name."""
    if position < len(node.args):
        return node.args[position]
    return node.kwargs.get(name, default)


def shape_of(value: Any) -> tuple[Any, ...] | None:
    """Shape of a node's value; () for numbers, None if it is unknown."""
    if isinstance(value, fx.Node):
        value = example_value(value)
    if isinstance(value, torch.Tensor):
        return tuple(value.shape)
    if isinstance(value, bool | int | float | torch.SymInt | torch.SymFloat):
        return ()
    return None


def known_shape(node: fx.Node) -> tuple[Any, ...]:
    """Shape of a node's value; () also if it is unknown."""
    return shape_of(node) or ()


def dtype_of(node: fx.Node) -> torch.dtype | None:
    """Dtype of a node's value; None if it is no tensor."""
    value = example_value(node)
    return value.dtype if isinstance(value, torch.Tensor) else None


def is_one(size: Any) -> bool:
    """Whether a size is 1 for certain; asking a symbolic size would add a guard."""
    return isinstance(size, int) and size == 1


def insert_call(
    graph: fx.Graph, target: Any, args: tuple[Any, ...], like: fx.Node | None, **kwargs: Any
) -> fx.Node:
    """Call `target` at the graph's insertion point, with the module stack of `like` (None: no
    module).

    The example value is made from the arguments' own, in Dynamo's fake mode.
    """
    if isinstance(target, str):
        node = graph.call_method(target, args, kwargs)
    else:
        node = graph.call_function(target, args, kwargs)
    for key in ("nn_module_stack", "stack_trace"):
        if like is not None and key in like.meta:
            node.meta[key] = like.meta[key]
    values = fx.node.map_arg(args, example_value)
    modes: list[Any] = []
    fx.node.map_arg(args, lambda n: modes.append(getattr(example_value(n), "fake_mode", None)))
    modes = [mode for mode in modes if mode is not None] or [_fake_mode(graph)]
    call = getattr(type(values[0]), target) if isinstance(target, str) else target
    if modes[0] is None:
        return node
    with modes[0]:
        node.meta["example_value"] = call(*values, **kwargs)
    return node


def _fake_mode(graph: fx.Graph) -> Any:
    for node in graph.nodes:
        if (mode := getattr(example_value(node), "fake_mode", None)) is not None:
            return mode
    return None


class WriteLog:
    """Where a graph writes memory in place, by storage, so that reads can be moved safely."""

    def __init__(self, graph: fx.Graph) -> None:
        self.order = {node: i for i, node in enumerate(graph.nodes)}
        self._writes: dict[int, list[fx.Node]] = {}
        for node in graph.nodes:
            for written in mutated_inputs(node):
                key = storage_key(written)
                if key is not None:
                    self._writes.setdefault(key, []).append(node)

    def writers_between(self, node: fx.Node, first: int, last: int) -> list[fx.Node]:
        """Nodes strictly between two places that write the memory of `node`'s value, in order."""
        key = storage_key(node)
        writers = self._writes.get(key, []) if key is not None else []
        return [writer for writer in writers if first < self.order[writer] < last]

    def writer_between(self, node: fx.Node, first: int, last: int) -> fx.Node | None:
        """The first of `writers_between`, or None."""
        return next(iter(self.writers_between(node, first, last)), None)
