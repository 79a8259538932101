"""Whole MoE layers against a float64 oracle: the error of plain torch is the yardstick.

Shape legend: M tokens, K experts of a token, E experts, C hidden size, I intermediate size of an
expert, J of the shared expert.
"""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from glm_compile.ops import _dispatch
from glm_compile.ops.moe import moe_layer
from glm_compile.ops.rms_norm.reference import rms_norm_reference
from tests.ops import test_moe, test_moe_router

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SIZES = [(1, 3, 8, 4, 1, 5), (5, 20, 136, 72, 8, 72), (9, 6, 65, 33, 3, 40)]


def make_inputs(M, E, C, I, K, J=None, *, dtype=BF16, device="cpu", is_same=False):  # noqa: E741
    """Arguments of moe_layer by position and the residual; `is_same`: all tokens are one."""
    J = I if J is None else J

    def random(*shape):
        return torch.randn(*shape, device=device)

    x, _, _, gate_up, down = test_moe.make_inputs(M, E, C, I, K, dtype=dtype, device=device)
    if is_same:
        x = x[:1].expand(M, C).contiguous()
    shared = [(random(*s) / s[1] ** 0.5).to(dtype) for s in ((J, C), (J, C), (C, J))]
    router = random(E, C) / C**0.5, random(E) * 0.1
    return (x, *router, K, gate_up, down, *shared), random(M, C).to(dtype)


EPS = 1e-3


def _both(inputs, residual, experts, linear, norm_weight):
    x, weight, bias, K, gate_up, down, shared_gate, shared_up, shared_down = inputs
    if norm_weight is not None:
        x = rms_norm_reference(x, norm_weight, EPS)
    weights, ids = test_moe_router.oracle(x, weight, bias, K, True, 2.5)
    routed = experts(x, weights.float(), ids, gate_up, down)
    hidden = F.silu(linear(x, shared_gate)) * linear(x, shared_up)
    total = routed + linear(hidden, shared_down)
    return total if residual is None else residual + total


def linear_in_float64(x, weight):
    return F.linear(x.double(), weight.double())


def check_error(output, inputs, residual, norm_weight=None):
    """Error at most twice that of plain torch, which rounds each product and each sum as
    transformers does; both mean and largest, plus half an ulp. The norm is that of both."""
    expected = _both(inputs, residual, test_moe.oracle, linear_in_float64, norm_weight)
    library = _both(inputs, residual, test_moe.plain_torch, F.linear, norm_weight)
    assert output.shape == library.shape and output.dtype == library.dtype
    assert output.is_contiguous()
    size = expected.square().mean().sqrt()
    ulp = expected.abs().clamp_min(size) * torch.finfo(output.dtype).eps
    error = (output.double() - expected).abs() / ulp
    library_error = (library.double() - expected).abs() / ulp
    assert error.mean() <= 2 * library_error.mean() + 0.05
    assert error.max() <= 2 * library_error.max() + 0.5


def run(inputs, residual=None, norm_weight=None, **keywords):
    return moe_layer(
        *inputs, norm_weight_C=norm_weight, eps=EPS, residual_MC=residual, scale=2.5, **keywords
    )


def make_norm_weight(inputs):
    x = inputs[0]
    return torch.empty(x.shape[1], device=x.device).uniform_(0.5, 1.5).to(x.dtype)


@pytest.mark.parametrize("M, E, C, I, K, J", SIZES)
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16])
@pytest.mark.parametrize("has_residual", [True, False])
def test_error_is_that_of_plain_torch(M, E, C, I, K, J, dtype, has_residual):  # noqa: E741
    inputs, residual = make_inputs(M, E, C, I, K, J, dtype=dtype)
    residual = residual if has_residual else None
    for backend in (None, "reference"):
        check_error(run(inputs, residual, backend=backend), inputs, residual)
        weight = make_norm_weight(inputs)
        check_error(run(inputs, residual, weight, backend=backend), inputs, residual, weight)


def test_weights_of_the_choice_follow_their_options():
    inputs, _ = make_inputs(4, 6, 16, 8, 2, dtype=FP32)
    plain = moe_layer(*inputs, normalize=False, scale=1.0)
    shared = moe_layer(*inputs, normalize=False, scale=0.0)
    doubled = moe_layer(*inputs, normalize=False, scale=2.0)
    torch.testing.assert_close(doubled - shared, 2 * (plain - shared))
    assert not torch.allclose(moe_layer(*inputs), plain)


