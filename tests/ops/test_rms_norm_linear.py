"""rms_norm_linear against the model's own norm and an fp64 product.

Shape legend: M rows, K in features, N out features.
"""

from __future__ import annotations

import pytest
import torch
from transformers.models.glm_moe_dsa.modeling_glm_moe_dsa import GlmMoeDsaRMSNorm

from glm_compile.ops import bf16_linear
from glm_compile.ops.rms_norm_linear import rms_norm_linear

EPS = 1e-5


def normed_by_the_model(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    norm = GlmMoeDsaRMSNorm(x.shape[-1], eps=EPS).to(x.dtype)
    norm.weight.copy_(weight)
    return norm(x)


def make_inputs(rows: tuple[int, ...], num_in: int, *num_out: int):
    # The norm's input is a slice of a wider merged product.
    x = torch.randn(*rows, num_in + 8).bfloat16()[..., 3 : num_in + 3] * 3
    weights = [torch.randn(n, num_in).bfloat16() / num_in**0.5 for n in num_out]
    return x, (torch.rand(num_in) + 0.5).bfloat16(), weights


@pytest.mark.parametrize("rows", [(1,), (6,), (2, 3), (0,), (1, 37)])
@pytest.mark.parametrize("num_out", [(24,), (24, 8)])
@pytest.mark.parametrize("num_in", [96, 100])
def test_equals_the_models_norm_and_an_exact_product(rows, num_out, num_in):
    x, norm_weight, weights = make_inputs(rows, num_in, *num_out)
    bias = torch.randn(sum(num_out)).bfloat16() if len(num_out) == 1 else None
    result = rms_norm_linear(x, norm_weight, weights, bias, eps=EPS)
    expected = normed_by_the_model(x, norm_weight).double() @ torch.cat(weights).double().T
    expected = expected if bias is None else expected + bias
    assert result.dtype == torch.bfloat16 and result.is_contiguous()
    torch.testing.assert_close(result.double(), expected, rtol=2**-7, atol=2**-7)


def swiglu_of(product: torch.Tensor) -> torch.Tensor:
    """What transformers' MLP makes of its two products, in fp64, with their roundings to bf16."""
    gate, up = product.bfloat16().double().chunk(2, dim=-1)
    return (gate / (1 + (-gate).exp())).bfloat16().double() * up


@pytest.mark.parametrize("rows", [(1,), (2, 3), (0,), (1, 37)])
@pytest.mark.parametrize("num_out", [(48,), (20, 20), (12, 5, 7)])
def test_gates_and_ups_come_out_as_swiglu(rows, num_out):
    x, norm_weight, weights = make_inputs(rows, 96, *num_out)
    result = rms_norm_linear(x, norm_weight, weights, eps=EPS, has_swiglu=True)
    product = normed_by_the_model(x, norm_weight).double() @ torch.cat(weights).double().T
    assert result.dtype == torch.bfloat16 and result.is_contiguous()
    torch.testing.assert_close(result.double(), swiglu_of(product), rtol=2**-6, atol=2**-7)


def test_one_weight_may_come_without_a_list():
    x, norm_weight, weights = make_inputs((5,), 64, 16)
    alone = rms_norm_linear(x, norm_weight, weights[0], eps=EPS)
    assert torch.equal(alone, rms_norm_linear(x, norm_weight, weights, eps=EPS))


def test_op_is_registered_as_torch_wants_it():
    x, norm_weight, weights = make_inputs((2, 3), 64, 16, 8)
    torch.library.opcheck(
        torch.ops.glm.rms_norm_linear.default, (x, norm_weight, weights, None, EPS, False, "")
    )
    torch.library.opcheck(
        torch.ops.glm.rms_norm_linear.default, (x, norm_weight, weights, None, EPS, False, "", True)
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda x, n, w: (x.float(), n, w), "bfloat16 expected"),
        (lambda x, n, w: (x, n[1:], w), "norm weight [K] expected"),
        (lambda x, n, w: (x, n, [w[0][:, 1:]]), "weights must be [N, 64]"),
        (lambda x, n, w: (x, n, []), "at least one weight"),
    ],
)
def test_calls_that_cannot_be_are_refused(change, message):
    x, norm_weight, weights = make_inputs((2,), 64, 16)
    with pytest.raises(ValueError) as error:
        rms_norm_linear(*change(x, norm_weight, weights), eps=EPS)
    assert message in str(error.value)


@pytest.mark.parametrize(("num_out", "has_bias"), [((16, 7), False), ((16,), True)])
def test_swiglu_takes_no_bias_and_no_odd_number_of_features(num_out, has_bias):
    x, norm_weight, weights = make_inputs((2,), 64, *num_out)
    bias = weights[0].new_zeros(16) if has_bias else None
    with pytest.raises(ValueError, match="an even number of features without a bias"):
        rms_norm_linear(x, norm_weight, weights, bias, eps=EPS, has_swiglu=True)


