"""Try whether the executors of a cluster reach the publisher and the warehouse, before a copy that needs them has a slot."""

from __future__ import annotations

import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pubsub.delta.places import directory, is_local
from pubsub.errors import ConnectionFailure, NotInPrerequisiteState
from pubsub.publisher import copy_out
from pubsub.setting_tables import OWN_PASSWORDS
from tablesync import task_secrets
from tablesync.task_secrets import TaskSecrets

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_OWN: Final = (
    "An executor connects from its own machine, with the files there that CONNECTION names (passfile, sslrootcert …)."
)
_WITHHELD: Final = (
    f"Set spark.authenticate and spark.network.crypto.enabled in [spark.conf], as on the cluster.  {OWN_PASSWORDS}"
)


def require_connections(session: SparkSession, conninfo: str, application_name: str, *, withheld: bool) -> None:
    """Connect to the publisher from as many tasks as run at a time; raise ConnectionFailure if one of them cannot.

    `withheld`: passwords were taken out of `conninfo`, since others may read what driver and executors say.
    """
    context = session.sparkContext
    tasks = context.defaultParallelism
    with task_secrets.sent(context, {"conninfo": conninfo}) as given:
        failed = context.parallelize(range(tasks), tasks).map(lambda _: _attempt(given, application_name)).collect()
    reason = next((one for one in failed if one is not None), None)
    if reason is not None:
        message = f"Spark's executors cannot connect to the publisher: {reason}"
        if withheld:
            detail = "They are not sent the password in CONNECTION, because others may read what Spark sends to them."
            raise ConnectionFailure(message, detail=detail, hint=_WITHHELD)
        raise ConnectionFailure(message, hint=_OWN)


def _attempt(given: TaskSecrets, application_name: str) -> str | None:
    """Connect, in a task; return what is wrong."""
    try:
        copy_out.session(given.read()["conninfo"], application_name).close()
    except ConnectionFailure as error:
        return error.message
    return None


def require_shared(session: SparkSession, warehouse: str) -> None:
    """Raise NotInPrerequisiteState unless executors see what is written in a warehouse that is a directory, and the daemon theirs.

    An executor would write its files to a directory of its own machine, and the table's log would name what nobody else has.
    """
    if not is_local(warehouse):
        return
    context = session.sparkContext
    tasks = context.defaultParallelism
    root = directory(warehouse)
    root.mkdir(parents=True, exist_ok=True)
    probe = root / f"_pubsub_{uuid.uuid4()}"
    try:
        probe.write_text(probe.name)
        found = context.parallelize(range(tasks), tasks).map(lambda number: _answer(str(probe), number)).collect()
        unseen = (f'"{path}" is not there.' for path in _answers(str(probe), tasks) if not path.exists())
        reason = next((one for one in found if one is not None), None) or next(unseen, None)
    finally:
        for path in (probe, *_answers(str(probe), tasks)):
            path.unlink(missing_ok=True)
    if reason is not None:
        raise NotInPrerequisiteState(
            f'Spark\'s executors do not share the warehouse "{warehouse}"',
            detail=reason,
            hint='The setting "warehouse" must name a directory that daemon and executors share, and may write, or S3 or HDFS.',
        )


def _answers(probe: str, tasks: int) -> list[Path]:
    return [Path(f"{probe}-{number}") for number in range(tasks)]


def _answer(probe: str, number: int) -> str | None:
    """Read the daemon's file and write one beside it, in a task; return what is wrong."""
    try:
        Path(probe).read_text()
        Path(f"{probe}-{number}").touch()
    except OSError as error:
        return f'An executor: "{error.filename}": {error.strerror}.'
    return None
