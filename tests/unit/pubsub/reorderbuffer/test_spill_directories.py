"""Spill directories of processes that have ended, and of running ones."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from pubsub.errors import ObjectInUse
from pubsub.reorderbuffer import directories
from pubsub.reorderbuffer.directories import SpillDirectory
from pubsub.reorderbuffer.files import FileFailure

_HOLDER = """
import sys, time
from pathlib import Path
from pubsub.reorderbuffer.directories import SpillDirectory
held = SpillDirectory.within(Path(sys.argv[1]), "spill-")
(held.path / "0.spill.arrows").write_bytes(b"changes")
print(held.path, flush=True)
time.sleep(600)
"""


def _open_files() -> list[Path]:
    found = []
    for one in Path("/proc/self/fd").iterdir():
        with suppress(OSError):
            found.append(Path(os.readlink(one)))
    return found


def test_directories_of_dead_processes_are_removed_and_those_in_use_stay(tmp_path: Path) -> None:
    (tmp_path / "spill-old").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "spill-file").touch()
    (tmp_path / "spill-link").symlink_to(tmp_path / "other")
    with subprocess.Popen([sys.executable, "-c", _HOLDER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as other:
        assert other.stdout is not None
        theirs = Path(other.stdout.readline().strip())
        stays = {"other", "spill-file", "spill-link", theirs.name}
        with SpillDirectory.within(tmp_path, "spill-") as mine:
            assert {path.name for path in tmp_path.iterdir()} == {*stays, mine.path.name}
            assert (theirs / "0.spill.arrows").exists()
        assert {path.name for path in tmp_path.iterdir()} == stays
        other.kill()
        other.wait()
        assert theirs.exists()
        with SpillDirectory.within(tmp_path, "spill-") as mine:
            assert {path.name for path in tmp_path.iterdir()} == {*stays - {theirs.name}, mine.path.name}


def test_a_directory_of_a_given_name_has_one_owner_and_begins_empty(tmp_path: Path) -> None:
    path = tmp_path / "spill"
    (path / "worker").mkdir(parents=True)
    (path / "worker" / "0.spill.arrows").touch()
    held = SpillDirectory.at(path)
    assert list(path.iterdir()) == []
    (path / "mine").touch()
    with pytest.raises(ObjectInUse):
        SpillDirectory.at(path)
    assert (path / "mine").exists()
    held.release()
    assert not path.exists()
    SpillDirectory.at(path).release()


def test_a_directory_that_could_not_be_emptied_can_be_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The lock went with the failure: a second try of this process met "in use by another process"."""
    path = tmp_path / "spill"

    def fail(_: Path) -> None:
        raise FileFailure("could not remove")

    with monkeypatch.context() as patch:
        patch.setattr(directories, "_empty", fail)
        with pytest.raises(FileFailure):
            SpillDirectory.at(path)
    SpillDirectory.at(path).release()


def test_a_file_system_without_locks_is_a_typed_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(directories.fcntl, "flock", fail)
    with pytest.raises(FileFailure, match="No locks available"):
        SpillDirectory.at(tmp_path / "spill")
    # Other threads of this process open and close files of theirs meanwhile.
    assert [one for one in _open_files() if one.is_relative_to(tmp_path)] == []
