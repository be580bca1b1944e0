"""pubsub.delta.pins: what a pin makes of a table's properties; pubsub.delta.log.version_files: what a version needs."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pyarrow as pa
import pytest
from deltalake import DeltaTable, write_deltalake

from pubsub.delta import pins
from pubsub.delta.log.transactions import Conflict
from pubsub.delta.log.version_files import require_readable
from pubsub.delta.pins import HELD, PROPERTY, pinned, released
from pubsub.errors import DataCorrupted, PubsubError, UndefinedFile, UndefinedTable

OWN = {"delta.logRetentionDuration": "interval 3 days", "pubsub.key": '["id"]'}


def test_a_pin_taken_back_leaves_the_properties_as_they_were() -> None:
    held = pinned(OWN, "a")
    assert held.items() >= HELD.items()
    assert held["pubsub.key"] == '["id"]'
    assert pinned(held, "a") == held
    assert released(held, "a") == OWN
    assert released(OWN, "a") == OWN


def test_the_last_of_several_pins_restores() -> None:
    held = pinned(pinned(OWN, "b"), "a")
    assert json.loads(held[PROPERTY])["names"] == ["a", "b"]
    one = released(held, "b")
    assert one.items() >= HELD.items()
    assert released(one, "b") == one
    assert released(one, "a") == OWN


def test_a_property_that_was_set_meanwhile_stays() -> None:
    held = {**pinned(OWN, "a"), "delta.logRetentionDuration": "interval 9 days"}
    del held["delta.enableExpiredLogCleanup"]
    assert released(held, "a") == OWN | {"delta.logRetentionDuration": "interval 9 days"}


def test_a_later_pin_remembers_what_was_set_meanwhile() -> None:
    held = {**pinned(OWN, "a"), "delta.logRetentionDuration": "interval 9 days"}
    held = pinned(held, "b")
    assert held.items() >= HELD.items()
    assert released(released(held, "a"), "b") == OWN | {"delta.logRetentionDuration": "interval 9 days"}


def test_a_table_that_was_held_before_stays_so() -> None:
    held = dict(HELD)
    assert released(pinned(held, "a"), "a") == held


def test_a_property_that_cannot_be_read() -> None:
    with pytest.raises(DataCorrupted, match=r"pubsub\.pins"):
        pinned({PROPERTY: "["}, "a")


class Tables:
    """Properties by path; the first `busy` changes of each call come second."""

    def __init__(self, busy: int = 0) -> None:
        self.busy = busy
        self.properties: dict[str, Mapping[str, str]] = {}

    def change_properties(self, path: str, change: pins.Change) -> None:
        if self.busy:
            self.busy -= 1
            raise Conflict("another")
        if path not in self.properties:
            raise UndefinedTable("there is none")
        self.properties[path] = change(self.properties[path])


def test_a_conflict_is_tried_again_and_a_table_that_is_gone_is_passed_over(tmp_path: Path) -> None:
    (tmp_path / "_delta_log").mkdir()
    tables = Tables(busy=3)
    tables.properties[str(tmp_path)] = OWN
    pins.pin_all(tables, [str(tmp_path)], "a")
    assert tables.properties[str(tmp_path)] == pinned(OWN, "a")
    with pytest.raises(UndefinedTable):
        pins.pin_all(tables, ["/gone"], "a")
    pins.release_all(tables, ["/gone", str(tmp_path)], "a")
    assert tables.properties[str(tmp_path)] == OWN
    with pytest.raises(PubsubError, match="other writers were first 10 times") as raised:
        pins.pin_all(Tables(busy=99), [str(tmp_path)], "a")
    assert raised.value.sqlstate == "40001"


@pytest.fixture
def path(tmp_path: Path) -> str:
    path = str(tmp_path / "t")
    for number in range(4):
        write_deltalake(path, pa.table({"id": [number], "p": ["a b%"]}), mode="overwrite", partition_by=["p"])
    DeltaTable(path, version=2).create_checkpoint()
    return path


@pytest.mark.parametrize("scheme", ["", "file://"])
def test_every_version_can_be_read(path: str, scheme: str) -> None:
    for version in range(4):
        require_readable(scheme + path, "public.t", version)
    assert not pins.holds(path, "a")
    assert not pins.holds(path + "/nowhere", "a")


def test_a_version_whose_file_is_gone(path: str) -> None:
    (uri,) = DeltaTable(path, version=1).file_uris()
    file = next(one for one in Path(path).rglob("*.parquet") if one.name in uri)
    file.unlink()
    with pytest.raises(UndefinedFile, match=r'^version 1 of table "public.t" can no longer be read$') as raised:
        require_readable(path, "public.t", 1)
    assert raised.value.detail == f'File "{file}" does not exist.'
    require_readable(path, "public.t", 2)


def test_a_version_whose_log_is_gone(path: str) -> None:
    for version in (0, 1):
        (Path(path) / "_delta_log" / f"{version:020}.json").unlink()
    for version in (0, 1, 4):
        with pytest.raises(UndefinedFile):
            require_readable(path, "public.t", version)
    for version in (2, 3):
        require_readable(path, "public.t", version)


def test_a_table_elsewhere(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in an object store: by deltalake's own access to it."""
    from pubsub.delta.log import version_files

    monkeypatch.setattr(version_files, "is_local", lambda _: False)
    write_deltalake(path + "2", pa.table({"id": [1]}))
    write_deltalake(path + "2", pa.table({"id": [2]}), mode="overwrite")
    (uri,) = DeltaTable(path + "2", version=0).file_uris()
    require_readable(path, "public.t", 3)
    require_readable(path + "2", "public.t", 0)
    Path(uri).unlink()
    with pytest.raises(UndefinedFile):
        require_readable(path + "2", "public.t", 0)
    require_readable(path + "2", "public.t", 1)
    with pytest.raises(UndefinedFile):
        require_readable(path + "2", "public.t", 7)
