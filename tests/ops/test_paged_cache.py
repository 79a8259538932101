"""Paged cache access against a loop over tokens, and FP8 pages byte for byte.

Shape legend: B batch, S tokens of the step, X row width, D head dim, P pages of a sequence.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch._dynamo.testing import CompileCounter

from glm_compile.ops.paged_cache import (
    advance,
    key_page_bytes,
    paged_gather,
    paged_gather_fp8,
    paged_write,
    paged_write_fp8,
)
from glm_compile.ops.paged_cache.reference import (
    paged_gather_fp8_reference,
    paged_gather_reference,
    paged_write_fp8_reference,
    paged_write_reference,
)
from tests.ops.fp8_packer import pack_row, store_row

NUM_PAGES = 9
TABLE = torch.tensor([[7, 2, 5], [0, 8, -1], [3, -1, 6]], dtype=torch.int32)
# Row borders, an empty sequence, one that runs off its table.
LENGTHS = [(0, 63, 64), (62, 1, 127), (190, 65, 0), (130, 126, 60)]


def _tokens(lengths, num_tokens):
    """(b, s, page, row) of the tokens that have a page."""
    for b, length in enumerate(lengths):
        for s in range(num_tokens):
            position = int(length) + s
            if 0 <= position < TABLE.shape[1] * 64 and TABLE[b, position // 64] >= 0:
                yield b, s, int(TABLE[b, position // 64]), position % 64


def _new(B, S, X, dtype=torch.float32):
    """Values with strides that no kernel expects: a slice of a wider, transposed tensor."""
    return torch.randn(S, B, X + 3).to(dtype).transpose(0, 1)[:, :, 2 : X + 2]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("S", [1, 6, 70])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("length_dtype", [torch.int32, torch.int64])
def test_write_goes_to_page_and_row_of_each_token(lengths, S, dtype, length_dtype):
    pages = torch.randn(NUM_PAGES, 64, 5).to(dtype)
    expected = pages.clone()
    new = _new(3, S, 5, dtype)
    for b, s, page, row in _tokens(lengths, S):
        expected[page, row] = new[b, s]
    address = pages.data_ptr()
    assert paged_write(pages, new, TABLE, torch.tensor(lengths, dtype=length_dtype)) is None
    assert pages.data_ptr() == address
    assert torch.equal(pages, expected)


@pytest.mark.parametrize("max_len", [1, 63, 64, 65, 130, 192, 200])
def test_gather_returns_rows_in_order_and_zeros_without_a_page(max_len):
    pages = torch.randn(NUM_PAGES, 64, 5)
    rows = paged_gather(pages, TABLE, max_len)
    assert rows.shape == (3, max_len, 5) and rows.is_contiguous()
    expected = torch.zeros(3, max_len, 5)
    for b, s, page, row in _tokens((0, 0, 0), max_len):
        expected[b, s] = pages[page, row]
    assert torch.equal(rows, expected)


def test_written_rows_come_back():
    pages = torch.full((NUM_PAGES, 64, 5), float("nan"))
    lengths = torch.tensor([0, 0, 0])
    history = torch.zeros(3, 192, 5)
    for S in (40, 30, 1, 6, 6, 60):
        new = torch.randn(3, S, 5)
        history[:, int(lengths[0]) : int(lengths[0]) + S] = new
        paged_write(pages, new, TABLE, lengths)
        advance(lengths, S)
    gathered = paged_gather(pages, TABLE, 143)
    for b in range(3):
        for t in range(143):
            has_page = TABLE[b, t // 64] >= 0
            assert torch.equal(gathered[b, t], history[b, t] * has_page)


def test_write_casts_to_the_pages_dtype():
    pages = torch.zeros(NUM_PAGES, 64, 5, dtype=torch.bfloat16)
    new = torch.randn(3, 2, 5)
    paged_write(pages, new, TABLE, torch.tensor([0, 0, 0]))
    assert torch.equal(pages[7, :2], new[0].bfloat16())


def test_nothing_to_write():
    pages = torch.ones(NUM_PAGES, 64, 5)
    for B, S in ((0, 3), (3, 0)):
        paged_write(pages, torch.zeros(B, S, 5), TABLE[:B], torch.zeros(B, dtype=torch.int64))
    paged_write(pages, torch.zeros(3, 2, 5), TABLE, torch.tensor([-2, -5, 192]))
    assert torch.equal(pages, torch.ones_like(pages))
    assert paged_gather(pages, TABLE[:0], 7).shape == (0, 7, 5)
    assert paged_gather(pages, TABLE, 0).shape == (3, 0, 5)


def test_a_table_without_columns_has_no_page():
    pages, lengths = torch.ones(NUM_PAGES, 64, 5), torch.zeros(3, dtype=torch.int32)
    key_pages = torch.ones(NUM_PAGES, key_page_bytes(32), dtype=torch.uint8)
    paged_write(pages, torch.zeros(3, 2, 5), TABLE[:, :0], lengths)
    paged_write_fp8(key_pages, torch.zeros(3, 2, 32), TABLE[:, :0], lengths)
    assert pages.eq(1).all() and key_pages.eq(1).all()
    assert torch.equal(paged_gather(pages, TABLE[:, :0], 7), torch.zeros(3, 7, 5))


def test_pages_may_be_strided():
    storage = torch.zeros(NUM_PAGES, 64, 8)
    new = torch.randn(3, 4, 5)
    paged_write(storage[:, :, 1:6], new, TABLE, torch.tensor([61, 62, 63]))
    plain = torch.zeros(NUM_PAGES, 64, 5)
    paged_write(plain, new, TABLE, torch.tensor([61, 62, 63]))
    assert torch.equal(storage[:, :, 1:6], plain)
    assert torch.equal(storage[:, :, 0], torch.zeros(NUM_PAGES, 64))
    assert torch.equal(paged_gather(storage[:, :, 1:6], TABLE, 99), paged_gather(plain, TABLE, 99))


@pytest.mark.parametrize("head_dim", [128, 64, 32, 20])
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_pages_equal_an_independent_packer_byte_for_byte(head_dim, lengths, dtype):
    pages = torch.randint(0, 256, (NUM_PAGES, key_page_bytes(head_dim)), dtype=torch.uint8)
    expected = pages.numpy().copy()
    new = _new(3, 4, head_dim, dtype)
    new[0, 0] = 0
    new[1, 1] *= 1e-6
    new[2, 2] *= 1e4
    for b, s, page, row in _tokens(lengths, 4):
        store_row(expected, page, row, new[b, s].float().numpy().astype(np.float32))
    paged_write_fp8(pages, new, TABLE, torch.tensor(lengths))
    assert np.array_equal(pages.numpy(), expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("max_len", [1, 64, 70, 200])
def test_fp8_gather_dequantises(dtype, max_len):
    pages = torch.zeros(NUM_PAGES, key_page_bytes(32), dtype=torch.uint8)
    new = torch.randn(3, 70, 32) * 3
    paged_write_fp8(pages, new, TABLE, torch.tensor([0, 0, 0]))
    rows = paged_gather_fp8(pages, TABLE, max_len, head_dim=32, dtype=dtype)
    assert rows.shape == (3, max_len, 32) and rows.is_contiguous() and rows.dtype == dtype
    expected = torch.zeros(3, max_len, 32)
    for b, s, _page, _row in _tokens((0, 0, 0), min(max_len, 70)):
        codes, scale = pack_row(new[b, s].numpy())
        values = torch.frombuffer(bytearray(codes), dtype=torch.float8_e4m3fn).float()
        expected[b, s] = values * torch.frombuffer(bytearray(scale), dtype=torch.float32)
    assert torch.equal(rows, expected.to(dtype))


def test_fp8_error_is_that_of_the_format():
    pages = torch.zeros(NUM_PAGES, key_page_bytes(128), dtype=torch.uint8)
    new = torch.randn(3, 60, 128) * 5
    paged_write_fp8(pages, new, TABLE, torch.tensor([0, 0, 0]))
    rows = paged_gather_fp8(pages, TABLE, 60, head_dim=128, dtype=torch.float32)
    scale = new.abs().amax(-1, keepdim=True) / 448
    assert ((rows - new).abs() <= new.abs() * 2.0**-4 + scale * 2.0**-10).all()


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_advance_adds_in_place(dtype):
    lengths = torch.tensor([3, 0, 70], dtype=dtype)
    assert advance(lengths, 6) is None
    assert lengths.tolist() == [9, 6, 76]


def test_opcheck():
    ops, lengths = torch.ops.glm, torch.tensor([1, 63, 70])
    pages, new = torch.randn(NUM_PAGES, 64, 5), _new(3, 4, 5)
    key_pages = torch.zeros(NUM_PAGES, key_page_bytes(32), dtype=torch.uint8)
    torch.library.opcheck(ops.paged_write.default, (pages, new, TABLE, lengths))
    torch.library.opcheck(ops.paged_gather.default, (pages, TABLE, 70))
    torch.library.opcheck(ops.paged_write_fp8.default, (key_pages, _new(3, 4, 32), TABLE, lengths))
    torch.library.opcheck(ops.paged_gather_fp8.default, (key_pages, TABLE, 70, 32, torch.bfloat16))
    torch.library.opcheck(ops.advance.default, (lengths, 3))


def test_compiled_step_writes_whole_tensors_and_compiles_once():
    def step(pages, key_pages, new, keys, lengths):
        paged_write(pages, new, TABLE, lengths)
        paged_write_fp8(key_pages, keys, TABLE, lengths)
        rows = paged_gather(pages, TABLE, 130)
        advance(lengths, new.shape[1])
        return rows * 2, paged_gather_fp8(key_pages, TABLE, 130, head_dim=32, dtype=torch.float32)

    counter = CompileCounter()
    counted = torch.compile(step, backend=counter, fullgraph=True)
    compiled = torch.compile(step, backend="aot_eager", fullgraph=True)
    states = [
        [
            torch.zeros(NUM_PAGES, 64, 5),
            torch.zeros(NUM_PAGES, key_page_bytes(32), dtype=torch.uint8),
            torch.tensor([60, 3, 0]),
        ]
        for _ in range(3)
    ]
    addresses = [tensor.data_ptr() for tensor in states[0]]
    for S in (3, 2, 9):
        new, keys = torch.randn(3, S, 5), torch.randn(3, S, 32)
        torch._dynamo.mark_dynamic(new, 1)
        torch._dynamo.mark_dynamic(keys, 1)
        results = [
            run(state[0], state[1], new, keys, state[2])
            for run, state in zip((compiled, step, counted), states)
        ]
        for one, other in zip(results[0], results[1]):
            assert torch.equal(one, other)
        for one, other in zip(states[0], states[1]):
            assert torch.equal(one, other)
    assert [tensor.data_ptr() for tensor in states[0]] == addresses
    assert states[0][2].tolist() == [74, 17, 14]
    assert counter.frame_count == 1


def test_wrong_arguments_are_named():
    pages, new = torch.zeros(NUM_PAGES, 64, 5), torch.zeros(3, 2, 5)
    key_pages = torch.zeros(NUM_PAGES, key_page_bytes(32), dtype=torch.uint8)
    lengths = torch.zeros(3, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"pages must be \[pages, 64, X\]"):
        paged_write(pages[:, :32], new, TABLE, lengths)
    with pytest.raises(ValueError, match="do not fit pages of 5"):
        paged_write(pages, torch.zeros(3, 2, 4), TABLE, lengths)
    with pytest.raises(ValueError, match="one batch size expected"):
        paged_write(pages, new, TABLE, lengths[:2])
    with pytest.raises(ValueError, match="block table"):
        paged_write(pages, new, TABLE[0], lengths)
    with pytest.raises(ValueError, match="has 2304 bytes, got 2000"):
        paged_write_fp8(key_pages[:, :2000].contiguous(), torch.zeros(3, 2, 32), TABLE, lengths)
    with pytest.raises(ValueError, match="must be uint8"):
        paged_gather_fp8(pages, TABLE, 3, head_dim=32, dtype=torch.float32)
    with pytest.raises(ValueError, match="multiple of 4"):
        paged_gather_fp8(key_pages, TABLE, 3, head_dim=30, dtype=torch.float32)
    with pytest.raises(ValueError, match="paged_write: block_table must be int32 or int64"):
        paged_write(pages, new, TABLE.float(), lengths)
    with pytest.raises(ValueError, match=r"lengths must be int32 or int64, got torch\.float32"):
        paged_write_fp8(key_pages, torch.zeros(3, 2, 32), TABLE, lengths.float())
    with pytest.raises(ValueError, match="paged_gather: block_table must be int32 or int64"):
        paged_gather(pages, TABLE.to(torch.int16), 3)
    with pytest.raises(ValueError, match=r"block table must be \[B, P\]"):
        paged_gather(pages, TABLE[0], 3)
    with pytest.raises(ValueError, match="max_len must not be negative, got -1"):
        paged_gather_fp8(key_pages, TABLE, -1, head_dim=32, dtype=torch.float32)


TRITON_DEVICES = [
    pytest.param("cpu", marks=pytest.mark.interpreter),
    pytest.param("cuda", marks=pytest.mark.gpu),
]


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("S", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_write_and_gather_equal_the_reference(device, lengths, S, dtype):
    from glm_compile.ops.paged_cache.triton_kernel import paged_gather_triton, paged_write_triton

    wide = torch.randn(NUM_PAGES, 64, 9).to(dtype)
    expected, pages = wide.clone()[:, :, 1:6], wide.to(device)[:, :, 1:6]
    new, lengths = _new(3, S, 5), torch.tensor(lengths, dtype=torch.int32)
    paged_write_reference(expected, new, TABLE, lengths)
    paged_write_triton(pages, new.to(device), TABLE.to(device), lengths.to(device))
    assert torch.equal(pages.cpu(), expected)
    for max_len in (1, 64, 131, 200):
        rows = paged_gather_triton(pages, TABLE.to(device), max_len)
        assert torch.equal(rows.cpu(), paged_gather_reference(expected, TABLE, max_len))


@pytest.mark.parametrize("device", TRITON_DEVICES)
@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("head_dim", [128, 20])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_triton_fp8_pages_equal_the_reference_byte_for_byte(device, lengths, head_dim, dtype):
    from glm_compile.ops.paged_cache.triton_kernel import (
        paged_gather_fp8_triton,
        paged_write_fp8_triton,
    )

    expected = torch.randint(0, 127, (NUM_PAGES, key_page_bytes(head_dim)), dtype=torch.uint8)
    pages = expected.to(device)
    new, lengths = _new(3, 4, head_dim, dtype), torch.tensor(lengths)
    new[0, 0] = 0
    new[1, 1] *= 1e-6
    new[2, 2, 3] = float("inf")
    new[2, 3, 1] = float("nan")
    paged_write_fp8_reference(expected, new, TABLE, lengths)
    # Columns of a wider table, and a table in column order.
    table = TABLE.T.contiguous().T.to(device)
    paged_write_fp8_triton(pages, new.to(device), table, lengths.to(device))
    assert torch.equal(pages.cpu(), expected)
    for max_len in (1, 64, 131, 200):
        rows = paged_gather_fp8_triton(pages, TABLE.to(device), max_len, head_dim, dtype)
        reference = paged_gather_fp8_reference(expected, TABLE, max_len, head_dim, dtype)
        torch.testing.assert_close(rows.cpu(), reference, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("device", TRITON_DEVICES)
def test_triton_skips_what_has_no_page(device):
    from glm_compile.ops.paged_cache.triton_kernel import paged_write_triton

    pages = torch.ones(NUM_PAGES, 64, 5, device=device)
    new, table = torch.zeros(3, 2, 5, device=device), TABLE.to(device)
    paged_write_triton(pages, new, table, torch.tensor([-2, -5, 192], device=device))
    paged_write_triton(pages, new, table, torch.tensor([2**31 - 1] * 3, device=device))
    assert torch.equal(pages, torch.ones_like(pages))


@pytest.mark.gpu
def test_capture_and_replay_follow_the_lengths():
    pages = torch.zeros(NUM_PAGES, 64, 5, device="cuda")
    new, table = torch.randn(3, 2, 5, device="cuda"), TABLE.cuda()
    lengths = torch.tensor([0, 0, 0], device="cuda")
    paged_write(pages, new, table, lengths)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_write(pages, new, table, lengths)
        rows = paged_gather(pages, table, 100)
        advance(lengths, 2)
    history = torch.zeros(3, 100, 5)
    for step in range(20):
        new.copy_(torch.randn_like(new))
        history[:, 2 * step : 2 * step + 2] = new.cpu()
        graph.replay()
    assert torch.equal(rows.cpu()[:2], history[:2])
    assert lengths.tolist() == [40, 40, 40]


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_kernels_compile_without_spilling(arch):
    from glm_compile.ops.paged_cache import triton_kernel as kernels
    from tests.compile_only import compile_triton

    def meta(*shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    latents, lengths = meta(100, 64, 576), meta(1, dtype=torch.int32)
    table = (meta(1, 100, dtype=torch.int32), 100, 100)
    key_pages, key_scales = meta(100, 8448, dtype=torch.uint8), meta(1, dtype=torch.float32)
    new, keys = meta(1, 6, 576), meta(1, 6, 128)
    calls = [
        (
            kernels.paged_write_kernel,
            (latents, *latents.stride(), new, *new.stride(), *table, lengths, 6),
            {"X": 576, "BLOCK_X": 1024},
            4,
        ),
        (
            kernels.paged_gather_kernel,
            (latents, *latents.stride(), *table, meta(1, 6400, 576), 6400),
            {"X": 576, "BLOCK_ROWS": 8, "BLOCK_X": 1024},
            4,
        ),
        (
            kernels.paged_write_fp8_kernel,
            (key_pages, key_scales, keys, *keys.stride(), *table, lengths, 6),
            {"D": 128, "BLOCK_D": 128},
            1,
        ),
        (
            kernels.paged_gather_fp8_kernel,
            (key_pages, key_scales, *table, meta(1, 6400, 128), 6400),
            {"D": 128, "BLOCK_ROWS": 8, "BLOCK_D": 128},
            2,
        ),
    ]
    for kernel, arguments, constexprs, num_warps in calls:
        compiled = compile_triton(kernel, arguments, constexprs, arch, num_warps=num_warps)
        assert compiled.stack_bytes == 0
        assert compiled.registers <= 128
