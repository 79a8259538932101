"""Registration of ops in the `glm` namespace.

`torch.library.Library` with written-out schemas is used instead of `custom_op`: it costs a third
per call, and calls are what is left of a decode step once the kernels are fast.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

# One fragment for the process; it must outlive every op, or torch deregisters them.
_LIBRARY = torch.library.Library("glm", "FRAGMENT")


def register_op(schema: str, impl: Callable, fake: Callable) -> Callable:
    """Register one op for every device and return the callable `torch.ops.glm.<name>.default`.

    Args:
        schema: e.g. `"topk_select(Tensor scores, ...) -> Tensor"`; a mutated argument is marked
            `Tensor(a!)`, and what such an op returns is new memory.
        impl: called for CPU and CUDA tensors; it dispatches between backends itself
            (`_dispatch.run`), so that graphs do not depend on the machine.
        fake: same dtypes, shapes and strides as `impl` without reading data or specialising sizes.
    """
    name = schema.split("(", 1)[0]
    _LIBRARY.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _LIBRARY.impl(name, impl, "CompositeExplicitAutograd")
    torch.library.register_fake(f"glm::{name}", fake, lib=_LIBRARY)
    return getattr(torch.ops.glm, name).default
