"""Run tests with one fault at a time, in a copy of the checkout.

Each run is a fork of a process that has imported what takes long and is not ours.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, Literal

from tests.mutants.plant import Fault

Seen = Literal["seen", "not seen", "endless"]

_OURS: Final = ("tests", "pubsub", "apply", "catalog", "launcher", "tablesync", "walsender")
#: The greatest time of a run that may yet end, in times that the tests take without a fault.
_PATIENCE: Final = 8


def copy_checkout(target: Path) -> None:
    """Copy the files of the checkout that git knows, as they are."""
    listed = subprocess.run(["git", "ls-files", "-z"], check=True, capture_output=True).stdout
    for name in listed.decode().split("\0"):
        if name and Path(name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(name, target / name)
    # Tests find Spark's jars, the servers and the interpreter there.
    (target / ".venv").symlink_to(Path(".venv").resolve())


@contextmanager
def planted(checkout: Path, fault: Fault) -> Iterator[None]:
    """Have the fault in the copy while the body runs."""
    path = checkout / fault.place.file
    before = path.read_bytes()
    path.write_text(fault.source)
    try:
        yield
    finally:
        path.write_bytes(before)


def run(checkout: Path, tests: Sequence[str], usual: float | None = None) -> tuple[Seen, str, float]:
    """Run tests in the copy.  Return whether one fails, which, and the seconds; `usual`: what they take without a fault."""
    began = time.monotonic()
    reading, writing = os.pipe()
    child = os.fork()
    if not child:
        os.close(reading)
        _child(checkout, tests, writing)
    os.close(writing)
    endless = False
    os.set_blocking(reading, False)
    limit = None if usual is None else max(60.0, usual * _PATIENCE)
    while not os.waitpid(child, os.WNOHANG)[0]:
        if limit is not None and time.monotonic() - began > limit:
            os.killpg(child, signal.SIGKILL)
            os.waitpid(child, 0)
            endless = True
            break
        time.sleep(0.05)
    try:
        failed = os.read(reading, 4096).decode()
    except BlockingIOError:
        failed = ""
    os.close(reading)
    seconds = time.monotonic() - began
    if endless:
        return "endless", "", seconds
    return ("not seen" if failed == "-" else "seen"), failed, seconds


def _child(checkout: Path, tests: Sequence[str], writing: int) -> None:
    """Be the process of one run; write the first test that fails, `-` if none does; nothing if it dies."""
    os.setpgid(0, 0)
    os.chdir(checkout)
    for name in [name for name in sys.modules if name.partition(".")[0] in _OURS]:
        del sys.modules[name]
    sys.path.insert(0, str(checkout))
    sys.dont_write_bytecode = True
    os.environ |= {"PYTHONPATH": str(checkout), "PYTHONDONTWRITEBYTECODE": "1"}
    output = os.open(os.devnull, os.O_WRONLY)
    os.dup2(output, 1)
    os.dup2(output, 2)
    import pytest

    class First:
        name = "-"

        def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
            if report.failed and self.name == "-":
                self.name = report.nodeid

        def pytest_collectreport(self, report: pytest.CollectReport) -> None:
            if report.failed and self.name == "-":
                self.name = report.nodeid

    first = First()
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", *tests], plugins=[first])
    if status and first.name == "-":
        first.name = f"pytest ended with {status}"
    os.write(writing, first.name.encode())
    os._exit(0)


def import_the_rest() -> None:
    """Import what the tests use and is not ours."""
    import aiosqlite  # noqa: F401
    import deltalake  # noqa: F401
    import hypothesis  # noqa: F401
    import psycopg  # noqa: F401
    import pyarrow.parquet  # noqa: F401
    import pytest  # noqa: F401
    import sqlalchemy.ext.asyncio  # noqa: F401
    import structlog  # noqa: F401