def test_any_strides_and_no_tokens():
    inputs, residual = make_inputs(5, 6, 24, 16, 3)
    expected = run(inputs, residual)
    turned = [
        t.transpose(0, 1).contiguous().transpose(0, 1)
        if isinstance(t, torch.Tensor) and t.dim() > 1
        else t
        for t in (*inputs, residual)
    ]
    torch.testing.assert_close(run(turned[:-1], turned[-1]), expected)
    assert run((inputs[0][:0], *inputs[1:])).shape == (0, 24)


def test_observers_of_the_experts_see_them():
    seen = []
    inputs, residual = make_inputs(3, 6, 16, 8, 2)
    with _dispatch.observed(lambda op, *args: seen.append((op, *args))):
        run(inputs, residual)
    experts = [args for op, *args in seen if op == "moe_experts"]
    assert len(experts) == 1
    assert experts[0][2].shape == (3, 2) and experts[0][3] is inputs[4]


def test_opcheck():
    inputs, residual = make_inputs(5, 6, 24, 16, 3, dtype=FP32)
    x, weight, bias, K, *experts = inputs
    op = torch.ops.glm.moe_layer.default
    for norm_weight, added in ((None, residual), (make_norm_weight(inputs), None)):
        arguments = (x, weight, bias, K, True, 2.5, *experts, norm_weight, EPS, added, "")
        torch.library.opcheck(op, arguments)


def test_wrong_arguments_are_named():
    (x, weight, bias, K, gate_up, down, gate, up, shared_down), residual = make_inputs(
        4, 5, 16, 8, 2
    )
    right = {
        "x_MC": x,
        "router_weight_EC": weight,
        "router_bias_E": bias,
        "top_k": K,
        "gate_up": gate_up,
        "down": down,
        "shared_gate_JC": gate,
        "shared_up_JC": up,
        "shared_down_CJ": shared_down,
    }
    for change, message in (
        ({"shared_up_JC": up[:4]}, r"shared_gate and shared_up \[J, 16\]"),
        ({"shared_down_CJ": shared_down[:, :4]}, r"shared_down \[16, J\]"),
        ({"shared_down_CJ": shared_down.half()}, "be torch.bfloat16 as x is, got torch.float16"),
        ({"norm_weight_C": x[0].float()}, "be torch.bfloat16 as x is, got torch.float32"),
        ({"norm_weight_C": x[0, :4]}, r"norm weight \[16\] expected"),
        ({"residual_MC": residual[:2]}, "residual like x"),
        ({"down": down[:4]}, r"moe_layer: gate_up \[E, 2 I, 16\]"),
        ({"router_bias_E": bias[:3]}, r"bias \[E\] expected"),
        ({"top_k": 6}, "top_k must be from 1 to 5"),
        ({"backend": "nvfp4"}, "unknown backend 'nvfp4'"),
        ({"backend": "cute"}, "'cute' cannot run this call"),
    ):
        with pytest.raises(ValueError, match=message):
            moe_layer(**(right | change))


