"""causal_mask against a loop over positions."""

from __future__ import annotations

import pytest
import torch

from glm_compile.ops.causal_mask import causal_mask


def oracle(
    lengths: list[int],
    num_queries: int,
    num_keys: int,
    starts: list[int] | None = None,
    key_mask: torch.Tensor | None = None,
) -> torch.Tensor:
    seen = torch.zeros(len(lengths), 1, num_queries, num_keys, dtype=torch.bool)
    for b, length in enumerate(lengths):
        for s in range(num_queries):
            for p in range(num_keys):
                allowed = key_mask is None or bool(
                    key_mask[min(b, key_mask.shape[0] - 1), min(s, key_mask.shape[1] - 1), p]
                )
                first = starts[b] if starts else 0
                seen[b, 0, s, p] = first <= p <= length + s and allowed
    return seen


@pytest.mark.parametrize("index_dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 1, 9), (3, 4, 9), (2, 6, 5)])
def test_equals_the_loop(shape: tuple[int, int, int], index_dtype: torch.dtype) -> None:
    num_batch, num_queries, num_keys = shape
    lengths, starts = [0, 3, 5][:num_batch], [0, 2, 7][:num_batch]
    key_mask = torch.rand(num_batch, 1, num_keys + 3) > 0.3
    for starts_list in (None, starts):
        for mask in (None, key_mask):
            got = causal_mask(
                torch.tensor(lengths, dtype=index_dtype),
                num_queries,
                num_keys,
                torch.bool,
                starts_B=starts_list and torch.tensor(starts_list, dtype=index_dtype),
                key_mask=mask,
            )
            assert torch.equal(got, oracle(lengths, num_queries, num_keys, starts_list, mask))


@pytest.mark.parametrize("shape", [(1, 1, 8), (2, 1, 8), (1, 4, 8), (2, 4, 8), (4, 1), (8,)])
def test_key_mask_broadcasts(shape: tuple[int, ...]) -> None:
    key_mask = torch.rand(shape) > 0.4
    got = causal_mask(torch.tensor([2, 4]), 4, 8, torch.bool, key_mask=key_mask)
    assert torch.equal(got, oracle([2, 4], 4, 8, None, key_mask.expand(2, 4, 8)))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_floating_masks_are_zero_or_the_lowest_finite_value(dtype: torch.dtype) -> None:
    seen = causal_mask(torch.tensor([1, 0]), 2, 6, torch.bool)
    mask = causal_mask(torch.tensor([1, 0]), 2, 6, dtype)
    assert mask.dtype == dtype
    assert (mask[seen] == 0).all()
    assert (mask[~seen] == torch.finfo(dtype).min).all()


@pytest.mark.parametrize("sizes", [(0, 2, 4), (2, 0, 4), (2, 2, 0)])
def test_empty_sizes(sizes: tuple[int, int, int]) -> None:
    num_batch, num_queries, num_keys = sizes
    mask = causal_mask(
        torch.zeros(num_batch, dtype=torch.int32), num_queries, num_keys, torch.float32
    )
    assert mask.shape == (num_batch, 1, num_queries, num_keys)


def test_refuses_wrong_arguments() -> None:
    lengths = torch.zeros(2, dtype=torch.int32)
    with pytest.raises(ValueError, match=r"causal_mask: dtype must be .*, got torch.int32"):
        causal_mask(lengths, 1, 4, torch.int32)
    with pytest.raises(ValueError, match="causal_mask: lengths must be int32 or int64"):
        causal_mask(lengths.float(), 1, 4, torch.bool)
    with pytest.raises(ValueError, match="causal_mask: starts must hold one value a row"):
        causal_mask(lengths, 1, 4, torch.bool, starts_B=lengths[:1])
    with pytest.raises(ValueError, match="causal_mask: key_mask must be bool"):
        causal_mask(lengths, 1, 4, torch.bool, key_mask=torch.zeros(1, 1, 4))
    with pytest.raises(ValueError, match="causal_mask: key_mask must broadcast"):
        causal_mask(lengths, 1, 4, torch.bool, key_mask=torch.zeros(1, 1, 3, dtype=torch.bool))


def test_op_passes_opcheck() -> None:
    lengths, starts = torch.tensor([1, 5]), torch.tensor([0, 2])
    key_mask = torch.ones(1, 1, 9, dtype=torch.bool)
    op = torch.ops.glm.causal_mask.default
    torch.library.opcheck(op, (lengths, starts, key_mask, 3, 8, torch.float32))
    torch.library.opcheck(op, (lengths, None, None, 3, 8, torch.bool))


def test_compiles_once_for_all_lengths_and_sizes() -> None:
    from torch._dynamo.testing import CompileCounterWithBackend

    counter = CompileCounterWithBackend("aot_eager")

    def mask_of(lengths: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
        return causal_mask(lengths, like.shape[0], like.shape[1], torch.bool)

    compiled = torch.compile(mask_of, backend=counter, fullgraph=True, dynamic=True)
    for num_queries, num_keys in ((3, 7), (4, 9), (5, 12)):
        got = compiled(torch.tensor([1, 4]), torch.empty(num_queries, num_keys))
        assert torch.equal(got, oracle([1, 4], num_queries, num_keys))
    assert counter.frame_count == 1
