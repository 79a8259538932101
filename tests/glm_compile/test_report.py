"""CompileReport: the verdict, the table, saving."""

from __future__ import annotations

from pathlib import Path

import pytest

from glm_compile import report as report_module
from glm_compile.fx_passes.base import Declined
from glm_compile.report import CompileReport, GraphDump

pytestmark = pytest.mark.newest_transformers


def make_report() -> CompileReport:
    report = CompileReport(
        tier="exact",
        mask_route="proven",
        matches={"mask": 7, "indexer_topk": 2},
        expected={"mask": 7, "indexer_topk": 3},
        notes=["weights of [x] are left alone"],
        graphs=[
            GraphDump("kind 0 x2", "indexer_topk", "before 0", "after 0"),
            GraphDump("kind 0 x2", "merge_linears", "after 0", "after 1"),
            GraphDump("kind 1 x1", "indexer_topk", "before 1", "before 1"),
        ],
    )
    report.add_declined(
        "indexer_topk", [Declined("model.layers.3.self_attn.indexer", "rope [/]: no")]
    )
    return report


def test_ok_means_that_matches_equal_expectations():
    assert CompileReport(matches={"mask": 1}, expected={"mask": 1}).ok
    assert not CompileReport(matches={"mask": 1}, expected={"mask": 2}).ok
    assert not CompileReport(matches={"mask": 2}, expected={"mask": 1}).ok
    assert not CompileReport(matches={"mask": 1}).ok
    assert CompileReport(expected={"mask": 0}).ok
    assert make_report().mismatched == ["indexer_topk"]


def test_table_shows_counts_reasons_tier_and_route():
    table = make_report().table()
    row = next(line for line in table.splitlines() if "indexer_topk" in line)
    assert [c.strip() for c in row.strip("|").split("|")][:3] == ["indexer_topk", "3", "2"]
    assert "rope [/]: no" in table
    assert "model.layers.3.self_attn.indexer" in table
    assert "tier: exact; mask: proven; inner compiler: inductor" in table
    assert "note: weights of [x] are left alone" in table
    assert table.isascii()


def test_reasons_are_grouped_and_recorded_once():
    report = CompileReport(expected={"mask": 5})
    entries = [Declined(f"layers.{i}", "float mask") for i in range(5)]
    report.add_declined("mask", entries)
    report.add_declined("mask", entries)
    assert report.declined["mask"] == entries
    table = " ".join(report.table().split())
    assert "layers.0, layers.1 and 3 more: float mask" in table


def test_reasons_that_differ_in_the_layer_only_are_one_line():
    report = CompileReport(expected={"mask": 3})
    entries = [Declined(f"layers.{i}.gate", f"apart from layers.{i}.up_proj") for i in range(3)]
    report.add_declined("mask", entries)
    table = " ".join(report.table().split())
    assert "layers.0.gate, layers.1.gate and 1 more: apart from layers.*.up_proj" in table
    assert report.declined["mask"] == entries


def test_save_writes_the_table_and_each_graph_before_and_after(tmp_path):
    report = make_report()
    folder = report.save(tmp_path / "new" / "report")
    files = {p.name: p.read_text() for p in folder.iterdir()}
    assert files[report_module.MARKER] == report.table() + "\n"
    assert files["00-kind_0_x2-0-indexer_topk-before.txt"] == "before 0\n"
    assert files["00-kind_0_x2-0-indexer_topk-after.txt"] == "after 0\n"
    assert files["00-kind_0_x2-1-merge_linears-after.txt"] == "after 1\n"
    assert files["01-kind_1_x1-0-indexer_topk-after.txt"] == "before 1\n"
    assert len(files) == 7
    assert [p.name for p in folder.parent.iterdir()] == ["report"]


def test_save_replaces_its_own_folder_and_leaves_nothing_of_the_old(tmp_path):
    report = make_report()
    report.save(tmp_path / "report")
    report.graphs = report.graphs[:1]
    report.save(tmp_path / "report")
    assert len(list((tmp_path / "report").iterdir())) == 3
    assert [p.name for p in tmp_path.iterdir()] == ["report"]


def test_save_takes_an_empty_folder(tmp_path):
    assert (make_report().save(tmp_path) / report_module.MARKER).is_file()


def test_save_refuses_what_it_did_not_make(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match="not a glm_compile report"):
        make_report().save(tmp_path)
    with pytest.raises(FileExistsError, match="not a folder"):
        make_report().save(tmp_path / "notes.txt")
    assert [p.name for p in tmp_path.iterdir()] == ["notes.txt"]
    assert (tmp_path / "notes.txt").read_text() == "mine"


def test_save_keeps_what_a_user_put_into_a_report(tmp_path):
    folder = make_report().save(tmp_path / "report")
    (folder / "notes.txt").write_text("mine")
    with pytest.raises(FileExistsError, match=r"notes\.txt"):
        make_report().save(folder)
    assert (folder / "notes.txt").read_text() == "mine"


@pytest.mark.parametrize("is_filled", [False, True])
def test_save_keeps_the_folder_that_it_fills(tmp_path, monkeypatch, is_filled):
    folder, link = tmp_path / "report", tmp_path / "link"
    folder.mkdir()
    link.symlink_to(folder)
    if is_filled:
        make_report().save(folder)
    inode = folder.stat().st_ino
    monkeypatch.chdir(folder)
    make_report().save(".")
    make_report().save(link)
    assert link.is_symlink() and folder.stat().st_ino == inode
    assert Path.cwd() == folder
    assert len(list(folder.iterdir())) == 7


def test_save_takes_the_longest_name(tmp_path):
    assert make_report().save(tmp_path / ("r" * 255)).is_dir()


def test_failed_save_leaves_no_trace(tmp_path, monkeypatch):
    report = make_report()
    report.save(tmp_path / "report")
    before = {p.name: p.read_text() for p in (tmp_path / "report").iterdir()}

    def fail(self, folder):
        (folder / "half.txt").write_text("half")
        raise OSError("disk full")

    monkeypatch.setattr(CompileReport, "_write", fail)
    with pytest.raises(OSError, match="disk full"):
        report.save(tmp_path / "report")
    assert [p.name for p in tmp_path.iterdir()] == ["report"]
    assert {p.name: p.read_text() for p in (tmp_path / "report").iterdir()} == before


def test_last_report_is_the_latest_and_the_list_is_bounded():
    all_reports = [CompileReport(title=str(i)) for i in range(20)]
    for report in all_reports:
        report_module.remember(report)
    assert report_module.last_report() is all_reports[-1]
    assert report_module.reports() == all_reports[-16:]
