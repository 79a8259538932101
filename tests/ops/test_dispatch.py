"""Choice of backends: the first that can, reasons of those that cannot, old GPUs without FP8."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from glm_compile.ops import _dispatch, fp8_quant, indexer_prologue, indexer_scores, paged_cache

BACKENDS = (
    _dispatch.Backend("triton", lambda x: "x is odd" if x % 2 else None, lambda x: ("triton", x)),
    _dispatch.Backend("reference", _dispatch.always, lambda x: ("reference", x)),
)


@pytest.mark.parametrize(("x", "expected"), [(2, "triton"), (3, "reference")])
@pytest.mark.parametrize("forced", [None, ""])
def test_the_first_that_can_runs(x, expected, forced):
    assert _dispatch.run("op", BACKENDS, forced, x) == (expected, x)


def test_a_forced_backend_runs_or_says_why_not():
    assert _dispatch.run("op", BACKENDS, "reference", 2) == ("reference", 2)
    with pytest.raises(ValueError, match=r"op: backend 'triton' cannot run this call: x is odd"):
        _dispatch.run("op", BACKENDS, "triton", 3)
    with pytest.raises(ValueError, match=r"op: unknown backend 'cute'; .*'triton', 'reference'"):
        _dispatch.run("op", BACKENDS, "cute", 2)


class OldGpuTensor(SimpleNamespace):
    """What predicates look at of a tensor on a GPU."""

    def __init__(self, *shape: int, dtype: torch.dtype = torch.bfloat16) -> None:
        super().__init__(shape=shape, dtype=dtype, is_cuda=True, device=torch.device("cuda", 0))

    def dim(self) -> int:
        return len(self.shape)


def test_fp8_kernels_need_a_gpu_that_has_fp8(monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _device: (8, 0))
    table, lengths = OldGpuTensor(1, 4), OldGpuTensor(1)
    pages, key = OldGpuTensor(4, 64 * 132), OldGpuTensor(1, 2, 128)
    q, gates, vector, table_of_angles = (
        OldGpuTensor(*shape) for shape in ((1, 2, 16, 128), (1, 2, 16), (128,), (1, 2, 64))
    )
    prologue = (q, key, gates, vector, vector, 1e-6, table_of_angles, table_of_angles, True, 0.25)
    calls = (
        (fp8_quant._BACKENDS, (key, False)),
        (paged_cache._WRITE_FP8, (pages, key, table, lengths)),
        (paged_cache._GATHER_FP8, (pages, table, 256, 128, torch.bfloat16)),
        (indexer_prologue._BACKENDS["indexer_prologue_fp8"], (*prologue, pages, table, lengths)),
        (
            (indexer_scores._PAGED_TRITON, indexer_scores._PAGED_REFERENCE),
            (
                OldGpuTensor(2, 16, 128, dtype=torch.float8_e4m3fn),
                *(OldGpuTensor(2, 16), pages, table, OldGpuTensor(2), 256, None, None, 2),
            ),
        ),
    )
    for (triton, _reference), arguments in calls:
        reason = triton.why_not(*arguments)
        assert reason == "FP8 needs compute capability 8.9, got 8.0", triton
    # Those that hold no FP8 ask for nothing.
    for backends, arguments in (
        (paged_cache._WRITE, (OldGpuTensor(4, 64, 128), key, table, lengths)),
        (paged_cache._GATHER, (OldGpuTensor(4, 64, 128), table, 256)),
        (indexer_prologue._BACKENDS["indexer_prologue"], prologue),
    ):
        reason = backends[0].why_not(*arguments)
        assert reason is None or "FP8" not in reason


def test_calls_are_seen_while_somebody_observes():
    seen = []
    with _dispatch.observed(lambda *call: seen.append(call)):
        _dispatch.run("op", BACKENDS, None, 3)
    _dispatch.run("op", BACKENDS, None, 5)
    assert seen == [("op", 3)]


def test_calls_within_a_kernel_are_shown_to_observers_only():
    made, seen = [], []

    def arguments():
        made.append(True)
        return 1, 2

    _dispatch.show("inner", arguments)
    assert not made
    with _dispatch.observed(lambda op, *args: seen.append((op, *args))):
        _dispatch.show("inner", arguments)
    assert seen == [("inner", 1, 2)] and made == [True]
