"""The table of splits: what is made of times, and that writing it keeps the rest of the file."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

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
