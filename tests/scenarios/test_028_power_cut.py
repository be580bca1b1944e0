"""What a power cut leaves: each commit that was reported as durable is whole, from recorded system calls.

`strace` records what is written, fsynced, linked and renamed, in order.  At each mark the files are put together again
as a file system may have them after a power cut then: names and contents that were not fsynced are lost.
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

import pyarrow as pa
import pytest
from deltalake import DeltaTable, QueryBuilder

from pubsub.delta.files.file_rows import rows_in
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.spark.spark_session import Spark

ROOT: Final = Path(__file__).parent.parent.parent
_CALLS: Final = (
    "openat,open,creat,mkdir,mkdirat,rename,renameat,renameat2,link,linkat,write,pwrite64,writev,fsync,fdatasync"
)
_CALL: Final = re.compile(r"^\d+ +(\w+)\((.*)\) += (\d+)(?:<(.*)>)?$")
_QUOTED: Final = re.compile(r'"([^"]*)"')
_DESCRIPTOR: Final = re.compile(r"^\d+<([^>]*)>")


@dataclass
class Disk:
    """A file system: the files by number, and the names in each directory, as they are and as they are on the disk."""

    names: dict[str, int] = field(default_factory=dict)
    durable_names: dict[str, int] = field(default_factory=dict)
    written: dict[int, bool] = field(default_factory=dict)
    """Whether the content of each file is on the disk."""

    def create(self, path: str) -> None:
        self.names[path] = number = len(self.written)
        self.written[number] = False

    def sync(self, path: str) -> None:
        if path in self.names:
            self.written[self.names[path]] = True
        parent = path.rstrip("/")
        for names, others in ((self.names, self.durable_names), (self.durable_names, self.names)):
            for name in [name for name in names if name.rpartition("/")[0] == parent]:
                if name in self.names:
                    self.durable_names[name] = self.names[name]
                elif others is self.names:
                    del self.durable_names[name]

    def after_power_cut(self, beneath: str) -> Iterator[tuple[str, bool]]:
        """Yield each path that is left, and whether its content is: a path needs all its directories' names."""
        for path, number in self.durable_names.items():
            if path.startswith(f"{beneath}/"):
                parts = path.removeprefix(f"{beneath}/").split("/")
                above = [f"{beneath}/{'/'.join(parts[:count])}" for count in range(1, len(parts))]
                if all(one in self.durable_names for one in above):
                    yield path, self.written[number]


def replay(trace: Path) -> Iterator[tuple[str, Disk]]:
    """Yield each mark's name, and the disk then."""
    disk = Disk()
    for line in calls(trace):
        found = _CALL.match(line)
        if found is None:
            continue
        name, arguments, _, opened = found.groups()
        paths = _QUOTED.findall(arguments)
        if name in ("openat", "open", "creat"):
            if opened is not None and "O_CREAT" in arguments and opened not in disk.names:
                disk.create(opened)
        elif name in ("mkdir", "mkdirat"):
            disk.create(paths[-1])
            if "/marks/" in paths[-1]:
                yield Path(paths[-1]).name, disk
        elif name.startswith("rename"):
            disk.names[paths[-1]] = disk.names.pop(paths[0], -1)
        elif name.startswith("link"):
            disk.names[paths[-1]] = disk.names[paths[0]]
        elif descriptor := _DESCRIPTOR.match(arguments):
            path = descriptor[1]
            if name.endswith("sync"):
                disk.sync(path)
            elif path in disk.names:
                disk.written[disk.names[path]] = False


def calls(trace: Path) -> Iterator[str]:
    """Yield the calls in the order of their ends: strace divides one that another thread's interrupts."""
    begun: dict[str, str] = {}
    with trace.open(errors="replace") as lines:
        for line in lines:
            line = line.rstrip()
            thread, _, rest = line.partition(" ")
            if line.endswith("<unfinished ...>"):
                begun[thread] = line.removesuffix("<unfinished ...>")
            elif "resumed>" in rest:
                yield begun.pop(thread, "") + rest.partition("resumed>")[2]
            else:
                yield line


@pytest.mark.full
@pytest.mark.skipif(shutil.which("strace") is None, reason="strace is not installed")
def test_a_commit_that_was_reported_is_whole_after_a_power_cut(spark: Spark, tmp_path: Path) -> None:
    home, trace = tmp_path / "home", tmp_path / "trace"
    home.mkdir()
    command = ["strace", "-f", "-qq", "--seccomp-bpf", "-y", "-s", "0", "-e", f"trace={_CALLS}", "-e", "signal=none"]
    command += ["-o", str(trace), sys.executable, "-m", "tests.support.durable_commits", str(home)]
    subprocess.run(command, cwd=ROOT, check=True)
    seen: dict[str, int] = {}
    for mark, disk in replay(trace):
        table, version, rows = mark.split("-")
        left = tmp_path / f"left-{mark}"
        there = {
            path: whole for path, whole in disk.after_power_cut(str(home)) if path.startswith(f"{home}/warehouse/")
        }
        rebuilt = rebuild(home / "warehouse", left, there)
        path = next((left / one for one in rebuilt if Path(one).name == table), None)
        assert path is not None, f"{mark}: the table's directory is lost"
        assert_whole(path, int(version), int(rows))
        if version in ("3", "5"):
            assert spark.session.read.format("delta").load(str(path)).count() == int(rows), mark
        seen[table] = int(version)
    assert seen == {"ours": 5, "statement": 3}


def rebuild(source: Path, target: Path, left: Mapping[str, bool]) -> list[str]:
    """Copy what is left, with nothing in a file whose content was not fsynced.  Return the directories' paths."""
    target.mkdir()
    directories = []
    for name, whole in sorted(left.items()):
        original, copy = Path(name), target / Path(name).relative_to(source)
        if original.is_dir():
            copy.mkdir(parents=True, exist_ok=True)
            directories.append(str(Path(name).relative_to(source)))
        elif original.exists():
            copy.write_bytes(original.read_bytes() if whole else b"")
    return directories


def assert_whole(path: Path, version: int, rows: int) -> None:
    log = TableLog(str(path))
    log.refresh()
    assert log.version >= version, "a commit was reported and is lost"
    if log.version > version:
        return  # the next one was made already, and may not be whole yet
    assert sum(rows_in(log, file) - file.deleted for file in log.files.values()) == rows
    found = (
        QueryBuilder()
        .register("t", DeltaTable(path))
        .execute("SELECT count(*) AS n, sum(id + n) AS read FROM t")
        .read_all()
    )
    assert pa.table(found)["n"][0].as_py() == rows
