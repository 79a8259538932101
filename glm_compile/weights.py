"""Weights that read the same input, laid out as one block.

A merged linear reads its weights as one matrix if they are neighbours in memory. Here parameters
become views of one block: names, values, `state_dict` and checkpoints stay as they were, and no
weight is stored twice. Casts, moves to another device and `deepcopy` give every parameter a storage
of its own again; results stay right then, and merging again restores the layout.

Shape legend: N rows of a weight, K its columns.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.weak import WeakIdKeyDictionary

from glm_compile.arguments import describe
from glm_compile.fx_passes.base import Declined
from glm_compile.ops.merged_linear import adjacent_block

logger = logging.getLogger(__name__)

# Names of linears that read one input, in the order of their calls in the model's forward, relative
# to the module that holds all of them. Shared layers have no indexer: what exists counts.
LINEARS_BY_INPUT = (
    ("q_a_proj", "kv_a_proj_with_mqa", "indexer.wk", "indexer.weights_proj"),
    ("q_b_proj", "indexer.wq_b"),
    ("gate_proj", "up_proj"),
)
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
# A view must stay aligned as compiled kernels assume of their inputs.
_ALIGN_BYTES = 16

# Parameter -> address of the block that it was laid out in.
_BLOCK_OF = WeakIdKeyDictionary()


@dataclass
class MergeRecord:
    """Outcome of laying out groups of weights.

    Attributes:
        num_merged: groups that lie in one block now, those that did before included.
        num_moved: groups whose weights were moved into a new block.
        left_alone: groups that were not touched, each with its reason.
    """

    num_merged: int = 0
    num_moved: int = 0
    left_alone: list[Declined] = field(default_factory=list)


def merge_weights(model: nn.Module) -> MergeRecord:
    """Lay out the weights that read the same input as one block each; parameters become its views.

    `torch.compile(model, backend="glm")` does the same when it compiles. Call it again after
    `.to()`, `deepcopy` or anything else that gave the parameters new storage; what is merged stays
    as it is. One group is moved at a time, so the extra memory is one block.

    Args:
        model: a GLM model, its MTP layer, or any part of one.

    Returns:
        What was merged, and which groups were left alone for which reason.
    """
    model = getattr(model, "_orig_mod", model)
    if not isinstance(model, nn.Module):
        hint = "; glm_compile.load returns (model, mtp)" if isinstance(model, tuple) else ""
        raise ValueError(f"merge_weights: model must be a module, got {describe(model)}{hint}")
    record = MergeRecord()
    merge_groups(_groups_by_name(model), record)
    return record


def find_left_alone(model: nn.Module) -> list[Declined]:
    """Groups that `merge_weights` would not touch, with the reasons; nothing is moved."""
    groups = list(_groups_by_name(model))
    owners = _Owners(weight for group in groups for _name, weight in group)
    reasons = ((group, _why_not(group, owners)) for group in groups)
    return [Declined(_group_name(group), reason) for group, reason in reasons if reason]


def merge_groups(groups: Iterable[Sequence[tuple[str, torch.Tensor]]], record: MergeRecord) -> None:
    """Lay out each group of (name, weight) adjacently, in its order, and note the outcome.

    Args:
        groups: weights of one linear that was merged, named for messages.
        record: receives the counts and reasons.
    """
    groups = [group for group in groups if len(group) > 1]
    owners = _Owners(weight for group in groups for _name, weight in group)
    for group in groups:
        weights = [weight for _name, weight in group]
        if weights[0].device.type == "meta":
            continue
        reason = _why_not(group, owners)
        if reason is not None:
            record.left_alone.append(Declined(_group_name(group), reason))
            continue
        record.num_merged += 1
        if adjacent_block(weights) is None:
            _lay_out(weights)
            record.num_moved += 1


def _groups_by_name(model: nn.Module) -> Iterator[list[tuple[str, torch.Tensor]]]:
    for path, module in model.named_modules():
        for names in LINEARS_BY_INPUT:
            group: list[tuple[str, torch.Tensor]] = []
            for name in names:
                weight = _weight_of(module, name)
                if weight is not None:
                    group.append((f"{path}.{name}".lstrip("."), weight))
            # wk and weights_proj alone would be the indexer's own; the first name anchors a group.
            if len(group) > 1 and _weight_of(module, names[0]) is not None:
                yield group


def _weight_of(module: nn.Module, path: str) -> torch.Tensor | None:
    owner: Any = module
    for name in path.split("."):
        owner = owner._modules.get(name) if isinstance(owner, nn.Module) else None
    # An adapter wraps the linear that it extends.
    owner = getattr(owner, "base_layer", owner) if owner is not None else None
    weight = getattr(owner, "weight", None)
    return weight if isinstance(weight, torch.Tensor) and weight.dim() == 2 else None


def _lay_out(weights: Sequence[torch.Tensor]) -> None:
    """Copy `weights` into one new block and make each of them a view of its rows."""
    first = weights[0]
    with torch.inference_mode(first.is_inference()), torch.no_grad():
        block = torch.empty(
            (sum(w.shape[0] for w in weights), first.shape[1]),
            dtype=first.dtype,
            device=first.device,
        )
        row = 0
        for weight in weights:
            view = block[row : row + weight.shape[0]]
            view.copy_(weight)
            weight.data = view
            _BLOCK_OF[weight] = block.untyped_storage().data_ptr()
            row += weight.shape[0]


def _why_not(group: Sequence[tuple[str, torch.Tensor]], owners: _Owners) -> str | None:
    """Reason why the weights of `group` must stay where they are, or None."""
    first = group[0][1]
    seen: dict[int, str] = {}
    for name, weight in group:
        if (
            type(weight) not in (nn.Parameter, torch.Tensor)
            or type(weight.data) is not torch.Tensor
        ):
            return f"{name} is a {type(weight.data).__name__}, not a plain tensor"
        if weight.layout != torch.strided or weight.dtype not in _DTYPES:
            return f"{name} is stored as {weight.dtype} {weight.layout}"
        if weight.dtype != first.dtype:
            return f"{name} is {weight.dtype} and {group[0][0]} is {first.dtype}"
        if weight.device != first.device:
            return f"{name} is on {weight.device} and {group[0][0]} on {first.device}"
        if weight.dim() != 2 or weight.shape[1] != first.shape[1]:
            return f"{name} is {tuple(weight.shape)} and {group[0][0]} {tuple(first.shape)}"
        if weight.is_inference() != first.is_inference():
            return f"{name} and {group[0][0]} differ in being inference tensors"
        if not weight.is_contiguous():
            return f"{name} is not contiguous: strides {weight.stride()}"
        if id(weight) in seen:
            return f"{name} and {seen[id(weight)]} are one parameter"
        seen[id(weight)] = name
        if (reason := owners.why_not(weight)) is not None:
            return f"{name}: {reason}"
        if (reason := _why_not_movable(weight, owners)) is not None:
            return f"{name} {reason}"
    for name, weight in group[:-1]:
        if weight.numel() * weight.element_size() % _ALIGN_BYTES:
            return f"{name} has {tuple(weight.shape)} {weight.dtype}: its end is not aligned"
    return None


def _why_not_movable(weight: torch.Tensor, owners: _Owners) -> str | None:
    storage = weight.untyped_storage()
    if _BLOCK_OF.get(weight) == storage.data_ptr():
        return None
    if storage.nbytes() != weight.numel() * weight.element_size():
        return "is a view of a larger storage that others may share"
    if (other := owners.alias_of(weight)) is not None:
        return f"shares its storage with {other}"
    return None


class _Owners:
    """The live modules that hold given tensors: their hooks, adapters and aliases.

    A captured graph knows parameters, not modules, so all live modules are looked through, once.
    """

    def __init__(self, weights: Iterable[torch.Tensor]) -> None:
        wanted = {id(w) for w in weights}
        self._owners: dict[int, list[tuple[nn.Module, str]]] = {}
        self._by_pointer: dict[int, list[tuple[torch.Tensor, str]]] = {}
        self._adapted: dict[int, nn.Module] = {}
        if not wanted:
            return
        for module in _live_modules():
            # Read past __getattr__: a lazily loading module must not be disturbed.
            for name, tensor in _held_tensors(module):
                if id(tensor) in wanted:
                    self._owners.setdefault(id(tensor), []).append((module, name))
                if type(tensor) in (nn.Parameter, torch.Tensor) and tensor.device.type != "meta":
                    place = (tensor, f"{type(module).__name__}.{name}")
                    self._by_pointer.setdefault(_pointer(tensor), []).append(place)
            base = module.__dict__.get("_modules", {}).get("base_layer")
            if isinstance(base, nn.Module):
                self._adapted[id(base)] = module

    def why_not(self, weight: torch.Tensor) -> str | None:
        """Reason that one of the modules that hold `weight` gives, or None."""
        for module, _name in self._owners.get(id(weight), []):
            state = module.__dict__
            for hooks, kind in (
                ("_forward_hooks", "forward hook"),
                ("_forward_pre_hooks", "forward pre-hook"),
            ):
                for hook in state.get(hooks, {}).values():
                    return f"its module has a {kind} ({_callable_name(hook)})"
            if type(module).__name__ == "ParametrizationList":
                return "it is parametrized"
            if "parametrizations" in state.get("_modules", {}):
                return "its module is parametrized"
            if id(module) in self._adapted:
                adapter = type(self._adapted[id(module)]).__name__
                return f"its module is wrapped by the adapter {adapter}"
        return None

    def alias_of(self, weight: torch.Tensor) -> str | None:
        """Another live tensor of a module with the address of `weight`, or None."""
        for tensor, name in self._by_pointer.get(_pointer(weight), []):
            if tensor is not weight:
                return name
        return None


def _live_modules() -> Iterator[nn.Module]:
    for candidate in gc.get_objects():
        if issubclass(type(candidate), nn.Module):
            yield candidate


def _held_tensors(module: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    for registry in ("_parameters", "_buffers"):
        for name, tensor in list(module.__dict__.get(registry, {}).items()):
            if isinstance(tensor, torch.Tensor):
                yield name, tensor


def _pointer(tensor: torch.Tensor) -> int:
    try:
        return tensor.untyped_storage().data_ptr()
    except RuntimeError:  # a fake tensor, or another without storage
        return -id(tensor)


def _callable_name(hook: Any) -> str:
    return getattr(hook, "__qualname__", None) or type(hook).__qualname__


def _group_name(group: Sequence[tuple[str, torch.Tensor]]) -> str:
    return " + ".join(name for name, _weight in group)
