"""Compiles the decoder's hot modules (walsender/hot) with mypyc; if that fails, as without a C compiler, says why.

python scripts/compile_hot.py
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from walsender import hot

# Each module becomes an extension of its own: together they would also need a shared library that has to be found.
_SETUP = """
import sys
from mypyc.build import mypycify
from setuptools import setup
setup(name="hot", packages=[], ext_modules=mypycify([sys.argv.pop()], opt_level="2", debug_level="0"))
"""
_CONFIGURATION = "[mypy]\nstrict = True\nignore_missing_imports = True\n"


def main() -> int:
    """Compile the modules and return the exit code: always 0, since the decoder also works without compiled modules."""
    target = hot.compiled_directory()
    if target.is_dir():
        return 0
    with tempfile.TemporaryDirectory(prefix="walsender-hot-") as name:
        work = Path(name)
        package = work / "walsender" / "hot"
        package.mkdir(parents=True)
        (work / "mypy.ini").write_text(_CONFIGURATION)
        (work / "setup.py").write_text(_SETUP)
        for directory in (package, package.parent):
            (directory / "__init__.py").touch()
        for module in hot.MODULES:
            shutil.copy(Path(hot.__file__).parent / f"{module}.py", package)
            command = [sys.executable, "setup.py", "-q", "build_ext", "--inplace", f"walsender/hot/{module}.py"]
            done = subprocess.run(command, check=False, cwd=work, capture_output=True, text=True, env=_environment())
            built = list(package.glob(f"{module}.*.so"))
            if done.returncode or not built:
                lines = (done.stdout + done.stderr).strip().splitlines()
                print("The decoder's hot modules could not be compiled, and will be interpreted:", file=sys.stderr)
                print("\n".join(f"    {line}" for line in lines[-5:]), file=sys.stderr)
                return 0
        ready = target.parent / f"{target.name}.{os.getpid()}"
        ready.mkdir(parents=True)
        for library in package.glob("*.so"):
            shutil.copy(library, ready)
        try:
            ready.rename(target)
        except OSError:
            # Another process was first.
            shutil.rmtree(ready)
    return 0


def _environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "MYPYPATH"}}


if __name__ == "__main__":
    sys.exit(main())
