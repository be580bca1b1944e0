"""Where PostgreSQL 19's packages come from, by the machine's apt configuration; what is said where there is none."""

from __future__ import annotations

from pathlib import Path

import pytest

from pubsub.errors import PubsubError
from pubsub.testing import binaries, debian_server
from pubsub.testing.debian_server import Source, sources

DEB822 = """\
# A comment
Types: deb deb-src
URIs: http://mirror.example.org/debian
Suites: bookworm bookworm-updates
Components: main contrib
Signed-By: /usr/share/keyrings/archive.gpg

Types: deb
URIs: http://mirror.example.org/of-others http://second.example.org/of-others
Suites: apps
Components: main
Signed-By:
 -----BEGIN PGP PUBLIC KEY BLOCK-----
 .
 xsFNBF
 -----END PGP PUBLIC KEY BLOCK-----

Types: deb
Enabled: no
URIs: http://off.example.org/debian
Suites: bookworm
Components: main

Types: deb-src
URIs: http://sources.example.org/debian
Suites: bookworm
Components: main

Types: deb
URIs: http://nodes.example.org/x
Suites: bookworm
Components: nodes
"""

ONE_LINE = """\
# deb http://off.example.org/debian bookworm main
deb http://mirror.example.org/debian bookworm main contrib # with a comment
deb [arch=amd64 signed-by=/usr/share/keyrings/archive.gpg] http://keyed.example.org/debian bookworm-updates main
deb-src http://sources.example.org/debian bookworm main
deb http://nodes.example.org/x bookworm nodes
"""


def test_sources_are_read_in_both_formats() -> None:
    key = "\n -----BEGIN PGP PUBLIC KEY BLOCK-----\n .\n xsFNBF\n -----END PGP PUBLIC KEY BLOCK-----"
    assert list(sources(DEB822, one_line=False)) == [
        (
            Source("http://mirror.example.org/debian", "/usr/share/keyrings/archive.gpg"),
            {"bookworm", "bookworm-updates"},
        ),
        (Source("http://mirror.example.org/of-others", key), {"apps"}),
        (Source("http://second.example.org/of-others", key), {"apps"}),
    ]
    assert list(sources(ONE_LINE, one_line=True)) == [
        (Source("http://mirror.example.org/debian"), {"bookworm"}),
        (Source("http://keyed.example.org/debian", "/usr/share/keyrings/archive.gpg"), {"bookworm-updates"}),
    ]


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """A machine with the programs of apt, whose configuration a test writes into the directory that is returned."""
    (tmp_path / "bin").mkdir()
    for name in ("apt-get", "apt-cache", "dpkg"):
        (tmp_path / "bin" / name).touch(0o755)
    (tmp_path / "apt" / "sources.list.d").mkdir(parents=True)
    (tmp_path / "os-release").write_text('PRETTY_NAME="Debian"\nVERSION_CODENAME=bookworm\nID=debian\n')
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.setenv("PUBSUB_SERVERS", str(tmp_path / "servers"))
    monkeypatch.setattr(debian_server, "APT", tmp_path / "apt")
    monkeypatch.setattr(debian_server, "OS_RELEASE", tmp_path / "os-release")
    return tmp_path


def test_the_source_is_that_of_the_machines_own_release(machine: Path) -> None:
    (machine / "apt/sources.list").write_text("deb http://apps.example.org/apt stable-apps main\n")
    assert "no source" in (binaries.obstacle("19") or "")
    (machine / "apt/sources.list.d/debian.sources").write_text(DEB822)
    assert binaries.obstacle("19") is None
    assert debian_server.machine_source() == Source(
        "http://mirror.example.org/debian", "/usr/share/keyrings/archive.gpg"
    )
    (machine / "os-release").write_text("ID=other\nVERSION_CODENAME=bookworm\n")
    assert "no source" in (binaries.obstacle("19") or "")


def test_a_machine_without_apt_says_so(machine: Path) -> None:
    (machine / "apt/sources.list").write_text(ONE_LINE)
    (machine / "bin/apt-get").unlink()
    assert "there is no apt-get here" in (binaries.obstacle("19") or "")
    assert binaries.obstacle("18") is None
    with pytest.raises(PubsubError, match="cannot be fetched") as caught:
        binaries.fetch(["19"])
    assert "there is no apt-get here" in (caught.value.detail or "")
    (machine / "servers/19").mkdir(parents=True, exist_ok=True)
    assert binaries.obstacle("19") is None, "one that is there needs no apt"


@pytest.mark.usefixtures("machine")
def test_a_missing_server_names_its_own_command() -> None:
    with pytest.raises(PubsubError) as caught:
        binaries.server("19")
    assert caught.value.hint == 'Run "python -m pubsub.testing.binaries fetch 19".'
    with pytest.raises(PubsubError, match="no embedded PostgreSQL 20"):
        binaries.fetch(["20"])


def test_what_fails_leaves_nothing_behind(machine: Path) -> None:
    (machine / "apt/sources.list").write_text(ONE_LINE)
    (machine / "bin/patchelf").touch(0o755)
    (machine / "bin/apt-get").write_text("#!/bin/sh\necho broken >&2\nexit 100\n")
    with pytest.raises(PubsubError, match="apt-get failed") as caught:
        binaries.fetch(["19"])
    assert caught.value.detail == "broken"
    assert list((machine / "servers").iterdir()) == []
