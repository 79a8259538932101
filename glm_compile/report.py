"""What the passes found in one compiled graph, against what the model has.

A report is computed from the graphs: the matches of a layer kind times the layers that use it. A
compile cache that is hit therefore loses nothing.
"""

from __future__ import annotations

import collections
import io
import os
import re
import shutil
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from glm_compile.fx_passes.base import Declined

# Written into every folder that `save` makes, so that it overwrites its own folders only.
MARKER = "glm_compile_report.txt"
_GRAPH_FILE = re.compile(r"\d{2,}-.+-(before|after)\.txt")
_SCRATCH = ".glm_compile-"
_MAX_REPORTS = 16
_REPORTS: collections.deque[CompileReport] = collections.deque(maxlen=_MAX_REPORTS)
_LISTENERS: list[Callable[[CompileReport], None]] = []


@dataclass(frozen=True)
class GraphDump:
    """One graph before and after one pass.

    Attributes:
        graph: which graph: `model`, or a layer kind with its uses.
        pass_name: report key of the pass, or the name of the stage.
        before: the graph as text.
        after: the same after the pass; equal to `before` where nothing matched.
    """

    graph: str
    pass_name: str
    before: str
    after: str


@dataclass
class CompileReport:
    """Matches and expectations of one compiled graph.

    Attributes:
        title: what was compiled: `model`, `MTP layer`, `part of the model`.
        tier: `exact` or `fp8 (changes numbers)`.
        inner: the compiler that the graph went to after the passes.
        mask_route: how the mask's meaning was found: `proven`, `bounds`, `kept`; else `none`.
        matches: regions replaced, by pass, over all layers.
        expected: regions that the model has, by pass.
        declined: candidates left alone, by pass, each with its reason.
        notes: what else a user should know.
        graphs: the graphs before and after each pass, for `save`.
        mtp: the report of the MTP layer, where one was asked for together with the model's.
    """

    title: str = "model"
    tier: str = "exact"
    inner: str = "inductor"
    mask_route: str = "none"
    matches: dict[str, int] = field(default_factory=dict)
    expected: dict[str, int] = field(default_factory=dict)
    declined: dict[str, list[Declined]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    graphs: list[GraphDump] = field(default_factory=list, repr=False)
    mtp: CompileReport | None = None

    @property
    def ok(self) -> bool:
        """Whether every pass matched exactly what the model, and the MTP layer if any, has."""
        return not self.mismatched and (self.mtp is None or self.mtp.ok)

    @property
    def mismatched(self) -> list[str]:
        """Passes that matched fewer or more regions than expected."""
        keys = {**self.expected, **self.matches}
        return [k for k in keys if self.matches.get(k, 0) != self.expected.get(k, 0)]

    def add_declined(self, pass_name: str, declined: Iterable[Declined]) -> None:
        """Record candidates that were left alone; the same place and reason are recorded once."""
        known = self.declined.setdefault(pass_name, [])
        known.extend(d for d in dict.fromkeys(declined) if d not in known)

    def table(self) -> str:
        """Return pass, expected, matched and declined as text, with the tier and the mask route."""
        from rich.box import ASCII
        from rich.console import Console
        from rich.table import Table

        table = Table(box=ASCII, show_lines=False, title=f"glm_compile: {self.title}")
        for column in ("pass", "expected", "matched", "declined"):
            table.add_column(
                column, justify="right" if column in ("expected", "matched") else "left"
            )
        for name in {**self.expected, **self.matches}:
            table.add_row(
                name,
                str(self.expected.get(name, 0)),
                str(self.matches.get(name, 0)),
                "\n".join(_summaries(self.declined.get(name, []))) or "-",
            )
        console = Console(
            file=io.StringIO(),
            width=120,
            color_system=None,
            markup=False,
            highlight=False,
            emoji=False,
        )
        console.print(table)
        console.print(
            f"tier: {self.tier}; mask: {self.mask_route}; inner compiler: {self.inner}",
            soft_wrap=True,
        )
        for note in self.notes:
            console.print(f"note: {note}", soft_wrap=True)
        text: str = console.file.getvalue()  # type: ignore[attr-defined]
        lines = [line.rstrip() for line in text.rstrip().splitlines()]
        return "\n".join([*lines, *(["", self.mtp.table()] if self.mtp is not None else [])])

    def __str__(self) -> str:
        return self.table()

    def save(self, path: str | os.PathLike[str]) -> Path:
        """Write the table and each graph before and after each pass as text files.

        A new folder appears complete or not at all. In one that an earlier `save` filled, its files
        are replaced once all of the new ones are written; the folder itself stays.

        Raises:
            FileExistsError: `path` is a file, or a folder with content that is not a report's.
        """
        target = Path(path).absolute()
        is_new = check_folder(target)
        target.parent.mkdir(parents=True, exist_ok=True)
        scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=target.parent if is_new else target))
        try:
            self._write(scratch)
            if is_new:
                # mkdtemp makes private folders; a report is as readable as other files of the user.
                umask = os.umask(0)
                os.umask(umask)
                scratch.chmod(0o777 & ~umask)
                scratch.rename(target)
            else:
                written = {file.name for file in scratch.iterdir()}
                for name in sorted(written):
                    (scratch / name).replace(target / name)
                for old in target.iterdir():
                    if old.name not in written and old != scratch:
                        old.unlink()
        finally:
            shutil.rmtree(scratch, ignore_errors=True)
        return target

    def _write(self, folder: Path) -> None:
        (folder / MARKER).write_text(self.table() + "\n", encoding="utf-8")
        numbers: dict[str, int] = {}
        own = [(dump.graph, dump) for dump in self.graphs]
        mtp = [(f"MTP {dump.graph}", dump) for dump in self.mtp.graphs] if self.mtp else []
        for name, dump in [*own, *mtp]:
            graph = _file_name(name)
            number = numbers.setdefault(graph, len(numbers))
            stage = sum(1 for _ in (folder.glob(f"{number:02d}-{graph}-*-before.txt")))
            stem = f"{number:02d}-{graph}-{stage}-{_file_name(dump.pass_name)}"
            (folder / f"{stem}-before.txt").write_text(dump.before + "\n", encoding="utf-8")
            (folder / f"{stem}-after.txt").write_text(dump.after + "\n", encoding="utf-8")


