"""What a process that serves keeps from the machine's other users: core files, files that they may write, settings with secrets."""

from __future__ import annotations

import os
import re
import resource

import structlog

from pubsub.setting_tables import names_secret
from pubsub.settings import FILE_NAME, Settings
from pubsub.sql.conninfo import MASK, mask_conninfo

logger = structlog.get_logger()


def harden() -> None:
    """Let this process and those that it starts leave no core files, and make no file that others may write.

    A core file holds connection strings and rows.  Only the soft limit is set: prlimit(1) allows cores to a running daemon.
    The node's own files have modes of their own; the umask decides who may read Delta tables outside the node's directory.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    os.umask(os.umask(0o077) | 0o022)


def warn_of_readers(settings: Settings) -> None:
    """Log a warning if the settings' file holds a secret and others may read it."""
    path = settings.home / FILE_NAME
    try:
        readable = path.stat().st_mode & 0o077 and path.parent.stat().st_mode & 0o011
    except OSError:
        return
    if readable and _holds_secret(settings):
        logger.warning(
            "configuration file with secrets can be read by others",
            file=str(path),
            hint=f'Restrict it: chmod 600 "{path}".',
        )


def warn_of_open_cluster(settings: Settings) -> None:
    """Log a warning if Spark runs on a cluster that does not keep others out."""
    if (unprotected := settings.spark.unprotected) is not None:
        message, detail, hint = unprotected
        logger.warning("Spark's cluster is open to its network", reason=message, detail=detail, hint=hint)


def _holds_secret(settings: Settings) -> bool:
    # SQLAlchemy's URLs are libpq's but for the driver's name; SQLite's name a file.
    url = re.sub(r"^postgresql\+\w+:", "postgresql:", settings.catalog.url or "")
    connections = (
        settings.walsender.upstream,
        settings.walsender.wal_source,
        url if url.startswith("postgresql:") else None,
    )
    return any(MASK in mask_conninfo(one or "") for one in connections) or any(map(names_secret, settings.spark.conf))
