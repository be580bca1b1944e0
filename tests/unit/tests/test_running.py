"""A test that fails is run once more, alone; red twice is red."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

_ROOT = Path(__file__).parents[3]

_TESTS = """
from pathlib import Path
import pytest

def test_passes():
    pass

@pytest.mark.skip(reason="for its count")
def test_skipped():
    pass

def test_wavers():
    before = Path(__file__).with_name("ran before")
    if not before.exists():
        before.touch()
        print("the first time")
        raise AssertionError("wavers")

@pytest.fixture
def wavering():
    yield
    before = Path(__file__).with_name("ended before")
    if not before.exists():
        before.touch()
        raise AssertionError("wavers at its end")

def test_wavers_at_its_end(wavering):
    pass
"""

_RED = """
def test_red():
    raise AssertionError("always red")
"""


def _run(directory: Path, *arguments: str) -> tuple[int, str]:
    (directory / "pytest.ini").write_text("[pytest]\n")
    ran = subprocess.run(
        [sys.executable, "-m", "tests.running", *arguments, "--rootdir", str(directory), "test_it.py"],
        cwd=directory,
        # Without the plugins that it does not need, each run takes a fifth of the time.
        env={
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")},
            "PYTHONPATH": str(_ROOT),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },
        capture_output=True,
        text=True,
        check=False,
    )
    return ran.returncode, ran.stdout


@pytest.mark.parametrize("parallel", [(), ("-p", "xdist", "-n", "1")])
def test_what_passes_alone_is_unsteady(tmp_path: Path, parallel: tuple[str, ...]) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    code, output = _run(tmp_path, *parallel)
    assert code == 0, output
    assert re.search(r"unsteady, .*:\n +test_it.py::test_wavers\n +test_it.py::test_wavers_at_its_end\n", output), (
        output
    )
    assert output.splitlines()[-1] == "3 passed, 0 failed, 1 skipped"
    (first,) = tmp_path.glob("build/unsteady/*test_wavers/first.txt")
    assert "AssertionError: wavers" in first.read_text()
    assert "the first time" in first.read_text()
    assert "1 passed" in first.with_name("second.txt").read_text()


def test_red_twice_is_red(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS + _RED)
    code, output = _run(tmp_path)
    assert code == 1, output
    assert re.search(r"red twice, .*:\n +test_it.py::test_red\n", output), output
    assert output.splitlines()[-1] == "3 passed, 1 failed, 1 skipped"


def test_green_and_broken_runs_keep_their_code(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("def test_passes(): pass")
    assert _run(tmp_path)[0] == 0
    (tmp_path / "test_it.py").write_text("import no_such_module")
    assert _run(tmp_path)[0] == 2


_DEADLY = """
import os
from pathlib import Path

def test_of_which_the_process_dies_once():
    before = Path(__file__).with_name("died before")
    if not before.exists():
        before.touch()
        os._exit(1)
"""


@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_run_goes_on_after_the_death_of_its_process(tmp_path: Path, after: int) -> None:
    """Files that had ended are not begun again, and the test that it died of is run alone."""
    for number in range(4):
        (tmp_path / f"test_{number}.py").write_text("def test_passes(): pass")
    (tmp_path / "test_it.py").write_text(_DEADLY + "".join(f"def test_{n}(): pass\n" for n in range(after)))
    files = [f"test_{number}.py" for number in range(4)]
    code, output = _run(tmp_path, "-p", "xdist", "-n", "1", "--dist", "loadfile", *files)
    assert code == 0, output
    assert output.count("node down") == 1
    assert "unsteady, both outputs in build/unsteady:\n    test_it.py::test_of_which_the_process_dies_once\n" in output
    assert output.splitlines()[-1] == f"{5 + after} passed, 0 failed, 0 skipped"


def test_many_failures_are_not_run_again(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text("".join(f"def test_{n}(): assert False\n" for n in range(11)))
    code, output = _run(tmp_path)
    assert code == 1
    assert "none is run again" in output


def test_steady_counts_what_wavered(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(_TESTS)
    code, output = _run(tmp_path, "--steady", "2")
    assert code == 1, output
    assert "1 of 2  test_it.py::test_wavers" in output
    assert output.splitlines()[-1] == "2 of 2 runs passed, 2 tests wavered"
