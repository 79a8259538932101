"""The streaming kernel of bf16_linear: what it compiles to, and its numbers on a GPU.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import concurrent.futures
import functools
import itertools
import sys
import time
import types
from dataclasses import replace

import pytest
import torch

from glm_compile.ops.bf16_linear import bf16_linear
from glm_compile.ops.bf16_linear.config import (
    FEW_ROWS,
    MAX_STAGES,
    StreamConfig,
    default_stream,
    is_for_stream,
    library_wins,
    norm_config_for,
    stream_config_for,
)
from glm_compile.ops.bf16_linear.measured import MANY_ROWS, MEASURED
from tests.ops.test_bf16_linear import check_error, make_inputs

pytestmark = pytest.mark.usefixtures("cute_gpu")

# Every way to split: one tile a block, several, K over a cluster, x held or loaded again, tiles
# that are no multiple of 16, one or two blocks a multiprocessor.
CONFIGS = [
    StreamConfig(24, 512, 8, 4),
    StreamConfig(8, 256, 8, 1),
    StreamConfig(40, 1024, 8, 2),
    StreamConfig(16, 512, 8, 2, cluster=2),
    StreamConfig(32, 256, 8, 4, cluster=4),
    StreamConfig(40, 512, 8, 4, cluster=2),
    StreamConfig(48, 512, 8, 4, cluster=2, late=True),
    StreamConfig(16, 512, 8, 2, blocks_per_processor=2),
    StreamConfig(24, 512, 8, 2, late=True),
    StreamConfig(96, 256, 8, 3),
    StreamConfig(24, 512, 8, 2, is_dynamic=True),
    StreamConfig(8, 256, 8, 1, late=True, is_dynamic=True),
    StreamConfig(48, 512, 8, 4, cluster=2, is_turned=True),
    StreamConfig(16, 256, 8, 2, is_turned=True),
]
# (N, K): neither a multiple of a tile nor of a stage; K of 8 columns; one feature; the release's.
SHAPES = [(100, 1000), (1, 8), (37, 520), (2784, 6144), (20480, 2048), (160, 6144), (6144, 16384)]


def splits(config: StreamConfig, num_columns: int) -> bool:
    """Whether the blocks of a cluster get equally many stages, whole ones to turn, not too many."""
    num_stages = -(-num_columns // config.stage_columns)
    if config.is_turned and num_columns % config.stage_columns:
        return False
    return num_stages % config.cluster == 0 and num_stages <= MAX_STAGES


def test_measured_choices_can_be_launched():
    assert set(MANY_ROWS) <= set(MEASURED)
    for table, num_rows in ((MEASURED, FEW_ROWS), (MANY_ROWS, FEW_ROWS + 1)):
        for (num_features, num_columns), fields in table.items():
            config = StreamConfig(*fields)
            assert config.tile % 8 == 0 and splits(config, num_columns)
            taken = stream_config_for(num_features, num_columns, num_rows)
            assert taken == config or (
                num_features == 2784 and taken == replace(config, late=False)
            )


def test_many_rows_have_a_split_of_their_own_unless_rows_must_not_depend_on_their_number(
    monkeypatch,
):
    import glm_compile.ops.bf16_linear as package
    from glm_compile.ops.bf16_linear import config

    monkeypatch.setitem(config.MEASURED, (16, 64), (16, 256))
    monkeypatch.setitem(config.MANY_ROWS, (16, 64), (8, 256))
    config.stream_config_for.cache_clear()
    seen = []

    def keep(x, *_arguments, config):
        seen.append(config.tile)
        return x

    kernel = types.SimpleNamespace(bf16_linear_cute=keep)
    monkeypatch.setitem(sys.modules, "glm_compile.ops.bf16_linear.cute_kernel", kernel)
    weight = torch.zeros(16, 64)
    for num_rows in (1, FEW_ROWS, FEW_ROWS + 1):
        for deterministic in (False, True):
            package._run_cute(torch.zeros(num_rows, 64), weight, None, None, deterministic)
    config.stream_config_for.cache_clear()
    assert seen == [16, 16, 16, 16, 8, 16]


def test_default_fits_any_weight():
    for num_features in (1, 8, 160, 2784, 154880):
        for num_columns in (8, 248, 520, 1024, 6144, 16384):
            config = default_stream(num_features, num_columns)
            assert config.tile % 8 == 0 and splits(config, num_columns)
            assert config.stage_columns % (32 * config.num_warps) == 0


def test_weights_that_nobody_measured_stream_unless_they_are_narrow(monkeypatch):
    import glm_compile.ops.bf16_linear as package

    assert is_for_stream(128, 6144) and is_for_stream(6144, 256)
    assert not is_for_stream(128, 256)
    # The weights of the indexer that stand beside q_a: K is shared out, over whole clusters.
    assert default_stream(32, 6144) == StreamConfig(8, 512, 8, 4, 4)
    assert default_stream(128, 6144) == StreamConfig(8, 512, 8, 4, 4)
    assert default_stream(576, 6144) == StreamConfig(24, 512, 8, 4, 4)
    asked = []

    def run(op, backends, *_arguments):
        asked.append(backends[0].name)

    monkeypatch.setattr(package._dispatch, "run", run)
    for num_rows, N, K in ((6, 128, 6144), (6, 128, 256), (17, 128, 6144), (6, 32_000, 512)):
        package.run_bf16_linear(
            torch.zeros(num_rows, K, device="meta"),
            torch.zeros(N, K, device="meta"),
            None,
            None,
            False,
            "",
        )
    assert asked == ["cute", "triton", "reference", "reference"]


def test_library_is_asked_about_the_next_power_of_two(monkeypatch):
    monkeypatch.setitem(library_wins.__globals__["LIBRARY"], (3, 5), (8,))
    assert [m for m in range(18) if library_wins(3, 5, m)] == [5, 6, 7, 8]
    assert not library_wins(5, 3, 8)


@pytest.mark.parametrize("change", ["odd K", "gaps", "address"])
def test_refused_with_a_reason(change):
    x, weight, _, _ = make_inputs(2, 16, 64)
    if change == "odd K":
        x, weight, reason = x[:, :60], weight[:, :60].contiguous(), "multiple of 8, got 60"
    elif change == "gaps":
        weight, reason = weight.T.contiguous().T, "dense and start at multiples of 16"
    else:
        weight, reason = weight.flatten()[1:961].view(15, 64), "start at multiples of 16 bytes"
    with pytest.raises(ValueError, match=reason):
        bf16_linear(x, weight, backend="cute")
    assert bf16_linear(x, weight).shape == (2, weight.shape[0])


def shapes_of_the_release() -> list[tuple[int, int]]:
    from glm_compile.ops.bf16_linear.tune import SHAPES

    return [shape for of_size in SHAPES.values() for shape in of_size]


def kernels_of_the_release() -> list[tuple[int, int, StreamConfig]]:
    """(K, M, split) of each, once: of N a kernel knows the split alone."""
    kernels = {}
    for N, K in [*shapes_of_the_release(), (100, 1000), (1, 8)]:
        for M in (6, 16):
            # Rows that must not depend on their number take the split for few.
            for config in (stream_config_for(N, K), stream_config_for(N, K, M)):
                kernels[K, M, config] = None
    return list(kernels)


@pytest.mark.compile_only
@pytest.mark.parametrize("K, M, config", kernels_of_the_release())
def test_compiles_without_spilling(K, M, config, tmp_path):
    check_compiles(config, "sm_90a", K, M, tmp_path)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("K", [1000, 6144])
def test_options_compile_without_spilling(arch, config, K, tmp_path):
    if splits(config, K):
        check_compiles(config, arch, K, 16, tmp_path, ("bias", "residual"))


def check_compiles(config, arch, K, M, folder, options=()):
    pytest.importorskip("cutlass")
    from glm_compile.ops.bf16_linear.cute_kernel import (
        Bf16LinearKernel,
        compile_variant,
        variant_for,
    )
    from tests.compile_only import compile_cute

    variant = replace(
        variant_for(K, M, config, "norm" in options, "swiglu" in options),
        has_bias="bias" in options,
        has_residual="residual" in options,
    )
    compiled = compile_cute(lambda more: compile_variant(variant, arch, more), arch, folder)
    kernel = Bf16LinearKernel(variant)
    assert compiled.stack_bytes == 0
    assert compiled.registers * kernel.num_threads <= 65536
    shared = variant.num_stages * (kernel.stage_bytes + 16) + kernel.other_shared_bytes
    assert config.blocks_per_processor * (shared + 1024) <= 228 * 1024
    assert shared <= 227 * 1024
    assert "cp.async.bulk.shared::cluster.global" in compiled.ptx
    assert "mma.sync.aligned.m16n8k16" in compiled.ptx
    # Weights are asked for before the kernels ahead have ended: a branch of the loading warps that
    # does not wait for them.
    assert compiled.ptx.index("cp.async.bulk") < compiled.ptx.index("griddepcontrol.wait")
    # Loads of a stage end before the stage is given back.
    last_load = compiled.ptx.rindex("ld.shared.v4", 0, compiled.ptx.rindex("mma.sync"))
    release = compiled.ptx.index("mbarrier.arrive", last_load)
    assert last_load < compiled.ptx.rindex("fence.proxy.async") < release
    wait, let_in = "griddepcontrol.wait", "griddepcontrol.launch_dependents"
    assert compiled.ptx.index(wait) < compiled.ptx.index(let_in)


def run_cute(*arguments, **keywords):
    from glm_compile.ops.bf16_linear.cute_kernel import bf16_linear_cute

    return bf16_linear_cute(*arguments, **keywords)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*CONFIGS, None])
@pytest.mark.parametrize(
    "M, options", [(1, ""), (6, ""), (16, "bias, residual"), (35, "bias, residual")]
)
@pytest.mark.parametrize("N, K", [(100, 1000), (37, 520), (2784, 6144)])
def test_error_is_that_of_the_library(config, M, options, N, K):
    if config is not None and not splits(config, K):
        pytest.skip("the blocks of a cluster need equally many stages")
    x, weight, bias, residual = make_inputs(
        M, N, K, bias="bias" in options, residual="residual" in options, device="cuda"
    )
    # What is left in shared memory from here is NaN, and must not be multiplied.
    nan = torch.full_like(weight, float("nan"))
    run_cute(x, nan, bias, residual, config=config)
    output = run_cute(x, weight, bias, residual, config=config)
    assert output.is_contiguous()
    check_error(output, x, weight, bias, residual)


@pytest.mark.gpu
@pytest.mark.parametrize("M", [6, 16])
@pytest.mark.parametrize("N, K", sorted(shape for shape in MEASURED if shape[0] < 10_000))
def test_measured_splits_are_as_good_as_the_library(N, K, M):
    x, weight, _, _ = make_inputs(M, N, K, device="cuda")
    output = run_cute(x, weight, None, None, config=stream_config_for(N, K, M))
    check_error(output, x, weight, None, None)
    again = [run_cute(x, weight, None, None, config=stream_config_for(N, K, M)) for _ in range(5)]
    assert all(torch.equal(output, other) for other in again)


@pytest.mark.gpu
@pytest.mark.parametrize("config", [c for c in CONFIGS if c.is_turned])
def test_tiles_that_begin_with_another_stage_have_rows_that_depend_on_nothing_else(config):
    x, weight, bias, residual = make_inputs(16, 700, 2048, bias=True, residual=True, device="cuda")
    whole = run_cute(x, weight, bias, residual, config=config)
    check_error(whole, x, weight, bias, residual)
    for M in (1, 6, 9):
        part = run_cute(x[:M], weight, bias, residual[:M], config=config)
        assert torch.equal(part, whole[:M])


@pytest.mark.gpu
def test_splits_for_many_rows_are_not_taken_where_rows_must_not_depend_on_their_number():
    N, K = 2624, 6144
    assert (N, K) in MANY_ROWS
    x, weight, _, _ = make_inputs(16, N, K, device="cuda")
    whole = bf16_linear(x, weight, deterministic=True, backend="cute")
    for M in (FEW_ROWS, FEW_ROWS + 1):
        output = bf16_linear(x[:M], weight, deterministic=True, backend="cute")
        assert torch.equal(output, whole[:M])
    assert torch.equal(bf16_linear(x[:FEW_ROWS], weight, backend="cute"), whole[:FEW_ROWS])


@pytest.mark.gpu
def test_any_strides_and_leading_dimensions():
    x, weight, bias, residual = make_inputs(6, 40, 72, bias=True, residual=True, device="cuda")
    expected = bf16_linear(x, weight, bias, residual=residual, backend="cute")
    check_error(expected, x, weight, bias, residual)

    def spread(tensor, offset):
        wide = torch.zeros(*tensor.shape[:-1], 128, dtype=tensor.dtype, device="cuda")
        wide[..., offset : offset + tensor.shape[-1]] = tensor
        return wide[..., offset : offset + tensor.shape[-1]]

    for arguments in (
        (spread(x, 8), weight, bias, residual),
        (spread(x, 3), weight, bias, residual),
        (x.T.contiguous().T, weight, bias, residual),
        (x, spread(weight, 16), bias, residual),
        (x, weight, torch.stack([bias, bias], 1)[:, 0], residual),
        (x, weight, bias, residual.T.contiguous().T),
        (x.view(2, 3, 72), weight, bias, residual.view(2, 3, 40)),
    ):
        *tensors, added = arguments
        output = bf16_linear(*tensors, residual=added, backend="cute")
        assert torch.equal(output.view(6, 40), expected)
    one = bf16_linear(spread(x, 3)[2:3], weight, bias, residual=residual[2:3], backend="cute")
    assert torch.equal(one, expected[2:3])


def test_only_blocks_without_a_cluster_draw_their_tiles():
    with pytest.raises(ValueError, match="blocks of a cluster cannot draw"):
        StreamConfig(48, 512, cluster=2, is_dynamic=True)


class Stream:
    def __init__(self, handle):
        self.cuda_stream = handle

    def synchronize(self):
        pass


def test_launches_that_may_run_side_by_side_have_counters_of_their_own(monkeypatch):
    pytest.importorskip("cutlass")
    from glm_compile.ops.bf16_linear.cute_kernel import Counters

    state = {"stream": Stream(1), "capturing": True}
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: state["stream"])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state["capturing"])
    counters = Counters(torch.device("cpu"))
    assert counters.take() is None
    state["capturing"] = False
    of_stream = counters.take()
    assert counters.take() is of_stream
    state["stream"] = Stream(2)
    taken = [of_stream, counters.take()]
    assert all(counter.numel() == 1 and not counter.any() for counter in taken)
    state["capturing"] = True
    while (counter := counters.take()) is not None:
        taken.append(counter)
    assert len({counter.data_ptr() for counter in taken}) == len(taken) == Counters.SIZE
    # A call outside makes room for the next capture.
    state.update(capturing=False, stream=Stream(1))
    assert counters.take() is of_stream
    state["capturing"] = True
    assert counters.take().data_ptr() not in {counter.data_ptr() for counter in taken}


def test_threads_get_counters_one_at_a_time(monkeypatch):
    pytest.importorskip("cutlass")
    from glm_compile.ops.bf16_linear.cute_kernel import Counters

    class SlowCounters(Counters):
        def _next(self):
            self.num_used += 1
            time.sleep(1e-3)
            return self.blocks[-1][self.num_used - 1 : self.num_used]

    capturing = [False]
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _device: Stream(1))
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: capturing[0])
    counters = SlowCounters(torch.device("cpu"))
    counters.take()
    capturing[0] = True
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda _: counters.take().data_ptr(), range(32)))
    assert len(set(taken)) == 32


def test_a_kernel_for_launches_without_a_counter_is_compiled_along(monkeypatch):
    pytest.importorskip("cutlass")
    from glm_compile.ops.bf16_linear import cute_kernel

    made = []
    monkeypatch.setattr(cute_kernel, "compile_variant", lambda variant, arch: made.append(variant))
    own = functools.cache(cute_kernel.compiled.__wrapped__)
    monkeypatch.setattr(cute_kernel, "compiled", own)
    drawn = cute_kernel.variant_for(1000, 6, StreamConfig(24, 512, 8, 4, is_dynamic=True))
    cute_kernel.compiled(drawn, "sm_90a")
    assert drawn.num_static and made == [replace(drawn, num_static=0), drawn]


# (N, K) and (tile, loaders) that leave tiles to draw on a GPU of 132 multiprocessors.
DRAWN_SHAPES = [(20_001, 1000), (40_000, 520), (24_576, 6144)]
DRAWN_TILES = [(24, 4), (8, 1), (16, 2)]


def num_drawn_of(config, M, N, K, *, num_processors=132, has_norm=False, has_swiglu=False):
    from glm_compile.ops.bf16_linear.cute_kernel import num_drawn, variant_for

    variant = variant_for(K, M, config, has_norm, has_swiglu)
    num_tiles = -(-N // config.tile)
    return num_drawn(variant, M, num_tiles, num_processors * config.blocks_per_processor)


def test_what_is_to_be_drawn_is_drawn():
    """In the tests below, in those of norms and under the sanitizer, on 132 multiprocessors."""
    pytest.importorskip("cutlass")
    for tile, num_loaders in DRAWN_TILES:
        config = StreamConfig(tile, 512, 8, num_loaders, is_dynamic=True)
        for M, (N, K) in itertools.product((1, 6, 16), DRAWN_SHAPES):
            assert num_drawn_of(config, M, N, K) > 50
            assert num_drawn_of(replace(config, is_dynamic=False), M, N, K) == 0
        # Blocks of rows would count with one counter.
        assert num_drawn_of(config, 17, *DRAWN_SHAPES[0]) == 0
    sanitized = StreamConfig(24, 512, is_dynamic=True)
    for is_gated in (False, True):
        options = {"has_norm": is_gated, "has_swiglu": is_gated}
        assert num_drawn_of(sanitized, 6, 7000, 2048, **options) > 20
    config = norm_config_for(19_360, 6144)
    for has_swiglu in (False, True):
        options = {"has_norm": True, "has_swiglu": has_swiglu}
        assert config == norm_config_for(19_360, 6144, has_swiglu=has_swiglu)
        assert num_drawn_of(config, 6, 19_360, 6144, **options) > 500


@pytest.fixture
def counters_taken(monkeypatch):
    """The counters, or Nones, of all launches that would draw their tiles."""
    from glm_compile.ops.bf16_linear.cute_kernel import Counters

    taken = []
    take = Counters.take

    def keep(self):
        taken.append(take(self))
        return taken[-1]

    monkeypatch.setattr(Counters, "take", keep)
    return taken


@pytest.mark.gpu
@pytest.mark.parametrize("M", [1, 6, 16])
@pytest.mark.parametrize("N, K", DRAWN_SHAPES)
@pytest.mark.parametrize("tile, num_loaders", DRAWN_TILES)
def test_who_takes_which_tile_changes_nothing(tile, num_loaders, M, N, K, counters_taken):
    from glm_compile.ops.bf16_linear.cute_kernel import counters_of

    dealt = StreamConfig(tile, 512, 8, num_loaders)
    drawn = replace(dealt, is_dynamic=True)
    x, weight, _, residual = make_inputs(M, N, K, residual=True, device="cuda")
    expected = run_cute(x, weight, None, residual, config=dealt)
    check_error(expected, x, weight, None, residual)
    assert not counters_taken
    graph = torch.cuda.CUDAGraph()
    outputs = [run_cute(x, weight, None, residual, config=drawn) for _ in range(5)]
    with torch.cuda.graph(graph):
        outputs += [run_cute(x, weight, None, residual, config=drawn) for _ in range(5)]
    for _ in range(5):
        for output in outputs[5:]:
            output.fill_(float("nan"))
        graph.replay()
    others = [torch.cuda.Stream() for _ in range(3)]
    for stream in others:
        stream.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        graph.replay()
        for stream in others:
            with torch.cuda.stream(stream):
                outputs.append(run_cute(x, weight, None, residual, config=drawn))
    torch.cuda.synchronize()
    assert all(torch.equal(output, expected) for output in outputs)
    assert not any(block.any() for block in counters_of(x.device).blocks)
    assert len(counters_taken) == len(outputs) == 25
    assert all(counter is not None for counter in counters_taken)


@pytest.mark.gpu
def test_many_rows_are_dealt_out_and_few_of_them_drawn(counters_taken):
    config = StreamConfig(24, 512, 8, 4, is_dynamic=True)
    x, weight, _, _ = make_inputs(35, 20_001, 520, device="cuda")
    whole = run_cute(x, weight, None, None, config=config)
    check_error(whole, x, weight, None, None)
    assert not counters_taken
    assert torch.equal(run_cute(x[3:9], weight, None, None, config=config), whole[3:9])
    assert len(counters_taken) == 1 and counters_taken[0] is not None


@pytest.mark.gpu
def test_a_capture_without_a_counter_gives_the_same(monkeypatch):
    from glm_compile.ops.bf16_linear import cute_kernel

    config = StreamConfig(24, 512, 8, 4, is_dynamic=True)
    x, weight, _, _ = make_inputs(6, 20_001, 520, device="cuda")
    expected = run_cute(x, weight, None, None, config=config)
    monkeypatch.setattr(cute_kernel.Counters, "take", lambda self: None)
    num_compiled = cute_kernel.compiled.cache_info().currsize
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = run_cute(x, weight, None, None, config=config)
    output.fill_(float("nan"))
    graph.replay()
    assert torch.equal(output, expected)
    assert cute_kernel.compiled.cache_info().currsize == num_compiled


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(0, 64), (2, 0, 64)])
def test_no_rows(shape):
    weight = torch.ones(10, 64, device="cuda").bfloat16()
    output = bf16_linear(weight.new_ones(shape), weight, backend="cute")
    assert output.shape == (*shape[:-1], 10)


@pytest.mark.gpu
@pytest.mark.parametrize("N, K", SHAPES)
def test_rows_do_not_depend_on_their_number_nor_on_the_run(N, K):
    x, weight, _, _ = make_inputs(70, N, K, device="cuda")
    whole = bf16_linear(x, weight, deterministic=True, backend="cute")
    check_error(whole, x, weight, None, None)
    for _ in range(20):
        assert torch.equal(bf16_linear(x, weight, deterministic=True, backend="cute"), whole)
    for M in (1, 2, 7, 8, 9, 15, 16, 17, 33):
        output = bf16_linear(x[:M], weight, deterministic=True, backend="cute")
        assert torch.equal(output, whole[:M])
    assert torch.equal(
        bf16_linear(x[9:12], weight, deterministic=True, backend="cute"), whole[9:12]
    )


@pytest.mark.gpu
def test_nan_stays_in_its_row_and_its_feature():
    x, weight, _, _ = make_inputs(3, 40, 1000, device="cuda")
    x[1, 3] = float("nan")
    weight[7, 999] = float("nan")
    output = bf16_linear(x, weight, backend="cute")
    assert output[1].isnan().all() and output[:, 7].isnan().all()
    assert output[[0, 2]][:, [i for i in range(40) if i != 7]].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("N, K", [(160, 6144), (2784, 6144)])
def test_capture_and_replay_of_a_chain(N, K):
    """Each product feeds the next: a kernel that started too early would read what is not there."""
    x, weight, _, _ = make_inputs(6, N, K, device="cuda")
    _, back, _, _ = make_inputs(1, K, N, device="cuda")
    bf16_linear(bf16_linear(x, weight, backend="cute"), back, backend="cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        chain = [x]
        for _ in range(8):
            chain.append(bf16_linear(chain[-1], weight, backend="cute"))
            chain.append(bf16_linear(chain[-1], back, backend="cute"))
    for _ in range(3):
        x.copy_(torch.randn_like(x))
        for link in chain[1:]:
            link.fill_(float("nan"))
        graph.replay()
        for i, link in enumerate(chain[1:]):
            check_error(link, chain[i], back if i % 2 else weight, None, None)


@pytest.mark.gpu
@pytest.mark.parametrize("num_loaders", [1, 2, 4])
@pytest.mark.parametrize("M, N, K, tile", [(35, 2784, 6144, 16), (70, 2784, 6144, 24)])
def test_a_stage_is_refilled_only_once_it_is_read(M, N, K, tile, num_loaders):
    """Several blocks read the same weights, so refills come from L2 and hurry after each stage."""
    x, weight, _, _ = make_inputs(M, N, K, device="cuda")
    config = StreamConfig(tile, 512, 8, num_loaders)
    outputs = [run_cute(x, weight, None, None, config=config) for _ in range(10)]
    check_error(outputs[0], x, weight, None, None)
    assert all(torch.equal(output, outputs[0]) for output in outputs)


@pytest.mark.gpu
@pytest.mark.big_memory
def test_offsets_beyond_32_bits():
    weight = torch.zeros(2**31 // 4096 + 40, 4096, dtype=torch.bfloat16, device="cuda")
    weight[-1] = 1
    x = torch.ones(1, 4096, dtype=torch.bfloat16, device="cuda")
    output = bf16_linear(x, weight, backend="cute")
    assert output[0, -1] == 4096 and output.count_nonzero() == 1
