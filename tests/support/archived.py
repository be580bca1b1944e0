"""A server that keeps no WAL for longer than it needs it itself, and archives it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pubsub.testing.servers import EmbeddedPostgres

_SETTINGS: dict[str, str | int] = {"min_wal_size": "2MB", "max_wal_size": "4MB", "archive_mode": "on"}


@contextmanager
def archived_server(version: str = "18", **settings: str | int) -> Iterator[EmbeddedPostgres]:
    """Run a server with segments of 1 MB, which it copies to `archive_of(server)`."""
    with EmbeddedPostgres(version, settings={**_SETTINGS, **settings}, initdb=["--wal-segsize=1"]) as server:
        archive = archive_of(server)
        archive.mkdir()
        os.chown(archive, server.data_dir.stat().st_uid, -1)
        command = f"cp %p {archive}/%f.aside && mv {archive}/%f.aside {archive}/%f"
        server.execute(f"ALTER SYSTEM SET archive_command = '{command}'")
        server.query("SELECT pg_reload_conf()")
        yield server


def archive_of(server: EmbeddedPostgres) -> Path:
    return server.socket_dir / "archive"
