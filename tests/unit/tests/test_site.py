"""The documents as a site: every page has its place, no link leads nowhere, and the reference says something of everything."""

from __future__ import annotations

import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from catalog.system_views import VIEWS
from pubsub.sql.options import CREATE_OPTIONS
from scripts import errors_page, reference_texts
from scripts.reference import pages
from scripts.site import BESIDE

ROOT = Path(__file__).parents[3]


def _places(nav: list[dict[str, Any]]) -> list[str]:
    found: list[str] = []
    for one in nav:
        for place in one.values():
            found += [place] if isinstance(place, str) else _places(place)
    return found


def test_every_page_has_its_place() -> None:
    with (ROOT / "zensical.toml").open("rb") as file:
        placed = _places(tomllib.load(file)["project"]["nav"])
    documents = {str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md")}
    assert sorted(placed) == sorted({*documents, *BESIDE.values(), *(f"reference/{name}.md" for name in pages())})


def test_the_site(tmp_path: Path) -> None:
    ran = subprocess.run(
        [sys.executable, "-m", "scripts.site", str(tmp_path)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert ran.returncode == 0, ran.stdout + ran.stderr
    page = (tmp_path / "site" / "index.html").read_text()
    for part in ("fonts.googleapis", "unpkg.com", "jsdelivr", "cdnjs"):
        assert part not in page
    assert 'href="start.html"' in page
    assert (tmp_path / "site" / "files" / "deploy" / "systemd" / "pubsub.service").is_file()
    assert "max_slot_wal_keep_size" in (tmp_path / "site" / "reference" / "settings.html").read_text()


@pytest.mark.full
def test_a_link_that_leads_nowhere_is_told(tmp_path: Path) -> None:
    """What the test above is worth: the builder's --strict, for a page and for a place in one."""
    pages_ = tmp_path / "pages"
    pages_.mkdir()
    (tmp_path / "zensical.toml").write_text('[project]\nsite_name = "x"\ndocs_dir = "pages"\nsite_dir = "site"\n')
    for text, code in (("[a](index.md#here)\n\n## Here\n", 0), ("[a](other.md)\n", 1), ("[a](index.md#there)\n", 1)):
        (pages_ / "index.md").write_text(text)
        command = [sys.executable, "-m", "zensical", "build", "--strict", "--clean", "--config-file"]
        ran = subprocess.run([*command, str(tmp_path / "zensical.toml")], capture_output=True, text=True, check=False)
        assert ran.returncode == code, f"{text}\n{ran.stdout}"


def test_every_option_and_view_is_described() -> None:
    assert set(reference_texts.OPTIONS) == set(CREATE_OPTIONS)
    assert set(reference_texts.VIEWS) == set(VIEWS)


def test_errors_are_read_from_the_sources() -> None:
    found = errors_page.raised()
    assert len(found) > 800
    by_message = {error.message: error for error in found}
    # By its class's SQLSTATE, by one of its own, and by that of a class in another module.
    assert by_message["terminating logical replication worker due to timeout"].sqlstate == "08006"
    told = by_message['unrecognized configuration parameter "…"']
    assert told.sqlstate == "42704"
    assert errors_page.condition("55000") == "object_not_in_prerequisite_state"
    assert errors_page.condition("F0000") == "config_file_error"
    page = errors_page.errors_page()
    assert "## 42704 undefined_object" in page
    assert "## XX001 data_corrupted" in page
