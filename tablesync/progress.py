"""The progress of a copy: the rows of finished ranges, plus those that the publisher counts for running ones.

A Python task reports its count to Spark only when it ends.  The publisher counts the rows of each running COPY
(pg_stat_progress_copy), without any report from the executors.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import structlog

from catalog.records import Subscription, SubscriptionRel
from catalog.store import Catalog
from pubsub.delta.spark.engine import Engine
from pubsub.errors import PubsubError
from pubsub.publisher import definitions
from pubsub.publisher.connection import Connection

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession

_INTERVAL = 1.0

logger = structlog.get_logger()


@asynccontextmanager
async def follow_progress(
    catalog: Catalog,
    subscription: Subscription,
    relation: SubscriptionRel,
    estimated_rows: int | None,
    application_name: str,
    engine: Engine,
) -> AsyncIterator[Accumulator[int]]:
    """Store the progress in the catalog once a second while the body runs, and the final count after it.

    Yields the accumulator to which tasks add the rows of finished ranges.
    """
    done = await engine.run(_accumulator)
    task = asyncio.create_task(
        _follow(catalog, subscription, relation, estimated_rows, application_name, done), name="copy progress"
    )
    try:
        yield done
    finally:
        task.cancel()
        await asyncio.wait({task})
    rows = int(done.value)
    await catalog.put_copy_progress(subscription.oid, relation.relid, rows, rows, finished=True)


async def _follow(
    catalog: Catalog,
    subscription: Subscription,
    relation: SubscriptionRel,
    estimated_rows: int | None,
    application_name: str,
    done: Accumulator[int],
) -> None:
    greatest = 0
    try:
        async with await Connection.connect(subscription.conninfo, application_name="pubsub progress") as connection:
            while True:
                running = await definitions.copy_progress(connection, application_name)
                # A range that has just ended is in neither count for a moment; the progress shown must not go back.
                greatest = max(greatest, int(done.value) + running.tuples)
                total = None if estimated_rows is None else max(estimated_rows, greatest)
                await catalog.put_copy_progress(subscription.oid, relation.relid, greatest, total, running.bytes)
                await asyncio.sleep(_INTERVAL)
    except PubsubError as error:
        # Progress is only informative: a copy does not fail without it.
        logger.warning("copy progress is not known", relation=relation.qualified_name, reason=error.message)


def _accumulator(session: SparkSession) -> Accumulator[int]:
    return session.sparkContext.accumulator(0)
