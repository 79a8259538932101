"""The table of splits: what is made of times, and that writing it keeps the rest of the file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest
import torch

from glm_compile.ops.bf16_linear import measured, tune
from glm_compile.ops.bf16_linear.config import StreamConfig, default_stream

FEW, MANY = StreamConfig(16, 512), StreamConfig(32, 512)
# Slower than the library at 8 rows alone: 6 rows are asked about by the same power of two.
TIMES = {1: (10.0, 20.0), 6: (10.0, 15.0), 8: (10.0, 9.0), 16: (10.0, 12.0)}


def load(path):
    spec = importlib.util.spec_from_file_location("rewritten", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_library_runs_where_it_wins():
    result = tune.Tuned((3, 512), FEW, FEW, TIMES)
    assert result.lost == (8,)
    assert result.speedups() == [2.0, 1.0, 1.0, 1.2]
    # What is only measured runs as the table says, even where that loses.
    result = tune.Tuned((3, 512), FEW, FEW, TIMES, library_at=(16,))
    assert result.lost == (16,) and result.speedups() == [2.0, 1.5, 0.9, 1.0]


def test_summary_is_over_what_runs(monkeypatch):
    monkeypatch.setattr(tune, "SHAPES", {1: [(3, 512)], 2: [(5, 512)]})
    results = [
        tune.Tuned((3, 512), FEW, FEW, {1: (1.0, 2.0)}),
        tune.Tuned((5, 512), FEW, FEW, {1: (1.0, 8.0)}),
    ]
    assert tune._summary(results) == [
        "all weights: geometric mean 4.000x, least 2.00x",
        "over 1 device: geometric mean 2.000x, least 2.00x",
        "over 2 devices: geometric mean 8.000x, least 8.00x",
    ]


def test_written_choices_are_read_again_and_others_stay(tmp_path, monkeypatch):
    path = tmp_path / "measured.py"
    path.write_text(Path(measured.__file__).read_text())
    monkeypatch.setattr(tune, "__file__", str(tmp_path / "tune.py"))
    shapes = list(measured.MEASURED)
    lost = tune.Tuned(shapes[0], FEW, FEW, TIMES)
    won = tune.Tuned(shapes[1], FEW, MANY, {1: (1.0, 2.0)})
    tune.write([lost, won])
    again = load(path)
    assert again.__doc__ == measured.__doc__
    assert StreamConfig(*again.MEASURED[shapes[0]]) == FEW
    assert StreamConfig(*again.MANY_ROWS[shapes[1]]) == MANY and shapes[0] not in again.MANY_ROWS
    assert again.LIBRARY[shapes[0]] == (8,) and shapes[1] not in again.LIBRARY
    for shape in shapes[2:]:
        assert again.MEASURED[shape] == measured.MEASURED[shape]
        assert again.MANY_ROWS.get(shape) == measured.MANY_ROWS.get(shape)
    # Nothing is left to write: the file is the same once more.
    text = path.read_text()
    monkeypatch.setattr(tune, "MEASURED", again.MEASURED)
    monkeypatch.setattr(tune, "MANY_ROWS", again.MANY_ROWS)
    monkeypatch.setattr(tune, "LIBRARY", again.LIBRARY)
    tune.write([lost, won])
    assert path.read_text() == text
    # As the formatter would have it, also where the library wins nowhere.
    assert text.rstrip().endswith("}") and "{\n}" not in text
    monkeypatch.setattr(tune, "LIBRARY", {})
    tune.write([won])
    assert path.read_text().endswith("\nLIBRARY: dict[tuple[int, int], tuple[int, ...]] = {}\n")


@pytest.mark.parametrize("shape", [s for shapes in tune.SHAPES.values() for s in shapes])
def test_candidates_can_run(shape):
    splits = list(tune.candidates(*shape))
    assert 2 <= len(splits) == len(set(splits))
    for config in [*splits, default_stream(*shape)]:
        assert -(-shape[1] // config.stage_columns) % config.cluster == 0


def test_times_are_written_for_the_plot(monkeypatch):
    from tests.benchmarks.plot_bf16_linear import read_lines, read_times

    monkeypatch.setattr(tune.torch.cuda, "get_device_name", lambda: "card")
    facts = json.loads(json.dumps(tune._facts([tune.Tuned((2784, 6144), FEW, FEW, TIMES)])))
    lines = read_lines(read_times(facts))
    assert lines["2784 x 6144"] == [(1, 2.0), (6, 1.0), (8, 1.0), (16, 1.2)]


@pytest.mark.parametrize("keep", [True, False])
def test_the_quickest_split_is_chosen_for_few_rows_and_for_many(keep, monkeypatch):
    """With times of their own instead of a GPU's: what is kept is only measured."""
    few, many, slow = StreamConfig(16, 512), StreamConfig(32, 512), StreamConfig(24, 512)
    compiled, measured_splits = [], []

    def ours(x, config, _weights):
        measured_splits.append(config)
        best = few if len(x) <= 8 else many
        return 1.0 if config == best else 2.0

    monkeypatch.setattr(tune, "candidates", lambda *_shape: iter([few, many]))
    monkeypatch.setattr(tune, "stream_config_for", lambda *_shape: slow)
    monkeypatch.setattr(tune, "compile_splits", lambda _shape, splits: compiled.extend(splits))
    monkeypatch.setattr(tune, "_ours", ours)
    monkeypatch.setattr(tune, "measure", lambda _fn, _weights: 3.0)
    monkeypatch.setattr(tune, "_COLD_BYTES", 1)
    monkeypatch.setattr(tune, "num_multiprocessors", lambda _device: 132)
    randn = torch.randn
    monkeypatch.setattr(torch, "randn", lambda *shape, **_options: randn(*shape))
    result = tune.tune((8, 16), keep)
    if keep:
        assert compiled == [slow] and set(measured_splits) == {slow}
        times = {m: (2.0, 3.0) for m in tune.ROWS}
        assert result == tune.Tuned((8, 16), slow, slow, times, library_at=())
    else:
        assert set(compiled) == {few, many, slow}
        assert result == tune.Tuned((8, 16), few, many, {m: (1.0, 3.0) for m in tune.ROWS})
