"""The wheel in an environment of its own: the command, the jars, and a node that copies and follows.

What the wheel depends on is lent by this environment; of the project nothing but the wheel can be imported there.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from pubsub import __version__, jars
from pubsub.testing.fixtures import Database
from tests.support.replica import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.full


class Installed:
    """An environment with the wheel, and a directory in which its commands run."""

    def __init__(self, base: Path) -> None:
        self.work = base / "work"
        self.work.mkdir()
        sources = base / "sources"
        # Built from a copy, as `make dist` does it: setuptools writes beside the sources.
        wanted = ["pubsub", "catalog", "walsender", "apply", "tablesync", "launcher"]
        for name in wanted:
            shutil.copytree(ROOT / name, sources / name, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md", "LICENSE"):
            shutil.copy(ROOT / name, sources)
        uv = shutil.which("uv", path=str(Path(sys.executable).parent)) or shutil.which("uv")
        assert uv is not None
        build = [uv, "build", "--quiet", "--wheel", "--no-build-isolation", "--python", sys.executable]
        self._run([*build, "--out-dir", str(base / "dist"), str(sources)])
        (self.wheel,) = (base / "dist").glob("*.whl")
        environment = base / "environment"
        self._run([sys.executable, "-m", "venv", "--without-pip", str(environment)])
        self.python = environment / "bin" / "python"
        self._run([uv, "pip", "install", "--quiet", "--no-deps", "--python", str(self.python), str(self.wheel)])
        site = self._run(
            [str(self.python), "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"]
        ).stdout.strip()
        # A .pth file is not read again for a directory that one names: our own editable installation stays outside.
        (Path(site) / "lent.pth").write_text(sysconfig.get_path("purelib") + "\n")

    def environment(self) -> dict[str, str]:
        hidden = {"PYTHONPATH", "PUBSUB_JARS", "PUBSUB_HOME", "VIRTUAL_ENV"}
        return {name: value for name, value in os.environ.items() if name not in hidden}

    def _run(self, command: list[str]) -> subprocess.CompletedProcess[str]:
        ran = subprocess.run(
            command, capture_output=True, text=True, check=False, cwd=self.work, env=self.environment(), timeout=600
        )
        assert ran.returncode == 0, f"{command}\n{ran.stdout}\n{ran.stderr}"
        return ran

    @property
    def command(self) -> str:
        return str(self.python.parent / "pubsub")

    def pubsub(self, *arguments: str) -> str:
        return self._run([self.command, *arguments]).stdout

    def refused(self, *arguments: str) -> str:
        ran = subprocess.run(
            [self.command, *arguments],
            capture_output=True,
            text=True,
            check=False,
            cwd=self.work,
            env=self.environment(),
            timeout=600,
        )
        assert ran.returncode == 1, ran
        return ran.stdout + ran.stderr


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Installed:
    return Installed(tmp_path_factory.mktemp("wheel"))


def test_every_file_is_in_it(installed: Installed) -> None:
    """Those that are no Python are named in pyproject.toml."""
    sources = installed.wheel.parents[1] / "sources"
    packages = [path for path in sources.iterdir() if path.is_dir() and (path / "__init__.py").exists()]
    there = {str(file.relative_to(sources)) for one in packages for file in one.rglob("*") if file.is_file()}
    with zipfile.ZipFile(installed.wheel) as wheel:
        packed = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert packed == there


def test_from_the_wheel_to_rows(installed: Installed, database: Database) -> None:
    database.execute(
        "CREATE TABLE t (id int PRIMARY KEY, x text); INSERT INTO t SELECT g, 'x' FROM generate_series(1, 1000) g"
    )
    where = "import pubsub, walsender.hot, sys; print(pubsub.__file__, walsender.hot.COMPILED); sys.exit('pytest' in sys.modules)"
    ran = installed._run([str(installed.python), "-c", where]).stdout.split()
    assert Path(ran[0]).is_relative_to(installed.python.parents[1]), ran
    assert ran[1] == "False"  # the decoder's modules in Python
    assert installed.pubsub("--version") == f"pubsub {__version__}\n"

    # The jars: first use says what to do, and without a network they come from a directory.
    for arguments in (("check",), ("daemon",)):
        assert 'Run "pubsub setup"' in installed.refused(*arguments)
    assert "could not find the jar" in installed.refused("setup", "--from", str(installed.work))
    assert "the jars are in" in installed.pubsub("setup", "--from", str(jars.directory()))

    installed.pubsub("init", database.conninfo, "--yes", "--subscription", "wheel")
    with (installed.work / "daemon.log").open("wb") as log:
        daemon = subprocess.Popen(
            [installed.command, "daemon"], cwd=installed.work, env=installed.environment(), stdout=log, stderr=log
        )
    try:

        def rows(expected: str) -> bool:
            ran = subprocess.run(
                [installed.command, "sql", "--format", "csv", "SELECT count(*) FROM public.t"],
                capture_output=True,
                text=True,
                check=False,
                cwd=installed.work,
                env=installed.environment(),
            )
            assert daemon.poll() is None, (installed.work / "daemon.log").read_text()[-3000:]
            return ran.stdout.split() == ["count", expected]

        wait_until(lambda: rows("1000"), "the copy")
        database.execute("INSERT INTO t VALUES (1001, 'y')")
        wait_until(lambda: rows("1001"), "the insert")
        installed.pubsub("sql", "DROP SUBSCRIPTION wheel")
        daemon.send_signal(signal.SIGTERM)
        assert daemon.wait(PATIENCE) == 0
    finally:
        daemon.kill()
        daemon.wait()
