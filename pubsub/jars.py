"""The Java that Spark needs, and the jars that pyspark does not include.

`make setup` fetches the jars once into the virtual environment; Spark then starts without a network.  Ivy, which
pyspark includes, fetches them, so a site's own Ivy settings file ($PUBSUB_IVY_SETTINGS) applies here too.  Every file
is checked against the digest in this module.

    python -m pubsub.jars check     check that there is a suitable Java
    python -m pubsub.jars fetch     fetch the jars that are missing; `pubsub setup` does the same
    python -m pubsub.jars fetch s3  fetch those that Spark needs for tables on S3

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

from pubsub import java_classes
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

# What Hadoop's s3a loads of Amazon's SDK: a fiftieth of the bundle that it names as its dependency.
S3: Final = (
    Artifact(
        "software.amazon.s3.analyticsaccelerator",
        "analyticsaccelerator-s3",
        "1.3.1",
        "4959a9747cbb479c73c3ffbcd479bee5b014f8b2880994585a8693fb9d24675e",
    ),
    Artifact(
        "software.amazon.awssdk",
        "annotations",
        "2.35.4",
        "6f36bd87155d1dd85d6efbdd29e532e3759a022211feb71affebee1aa34f04b8",
    ),
    Artifact(
        "software.amazon.awssdk",
        "apache-client",
        "2.35.4",
        "6eade21b482724ed0a4613eaa95d20e47e7a81304bd28538ac427fece94a7740",
    ),
    Artifact(
        "software.amazon.awssdk",
        "arns",
        "2.35.4",
        "c63cc29f76a8527e9e10b621703163df541dc5cb315508dc2898518602c75380",
    ),
    Artifact(
        "software.amazon.awssdk",
        "auth",
        "2.35.4",
        "6b601323004833fb4a857ffc95db4795e0e6320eb93e64b1246c655c9ff04994",
    ),
    Artifact(
        "software.amazon.awssdk",
        "aws-core",
        "2.35.4",
        "fdb5fc8f1a48d97fa7d04d3460fb42f6973c7b1bbe1b9d317871ef0162bcb623",
    ),
    Artifact(
        "software.amazon.awssdk",
        "aws-query-protocol",
        "2.35.4",
        "9b4cf9b78977cc9f5b4ceae9c435dedbde6a055a0f8d9e053eaca945715e2a9f",
    ),
    Artifact(
        "software.amazon.awssdk",
        "aws-xml-protocol",
        "2.35.4",
        "4f59176da2522c357b1993e4a890fde529f12f365795ef86269bde4a3984cd0d",
    ),
    Artifact(
        "software.amazon.awssdk",
        "checksums",
        "2.35.4",
        "94464af4374d08ecf33ca06ed4d03e1615529e547726e26b56abacefbeee7948",
    ),
    Artifact(
        "software.amazon.awssdk",
        "checksums-spi",
        "2.35.4",
        "88b5af85ac2d3c862be8856be4e683ab31932e4a5a3c1c45af864d2671ac7cec",
    ),
    Artifact(
        "software.amazon.awssdk",
        "crt-core",
        "2.35.4",
        "2c6aaa17bf9ccbb9d962dded4351e73decb197e3c5519970e0dae17e05d3df62",
    ),
    Artifact(
        "software.amazon.awssdk",
        "endpoints-spi",
        "2.35.4",
        "ef02441bda916959b8341290b49c68cc35538e1ad6f8629b75d8334dc6653e00",
    ),
    Artifact(
        "software.amazon.eventstream",
        "eventstream",
        "1.0.1",
        "0c37d8e696117f02c302191b8110b0d0eb20fa412fce34c3a269ec73c16ce822",
    ),
    Artifact(
        "org.apache.hadoop",
        "hadoop-aws",
        "3.5.0",
        "66bd9eefb938b1a1657487324b63c13df2d8b17164a1dd24e0ef37b905bc5baa",
    ),
    Artifact(
        "software.amazon.awssdk",
        "http-auth",
        "2.35.4",
        "3ec933a06e751a05e195eb3589209e23c44e1897263b6fcae34ef4cc63cd4491",
    ),
    Artifact(
        "software.amazon.awssdk",
        "http-auth-aws",
        "2.35.4",
        "c4acb92fdec90bfd9b67bfab8e41b69cd152c03cacc10281a8ab464791856e01",
    ),
    Artifact(
        "software.amazon.awssdk",
        "http-auth-aws-eventstream",
        "2.35.4",
        "709107552f302be3fa9e05969a3779f5c0f07fb809e6fa1fa571a6f0c61326dd",
    ),
    Artifact(
        "software.amazon.awssdk",
        "http-auth-spi",
        "2.35.4",
        "4495463406bb98eb136f2c3f3604ed5f08ec9974ebc3f34f2121b20679f61d5c",
    ),
    Artifact(
        "software.amazon.awssdk",
        "http-client-spi",
        "2.35.4",
        "728be89b2a07b595edb0adee3a2cbbbdd4cb1f4caddde0d08c3979fe2620dedb",
    ),
    Artifact(
        "software.amazon.awssdk",
        "identity-spi",
        "2.35.4",
        "188d73db7d4e2361654bc3c5a1b3eaeb445d0500fb012cc46c5d67975adf97bf",
    ),
    Artifact(
        "software.amazon.awssdk",
        "json-utils",
        "2.35.4",
        "80d67a6bb3e7eb49c7d4b6e4ba4c1463ed7da0192b795158328602dc131c5ecc",
    ),
    Artifact(
        "software.amazon.awssdk",
        "metrics-spi",
        "2.35.4",
        "c2a4ee90a21081317e2e6eba0c414d05d3d518aed2f86b1c1710a7367b450487",
    ),
    Artifact(
        "software.amazon.awssdk",
        "netty-nio-client",
        "2.35.4",
        "b82f8b33e5c85273a47da45ede884d7ccb31c9c2f69e6910a76c5c48fa1275dc",
    ),
    Artifact(
        "software.amazon.awssdk",
        "profiles",
        "2.35.4",
        "0f4ef7ca72ccd80dd49ebeaf7f3ce60a7d7a00da59a91aeeae6e91052bbacbd8",
    ),
    Artifact(
        "software.amazon.awssdk",
        "protocol-core",
        "2.35.4",
        "f2532eca6ba2142fe4821d5decb03c83a3e15dc8bfae2240e7f2efa75f9868b5",
    ),
    Artifact(
        "org.reactivestreams",
        "reactive-streams",
        "1.0.4",
        "f75ca597789b3dac58f61857b9ac2e1034a68fa672db35055a8fb4509e325f28",
    ),
    Artifact(
        "software.amazon.awssdk",
        "regions",
        "2.35.4",
        "77eae87b34ce96ecdf916a9bc06684dbeafcb6d38ef0513285fa5d5d6d41f5ca",
    ),
    Artifact(
        "software.amazon.awssdk",
        "retries",
        "2.35.4",
        "f99fb2f8c66d7e859955b3542d3af8f9de8f23a21d5e3250f0f2c5f18487e469",
    ),
    Artifact(
        "software.amazon.awssdk",
        "retries-spi",
        "2.35.4",
        "668638751d059c527ddd41ffa4dcebe36a7c14860ed56776df09b861c14dc7dd",
    ),
    Artifact(
        "software.amazon.awssdk",
        "s3",
        "2.35.4",
        "f23532c5223be9b0bfec0d72837ed09ed34dbdf8022818ba145b20076a78b4bc",
    ),
    Artifact(
        "software.amazon.awssdk",
        "s3-transfer-manager",
        "2.35.4",
        "0eec78870b3d0abc509a847072cf963cb2ae6e360dc6161a9449b3398c470476",
    ),
    Artifact(
        "software.amazon.awssdk",
        "sdk-core",
        "2.35.4",
        "fa559a4ce598852f3519c8f3b36250f583b0858a7611eedc4a81997778c617f4",
    ),
    Artifact(
        "software.amazon.awssdk",
        "sts",
        "2.35.4",
        "8d0f7816d3f96e3f00249f5d054d926e939a104bcf9ef57676ee0b16c59684d2",
    ),
    Artifact(
        "software.amazon.awssdk",
        "third-party-jackson-core",
        "2.35.4",
        "32f4252c6c2df8f3a4aff885e6dc77024ad6b4cb48455d07b461ec30c41643ea",
    ),
    Artifact(
        "software.amazon.awssdk",
        "utils",
        "2.35.4",
        "642aeef536a071668f0b772f05f9d21573abf6955e7b6fb5fdb893760cca10e8",
    ),
    Artifact(
        "software.amazon.awssdk",
        "utils-lite",
        "2.35.4",
        "e004806def5e22ec98edc48a133ff3317166255e1ba29d93d129e9fdfa64a7be",
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
    paths = [*(directory() / artifact.filename for artifact in DELTA), directory() / java_classes.jar_name()]
    return _there(paths, "pubsub setup")


def s3() -> list[Path]:
    """Return the jars that Spark needs for tables on S3.  Raises PubsubError if one is missing."""
    return _there([directory() / artifact.filename for artifact in S3], "pubsub setup --s3")


def _there(paths: list[Path], command: str) -> list[Path]:
    for path in paths:
        if not path.is_file():
            raise PubsubError(
                f'could not find the jar "{path.name}"',
                sqlstate="58P01",
                detail=f'It was looked for in "{path.parent}".',
                hint=f'Run "{command}", or set PUBSUB_JARS to the directory that holds it.',
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


def set_up(*, s3: bool = False, source: Path | None = None) -> Path:
    """Fetch the jars that are missing, and build ours; return their directory.

    `source`: a directory that has the jars by their file names, instead of a repository.  Raises PubsubError, DataCorrupted
    for a jar with another digest.
    """
    require_java()
    into = directory()
    artifacts = DELTA + S3 if s3 else DELTA
    try:
        if source is not None:
            _copy(artifacts, source, into)
        fetch(artifacts, into)
        java_classes.build(into, [into / artifact.filename for artifact in DELTA])
    except OSError as error:
        raise PubsubError(
            f'could not write to "{into}": {error.strerror}',
            sqlstate="58030",
            hint="Set PUBSUB_JARS to a directory that this user may write, here and for the daemon.",
        ) from error
    return into


def _copy(artifacts: Iterable[Artifact], source: Path, into: Path) -> None:
    """Copy jars under their names, complete or not at all.  Raises PubsubError if one is missing or another file."""
    into.mkdir(parents=True, exist_ok=True)
    for artifact in artifacts:
        path = source / artifact.filename
        if not path.is_file():
            raise PubsubError(f'could not find the jar "{artifact.filename}" in "{source}"', sqlstate="58P01")
        if (found := _sha256(path)) != artifact.sha256:
            raise DataCorrupted(
                f'"{path}" is not the file that was expected',
                detail=f"Its SHA-256 is {found}, and should be {artifact.sha256}.",
            )
        aside = into / f".{artifact.filename}.{os.getpid()}"
        try:
            shutil.copyfile(path, aside)
            aside.replace(into / artifact.filename)
        finally:
            aside.unlink(missing_ok=True)


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
    """Run `python -m pubsub.jars check|fetch [s3]`; return the exit code."""
    try:
        match list(arguments):
            case ["check"]:
                require_java()
            case ["fetch"]:
                for path in fetch(DELTA, directory()):
                    print(path)
                print(java_classes.build(directory(), [directory() / artifact.filename for artifact in DELTA]))
            case ["fetch", "s3"]:
                for path in fetch(S3, directory()):
                    print(path)
            case _:
                print("usage: python -m pubsub.jars check|fetch [s3]", file=sys.stderr)
                return 2
    except PubsubError as error:
        print(error.report(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
