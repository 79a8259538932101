"""Loading a Hugging Face directory: the model through transformers, the MTP layer beside it.

transformers ignores tensors behind the last decoder layer and starts missing ones from random
values. Here everything is compared first, from the headers of the files, and all faults are
reported together before any memory is taken. A file that the index does not name is read too when
it holds the MTP layer.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import logging
import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import GlmMoeDsaForCausalLM
from transformers.utils import logging as transformers_logging

from glm_compile.arguments import check_device, check_flag, describe
from glm_compile.errors import CheckpointError, UnsupportedError
from glm_compile.model_facts import SHARED, GlmDsaConfig, make_config
from glm_compile.mtp import GlmMoeDsaMtp, checkpoint_shapes

_log = logging.getLogger(__name__)

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"

_LAYER = re.compile(r"model\.layers\.(\d+)\.")
_INDEXER = re.compile(r"model\.layers\.(\d+)\.self_attn\.indexer\.")
_EXPERT = re.compile(r"\.experts\.\d+\.")
_QUANTISED = re.compile(
    r"\.(weight_scale(_inv|_2)?|input_scale|weight_packed|weight_global_scale)$"
)
# Dtypes of the safetensors format that hold plain weights.
_PLAIN_DTYPES = ("F32", "BF16", "F16", "F64")
_LOADABLE = (torch.float32, torch.bfloat16, torch.float16)


def load(
    path: str | os.PathLike[str],
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
    mtp: bool = True,
) -> tuple[GlmMoeDsaForCausalLM, GlmMoeDsaMtp | None]:
    """Load a model and its MTP layer for inference: eval mode, no parameter requires a gradient.

    Args:
        path: directory with config.json and safetensors files.
        device: where to load; None for the CPU.
        dtype: None for the dtype that the checkpoint was saved in. What transformers keeps in
            float32 (the router's correction bias; its weight from 5.24 on) stays so.
        mtp: whether to load the MTP layer; False returns None for it.

    Raises:
        CheckpointError: files or tensors missing, damaged, surplus or misshapen, all listed.
        ConfigError: config.json belongs to another model or contradicts itself.
        UnsupportedError: a quantised checkpoint, or more than one MTP layer; a dtype or device that
            cannot be used.
        ValueError: another argument of the wrong kind.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise ValueError(
            f"load: path must be the directory of a checkpoint, got {describe(path)}; "
            "torch.compile and generate take a model that is loaded already"
        )
    check_flag("load", "mtp", mtp)
    path = Path(path)
    if dtype is not None and dtype not in _LOADABLE:
        raise UnsupportedError(
            "load: dtype must be torch.float32, torch.bfloat16 or torch.float16, got "
            f"{dtype!r}; None keeps the checkpoint's"
        )
    check_device(device, "load")
    raw, facts = _read_config(path)
    files = _Inventory.of(path, facts)
    _refuse_quantised(path, raw, files)
    with torch.device("meta"):
        skeleton = GlmMoeDsaForCausalLM(make_config(raw))
    faults = [*files.faults, *_model_faults(skeleton, facts, files)]
    if mtp:
        faults += _mtp_faults(skeleton, facts, files)
    if faults:
        raise CheckpointError(_message(path, faults))
    model = _load_model(path, device, dtype)
    if not mtp:
        return model, None
    layer = GlmMoeDsaMtp(model, device=torch.device("meta"))
    layer.copy_tensors(_LazyTensors(files, _mtp_prefix(facts)))
    return model, layer


def load_structure(
    path: str | os.PathLike[str], *, dtype: torch.dtype | None = None
) -> tuple[GlmMoeDsaForCausalLM, GlmMoeDsaMtp | None]:
    """Make the model of a directory's config.json on `meta`: no weight is read, none need exist.

    The MTP layer is None if the config declares none.
    """
    raw, facts = _read_config(Path(path))
    with torch.device("meta"):
        model = GlmMoeDsaForCausalLM._from_config(make_config(raw), dtype=dtype or facts.dtype)
        model.eval().requires_grad_(False)
        return model, GlmMoeDsaMtp(model) if facts.num_mtp_layers else None


def read_facts(path: str | os.PathLike[str]) -> GlmDsaConfig:
    """Facts of a directory's config.json.

    Raises:
        CheckpointError: no directory, or no config.json in it.
        ConfigError: it belongs to another model or contradicts itself.
    """
    return _read_config(Path(path))[1]


@dataclass(frozen=True)
class _Entry:
    """Where a tensor is, from a file's header."""

    file: Path
    shape: tuple[int, ...]
    dtype: str


@dataclass
class _Inventory:
    """What the files of a directory hold, and what is wrong between them and the index.

    Attributes:
        lost: names that the index places in files which do not have them; reported once, there.
    """

    entries: dict[str, _Entry] = field(default_factory=dict)
    lost: set[str] = field(default_factory=set)
    faults: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, path: Path, facts: GlmDsaConfig) -> _Inventory:
        """Read the index and the header of every safetensors file."""
        inventory = cls()
        on_disk = {file.name for file in path.glob("*.safetensors")}
        weight_map: dict[str, str] | None = None
        if (path / _INDEX).exists():
            index = _read_json(path / _INDEX)
            for key in ("metadata", "weight_map"):
                if not isinstance(index.get(key), dict):
                    inventory.faults.append(f"{_INDEX} has no {key!r} object")
            placed = index.get("weight_map")
            placed = placed if isinstance(placed, dict) else {}
            weight_map = {n: file for n, file in placed.items() if _is_file_name(file)}
            inventory.faults += [
                f"{_INDEX} places tensor {name} in {file!r}, which is no name of a file beside it"
                for name, file in placed.items()
                if name not in weight_map
            ]
            inventory.lost |= placed.keys() - weight_map.keys()
            listed = set(weight_map.values())
        elif _SINGLE in on_disk:
            listed = {_SINGLE}
        else:
            found = (
                f"found {', '.join(sorted(on_disk))}" if on_disk else "found no safetensors file"
            )
            inventory.faults.append(f"expected {_INDEX} or {_SINGLE}, {found}")
            return inventory
        for name in sorted(listed):
            inventory._read_listed(path / name, weight_map, facts)
        for name in sorted(on_disk - listed):
            inventory._read_unlisted(path / name, facts)
        return inventory

    def mtp_names(self, facts: GlmDsaConfig) -> list[str]:
        """Names of tensors behind the decoder layers."""
        return [name for name in self.entries if _is_mtp(name, facts)]

    def _read_listed(
        self, file: Path, weight_map: Mapping[str, str] | None, facts: GlmDsaConfig
    ) -> None:
        placed = {name for name, shard in (weight_map or {}).items() if shard == file.name}
        if not file.exists():
            self.faults.append(
                f"shard {file.name} is missing; the index places {len(placed)} tensors in it"
            )
            self.lost |= placed
            return
        header = self._read_header(file)
        if header is None:
            self.lost |= placed
            return
        for name, entry in header.items():
            if weight_map is not None and name not in placed and not _is_mtp(name, facts):
                where = weight_map.get(name)
                where = f"places it in {where}" if where else "does not name it"
                self.faults.append(f"{file.name} holds tensor {name}, but the index {where}")
            self._add(name, entry)
        for name in sorted(placed - header.keys()):
            self.faults.append(
                f"{file.name} does not hold tensor {name}, which the index places in it"
            )
            self.lost.add(name)

    def _read_unlisted(self, file: Path, facts: GlmDsaConfig) -> None:
        header = self._read_header(file)
        if header is None:
            return
        others = [name for name in header if not _is_mtp(name, facts)]
        if others:
            self.faults.append(
                f"extra file {file.name}: nothing refers to it, and it holds {len(others)} tensors "
                f"that are not the MTP layer's (such as {others[0]})"
            )
        for name, entry in header.items():
            if _is_mtp(name, facts):
                self._add(name, entry)

    def _read_header(self, file: Path) -> dict[str, _Entry] | None:
        try:
            with safe_open(file, framework="pt") as handle:
                header = {}
                for name in handle.keys():  # noqa: SIM118 - not a dict
                    tensor = handle.get_slice(name)
                    header[name] = _Entry(file, tuple(tensor.get_shape()), tensor.get_dtype())
                return header
        except (SafetensorError, OSError) as error:
            self.faults.append(f"file {file.name} is truncated or damaged ({error})")
            return None

    def _add(self, name: str, entry: _Entry) -> None:
        if name in self.entries:
            self.faults.append(
                f"tensor {name} is in two files: {self.entries[name].file.name} and "
                f"{entry.file.name}"
            )
        else:
            self.entries[name] = entry


