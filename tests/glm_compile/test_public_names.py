"""The package's lazy public names."""

from __future__ import annotations

import importlib.util

import pytest

import glm_compile

pytestmark = pytest.mark.newest_transformers


@pytest.mark.parametrize("name", sorted(glm_compile._PUBLIC))
def test_a_public_name_is_what_its_module_defines(name):
    module = importlib.import_module(glm_compile._PUBLIC[name])
    assert getattr(glm_compile, name) is getattr(module, name)
    # Importing a module of the same name would put it in the place of the public one.
    assert importlib.util.find_spec(f"glm_compile.{name}") is None


def test_names_are_listed_and_others_refused():
    assert set(glm_compile.__all__) <= set(dir(glm_compile))
    with pytest.raises(AttributeError, match="has no attribute 'explian'"):
        _ = glm_compile.explian
