"""Merged linears: one product for neighbouring weights, the same numbers otherwise.

Shape legend: K in features, N out features.
"""

from __future__ import annotations

import copy

import pytest
import torch

from glm_compile.ops import merged_linear as package
from glm_compile.ops.bf16_linear import bf16_linear
from glm_compile.ops.merged_linear import adjacent_block, merged_linear
from glm_compile.ops.merged_linear.reference import merged_linear_reference

ROWS = (5, 1, 8)


def _block(K=24, dtype=torch.bfloat16, offset=0):
    block = torch.randn(offset + sum(ROWS) + 2, K).to(dtype)
    return list(block[offset : offset + sum(ROWS)].split(ROWS))


def _count_products(monkeypatch):
    calls = []
    real = package._linear
    monkeypatch.setattr(
        package, "_linear", lambda x, w, d: calls.append(tuple(w.shape)) or real(x, w, d)
    )
    return calls


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float16])
@pytest.mark.parametrize("shape", [(6, 24), (2, 3, 24), (24,), (0, 24), (1, 0, 24)])
def test_one_product_for_neighbours_and_the_same_numbers(monkeypatch, dtype, shape):
    calls = _count_products(monkeypatch)
    weights = _block(dtype=dtype, offset=1)
    x = torch.randn(shape).to(dtype)
    output = merged_linear(x, weights)
    assert calls == [(14, 24)]
    assert output.shape == (*shape[:-1], 14) and output.is_contiguous()
    apart = merged_linear(x, [w.clone() for w in weights])
    assert calls[1:] == [(n, 24) for n in ROWS]
    scale = 24**0.5
    tolerance = 4 * torch.finfo(dtype).eps
    for result in (output, apart):
        torch.testing.assert_close(
            result, merged_linear_reference(x, weights), rtol=tolerance, atol=tolerance * scale
        )
        expected = torch.cat([x.double() @ w.double().T for w in weights], -1)
        torch.testing.assert_close(
            result.double(), expected, rtol=tolerance, atol=tolerance * scale
        )


@pytest.mark.gpu
def test_gpu_weights_that_lie_apart_are_said_once(caplog):
    weights = [w.clone() for w in torch.randn(14, 40, device="cuda").split(ROWS)]
    x = torch.randn(2, 40, device="cuda")
    for _ in range(2):
        merged_linear(x, weights)
    assert len(caplog.records) == 1 and "merge_weights(model)" in caplog.text
    assert "(5, 40), (1, 40), (8, 40)" in caplog.text


def test_the_block_is_a_view():
    weights = _block()
    block = adjacent_block(weights)
    assert block is not None
    assert block.data_ptr() == weights[0].data_ptr()
    assert torch.equal(block, torch.cat(weights))


def test_weights_that_are_not_neighbours_are_seen():
    a, b, c = _block()
    assert adjacent_block([a, c]) is None  # a gap
    assert adjacent_block([b, a, c]) is None  # another order
    assert adjacent_block([a, a]) is None  # overlap
    assert adjacent_block([a, b.clone(), c]) is None
    assert adjacent_block([a[:, :20], b[:, :20]]) is None  # rows with gaps
    assert adjacent_block([a.T, b.T]) is None
    assert adjacent_block([a, b.view(torch.float16), c]) is None
    assert adjacent_block([a, b.view(torch.float16).view(2, -1)]) is None
    assert adjacent_block([a]) is a


def test_neighbours_in_memory_of_two_storages_are_not_one_block():
    """The next allocation may follow directly; a view must not cross into another storage."""
    raw = bytearray(4 * 10 * 8)
    whole = torch.frombuffer(raw, dtype=torch.float32).view(10, 8)
    first = torch.frombuffer(memoryview(raw)[: 4 * 32], dtype=torch.float32).view(4, 8)
    second = torch.frombuffer(memoryview(raw)[4 * 32 :], dtype=torch.float32).view(6, 8)
    assert second.data_ptr() == first.data_ptr() + 4 * 32
    assert adjacent_block([first, second]) is None
    assert adjacent_block([whole[:4], whole[4:]]) is not None


