"""Directories that are made stay after a power loss: each new name is fsynced in the directory that holds it."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from catalog.store import Catalog
from pubsub.node.node import make_home
from pubsub.reorderbuffer import files


@pytest.fixture
def synced(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The directories and files that were fsynced, by their paths."""
    paths: list[Path] = []
    fsync = os.fsync

    def note(number: int) -> None:
        paths.append(Path(os.readlink(f"/proc/self/fd/{number}")))
        fsync(number)

    monkeypatch.setattr(os, "fsync", note)
    return paths


def test_a_home_and_its_parents(tmp_path: Path, synced: list[Path]) -> None:
    make_home(tmp_path / "a" / "b")
    assert synced == [tmp_path, tmp_path / "a"]
    make_home(tmp_path / "a" / "b")
    assert len(synced) == 2, "what was there is not made again"


async def test_the_directory_of_a_catalog(tmp_path: Path, synced: list[Path]) -> None:
    async with await Catalog.open(tmp_path / "new" / "catalog.db"):
        assert tmp_path in synced


def test_the_directories_of_prepared_transactions_and_slots(tmp_path: Path, synced: list[Path]) -> None:
    files.make_directory(tmp_path / "prepared" / "16384")
    assert synced == [tmp_path, tmp_path / "prepared"]
