"""The Java that Spark needs, and the jars that pyspark does not include.

`make setup` fetches the jars once into the virtual environment; Spark then starts without a network.  Ivy, which
pyspark includes, fetches them, so a site's own Ivy settings file ($PUBSUB_IVY_SETTINGS) applies here too.  Every file
is checked against the digest in this module.

    python -m pubsub.jars check     check that there is a suitable Java
    python -m pubsub.jars fetch     fetch the jars that are missing

A class-data-sharing archive beside the jars (made by scripts/class_data_archive.py) saves some three seconds at each
start of the JVM.  It fits only one JVM and class path.  Its name has a digest of both, so an archive that does not fit
is not found, and Spark starts without one.
"""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final
from xml.sax.saxutils import quoteattr

from pubsub import log_store
from pubsub.errors import DataCorrupted, PubsubError

JAVA_MINIMUM: Final = 17
"""The oldest Java that Spark 4 supports."""

_FETCH_SECONDS: Final = 600


@dataclass(frozen=True, slots=True)
class Artifact:
    """A jar in a Maven repository, and the SHA-256 of its bytes in hexadecimal."""

    group: str
    name: str
    version: str
    sha256: str

    @property
    def filename(self) -> str:
        return f"{self.name}-{self.version}.jar"


# Delta's other dependencies are in pyspark, or only its third-party catalogs use them.
DELTA: Final = (
    Artifact(
        "io.delta",
        "delta-spark_4.2_2.13",
        "4.4.0",
        "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    ),
    Artifact(
        "io.delta",
        "delta-storage",
        "4.4.0",
        "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc",
    ),
)


def share_directory() -> Path:
    """Return where set-up puts fetched files: in the virtual environment, so that both are removed together."""
    return Path(sys.prefix) / "share" / "pubsub"


def directory() -> Path:
    """Return the directory of the jars: $PUBSUB_JARS, else one in the virtual environment."""
    override = os.environ.get("PUBSUB_JARS")
    return Path(override) if override else share_directory() / "jars"


def class_path() -> list[Path]:
    """Return the jars for the driver's class path.  Raises PubsubError if one is missing."""
    paths = [*(directory() / artifact.filename for artifact in DELTA), directory() / log_store.jar_name()]
    for path in paths:
        if not path.is_file():
            raise PubsubError(
                f'could not find the jar "{path.name}"',
                sqlstate="58P01",
                detail=f'It was looked for in "{path.parent}".',
                hint='Run "python -m pubsub.jars fetch", or set PUBSUB_JARS to the directory that holds it.',
            )
    return paths


def cds_archive() -> Path | None:
    """Return the class-data-sharing archive for this JVM and class path; None if there is none that fits."""
    path = cds_archive_path()
    return path if path is not None and path.is_file() else None


def cds_archive_path() -> Path | None:
    """Return the path of the archive for this JVM and class path, whether or not it exists; None without a Java."""
    java = find_java()
    if java is None:
        return None
    jvm = java.resolve()
    parts = [str(jvm), sys.prefix]
    # A JVM that was upgraded in place rejects the old one's archive, so these files are part of the key.
    for file in (jvm, jvm.parent.parent / "release", jvm.parent.parent / "lib" / "modules"):
        if file.exists():
            status = file.stat()
            parts.append(f"{status.st_size} {status.st_mtime_ns}")
    parts += [str(path) for path in class_path()]
    parts.append(sysconfig.get_path("purelib"))
    key = hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16]
    return directory() / f"classes-{key}.jsa"


def find_java() -> Path | None:
    """Return the java of Spark's scripts: $JAVA_HOME/bin/java if JAVA_HOME is set, else the first on the path."""
    home = os.environ.get("JAVA_HOME")
    found = shutil.which("java", path=str(Path(home) / "bin")) if home else shutil.which("java")
    return Path(found) if found else None


