"""Try whether the executors of a cluster can connect to the publisher, before a copy that needs them has a slot."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from pubsub.errors import ConnectionFailure
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
