"""A short run of each search that has a command of its own: `make simulate`, `make power`.  A failure prints its seed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.power import trace

_ROOT = Path(__file__).parents[2]


def _search(*arguments: str, patience: float = 7200.0) -> None:
    """Run a search; `patience`: the seconds after which it counts as one that does not end."""
    ran = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=_ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
        timeout=patience,
    )
    assert ran.returncode == 0, ran.stdout


def test_a_few_lives_under_a_virtual_clock() -> None:
    """Enough to find that the model no longer fits what it stands for."""
    _search("tests.simulation", "--seeds", "25", "--jobs", "1", patience=600.0)


@pytest.mark.full
def test_a_life_that_lost_a_row() -> None:
    """A table was promised a place within the last commit before the origin, which neither worker was sent again."""
    _search("tests.simulation", "--seed", "359")


@pytest.mark.full
def test_a_life_that_stood_still() -> None:
    """A table became ready while its next batch waited for the commits before it, and that batch then for its sync worker."""
    _search("tests.simulation", "--seed", "531")


@pytest.mark.full
def test_a_thousand_lives_under_a_virtual_clock() -> None:
    _search("tests.simulation", "--seeds", "1000", "--jobs", "2")


@pytest.mark.soak
@pytest.mark.skipif(not trace.available(), reason="strace is not installed")
def test_what_power_losses_leave() -> None:
    _search("tests.power", "--states", "300")