def last_report() -> CompileReport | None:
    """Return the report of the latest compilation by the backend in this process, or None."""
    return _REPORTS[-1] if _REPORTS else None


def reports() -> list[CompileReport]:
    """Return the reports of the latest compilations (at most 16), oldest first."""
    return list(_REPORTS)


def remember(report: CompileReport) -> None:
    """Make `report` the latest one and hand it to the listeners."""
    _REPORTS.append(report)
    for listener in _LISTENERS:
        listener(report)


@contextmanager
def listening(listener: Callable[[CompileReport], None]) -> Iterator[None]:
    """Call `listener` with each report of the compilations inside the block."""
    _LISTENERS.append(listener)
    try:
        yield
    finally:
        _LISTENERS.remove(listener)


def _summaries(declined: list[Declined]) -> list[str]:
    """One line a reason: the places that share it, the first two by name.

    Reasons that differ in the layer's number only are one.
    """
    groups: dict[str, list[Declined]] = {}
    for entry in declined:
        groups.setdefault(re.sub(r"\blayers\.\d+", "layers.*", entry.reason), []).append(entry)
    lines = []
    for reason, entries in groups.items():
        where = ", ".join(entry.where for entry in entries[:2])
        more = f" and {len(entries) - 2} more" if len(entries) > 2 else ""
        is_one = len({entry.reason for entry in entries}) == 1
        lines.append(f"{where}{more}: {entries[0].reason if is_one else reason}")
    return lines


def check_folder(path: str | os.PathLike[str]) -> bool:
    """Whether the folder of a report is still to be made.

    Raises:
        FileExistsError: it is a file, or a folder with content that is not a report's.
    """
    target = Path(path).absolute()
    if not target.exists() and not target.is_symlink():
        return True
    if not target.is_dir():
        raise FileExistsError(f"save: {target} exists and is not a folder")
    _check_is_own(target)
    return False


def _check_is_own(folder: Path) -> None:
    """Refuse a folder that holds anything but a report, or nothing."""
    names = sorted(path.name for path in folder.iterdir())
    if not names:
        return
    others = [name for name in names if name != MARKER and not _GRAPH_FILE.fullmatch(name)]
    if others or MARKER not in names:
        raise FileExistsError(
            f"save: {folder} has content that is not a glm_compile report"
            f"{f' ({others[0]})' if others else ''}; give an empty or new folder"
        )


def _file_name(text: str) -> str:
    return "".join(c if c.isalnum() or c in "._" else "_" for c in text)
