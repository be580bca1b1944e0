"""Run tests; those that fail once more, alone: `python -m tests.running [options of pytest]`.

Red twice is red: the exit code is 1.  A test that passes the second time is unsteady: the run passes, ends with a list of
such tests, and both outputs are in build/unsteady.  Other exit codes are pytest's: nothing collected, interrupted.

    python -m tests.running --steady 5 -n 3      the same five times, beside a process that keeps a core busy
"""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Final

import pytest

from tests.running.failures import Run

_UNSTEADY: Final = Path("build/unsteady")

# If more tests fail than this, they fail for one reason, and all of them again would take long.
_MOST_AGAIN: Final = 10


def main(arguments: list[str]) -> int:
    """Return the exit code."""
    shutil.rmtree(_UNSTEADY, ignore_errors=True)
    if arguments[:1] == ["--steady"]:
        return _steady(int(arguments[1]), arguments[2:])
    return _run(arguments)[0]


def _run(arguments: list[str]) -> tuple[int, list[str]]:
    """Run tests; return the exit code and which of them are unsteady."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="pubsub-run-") as name:
        directory = Path(name)
        code = _pytest(arguments, directory)
        run = Run(directory)
        if code != pytest.ExitCode.TESTS_FAILED or not run.failed:
            return code, []
        if len(run.failed) > _MOST_AGAIN:
            print(f"{len(run.failed)} tests failed; with more than {_MOST_AGAIN}, none is run again")
            return code, []
        print("failed tests once more, each alone in a new process", flush=True)
        unsteady = [test for test in run.failed if _passes_alone(test, run.output(test))]
        red = [test for test in run.failed if test not in unsteady]
        for title, tests in (("red twice", red), ("unsteady", unsteady)):
            if tests:
                print(f"{title}, both outputs in {_UNSTEADY}:", *tests, sep="\n    ")
        seconds = time.monotonic() - began
        print(f"{len(unsteady)} unsteady, {seconds:.0f} s")
        # The one line that counts all of it.
        print(f"{run.count('passed') + len(unsteady)} passed, {len(red)} failed, {run.count('skipped')} skipped")
        return int(bool(red)), unsteady


def _passes_alone(test: str, first: str) -> bool:
    """Run a test that failed once more, and keep both outputs."""
    directory = _UNSTEADY / re.sub(r"[^\w.-]+", "_", test)[-150:]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "first.txt").write_text(first)
    with (directory / "second.txt").open("w") as output:
        # Whatever marks it has, and with everything that it prints.
        again = [sys.executable, "-m", "pytest", "-m", "", "-p", "no:cacheprovider", "-rA", test]
        code = subprocess.run(again, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    print(f"    {'passed' if code == 0 else 'failed'}  {test}", flush=True)
    if code != 0:
        print((directory / "second.txt").read_text()[-20_000:], flush=True)
    return code == 0


def _pytest(arguments: list[str], directory: Path) -> int:
    plugins = ("-p", "tests.running.failures", "-p", "tests.running.scheduling")
    command = [sys.executable, "-m", "pytest", *plugins, *arguments]
    return subprocess.run(command, env=Run.environment(directory), check=False).returncode


def _steady(runs: int, arguments: list[str]) -> int:
    """Run tests several times beside a busy process; list what wavered, and how often.  Return 1 if anything did."""
    wavered: Counter[str] = Counter()
    codes: list[int] = []
    with ExitStack() as stack:
        busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
        stack.callback(busy.kill)
        for number in range(runs):
            began = time.monotonic()
            code, unsteady = _run(arguments)
            wavered.update(unsteady)
            codes.append(code)
            print(f"run {number + 1} of {runs}: exit code {code}, {time.monotonic() - began:.0f} s", flush=True)
    for test, times in wavered.most_common():
        print(f"    {times} of {runs}  {test}")
    print(f"{codes.count(0)} of {runs} runs passed, {len(wavered)} tests wavered")
    return int(any(codes) or bool(wavered))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
