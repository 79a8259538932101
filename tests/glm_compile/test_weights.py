"""Laying out weights as views of one block: what stays as it was, what is left alone."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize

import glm_compile
from glm_compile.ops.merged_linear import adjacent_block
from glm_compile.weights import MergeRecord, merge_groups, merge_weights
from tests.tiny_models import tiny_model


def names_of_groups(model):
    layers = model.model.layers
    groups = []
    for layer in layers:
        attention = layer.self_attn
        first = [attention.q_a_proj.weight, attention.kv_a_proj_with_mqa.weight]
        if getattr(attention, "indexer", None) is not None:
            first += [attention.indexer.wk.weight, attention.indexer.weights_proj.weight]
            groups.append([attention.q_b_proj.weight, attention.indexer.wq_b.weight])
        groups.append(first)
        mlp = getattr(layer.mlp, "shared_experts", layer.mlp)
        groups.append([mlp.gate_proj.weight, mlp.up_proj.weight])
    return groups


def num_adjacent(model):
    return sum(adjacent_block(group) is not None for group in names_of_groups(model))


def values_of(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same_values(model, values):
    state = model.state_dict()
    assert state.keys() == values.keys()
    for name, tensor in state.items():
        assert torch.equal(tensor, values[name]), name


class Pair(nn.Module):
    """The smallest module with a group."""

    def __init__(self, rows: tuple[int, int] = (8, 4), columns: int = 16) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(columns, rows[0], bias=False)
        self.up_proj = nn.Linear(columns, rows[1], bias=False)

    def forward(self, x):
        return self.gate_proj(x), self.up_proj(x)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_all_groups_of_the_model_become_adjacent_and_nothing_else_changes(dtype):
    model = tiny_model(dtype=dtype)
    values, names = values_of(model), [n for n, _ in model.named_parameters()]
    parameters = dict(model.named_parameters())
    record = glm_compile.merge_weights(model)
    assert record.num_merged == record.num_moved == len(names_of_groups(model)) == 11
    assert not record.left_alone
    assert num_adjacent(model) == 11
    assert_same_values(model, values)
    assert [n for n, _ in model.named_parameters()] == names
    assert all(p is parameters[n] for n, p in model.named_parameters())


def test_merging_again_moves_nothing():
    model = tiny_model()
    merge_weights(model)
    pointers = [p.data_ptr() for p in model.parameters()]
    record = merge_weights(model)
    assert (record.num_merged, record.num_moved) == (11, 0)
    assert [p.data_ptr() for p in model.parameters()] == pointers


def test_no_weight_is_stored_twice():
    model = tiny_model()
    merge_weights(model)
    storages = {
        p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in model.parameters()
    }
    assert sum(storages.values()) == sum(p.numel() * p.element_size() for p in model.parameters())


def test_a_group_grows_when_a_longer_one_is_found():
    pair = Pair()
    weights = [pair.gate_proj.weight, pair.up_proj.weight, nn.Parameter(torch.randn(12, 16))]
    values = [w.clone() for w in weights]
    record = MergeRecord()
    merge_groups([[(str(i), w) for i, w in enumerate(weights[:2])]], record)
    merge_groups([[(str(i), w) for i, w in enumerate(weights)]], record)
    merge_groups([[(str(i), w) for i, w in enumerate(weights[:2])]], record)
    assert (record.num_merged, record.num_moved) == (3, 2)
    assert adjacent_block(weights) is not None
    assert torch.equal(adjacent_block(weights), torch.cat(values))


def test_save_pretrained_and_from_pretrained_keep_keys_values_and_size(tmp_path):
    model = tiny_model()
    model.save_pretrained(tmp_path / "before")
    values = values_of(model)
    merge_weights(model)
    model.save_pretrained(tmp_path / "after")
    sizes = [
        sum(f.stat().st_size for f in (tmp_path / folder).glob("*.safetensors"))
        for folder in ("before", "after")
    ]
    assert sizes[0] == sizes[1]
    assert_same_values(type(model).from_pretrained(tmp_path / "after"), values)


def test_safetensors_save_file_of_the_state_dict_works(tmp_path):
    from safetensors.torch import load_file, save_file

    pair = Pair()
    values = values_of(pair)
    merge_weights(pair)
    save_file(pair.state_dict(), tmp_path / "pair.safetensors")
    loaded = load_file(tmp_path / "pair.safetensors")
    assert all(torch.equal(loaded[name], value) for name, value in values.items())


def test_torch_save_stores_a_block_once_and_keeps_it(tmp_path):
    pair = Pair((256, 256), 256)
    merge_weights(pair)
    torch.save(pair.state_dict(), tmp_path / "pair.pt")
    assert (tmp_path / "pair.pt").stat().st_size < 1.1 * 2 * 256 * 256 * 4
    state = torch.load(tmp_path / "pair.pt")
    assert adjacent_block(list(state.values())) is not None


def test_load_state_dict_and_a_cast_to_the_same_dtype_keep_the_layout():
    pair, other = Pair(), Pair()
    merge_weights(pair)
    pair.load_state_dict(other.state_dict())
    pair.to(torch.float32)
    assert adjacent_block([pair.gate_proj.weight, pair.up_proj.weight]) is not None
    assert_same_values(pair, values_of(other))


@pytest.mark.parametrize("change", [copy.deepcopy, lambda m: m.to(torch.bfloat16)])
def test_a_copy_or_cast_loses_the_layout_and_merging_restores_it(change):
    pair = Pair()
    merge_weights(pair)
    changed = change(pair)
    weights = [changed.gate_proj.weight, changed.up_proj.weight]
    values = values_of(changed)
    assert adjacent_block(weights) is None
    record = merge_weights(changed)
    assert (record.num_merged, record.num_moved) == (1, 1)
    assert adjacent_block(weights) is not None
    assert_same_values(changed, values)


def test_deepcopy_does_not_share_with_the_original():
    pair = Pair()
    merge_weights(pair)
    other = copy.deepcopy(pair)
    other.gate_proj.weight.zero_()
    assert pair.gate_proj.weight.abs().sum() > 0


def test_a_parameter_that_two_modules_share_stays_one():
    pair, other = Pair(), Pair()
    other.gate_proj.weight = pair.gate_proj.weight
    record = merge_weights(pair)
    assert record.num_merged == 1
    assert other.gate_proj.weight is pair.gate_proj.weight
    assert other.gate_proj.weight.data_ptr() == pair.gate_proj.weight.data_ptr()


def test_gradient_state_is_kept():
    pair = Pair().requires_grad_(True)
    pair.up_proj.weight.requires_grad_(False)
    pair.gate_proj.weight.grad = torch.ones(8, 16)
    merge_weights(pair)
    assert pair.gate_proj.weight.requires_grad
    assert not pair.up_proj.weight.requires_grad
    assert pair.gate_proj.weight.is_leaf
    assert torch.equal(pair.gate_proj.weight.grad, torch.ones(8, 16))


def test_weights_made_under_inference_mode_merge():
    with torch.inference_mode():
        pair = Pair().requires_grad_(False)
    values = values_of(pair)
    assert merge_weights(pair).num_moved == 1
    assert adjacent_block([pair.gate_proj.weight, pair.up_proj.weight]) is not None
    assert_same_values(pair, values)


def test_meta_weights_are_passed_over():
    with torch.device("meta"):
        pair = Pair()
    record = merge_weights(pair)
    assert record == MergeRecord()


def hook(module, arguments, output):
    return output


def pre_hook(module, arguments):
    return arguments


class Double(nn.Module):
    def forward(self, weight):
        return 2 * weight


class Subclass(torch.Tensor):
    pass


class Adapter(nn.Module):
    def __init__(self, base):
        super().__init__()
        self.base_layer = base


def add_hook(pair):
    pair.up_proj.register_forward_hook(hook)


def add_pre_hook(pair):
    pair.gate_proj.register_forward_pre_hook(pre_hook)


def add_adapter(pair):
    pair.up_proj = Adapter(pair.up_proj)


def cast_one(pair):
    pair.up_proj.to(torch.float16)


def store_as_fp8(pair):
    pair.requires_grad_(False).to(torch.float8_e4m3fn)


def make_subclass(pair):
    pair.up_proj.weight = nn.Parameter(pair.up_proj.weight.detach().as_subclass(Subclass))


def alias_elsewhere(pair):
    pair.other = nn.Linear(16, 4, bias=False)
    pair.other.weight = nn.Parameter(pair.up_proj.weight.detach())


def view_of_larger(pair):
    pair.up_proj.weight = nn.Parameter(torch.randn(8, 16)[:4])


def transpose_one(pair):
    pair.up_proj.weight = nn.Parameter(torch.randn(16, 4).t())


def tie(pair):
    pair.gate_proj.weight = pair.up_proj.weight


REASONS = [
    (add_hook, r"up_proj: its module has a forward hook \(hook\)"),
    (add_pre_hook, r"gate_proj: its module has a forward pre-hook \(pre_hook\)"),
    (add_adapter, r"up_proj: its module is wrapped by the adapter Adapter"),
    (cast_one, r"up_proj is torch.float16 and gate_proj is torch.float32"),
    (store_as_fp8, r"gate_proj is stored as torch.float8_e4m3fn"),
    (make_subclass, r"up_proj is a Subclass, not a plain tensor"),
    (alias_elsewhere, r"up_proj shares its storage with Linear.weight"),
    (view_of_larger, r"up_proj is a view of a larger storage"),
    (transpose_one, r"up_proj is not contiguous"),
    (tie, r"up_proj and gate_proj are one parameter"),
]


@pytest.mark.parametrize(("change", "reason"), REASONS, ids=[c.__name__ for c, _ in REASONS])
def test_a_group_that_must_stay_is_left_alone_with_a_reason(change, reason):
    pair = Pair()
    change(pair)
    pointers = [p.data_ptr() for p in pair.parameters()]
    record = merge_weights(pair)
    assert record.num_merged == 0
    assert [d.where for d in record.left_alone] == ["gate_proj + up_proj"]
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(record.left_alone[0].reason)
    assert [p.data_ptr() for p in pair.parameters()] == pointers


def test_parametrized_weights_are_left_alone():
    pair = Pair()
    parametrize.register_parametrization(pair.up_proj, "weight", Double())
    original = pair.up_proj.parametrizations.weight.original
    record = MergeRecord()
    merge_groups([[("gate", pair.gate_proj.weight), ("up", original)]], record)
    assert record.num_merged == 0
    assert "parametrized" in record.left_alone[0].reason


def test_rows_that_would_end_unaligned_are_left_alone():
    pair = Pair((3, 5), 3)
    record = merge_weights(pair)
    assert record.num_merged == 0
    assert "not aligned" in record.left_alone[0].reason