def on_gpu(*tensors):
    return [tensor.cuda() for tensor in tensors]


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize("num_rows", [6, 16])
@pytest.mark.parametrize("num_out", [20480, 2048, 6144])
def test_compiles_without_spilling(arch, num_rows, num_out, tmp_path):
    pytest.importorskip("cutlass")
    from glm_compile.ops.bf16_linear.config import norm_config_for
    from tests.ops.test_bf16_linear_cute import check_compiles

    config = norm_config_for(num_out, 2048)
    check_compiles(config, arch, 2048, num_rows, tmp_path, ("norm",))


@pytest.mark.compile_only
@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
@pytest.mark.parametrize(
    ("num_out", "num_in", "options"),
    [
        (2784, 6144, ("norm",)),
        (2624, 6144, ("norm",)),
        (154880, 6144, ("norm",)),
        (24576, 6144, ("norm", "swiglu")),
        (19360, 6144, ("norm", "swiglu")),
        (200, 1000, ("norm", "swiglu")),
    ],
)
def test_wide_rows_and_gates_compile_without_spilling(arch, num_out, num_in, options, tmp_path):
    pytest.importorskip("cutlass")
    from glm_compile.ops.bf16_linear.config import norm_config_for
    from tests.ops.test_bf16_linear_cute import check_compiles

    config = norm_config_for(num_out, num_in, has_swiglu="swiglu" in options)
    check_compiles(config, arch, num_in, 6, tmp_path, options)