def test_copies_and_casts_of_a_model_stay_right():
    x = torch.randn(3, 24)
    weights = [torch.nn.Parameter(w) for w in _block(dtype=torch.float32)]
    module = torch.nn.ParameterList(weights)
    expected = merged_linear(x, list(module))
    assert adjacent_block(list(module)) is not None
    copied = copy.deepcopy(module)
    assert adjacent_block(list(copied)) is None
    torch.testing.assert_close(merged_linear(x, list(copied)), expected)
    cast = copied.to(torch.float64)
    torch.testing.assert_close(merged_linear(x, list(cast)).float(), expected)


def test_no_weight_is_copied(monkeypatch):
    weights = _block()
    seen = []
    monkeypatch.setattr(
        package,
        "run_bf16_linear",
        lambda x, w, *rest: seen.append(w.data_ptr()) or torch.zeros(3, w.shape[0]),
    )
    x = torch.randn(3, 24).bfloat16()
    merged_linear(x, weights)
    merged_linear(x, [weights[2], weights[0]])
    assert seen == [weights[0].data_ptr(), weights[2].data_ptr(), weights[0].data_ptr()]


def test_mixed_dtypes_keep_the_precision_of_each_weight():
    x = torch.randn(4, 24).bfloat16()
    low, high = torch.randn(5, 24).bfloat16(), torch.randn(3, 24)
    output = merged_linear(x, [low, high])
    assert output.dtype == torch.float32
    assert torch.equal(output[:, :5], torch.nn.functional.linear(x, low).float())
    assert torch.equal(output[:, 5:], torch.nn.functional.linear(x.float(), high))


def test_bf16_linear_takes_a_list():
    weights = _block()
    x = torch.randn(2, 3, 24).bfloat16()
    assert torch.equal(bf16_linear(x, weights), merged_linear(x, weights))
    with pytest.raises(ValueError, match="no bias, residual or backend"):
        bf16_linear(x, weights, backend="reference")


def test_deterministic_rows_do_not_depend_on_their_number():
    weights = _block(K=640)
    x = torch.randn(40, 640).bfloat16()
    whole = merged_linear(x, weights, deterministic=True)
    for M in (1, 3, 16, 17):
        assert torch.equal(merged_linear(x[:M], weights, deterministic=True), whole[:M])


@pytest.mark.parametrize("adjacent", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_opcheck(adjacent, dtype):
    weights = _block(dtype=dtype)
    if not adjacent:
        weights = [w.clone() for w in weights]
    x = torch.randn(2, 3, 24).to(dtype)
    torch.library.opcheck(torch.ops.glm.merged_linear.default, (x, weights, False))


def test_compiled_parameters_stay_neighbours(monkeypatch):
    calls = _count_products(monkeypatch)
    weights = [torch.nn.Parameter(w, requires_grad=False) for w in _block()]

    def step(x):
        return merged_linear(x, weights) * 2

    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    for S in (3, 5, 9):
        x = torch.randn(2, S, 24).bfloat16()
        torch._dynamo.mark_dynamic(x, 1)
        assert torch.equal(compiled(x), step(x))
    assert set(calls) == {(14, 24)}


def test_wrong_arguments_are_named():
    x = torch.randn(2, 24)
    with pytest.raises(ValueError, match="at least one weight"):
        merged_linear(x, [])
    with pytest.raises(ValueError, match=r"floating \[N, 24\]"):
        merged_linear(x, [torch.randn(3, 23)])
    with pytest.raises(ValueError, match="floating"):
        merged_linear(x, [torch.ones(3, 24, dtype=torch.int8)])
    with pytest.raises(ValueError, match=r"x must be \[\.\.\., K\]"):
        merged_linear(x[0, 0], [torch.randn(3, 1)])
