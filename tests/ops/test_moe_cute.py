"""The streaming kernels of moe_experts: what they compile to, and their numbers on a GPU.

Shape legend: M tokens, K experts of a token, E experts, C hidden size, I intermediate size.
"""

from __future__ import annotations

import pytest
import torch

from glm_compile.ops.moe import moe_experts
from glm_compile.ops.moe.config import StreamConfig, stream_config_for
from tests.ops.test_moe import check_error, make_inputs

pytestmark = pytest.mark.usefixtures("cute_gpu")

# (columns, features, is gated): the release's weights, neither a multiple of a tile nor of a stage.
WEIGHTS = [(6144, 2048, True), (2048, 6144, False), (1000, 104, True), (104, 1000, False)]
CONFIGS = [StreamConfig(16, 1024, 8, 1), StreamConfig(64, 256, 8, 2), StreamConfig(48, 512, 8, 4)]


@pytest.mark.parametrize("change", ["odd C", "gaps", "pairs", "dtype"])
def test_refused_with_a_reason(change):
    x, weights, ids, gate_up, down = make_inputs(4, 3, 64, 32, 2)
    if change == "odd C":
        x, gate_up, down = x[:, :60], gate_up[..., :60].contiguous(), down[:, :60].contiguous()
        reason = "in features of gate_up must be a multiple of 8 and not too many: 60"
    elif change == "gaps":
        down, reason = down.transpose(1, 2).contiguous().transpose(1, 2), "weights must be dense"
    elif change == "pairs":
        x, weights, ids = (t.repeat(40, 1) for t in (x, weights, ids))
        reason = "at most 256 pairs of a token and an expert, got 320"
    else:
        x, gate_up, down = x.float(), gate_up.float(), down.float()
        reason = "takes bfloat16, got torch.float32"
    with pytest.raises(ValueError, match=reason):
        moe_experts(x, weights, ids, gate_up, down, backend="cute")
    assert moe_experts(x, weights, ids, gate_up, down).shape == x.shape


def test_tiles_that_cannot_be_split_are_refused():
    for fields in ((12,), (32, 100), (32, 512, 8, 3)):
        with pytest.raises(ValueError, match="multiple of 8 rows"):
            StreamConfig(*fields)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    "columns, features, is_gated, config",
    [(*weight, None) for weight in WEIGHTS]
    + [(*weight, config) for weight, config in zip(WEIGHTS[1:], CONFIGS)],
)
def test_compiles_without_spilling(arch, columns, features, is_gated, config, tmp_path):
    pytest.importorskip("cutlass")
    from cutlass import Int32, Int64

    from glm_compile.ops.moe.cute_kernel import ExpertKernel, compile_variant, variant_for
    from tests.compile_only import compile_cute

    chosen = config or stream_config_for(columns, is_gated=is_gated)
    variant = variant_for(columns, features, 8, chosen, is_gated=is_gated)
    dtype = Int32 if config else Int64
    compiled = compile_cute(
        lambda more: compile_variant(variant, dtype, arch, more), arch, tmp_path
    )
    kernel = ExpertKernel(variant)
    assert compiled.stack_bytes <= (0 if config is None else 8)
    assert compiled.registers * kernel.num_threads <= 65536
    shared = variant.num_stages * (kernel.stage_bytes + 16) + kernel.other_shared_bytes
    assert shared <= 227 * 1024
    assert "mma.sync.aligned.m16n8k16" in compiled.ptx
    # Loads of a stage end before the stage is given back.
    release = compiled.ptx.rindex("mbarrier.arrive")
    assert compiled.ptx.rindex("ld.shared.v4") < compiled.ptx.rindex("fence.proxy.async") < release
    # The first kernel reads ids that the kernel ahead wrote; the second asks for weights at once.
    wait = compiled.ptx.index("griddepcontrol.wait")
    assert (wait < compiled.ptx.index("cp.async.bulk")) == is_gated
    assert wait < compiled.ptx.index("griddepcontrol.launch_dependents")


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_sum_compiles(arch, tmp_path):
    pytest.importorskip("cutlass")
    from cutlass import Int64

    from glm_compile.ops.moe.cute_kernel import compile_sum
    from tests.compile_only import compile_cute

    compiled = compile_cute(lambda more: compile_sum(8, Int64, arch, more), arch, tmp_path)
    assert compiled.stack_bytes == 0 and compiled.registers <= 64


@pytest.mark.gpu
@pytest.mark.parametrize("E, C, I", [(20, 1000, 104), (12, 6144, 2048)])
@pytest.mark.parametrize(
    "M, ids", [(1, "topk"), (6, "topk"), (16, "any"), (11, "same"), (32, "same")]
)
def test_error_is_that_of_plain_torch(E, C, I, M, ids):  # noqa: E741
    inputs = make_inputs(M, E, C, I, 8, device="cuda", ids=ids)
    x, weights, chosen, gate_up, down = inputs
    # What is left in shared memory from here is NaN, and must not be multiplied.
    nan = float("nan")
    moe_experts(x, weights, chosen, torch.full_like(gate_up, nan), torch.full_like(down, nan),
                backend="cute")  # fmt: skip
    output = moe_experts(*inputs, backend="cute")
    check_error(output, *inputs)
    for _ in range(20):
        assert torch.equal(moe_experts(*inputs, backend="cute"), output)
    last = moe_experts(x[-1:], weights[-1:], chosen.int()[-1:], gate_up, down, backend="cute")
    assert torch.equal(last, output[-1:])


@pytest.mark.gpu
@pytest.mark.parametrize("config", CONFIGS)
def test_every_split_computes_the_same(config):
    from glm_compile.ops.moe.cute_kernel import run_product

    x, _, ids, gate_up, down = make_inputs(6, 12, 1000, 104, 8, device="cuda")
    for weight, features, dtype, is_gated in (
        (gate_up, 104, torch.bfloat16, True),
        (down, 1000, torch.float32, False),
    ):
        source = x if is_gated else x.new_ones(48, 104).normal_()
        outputs = [torch.empty(48, features, dtype=dtype, device="cuda") for _ in range(2)]
        run_product(source, ids, weight, outputs[0], is_gated=is_gated)
        run_product(source, ids, weight, outputs[1], config, is_gated=is_gated)
        torch.testing.assert_close(*outputs, rtol=0.01, atol=1e-3)
