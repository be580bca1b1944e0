"""Delta's OPTIMIZE on Spark's executors, for the tables that are not rewritten here, and for those with cluster columns.

    a table with CLUSTER BY               a tenth of its bytes is not clustered yet: 64 MB, or less once it rests
    one that only Spark's statement       16 small files in one partition, or two once it rests
    writes, or that tracks its rows
    one in another file system            16 batches, or two once it rests; only Delta knows its files

Of a clustered table OPTIMIZE rewrites everything but very large groups of files, hence the tenth.  A batch that is
committed meanwhile may be in its way: then OPTIMIZE is run again later.  Blocks.
"""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from delta.tables import DeltaTable

from pubsub.delta.housekeeping.choose_files import SMALL_BYTES
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.spark.jvm_transactions import CONFLICTS
from pubsub.processor_time import spent_on

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

_UNCLUSTERED: Final = 0.1
_MERGE: Final = 16
_MERGE_AT_REST: Final = 2


def is_due(log: TableLog, *, rewritten_here: bool, resting: bool) -> bool:
    """Return whether OPTIMIZE is worth it for a local table; `rewritten_here`: rewrite.py merges its small files."""
    files = list(log.files.values())
    if log.cluster_columns:
        size = sum(file.size for file in files)
        loose = sum(file.size for file in files if not file.clustered)
        return loose > _UNCLUSTERED * size and (resting or loose >= SMALL_BYTES)
    # OPTIMIZE does not merge files of different partitions.
    small = Counter(file.partition_key for file in files if file.size < SMALL_BYTES)
    return not rewritten_here and enough(max(small.values(), default=0), resting=resting)


def enough(files: int, *, resting: bool) -> bool:
    """Return whether so many small files are worth it."""
    return files >= (_MERGE_AT_REST if resting else _MERGE)


@spent_on("housekeeping", whole=True)
def optimize(session: SparkSession, path: str) -> bool | None:
    """Run it; return whether it has rewritten files, None if a batch was in its way.  Raises what Spark raises."""
    try:
        (result,) = DeltaTable.forPath(session, path).optimize().executeCompaction().collect()
    except CONFLICTS:
        return None
    return bool(result.metrics.numFilesRemoved)
