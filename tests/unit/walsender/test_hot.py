"""The hot modules, compiled and interpreted: the same tests for both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from walsender import hot
from walsender.decode import changes
from walsender.hot import catalogs, walk
from walsender.types import layout
from walsender.xlog import formats

_HERE = Path(__file__).parent


def run(*arguments: str, interpreted: bool) -> str:
    environment = {**os.environ, "WALSENDER_INTERPRETED": "1" if interpreted else "0"}
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_modules_compiled_from_these_sources_are_used() -> None:
    program = "from walsender import hot; from walsender.hot import walk; print(hot.COMPILED, walk.__file__)"
    compiled, file = run("-c", program, interpreted=False).split()
    assert compiled == str(hot.compiled_directory().is_dir())
    assert (Path(file).suffix == ".so") is hot.compiled_directory().is_dir()
    assert run("-c", program, interpreted=True).split()[0] == "False"


def test_interpreted_modules_pass_the_same_tests() -> None:
    """This run uses one kind, compiled if there is a compiler; the readers' tests run with the other kind, too."""
    tests = [str(_HERE / "test_reader.py"), str(_HERE / "test_values.py")]
    tests.append(
        f"{_HERE.parent.parent / 'property' / 'test_wal_fuzz.py'}::test_the_fast_walk_agrees_with_the_general_decoder"
    )
    run("-m", "pytest", "-q", "-p", "no:cacheprovider", *tests, interpreted=hot.COMPILED)


def test_the_numbers_written_out_for_the_compiler_are_those_of_the_formats() -> None:
    """walk and catalogs repeat masks and record kinds under the names that they have elsewhere."""
    known = {name: int(value) for name, value in formats.Rmgr.__members__.items()}
    for module in (formats, changes, layout):
        known |= {name: value for name, value in vars(module).items() if name.isupper() and isinstance(value, int)}
    repeated = 0
    for module in (walk, catalogs):
        for name, value in vars(module).items():
            if name in known and isinstance(value, int):
                assert value == known[name], f"{module.__name__}.{name}"
                repeated += 1
    assert repeated > 40