@pytest.mark.usefixtures("cute_gpu")
@pytest.mark.parametrize("change", ["wide", "tokens", "apart", "gaps", "router", "experts"])
def test_refused_with_a_reason(change):
    M, J = (9, None) if change == "tokens" else (2, 40 if change == "wide" else None)
    inputs, _ = make_inputs(M, 3, 64, 32, 2, J)
    inputs = list(inputs)
    if change == "apart":
        inputs[7] = torch.nn.functional.pad(inputs[7], (0, 8))[:, :64]
        reason = "must lie equally far apart"
    elif change == "gaps":
        inputs[8] = inputs[8].T.contiguous().T
        reason = "rows of shared_down must be dense"
    elif change == "router":
        inputs[1] = inputs[1].half()
        reason = "the router's weight must be float32 or bfloat16, got torch.float16"
    elif change == "experts":
        inputs, _ = make_inputs(2, 600, 64, 32, 2)
        reason = "at most 32 of 512 experts and 8192 features, got 2 of 600 and 64"
    elif change == "tokens":
        reason = "at most 8 tokens and 128 pairs of a token and an expert, got 9 and 18"
    else:
        reason = "the shared expert must be as wide as the others, 32, got 40"
    with pytest.raises(ValueError, match=reason):
        moe_layer(*inputs, backend="cute")
    check_error(moe_layer(*inputs, scale=2.5), inputs, None)


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
@pytest.mark.parametrize("E, C, I", [(20, 1000, 104), (12, 6144, 2048)])
@pytest.mark.parametrize("M, is_same", [(1, False), (2, False), (6, True), (8, False)])
def test_gpu_error_is_that_of_plain_torch(E, C, I, M, is_same):  # noqa: E741
    inputs, residual = make_inputs(M, E, C, I, 8, device="cuda", is_same=is_same)
    # What is left in shared memory from here is NaN, and must not be multiplied.
    nan = [torch.full_like(w, float("nan")) for w in inputs[4:]]
    run((*inputs[:4], *nan), residual, backend="cute")
    norm_weight = make_norm_weight(inputs)
    output = run(inputs, residual, norm_weight, backend="cute")
    check_error(output, inputs, residual, norm_weight)
    check_error(run(inputs, residual, backend="cute"), inputs, residual)
    check_error(run(inputs, backend="cute"), inputs, None)
    check_error(run(inputs, residual, backend="separate"), inputs, residual)
    for _ in range(20):
        assert torch.equal(run(inputs, residual, norm_weight, backend="cute"), output)
    last = run((inputs[0][-1:], *inputs[1:]), residual[-1:], norm_weight, backend="cute")
    assert torch.equal(last, output[-1:])


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
@pytest.mark.parametrize("dtype", [FP32, BF16])
@pytest.mark.parametrize("E, K", [(7, 3), (256, 8), (500, 32)])
@pytest.mark.parametrize("normalize", [True, False])
def test_gpu_choice_is_that_of_the_router(dtype, E, K, normalize):
    """Each expert gives a number of its own: the sum tells who was chosen, and how weighed."""
    C, I = 64, 8  # noqa: E741
    (x, weight, bias, *_), _ = make_inputs(4, E, C, I, K, device="cuda")
    # Ties, of which the lowest id wins.
    weight[3] = weight[2]
    bias[3] = bias[2] = 5
    weight = weight.to(dtype)
    gate_up = torch.zeros(E, 2 * I, C, dtype=BF16, device="cuda")
    gate_up[:, :, 0] = 16
    down = torch.zeros(E, C, I, dtype=BF16, device="cuda")
    down[torch.arange(E), torch.arange(E) % C, 0] = 1 + (torch.arange(E) // C).cuda().bfloat16()
    zeros = [torch.zeros(s, dtype=BF16, device="cuda") for s in ((I, C), (I, C), (C, I))]
    x[:, 0] = 1
    arguments = (x, weight, bias, K, gate_up, down, *zeros)
    found = moe_layer(*arguments, normalize=normalize, backend="cute")
    expected = moe_layer(*arguments, normalize=normalize, backend="reference")
    torch.testing.assert_close(found, expected, rtol=0.02, atol=1e-6)
    assert torch.equal(found != 0, expected != 0)


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
def test_gpu_observers_see_what_the_kernels_choose():
    (x, weight, bias, K, *experts), residual = make_inputs(6, 24, 256, 104, 8, device="cuda")
    seen = []
    with _dispatch.observed(lambda op, *args: seen.append((op, *args))):
        run((x, weight, bias, K, *experts), residual, backend="cute")
    ((_, _, ids, gate_up, down),) = [args for op, *args in seen if op == "moe_experts"]
    assert torch.equal(ids, test_moe_router.oracle(x, weight, bias, K, True, 2.5)[1])
    assert gate_up is experts[0] and down is experts[1]


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
@pytest.mark.parametrize("M", [1, 6])
def test_gpu_layers_in_a_graph_follow_their_inputs(M):
    """Kernels of one layer start while those of the one before still run."""
    layers = [make_inputs(M, 24, 256, 104, 8, device="cuda")[0] for _ in range(4)]
    x = layers[0][0]

    def stack():
        value = x
        for layer in layers:
            value = run((value / 2, *layer[1:]), value, backend="cute")
        return value

    stack()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = stack()
    for _ in range(5):
        x.normal_()
        graph.replay()
        value = x
        for layer in layers:
            torch.cuda.synchronize()
            value = run((value / 2, *layer[1:]), value, backend="cute")
        assert torch.equal(output, value)


@pytest.mark.compile_only
@pytest.mark.parametrize(
    "arch, columns, is_wide, has_norm",
    [
        ("sm_90a", 6144, False, True),
        ("sm_90a", 6144, True, True),
        ("sm_90a", 1000, True, False),
        ("sm_100a", 6144, False, True),
    ],
)
def test_logits_compile_without_spilling(arch, is_wide, has_norm, columns, tmp_path):
    pytest.importorskip("cutlass")
    from glm_compile.ops.moe.logits_kernel import LogitsVariant, compile_logits
    from tests.compile_only import compile_cute

    variant = LogitsVariant(columns, is_wide, has_norm)
    compiled = compile_cute(lambda more: compile_logits(variant, arch, more), arch, tmp_path)
    assert compiled.stack_bytes == 0 and compiled.registers <= 224
    # Weights are asked for before the wait, and dependents let in ahead of both.
    wait = compiled.ptx.index("griddepcontrol.wait")
    assert compiled.ptx.index("griddepcontrol.launch_dependents") < wait
    assert compiled.ptx.index("ld.global.v4") < wait