def require_java() -> int:
    """Return the major version of the Java that Spark will use.  Raises PubsubError if it is missing or too old."""
    hint = (
        f"Install Java {JAVA_MINIMUM} or later (Debian and Ubuntu: apt install openjdk-17-jre-headless; "
        "Fedora: dnf install java-21-openjdk-headless), and set JAVA_HOME to it if it is not the first on the path."
    )
    java = find_java()
    if java is None:
        home = os.environ.get("JAVA_HOME")
        where = f'There is no bin/java in JAVA_HOME, "{home}".' if home else 'There is no "java" on the path.'
        raise PubsubError("could not find Java, which Spark needs", sqlstate="58P01", detail=where, hint=hint)
    try:
        ran = subprocess.run(
            [str(java), "-version"], capture_output=True, text=True, errors="replace", timeout=60, check=False
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PubsubError(f'could not run "{java}": {error}', sqlstate="58030", hint=hint) from error
    version = java_version(ran.stderr + ran.stdout)
    if version is None:
        raise PubsubError(
            f'could not tell the version of "{java}"',
            sqlstate="58030",
            detail=(ran.stderr + ran.stdout).strip() or f"It ended with exit code {ran.returncode}.",
            hint=hint,
        )
    if version < JAVA_MINIMUM:
        raise PubsubError(
            f"Spark needs Java {JAVA_MINIMUM} or later, and found Java {version}",
            sqlstate="0A000",
            detail=f'It is "{java}".',
            hint=hint,
        )
    return version


def java_version(output: str) -> int | None:
    """Return the major version in `java -version`'s output: 8 for "1.8.0_402", 17 for "17.0.15"; None without one."""
    match = re.search(r'version "(\d+)(?:\.(\d+))?', output)
    if match is None:
        return None
    first, second = match.groups()
    return int(second) if first == "1" and second else int(first)


def fetch(artifacts: Sequence[Artifact], into: Path) -> list[Path]:
    """Fetch those of `artifacts` that are not in the directory `into` yet; return the paths of all, in the same order.

    One JVM fetches all of them.  A file gets its own name only once it is complete and checked.  Raises PubsubError if
    Ivy cannot fetch one, DataCorrupted if its digest differs.
    """
    into.mkdir(parents=True, exist_ok=True)
    paths = [into / artifact.filename for artifact in artifacts]
    missing = [
        (artifact, path)
        for artifact, path in zip(artifacts, paths, strict=True)
        if not (path.is_file() and _sha256(path) == artifact.sha256)
    ]
    if not missing:
        return paths
    require_java()
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=into) as scratch:
        _run_ivy([artifact for artifact, _ in missing], Path(scratch))
        for artifact, path in missing:
            fetched = Path(scratch) / artifact.filename
            found = _sha256(fetched)
            if found != artifact.sha256:
                raise DataCorrupted(
                    f'"{artifact.filename}" is not the file that was expected',
                    detail=f"Its SHA-256 is {found}, and should be {artifact.sha256}.",
                    hint="Remove it from Ivy's cache (~/.ivy2/cache) and try again.",
                )
            fetched.replace(path)
    return paths


def _run_ivy(artifacts: Iterable[Artifact], into: Path) -> None:
    module = into / "ivy.xml"
    module.write_text(_ivy_module(artifacts))
    command = [
        str(find_java()),
        "-cp",
        str(_ivy_jar()),
        "org.apache.ivy.Main",
        *(("-settings", settings) if (settings := os.environ.get("PUBSUB_IVY_SETTINGS")) else ()),
        *("-ivy", str(module), "-confs", "default"),
        *("-retrieve", f"{into}/[artifact]-[revision].[ext]"),
    ]
    ran = subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        timeout=_FETCH_SECONDS,
        check=False,
    )
    absent = [artifact.filename for artifact in artifacts if not (into / artifact.filename).is_file()]
    if ran.returncode != 0 or absent:
        lines = [line.strip() for line in ran.stdout.splitlines() if re.search(r"WARN|ERROR|rror:|xception", line)]
        raise PubsubError(
            f"could not fetch {', '.join(absent) or 'the jars'}",
            sqlstate="08001",
            detail="; ".join(lines[-8:]) or f"Ivy ended with exit code {ran.returncode}.",
            hint="The machine must reach a Maven repository once: set proxies in JAVA_TOOL_OPTIONS, a mirror in an Ivy "
            "settings file that PUBSUB_IVY_SETTINGS names, or put the jars into PUBSUB_JARS by hand.",
        )


def _ivy_module(artifacts: Iterable[Artifact]) -> str:
    """Return an Ivy file that requests exactly these artifacts, several versions of one too, without dependencies."""
    dependencies = "".join(
        f"<dependency org={quoteattr(each.group)} name={quoteattr(each.name)} rev={quoteattr(each.version)}"
        ' transitive="false" conf="default->master"/>'
        for each in artifacts
    )
    return (
        '<ivy-module version="2.0"><info organisation="pubsub" module="fetch"/>'
        '<configurations><conf name="default"/></configurations>'
        f'<dependencies>{dependencies}<conflict manager="all"/></dependencies></ivy-module>'
    )


def _ivy_jar() -> Path:
    import importlib.util

    spec = importlib.util.find_spec("pyspark")
    if spec is not None and spec.origin is not None:
        for path in sorted((Path(spec.origin).parent / "jars").glob("ivy-*.jar")):
            return path
    raise PubsubError("could not find Ivy in pyspark", sqlstate="58P01", hint="Install pyspark.")


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main(arguments: Sequence[str]) -> int:
    """Run `python -m pubsub.jars check|fetch`; return the exit code."""
    try:
        match list(arguments):
            case ["check"]:
                require_java()
            case ["fetch"]:
                for path in fetch(DELTA, directory()):
                    print(path)
                print(log_store.build(directory(), [directory() / artifact.filename for artifact in DELTA]))
            case _:
                print("usage: python -m pubsub.jars check|fetch", file=sys.stderr)
                return 2
    except PubsubError as error:
        print(error.report(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
