"""Fixtures of every test: fixed seeds, no gradients, a fresh Dynamo."""

from __future__ import annotations

import gc
import importlib
import os
from collections.abc import Iterator

import pytest
import torch

if os.environ.get("TRITON_INTERPRET") == "1":
    from tests import triton_interpreter

    triton_interpreter.install()


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip what this process cannot run: GPU tests without a GPU, interpreter tests without it."""
    interpreting = os.environ.get("TRITON_INTERPRET") == "1"
    for item in items:
        if "gpu" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if ("interpreter" in item.keywords) != interpreting:
            reason = "runs only" if "interpreter" in item.keywords else "does not run"
            item.add_marker(pytest.mark.skip(reason=f"{reason} under TRITON_INTERPRET=1"))


def pytest_collection_finish() -> None:
    """Collect garbage seldom, and never in what was imported: a tenth of a compilation's time.

    The backend looks through all objects for modules as well; those of imports are half a million.
    """
    importlib.import_module("torch._inductor.compile_fx")  # as every compilation does
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 10, 10)


@pytest.fixture
def cute_gpu(request: pytest.FixtureRequest) -> None:
    """For tests of CuTe kernels: skips those marked `gpu` where the GPU is none they run on."""
    if "gpu" in request.node.keywords and torch.cuda.is_available():
        from glm_compile.ops._cute import why_no_cute

        if (reason := why_no_cute(torch.empty(0, device="cuda"))) is not None:
            pytest.skip(reason)


@pytest.fixture(autouse=True)
def _fresh_state() -> Iterator[None]:
    torch.manual_seed(0)
    torch._dynamo.reset()
    with torch.no_grad():
        yield
