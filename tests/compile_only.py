"""Compile kernels for a GPU that this machine does not have, and read what they use.

The specialization is the one that the launcher would give: pointers by their real alignment,
integers by divisibility by 16, the value 1 as a constant, None as a constant. A kernel compiled
without it is another kernel: a GEMM with plain integers takes 255 registers and spills 2.6 KB.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ARCHS = ("sm_90a", "sm_100a")

_POINTERS = {
    torch.float64: "*fp64",
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.float8_e4m3fn: "*fp8e4nv",
    torch.float8_e5m2: "*fp8e5",
    torch.uint8: "*u8",
    torch.int8: "*i8",
    torch.int16: "*i16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint32: "*u32",
    torch.uint64: "*u64",
    torch.bool: "*i1",
}
_DIVISIBLE = [["tt.divisibility", 16]]


@dataclass(frozen=True)
class CompiledKernel:
    """What a kernel needs on one architecture.

    Attributes:
        registers: per thread.
        stack_bytes: local memory per thread; spills end up here.
        shared_bytes: shared memory per block, as the launcher would ask for it.
        ptx: the assembly, for counting instructions.
        cubin: the machine code.
        ttgir: Triton's GPU dialect, for asserting on layouts and integer widths; None from CuTe.
    """

    registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str
    cubin: bytes
    ttgir: str | None = None


def compile_triton(
    kernel: Any,
    args: Sequence[Any],
    constexprs: Mapping[str, Any],
    arch: str,
    **options: Any,
) -> CompiledKernel:
    """Compile `kernel` for `arch` as a launch with these arguments would.

    Args:
        kernel: a `triton.jit` function.
        args: one value for each argument that is not a constexpr, in order: tensors (meta tensors
            do; only dtype and alignment count), ints, floats, bools, None.
        constexprs: values of the constexpr arguments by name; defaults may be left out.
        arch: `sm_90a` or `sm_100a`.
        **options: launch options: num_warps, num_stages, maxnreg, ...
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    signature: dict[str, str] = {}
    constants: dict[tuple[int], Any] = {}
    attributes: dict[tuple[int], list] = {}
    values = iter(args)
    for position, parameter in enumerate(kernel.params):
        name = parameter.name
        if parameter.is_constexpr:
            signature[name] = "constexpr"
            constants[(position,)] = constexprs.get(name, parameter.default)
            continue
        value = next(values)
        kind, constant, is_divisible = _specialize(value, parameter)
        signature[name] = kind
        if constant:
            constants[(position,)] = value
        elif is_divisible:
            attributes[(position,)] = _DIVISIBLE
    assert next(values, None) is None, "more arguments than the kernel takes"
    unknown = set(constexprs) - {p.name for p in kernel.params if p.is_constexpr}
    assert not unknown, f"no such constexprs: {sorted(unknown)}"

    compiled = triton.compile(
        ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attributes),
        target=GPUTarget("cuda", {"sm_90a": 90, "sm_100a": 100}[arch], 32),
        options=options or None,
    )
    registers, stack_bytes = read_resources(compiled.asm["cubin"])
    return CompiledKernel(
        registers=registers,
        stack_bytes=stack_bytes,
        shared_bytes=compiled.metadata.shared,
        ptx=compiled.asm["ptx"],
        cubin=compiled.asm["cubin"],
        ttgir=compiled.asm["ttgir"],
    )


def compile_cute(compile_for: Callable[[str], Any], arch: str, folder: Path) -> CompiledKernel:
    """Compile a CuTe kernel for `arch` through the function that its host code uses.

    Args:
        compile_for: takes further compile options, returns what `compile_kernel` returns.
        arch: `sm_90a` or `sm_100a`; `compile_for` compiles for it.
        folder: where the compiler leaves its files; it must exist.
    """
    compiled = compile_for(f"--keep-ptx --keep-cubin --dump-dir={folder}")
    registers, stack_bytes = read_resources(compiled.__cubin__)
    ptx = compiled.__ptx__
    assert f".target {arch}" in ptx, f"not compiled for {arch}"
    return CompiledKernel(registers, stack_bytes, _shared_bytes(ptx), ptx, compiled.__cubin__)


def _shared_bytes(ptx: str) -> int:
    """Static shared memory that the PTX declares; what a launch asks for comes on top."""
    return sum(int(n) for n in re.findall(r"\.shared [^;]*\.b8 [\w$]+\[(\d+)\]", ptx))


def _specialize(value: Any, parameter: Any) -> tuple[str, bool, bool]:
    """(signature type, is it a constant, is it divisible by 16) as Triton's launcher decides."""
    aligned = not (parameter.do_not_specialize or parameter.do_not_specialize_on_alignment)
    if value is None:
        return "constexpr", True, False
    if isinstance(value, torch.Tensor):
        address = (
            value.storage_offset() * value.element_size() if value.is_meta else value.data_ptr()
        )
        return _POINTERS[value.dtype], False, aligned and address % 16 == 0
    if isinstance(value, bool):
        return "u1", False, False
    if isinstance(value, float):
        return "fp32", False, False
    assert isinstance(value, int), f"{parameter.name}: cannot specialize {type(value)}"
    if value == 1 and not parameter.do_not_specialize:
        return "constexpr", True, False
    kind = "i32" if -(2**31) <= value < 2**31 else "i64"
    annotated = parameter.annotation_type
    return annotated or kind, False, aligned and value % 16 == 0


_ATTRIBUTE_WITH_SIZE = 4
_REGISTER_COUNT = 0x2F
_FRAME_SIZE = 0x11


def read_resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of the one kernel in a cubin, from its `.nv.info` section."""
    assert cubin[:4] == b"\x7fELF", "not a cubin"
    (table,) = struct.unpack_from("<Q", cubin, 0x28)
    entry_bytes, num_sections, names_index = struct.unpack_from("<HHH", cubin, 0x3A)
    sections = [
        struct.unpack_from("<IIQQQQIIQQ", cubin, table + i * entry_bytes)
        for i in range(num_sections)
    ]
    names_offset = sections[names_index][4]
    found: dict[int, int] = {}
    for section in sections:
        start = names_offset + section[0]
        if cubin[start : cubin.index(b"\0", start)] != b".nv.info":
            continue
        offset, end = section[4], section[4] + section[5]
        while offset < end:
            form, attribute = cubin[offset], cubin[offset + 1]
            if form == _ATTRIBUTE_WITH_SIZE:
                (size,) = struct.unpack_from("<H", cubin, offset + 2)
                if size == 8:
                    _symbol, value = struct.unpack_from("<II", cubin, offset + 4)
                    found[attribute] = max(found.get(attribute, 0), value)
                offset += size
            offset += 4
    return found[_REGISTER_COUNT], found[_FRAME_SIZE]
