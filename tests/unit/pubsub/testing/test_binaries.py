"""Which servers a machine can have."""

from __future__ import annotations

from pathlib import Path

import pytest

from pubsub.errors import PubsubError
from pubsub.testing import binaries


@pytest.mark.parametrize(("machine", "system"), [("x86_64", "linux-amd64"), ("aarch64", "linux-arm64v8")])
def test_every_version_for_both_processors(machine: str, system: str) -> None:
    found = binaries.archives(machine)
    assert list(found) == ["15", "16", "17", "18"]
    for version, archive in found.items():
        assert archive.name == f"embedded-postgres-binaries-{system}"
        assert archive.version.split(".")[0] == version
        assert len(archive.sha256) == 64


def test_a_processor_that_nothing_is_published_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PUBSUB_SERVERS", str(tmp_path))
    monkeypatch.setattr(binaries, "ARCHIVES", binaries.archives("riscv64"))
    monkeypatch.setattr("platform.machine", lambda: "riscv64")
    assert binaries.obstacle("18") == "nobody publishes PostgreSQL 18 for tests on riscv64"
    with pytest.raises(PubsubError, match="nobody publishes PostgreSQL 18"):
        binaries.fetch(["18"])
