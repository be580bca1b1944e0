"""The file of users that authenticate here: their verifiers, and what they may do on the node itself.

    # name    verifier, as in pg_authid                      privileges on the node
    me        SCRAM-SHA-256$4096:…$…:…                       superuser
    "Reader"  SCRAM-SHA-256$4096:…$…:…
    follower  SCRAM-SHA-256$4096:…$…:…                       replication

Everyone may read the node's tables and views; `replication` allows slots and streams, `superuser` statements, too.  On the
upstream server a user has what its role of this name has there.

    python -m pubsub.backend.users NAME [PRIVILEGE]     asks for a password, and prints a line

It is read at each log-in, so that a change counts at once.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from pubsub.backend.scram import Verifier
from pubsub.errors import PubsubError

PRIVILEGES: Final = frozenset({"superuser", "replication"})
_LINE: Final = re.compile(r'\s*(?:"((?:[^"]|"")+)"|([^\s"#]+))\s+"?(SCRAM-SHA-256\$[^\s"]+)"?((?:\s+\w+)*)\s*(?:#.*)?')


@dataclass(frozen=True, slots=True)
class User:
    """Somebody who may connect."""

    name: str
    verifier: Verifier | None
    privileges: frozenset[str] = frozenset()

    @property
    def is_superuser(self) -> bool:
        return "superuser" in self.privileges

    @property
    def may_replicate(self) -> bool:
        return bool(self.privileges & PRIVILEGES)


def read(path: Path) -> Mapping[str, User]:
    """Read the file.  Raises PubsubError, which names the line and never repeats it."""
    try:
        if path.stat().st_mode & 0o077:
            raise PubsubError(
                f'authentication file "{path}" has group or world access',
                sqlstate="F0000",
                hint="The file must have permissions u=rw (0600) or less.",
            )
        lines = path.read_text("utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise PubsubError(f'could not read authentication file "{path}": {error}', sqlstate="F0000") from error
    users: dict[str, User] = {}
    for number, line in enumerate(lines, 1):
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        match = _LINE.fullmatch(line)
        privileges = frozenset(match[4].split()) if match is not None else frozenset()
        if match is None or privileges - PRIVILEGES:
            raise PubsubError(
                f'invalid line {number} of authentication file "{path}"',
                sqlstate="F0000",
                hint="A line is a name, a SCRAM verifier, and perhaps superuser or replication.",
            )
        name = match[1].replace('""', '"') if match[1] else match[2]
        try:
            users[name] = User(name, Verifier.parse(match[3]), privileges)
        except PubsubError as error:
            error.context = f'line {number} of authentication file "{path}"'
            raise
    return users


def line(name: str, verifier: Verifier, privileges: str = "") -> str:
    """Return a user's line of the file."""
    shown = name if re.fullmatch(r'[^\s"#]+', name) else '"' + name.replace('"', '""') + '"'
    return f"{shown} {verifier} {privileges}".rstrip()


def _main() -> None:
    from getpass import getpass

    if not 2 <= len(sys.argv) <= 3 or (len(sys.argv) == 3 and sys.argv[2] not in PRIVILEGES):
        sys.exit("usage: python -m pubsub.backend.users NAME [superuser | replication]")
    password = getpass() if sys.stdin.isatty() else sys.stdin.readline().rstrip("\n")
    print(line(sys.argv[1], Verifier.of_password(password), *sys.argv[2:]))


if __name__ == "__main__":
    _main()
