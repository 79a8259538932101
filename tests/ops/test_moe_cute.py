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
MODES = [(True, False), (True, True), (False, False)]
CONFIGS = [StreamConfig(16, 1024, 8, 8), StreamConfig(64, 256, 8, 4), StreamConfig(48, 512, 8, 4)]


@pytest.mark.parametrize("change", ["odd C", "gaps", "pairs", "dtype"])
def test_refused_with_a_reason(change):
    x, weights, ids, gate_up, down = make_inputs(4, 3, 64, 32, 2)
    if change == "odd C":
        x, gate_up, down = x[:, :60], gate_up[..., :60].contiguous(), down[:, :60].contiguous()
        reason = "in features of gate_up must be a multiple of 8 and not too many: 60"
    elif change == "gaps":
        down, reason = down.transpose(1, 2).contiguous().transpose(1, 2), "weights must be dense"
    elif change == "pairs":
        x, weights, ids = (t.repeat(4, 1) for t in (x, weights, ids))
        reason = "at most 8 tokens and 128 pairs of a token and an expert, got 16 and 32"
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


# Where each is worth its time: (architecture, weight, split, is there a shared expert, are tiles
# drawn).
COMPILED = [
    *[("sm_90a", weight, None, *mode) for weight in WEIGHTS[:2] for mode in MODES],
    *[("sm_100a", weight, None, True, True) for weight in WEIGHTS[:2]],
    *[("sm_90a", weight, None, False, False) for weight in WEIGHTS[2:]],
    *[("sm_90a", weight, split, True, True) for weight, split in zip(WEIGHTS[1:], CONFIGS)],
]


@pytest.mark.compile_only
@pytest.mark.parametrize("arch, weight, config, has_shared, is_dynamic", COMPILED)
def test_compiles_without_spilling(arch, weight, config, has_shared, is_dynamic, tmp_path):
    columns, features, is_gated = weight
    pytest.importorskip("cutlass")
    from cutlass import Int32, Int64

    from glm_compile.ops.moe.cute_kernel import ExpertKernel, compile_variant, variant_for
    from tests.compile_only import compile_cute

    variant = variant_for(
        columns,
        features,
        8,
        config or stream_config_for(columns, is_gated=is_gated),
        is_gated=is_gated,
        has_shared=has_shared,
        has_residual=has_shared and not is_gated and not is_dynamic,
        num_logits=256 * has_shared,
        normalizes=has_shared,
        is_dynamic=is_dynamic,
    )
    dtype = Int32 if config else Int64
    compiled = compile_cute(
        lambda more: compile_variant(variant, dtype, arch, more), arch, tmp_path
    )
    kernel = ExpertKernel(variant)
    # Frames of a few barriers of diverged warps; no data.
    assert compiled.stack_bytes <= 32
    assert compiled.registers * kernel.num_threads <= 65536
    shared = variant.num_stages * (kernel.stage_bytes + 16) + kernel.other_shared_bytes
    assert shared <= 227 * 1024
    assert "mma.sync.aligned.m16n8k16" in compiled.ptx
    # Loads of a stage end before the stage is given back.
    release = compiled.ptx.rindex("mbarrier.arrive")
    assert compiled.ptx.rindex("ld.shared.v4") < compiled.ptx.rindex("fence.proxy.async") < release
    # Weights are asked for before the wait where they are known: those of a shared expert, and all
    # of the second kernel. Dependents are let in behind it.
    wait = compiled.ptx.index("griddepcontrol.wait")
    assert (compiled.ptx.index("cp.async.bulk") < wait) == (has_shared or not is_gated)
    assert wait < compiled.ptx.index("griddepcontrol.launch_dependents")
    assert ("atom.relaxed.gpu.global.add" in compiled.ptx) == is_dynamic
    # Warps that load wait for the choice, those that multiply for what they multiply.
    assert compiled.ptx.count("griddepcontrol.wait") == 1 + is_gated


@pytest.mark.gpu
@pytest.mark.parametrize("E, C, I", [(20, 1000, 104), (12, 6144, 2048)])
@pytest.mark.parametrize("M, ids", [(1, "topk"), (6, "topk"), (8, "any"), (7, "same"), (8, "same")])
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
    from glm_compile.ops.moe.cute_kernel import Choice, run_down, run_gate_up
    from glm_compile.ops.moe.sum_kernel import run_sum

    x, weights, ids, gate_up, down = make_inputs(6, 12, 1000, 104, 8, device="cuda", ids="any")
    hidden, outputs = [], []
    for chosen_config in (None, config):
        for is_dynamic in (False, True):
            counters = torch.zeros(2, dtype=torch.int32, device="cuda") if is_dynamic else None
            choice = Choice(ids, weights, 8, counters=counters)
            chosen = weights.new_empty(2, 48) if is_dynamic else None
            hidden.append(torch.zeros(48, 104, dtype=torch.bfloat16, device="cuda"))
            run_gate_up(x, choice, gate_up, None, chosen, hidden[-1], chosen_config)
            outputs.append(torch.empty_like(x))
            if is_dynamic:
                products = weights.new_full((48, 1000), float("nan"))
                run_down(hidden[0], choice, down, None, None, products, chosen_config)
                run_sum(products, chosen, 8, None, outputs[-1])
            else:
                run_down(hidden[0], choice, down, None, None, outputs[-1], chosen_config)
        # Who does which tile changes nothing.
        assert torch.equal(hidden[-1], hidden[-2]) and torch.equal(outputs[-1], outputs[-2])
    torch.testing.assert_close(hidden[0], hidden[2], rtol=0.01, atol=1e-3)
    torch.testing.assert_close(outputs[0], outputs[2], rtol=0.01, atol=0.01)


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("has_shared", [True, False])
def test_sum_compiles(arch, has_shared, tmp_path):
    pytest.importorskip("cutlass")
    from glm_compile.ops.moe.sum_kernel import compile_sum
    from tests.compile_only import compile_cute

    compiled = compile_cute(
        lambda more: compile_sum(8, has_shared, has_shared, arch, more), arch, tmp_path
    )
    assert compiled.stack_bytes == 0 and compiled.registers <= 64
    # Products and their weights are asked for at once.
    body = compiled.ptx[: compiled.ptx.index("fma.rn")]
    assert body.count("ld.global") >= 3 * 8