class _LazyTensors(Mapping[str, torch.Tensor]):
    """Tensors below a prefix, read from their file at each access."""

    def __init__(self, files: _Inventory, prefix: str) -> None:
        self._entries = {
            name.removeprefix(prefix): (name, entry.file)
            for name, entry in files.entries.items()
            if name.startswith(prefix)
        }

    def __getitem__(self, name: str) -> torch.Tensor:
        full_name, file = self._entries[name]
        with safe_open(file, framework="pt") as handle:
            return handle.get_tensor(full_name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __len__(self) -> int:
        return len(self._entries)


def _model_faults(
    skeleton: GlmMoeDsaForCausalLM, facts: GlmDsaConfig, files: _Inventory
) -> list[str]:
    expected = checkpoint_shapes(
        {name: tuple(tensor.shape) for name, tensor in skeleton.state_dict().items()},
        files.entries.keys(),
    )
    optional = {"lm_head.weight"} if facts.has_tied_embeddings else set()
    faults = [
        f"missing tensor {name}"
        for name in expected
        if name not in files.entries and name not in files.lost and name not in optional
    ]
    num_surplus = 0
    for name, entry in files.entries.items():
        if _is_mtp(name, facts) or name.endswith("rotary_emb.inv_freq"):
            continue
        if name not in expected:
            # Sharing is a decision about computing; a checkpoint may still carry these weights.
            layer = _INDEXER.match(name)
            if layer and facts.indexer_types[int(layer[1])] == SHARED:
                num_surplus += 1
            else:
                faults.append(f"unexpected tensor {name}")
        elif entry.shape != expected[name]:
            faults.append(
                f"tensor {name} has shape {list(entry.shape)}, "
                f"the config makes it {list(expected[name])}"
            )
    if num_surplus:
        _log.info(
            "ignored %d indexer tensors of layers that share another layer's selection", num_surplus
        )
    return faults


def _mtp_faults(
    skeleton: GlmMoeDsaForCausalLM, facts: GlmDsaConfig, files: _Inventory
) -> list[str]:
    prefix = _mtp_prefix(facts)
    names = files.mtp_names(facts)
    if not names and not any(_is_mtp(name, facts) for name in files.lost):
        return [
            f"the MTP layer was asked for (mtp=True), but no file holds {prefix}*; "
            "use mtp=False to load the model alone"
        ]
    with torch.device("meta"):
        layer = GlmMoeDsaMtp(skeleton)
    shapes = {
        name.removeprefix(prefix): files.entries[name].shape
        for name in names
        if name.startswith(prefix)
    }
    lost = {name.removeprefix(prefix) for name in files.lost if name.startswith(prefix)}
    faults = layer.find_faults(shapes, unknown=lost)
    faults = [fault.replace("tensor ", f"tensor {prefix}", 1) for fault in faults]
    return faults + [f"unexpected tensor {name}" for name in names if not name.startswith(prefix)]


def _load_model(
    path: Path, device: torch.device | str | None, dtype: torch.dtype | None
) -> GlmMoeDsaForCausalLM:
    placement: dict[str, Any] = {}
    is_host = device is None or torch.device(device).type == "cpu"
    has_accelerate = importlib.util.find_spec("accelerate") is not None
    if not is_host and has_accelerate:
        placement["device_map"] = device
    with _quiet_transformers():
        loaded: Any = GlmMoeDsaForCausalLM.from_pretrained(
            path, dtype=dtype or "auto", output_loading_info=True, **placement
        )
    model, info = loaded
    faults = [
        f"{kind.replace('_', ' ')}: {name}"
        for kind in ("missing_keys", "mismatched_keys")
        for name in sorted(map(str, info[kind]))
    ]
    if faults:
        raise CheckpointError(_message(path, faults))
    if not is_host and not placement:
        _log.info("install accelerate to load to %s without a copy in host memory", device)
        model.to(device)
    return model.eval().requires_grad_(False)


def _refuse_quantised(path: Path, raw: Mapping[str, Any], files: _Inventory) -> None:
    declared = raw.get("quantization_config") or {}
    if not declared and (path / "hf_quant_config.json").exists():
        declared = _read_json(path / "hf_quant_config.json").get("quantization") or {}
    if not isinstance(declared, Mapping):
        raise CheckpointError(f"{path}: its quantization config is no object: {declared!r}")
    names = [declared.get("quant_method"), declared.get("quant_algo")]
    method = " ".join(str(name) for name in names if name)
    evidence = next(
        (
            name
            for name, entry in files.entries.items()
            if _QUANTISED.search(name) or entry.dtype not in _PLAIN_DTYPES
        ),
        None,
    )
    if not declared and evidence is None:
        return
    says = (
        f"its config declares {method or 'quantization'}"
        if declared
        else "its config does not say so"
    )
    holds = f"it holds {evidence}" if evidence else "it holds no quantised tensor"
    raise UnsupportedError(
        f"{path} is a quantised checkpoint ({says}; {holds}); this version loads bfloat16, float16 "
        "and float32 checkpoints"
    )


def _mtp_prefix(facts: GlmDsaConfig) -> str:
    return f"model.layers.{facts.num_hidden_layers}."


def _is_file_name(value: Any) -> bool:
    return isinstance(value, str) and value == Path(value).name != ""


def _is_mtp(name: str, facts: GlmDsaConfig) -> bool:
    layer = _LAYER.match(name)
    return layer is not None and int(layer[1]) >= facts.num_hidden_layers


def _read_config(path: Path) -> tuple[dict[str, Any], GlmDsaConfig]:
    raw = _read_json(path / "config.json")
    return raw, GlmDsaConfig.from_transformers(raw)


def _read_json(file: Path) -> dict[str, Any]:
    if not file.parent.is_dir():
        raise CheckpointError(
            f"{file.parent} is not a directory; download the checkpoint first (hf download)"
        )
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise CheckpointError(f"{file.parent} has no {file.name}") from None
    except OSError as error:
        raise CheckpointError(f"{file} cannot be read: {error.strerror}") from error
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{file} is not valid JSON: {error}") from error
    if not isinstance(content, dict):
        raise CheckpointError(f"{file} holds a JSON {type(content).__name__}, expected an object")
    return content


def _message(path: Path, faults: list[str]) -> str:
    """All faults, one a line; those that differ only in the number of an expert are one line."""
    lines = Counter(_EXPERT.sub(".experts.*.", fault) for fault in faults)
    listed = [f"{line} ({count} experts)" if count > 1 else line for line, count in lines.items()]
    return f"{path} cannot be loaded:\n" + "\n".join(f"  - {line}" for line in listed)


@contextlib.contextmanager
def _quiet_transformers() -> Iterator[None]:
    """Silence transformers' report of unused tensors: what it would say has been checked above."""
    level = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(level)