def test_rows_too_wide_for_a_block_of_sixteen_are_normed_before(monkeypatch):
    import glm_compile.ops.rms_norm_linear as package

    asked = []
    monkeypatch.setattr(
        package._dispatch, "run", lambda op, backends, *_rest: asked.append(backends[0].name)
    )
    for num_rows in (1, 8, 9, 17):
        for deterministic in (False, True):
            package._rms_norm_linear(
                torch.zeros(num_rows, 6144, device="meta"),
                torch.zeros(6144, device="meta"),
                [torch.zeros(2784, 6144, device="meta")],
                None,
                EPS,
                deterministic,
                "",
            )
    assert asked == ["cute", "cute", "cute", "cute", "triton", "cute", "triton", "cute"]


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
@pytest.mark.parametrize("num_rows", [0, 1, 6, 16, 37])
@pytest.mark.parametrize(
    "num_in, num_out",
    [
        (2048, (16384, 4096)),
        (520, (37,)),
        (2048, (2048,)),
        (6144, (2048, 576, 128, 32)),
        (6144, (2048, 576)),
        (6144, (1000,)),
        (1000, (200,)),
    ],
)
@pytest.mark.parametrize("has_swiglu", [False, True])
def test_norm_inside_the_product(num_rows, num_in, num_out, has_swiglu):
    if has_swiglu and sum(num_out) % 2:
        pytest.skip("as many gates as ups")
    block = (torch.randn(sum(num_out), num_in, device="cuda") / num_in**0.5).bfloat16()
    weights = list(block.split(num_out))
    wide = (torch.randn(num_rows, num_in + 736, device="cuda") * 3).bfloat16()
    x, norm_weight = wide[:, :num_in], (torch.rand(num_in, device="cuda") + 0.5).bfloat16()

    def run(x):
        return rms_norm_linear(
            x, norm_weight, weights, eps=EPS, has_swiglu=has_swiglu, backend="cute"
        )

    result = run(x)
    normed = normed_by_the_model(x.cpu(), norm_weight.cpu()).cuda()
    expected = normed.double() @ block.double().T
    if has_swiglu:
        expected = swiglu_of(expected)
    torch.testing.assert_close(result.double(), expected, rtol=2**-6, atol=2**-6)
    for _ in range(20):
        assert torch.equal(run(x), result)
    for few in (1, 5, 16):
        assert torch.equal(run(x[:few]), result[:few])


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
@pytest.mark.parametrize("has_swiglu", [False, True])
@pytest.mark.parametrize("num_rows", [1, 6])
def test_norm_inside_a_product_whose_tiles_are_drawn(num_rows, has_swiglu, monkeypatch):
    """The rows of lm_head over eight devices: the least for which that is chosen."""
    from glm_compile.ops.bf16_linear.config import norm_config_for
    from glm_compile.ops.bf16_linear.cute_kernel import Counters

    num_out, num_in = 19_360, 6144
    assert norm_config_for(num_out, num_in, has_swiglu=has_swiglu).is_dynamic
    taken, take = [], Counters.take

    def keep(self):
        taken.append(take(self))
        return taken[-1]

    monkeypatch.setattr(Counters, "take", keep)
    weight = (torch.randn(num_out, num_in, device="cuda") / num_in**0.5).bfloat16()
    x = (torch.randn(num_rows, num_in, device="cuda") * 3).bfloat16()
    norm_weight = (torch.rand(num_in, device="cuda") + 0.5).bfloat16()

    def run():
        return rms_norm_linear(
            x, norm_weight, weight, eps=EPS, has_swiglu=has_swiglu, backend="cute"
        )

    result = run()
    normed = normed_by_the_model(x.cpu(), norm_weight.cpu()).cuda()
    expected = normed.double() @ weight.double().T
    expected = swiglu_of(expected) if has_swiglu else expected
    torch.testing.assert_close(result.double(), expected, rtol=2**-6, atol=2**-6)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = [run() for _ in range(4)]
    for _ in range(5):
        for output in captured:
            output.fill_(float("nan"))
        graph.replay()
        assert all(torch.equal(output, result) for output in captured)
    assert len(taken) == 5 and all(counter is not None for counter in taken)


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
def test_chain_of_a_dense_layer_under_capture():
    """Every kernel starts before the one ahead has ended, and reads what that one wrote."""
    size, inner, width = 512, 768, 1024
    weights = {
        name: (torch.randn(shape, device="cuda") / shape[1] ** 0.5).bfloat16()
        for name, shape in {
            "o": (size, width),
            "gate_up": (2 * inner, size),
            "down": (size, inner),
            "qkv": (400, size),
        }.items()
    }
    norm_weight = (torch.rand(size, device="cuda") + 0.5).bfloat16()
    attended, residual = (torch.randn(6, n, device="cuda").bfloat16() for n in (width, size))

    def chain(forced):
        hidden = bf16_linear.bf16_linear(attended, weights["o"], residual=residual, backend=forced)
        options = {"eps": EPS, "backend": forced}
        inside = rms_norm_linear(
            hidden, norm_weight, weights["gate_up"], has_swiglu=True, **options
        )
        hidden = bf16_linear.bf16_linear(inside, weights["down"], residual=hidden, backend=forced)
        return hidden, rms_norm_linear(hidden, norm_weight, weights["qkv"], **options)

    chain("cute")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = [chain("cute") for _ in range(6)]
    for _ in range(5):
        residual.copy_(torch.randn_like(residual))
        for result in results:
            for tensor in result:
                tensor.fill_(float("nan"))
        graph.replay()
        for result in results:
            for got, want in zip(result, chain("reference")):
                torch.testing.assert_close(got, want, rtol=2**-5, atol=2**-5)


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
@pytest.mark.parametrize("num_rows", [6, 16])
def test_normed_values_are_the_models(num_rows):
    """A unit matrix shows the normed value itself: every rounding is that of the model's norm."""
    num_in = 2048
    weight = torch.eye(num_in, device="cuda").bfloat16()
    x = (torch.randn(num_rows, num_in, device="cuda") * 3).bfloat16()
    norm_weight = (torch.rand(num_in, device="cuda") + 0.5).bfloat16()
    norm = GlmMoeDsaRMSNorm(num_in, eps=EPS).to("cuda", torch.bfloat16)
    norm.weight.copy_(norm_weight)
    result = rms_norm_linear(x, norm_weight, weight, eps=EPS, backend="cute")
    # The order of the sum of squares differs, which may move the scale by its last bit.
    assert (result != norm(x)).float().mean() <= 1e-4
    torch.testing.assert_close(result, norm(x), rtol=2**-7, atol=0)


@pytest.mark.gpu
@pytest.mark.usefixtures("cute_gpu")
def test_what_the_norm_inside_cannot_take_is_said():
    x, norm_weight, weights = make_inputs((2,), 64, 16, 8)
    x, norm_weight, *weights = on_gpu(x, norm_weight, *weights)
    with pytest.raises(ValueError, match="side by side"):
        rms_norm_linear(x, norm_weight, weights, eps=EPS, backend="cute")
    block = torch.randn(256, 16384, device="cuda").bfloat16()
    with pytest.raises(ValueError, match="registers of one block"):
        rms_norm_linear(block[:2], block[0], block, eps=EPS, backend="cute")
    assert rms_norm_linear(block[:2], block[0], block, eps=EPS).shape == (2, 256)


def test_a_norm_weight_with_gaps_is_not_for_the_norm_inside(monkeypatch):
    x, norm_weight, weights = make_inputs((2,), 64, 16)
    spread = norm_weight.repeat_interleave(2)[::2]
    with monkeypatch.context() as patch:
        patch.setattr(bf16_linear, "why_no_cute", lambda *tensors, archs: None)
        with pytest.raises(ValueError, match="must be contiguous"):
            rms_norm_linear(x, spread, weights, eps=EPS, backend="cute")
    assert torch.equal(
        rms_norm_linear(x, spread, weights, eps=EPS),
        rms_norm_linear(x, norm_weight, weights, eps=EPS),
    )
