"""Spill directories of processes that have ended, and of running ones."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from pubsub.errors import ObjectInUse
from pubsub.reorderbuffer.directories import SpillDirectory

_HOLDER = """
import sys, time
from pathlib import Path
from pubsub.reorderbuffer.directories import SpillDirectory
held = SpillDirectory.within(Path(sys.argv[1]), "spill-")
(held.path / "0.spill.arrows").write_bytes(b"changes")
print(held.path, flush=True)
time.sleep(600)
"""


def test_what_a_killed_process_left_is_removed_and_what_a_living_one_has_stays(tmp_path: Path) -> None:
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
