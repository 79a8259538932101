"""CompileOptions: the dict form, unknown names, wrong values, modes."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

import glm_compile
from glm_compile.errors import UnsupportedError
from glm_compile.options import CompileOptions, check_mode


def test_defaults_are_the_documented_ones():
    options = CompileOptions()
    assert dataclasses.asdict(options) == {
        "indexer_dtype": "auto",
        "inner": "inductor",
        "strict": True,
        "disable": (),
        "deterministic": False,
    }
    assert glm_compile.CompileOptions is CompileOptions


def test_options_are_frozen_and_hashable():
    options = CompileOptions(disable=["merge_linears"])
    assert options.disable == ("merge_linears",)
    assert hash(options) == hash(CompileOptions(disable=("merge_linears",)))
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.strict = False


def test_dict_and_record_are_one_thing():
    options = CompileOptions(inner="eager", strict=False)
    assert CompileOptions.from_dict({"inner": "eager", "strict": False}) == options
    assert CompileOptions.from_dict(options) is options
    assert CompileOptions.from_dict(None) == CompileOptions()


def test_inner_knows_whether_it_was_asked_for():
    assert not CompileOptions().is_inner_explicit
    assert not CompileOptions.from_dict({"strict": False}).is_inner_explicit
    assert not dataclasses.replace(CompileOptions(), strict=False).is_inner_explicit
    assert CompileOptions.from_dict({"inner": "inductor"}).is_inner_explicit


def test_unknown_option_names_the_known_ones_and_the_closest():
    with pytest.raises(ValueError, match=r"'indexer_type'.*did you mean 'indexer_dtype'.*strict"):
        CompileOptions.from_dict({"indexer_type": "fp8"})
    with pytest.raises(ValueError, match=r"'indexer_type'.*did you mean 'indexer_dtype'.*strict"):
        CompileOptions(indexer_type="fp8")
    with pytest.raises(ValueError, match="unknown option 3; known options: indexer_dtype"):
        CompileOptions.from_dict({3: 1})
    assert next(iter(inspect.signature(CompileOptions).parameters)) == "indexer_dtype"


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("indexer_dtype", "fp16", r"'auto', 'fp8', 'bf16', 'fp32', got 'fp16'"),
        ("indexer_dtype", None, "got None"),
        ("inner", "Inductor", "did you mean 'inductor'"),
        ("strict", 1, "expected True or False, got 1"),
        ("deterministic", "yes", "expected True or False"),
        ("disable", "merge_linears", "expected a tuple of pass names"),
        ("disable", ("merge_linear",), "did you mean 'merge_linears'"),
        ("disable", (3,), "expected a tuple of pass names"),
        ("disable", 3, "expected a tuple of pass names, got 3"),
        ("disable", None, "expected a tuple of pass names, got None"),
    ],
)
def test_wrong_value_says_what_was_expected(name, value, message):
    with pytest.raises(ValueError, match=message):
        CompileOptions.from_dict({name: value})


def test_options_of_another_type_are_refused():
    with pytest.raises(ValueError, match="expected a dict or CompileOptions, got list"):
        CompileOptions.from_dict(["strict"])


def test_tensorrt_is_refused_with_the_alternatives():
    with pytest.raises(UnsupportedError, match="'inductor' or 'eager'"):
        CompileOptions(inner="tensorrt")


def test_only_the_default_mode_is_taken():
    check_mode(None)
    check_mode("default")
    for mode in ("reduce-overhead", "max-autotune", "max-autotune-no-cudagraphs", ""):
        with pytest.raises(ValueError, match="captures no CUDA graphs of its own"):
            check_mode(mode)


def test_disabling_the_mask_disables_what_stands_on_it():
    assert CompileOptions(disable=("mask",)).disabled == {
        "mask",
        "indexer_prologue",
        "indexer_topk",
        "sparse_mla",
    }
    assert CompileOptions(disable=("indexer_topk",)).disabled == {"indexer_topk"}
