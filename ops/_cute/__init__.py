"""What kernels written in CuTe DSL share on the host: whether they can run, and compiling them.

Importing this needs no CuTe DSL; `compile_kernel` does. Device functions that several kernels share
are in `device.py`, those of kernels that stream weights in `stream.py` and `ring.py`; `fakes.py`
tells the compiler what a kernel takes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from glm_compile.ops._dispatch import is_installed, num_multiprocessors

__all__ = ["arch_of", "compile_kernel", "rows_to_load", "why_no_cute"]

_ARCHS = {(9, 0): "sm_90a", (10, 0): "sm_100a", (10, 3): "sm_103a"}


# Clusters of 16 blocks need a processing cluster with as many multiprocessors; slices of a GPU may
# have none.
_LEAST_MULTIPROCESSORS = 64


def why_no_cute(
    tensor: torch.Tensor, *others: torch.Tensor | None, archs: Sequence[str] = ("sm_90a",)
) -> str | None:
    """Reason why a kernel written for `archs` cannot take these tensors, or None."""
    for module in ("cutlass", "tvm_ffi"):
        if not is_installed(module):
            return f"CuTe DSL is not complete: no module {module!r} (pip install -e '.[cute]')"
    if not tensor.is_cuda:
        return f"CuTe kernels need CUDA tensors, got {tensor.device}"
    if (arch := arch_of(tensor.device)) not in archs:
        return f"written for {', '.join(archs)}, and {tensor.device} is {arch}"
    if (number := num_multiprocessors(tensor.device)) < _LEAST_MULTIPROCESSORS:
        return f"written for a whole GPU, and {tensor.device} has {number} multiprocessors"
    for other in others:
        if other is not None and other.device != tensor.device:
            return f"everything must be on {tensor.device}, got {other.device}"
    return None


@functools.cache
def arch_of(device: torch.device) -> str:
    """The architecture of a CUDA device as CuTe DSL spells it, such as `sm_90a`."""
    capability = torch.cuda.get_device_capability(device)
    return _ARCHS.get(capability, "sm_{}{}".format(*capability))


def rows_to_load(x: torch.Tensor) -> torch.Tensor:
    """A bf16 matrix whose rows can be loaded 16 bytes at a time: x, or a dense copy."""
    if x.shape[0] == 1:
        # The stride of the only row means nothing, and may be anything.
        x = x.as_strided(x.shape, (-(-x.shape[1] // 8) * 8, x.stride(1)))
    if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    return x


def compile_kernel(launcher: Any, *args: Any, arch: str, options: str = "") -> Callable[..., None]:
    """Compile a `cute.jit` launcher for `arch`; the result takes torch tensors and Python numbers.

    The last parameter of the launcher is the stream: it is added here and left out in calls, which
    launch on torch's current stream. Compiling takes about 0.1 s to 1 s, so callers cache by what
    they specialised.

    Args:
        launcher: a `cute.jit` function.
        *args: fake tensors (`cutlass.cute.runtime`), CuTe numbers and constants of the launcher.
        arch: `sm_90a` or `sm_100a`.
        options: further compile options, as `cute.compile` spells them.
    """
    import cutlass.cute as cute
    from cutlass.cute.runtime import make_fake_stream

    stream = make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(
        launcher, *args, stream, options=f"--gpu-arch={arch} --enable-tvm-ffi {options}"
    )
