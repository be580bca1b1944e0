"""What tasks on a Spark cluster import, as one archive that Spark sends to its executors.

An executor needs a Python of the driver's version and nothing else: Spark brings its own packages, this archive the
program's code and the libraries that it needs.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from typing import Final

import structlog

#: The directory in which an executor finds the packages; it is on its PYTHONPATH.
UNPACKED: Final = "pubsub_packages"
_CODE: Final = ("pubsub", "apply", "tablesync")
# The first two are in every executor already.
_THERE: Final = frozenset({"pyspark", "py4j", *_CODE})
_ASK: Final = (
    "import sys; import pubsub.delta.spark.python_workers; print(*{name.split('.')[0] for name in sys.modules})"
)

logger = structlog.get_logger()


def archive(directory: Path) -> Path:
    """Return the archive in `directory`, made if there is none of this code and these versions.

    It takes seconds to make, and some 250 MB.
    """
    distributions = _distributions()
    code = [(file, file.relative_to(root)) for root, file in _code()]
    digest = hashlib.sha256(sys.version.encode())
    for one in distributions:
        digest.update(f"\n{one.metadata['Name']}-{one.version}".encode())
    for file, place in code:
        digest.update(f"\n{place} {hashlib.sha256(file.read_bytes()).hexdigest()}".encode())
    path = directory / f"executor-packages-{digest.hexdigest()[:16]}.zip"
    if path.is_file():
        return path
    for old in directory.glob("executor-packages-*"):
        old.unlink()
    aside = path.with_suffix(f".{os.getpid()}")
    # Not compressed: that would take a minute, once, and save the cluster's network a second.
    with zipfile.ZipFile(aside, "w", zipfile.ZIP_STORED, strict_timestamps=False) as packed:
        for file, place in (*code, *_files(distributions)):
            packed.write(file, place)
    os.replace(aside, path)
    logger.info("an archive of packages for Spark's executors was made", path=str(path), bytes=path.stat().st_size)
    return path


def _code() -> Iterator[tuple[Path, Path]]:
    root = Path(__file__).resolve().parents[3]
    for package in _CODE:
        for file in sorted((root / package).rglob("*")):
            if file.is_file() and "__pycache__" not in file.parts:
                yield root, file


def _distributions() -> list[metadata.Distribution]:
    """Return the installed packages that a task imports, by name."""
    asked = subprocess.run([sys.executable, "-c", _ASK], capture_output=True, text=True, check=True)
    of_import = metadata.packages_distributions()
    names = {name for one in asked.stdout.split() for name in of_import.get(one, ()) if one not in _THERE}
    return [metadata.distribution(name) for name in sorted(names)]


def _files(distributions: list[metadata.Distribution]) -> Iterator[tuple[Path, Path]]:
    for distribution in distributions:
        for file in distribution.files or ():
            place, found = Path(str(file)), Path(str(file.locate()))
            if ".." not in place.parts and "__pycache__" not in place.parts and found.is_file():
                yield found, place
