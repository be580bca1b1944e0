"""Where batches are staged for Spark's statements."""

from __future__ import annotations

import hashlib
import socket
from typing import TYPE_CHECKING

from pubsub.errors import FeatureNotSupported
from pubsub.settings import Settings

if TYPE_CHECKING:
    from pubsub.delta.places import Place


def stage_directory(settings: Settings, node_id: str, process: int = 0, *, sharing: bool = False) -> Place:
    """Return the directory of a process of the daemon: in the warehouse for a cluster, whose executors see that.

    `sharing`: other daemons use the warehouse beside it, perhaps from homes of the same name on other hosts.

    Raises FeatureNotSupported for a cluster with a warehouse elsewhere, which the daemon does not reach itself.
    """
    from pubsub.delta.places import is_reached, place

    more = f"-{process}" if process else ""
    if settings.spark.is_local:
        return settings.spill_directory / f"stage{more}"
    if not is_reached(settings.warehouse_uri):
        raise FeatureNotSupported(
            "a Spark cluster is supported only with a warehouse on S3 or HDFS, or in a directory that its executors share",
            detail=f'The setting "spark.master" is "{settings.spark.master}", "warehouse" is "{settings.warehouse_uri}".',
        )
    home = f"{socket.gethostname()}:{settings.home}" if sharing else str(settings.home)
    of_home = hashlib.sha256(home.encode()).hexdigest()[:8]
    return place(settings.warehouse_uri) / "_pubsub_stage" / f"{node_id}-{of_home}{more}"
