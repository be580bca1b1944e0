"""A project that uses pubsub.testing, with exactly the files of docs/testing.md."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path

import pytest

_PAGE = Path(__file__).parents[2] / "docs" / "testing.md"
_NAMES = (
    "any_database",
    "any_publisher",
    "database",
    "publisher",
    "publisher15",
    "publisher16",
    "publisher17",
    "servers",
)


def run(directory: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    return subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments],
        cwd=directory, env=environment, capture_output=True, text=True, timeout=600, check=False,
    )  # fmt: skip


@pytest.mark.full
def test_the_project_of_the_docs(tmp_path: Path) -> None:
    files = re.findall(
        r"`(\w+\.py)`[^\n]*(?:\n[^\n`]+)*\n\n```python\n(.*?)```\n", _PAGE.read_text(encoding="utf-8"), re.DOTALL
    )
    names = ["test_orders.py", "test_outage.py", "test_upgrade.py", "conftest.py", "test_library.py"]
    assert [name for name, _ in files] == names
    for name, content in files:
        (tmp_path / name).write_text(content, encoding="utf-8")
    ran = run(tmp_path)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    assert "4 passed" in ran.stdout


def test_the_plugin_costs_other_projects_nothing() -> None:
    """pytest loads it wherever the package is installed."""
    wanted = "import sys, pubsub.testing.plugin; print([n for n in ('pyarrow', 'psycopg', 'structlog', 'numpy') if n in sys.modules])"
    ran = subprocess.run([sys.executable, "-c", wanted], capture_output=True, text=True, check=True)
    assert ran.stdout == "[]\n"
    (entry,) = entry_points(group="pytest11", name="pubsub")
    assert entry.value == "pubsub.testing.plugin"


@pytest.mark.full
@pytest.mark.parametrize("name", _NAMES)
def test_each_fixture_can_be_imported_alone(tmp_path: Path, name: str) -> None:
    (tmp_path / "conftest.py").write_text(f"from pubsub.testing.fixtures import {name}\n")
    (tmp_path / "test_it.py").write_text(f"def test_it({name}):\n    assert {name} is not None\n")
    ran = run(tmp_path, "--setup-plan")
    assert ran.returncode == 0, ran.stdout + ran.stderr
