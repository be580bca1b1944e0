"""What Delta tables take on disk, and how long another engine takes to read them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from deltalake import DeltaTable, QueryBuilder

from bench.results import Limit
from pubsub.delta.log.table_log import TableLog
from pubsub.delta.places import Place, files_below

_SCANS: Final = 3


@dataclass(frozen=True, slots=True)
class Storage:
    """Several tables together.  `files`: data files of the newest versions.

    `bytes_now`: their bytes, and their deletion vectors'; `bytes_kept`: all that lies in the tables' directories apart
    from the logs; `scan`: seconds in which deltalake reads all rows and columns, the least of several times.
    """

    files: int
    bytes_now: int
    bytes_kept: int
    log_bytes: int
    log_files: int
    scan: float


def measure(tables: Sequence[Place]) -> Storage:
    """Measure tables.  They must not be written meanwhile."""
    files = now = kept = logs = log_files = 0
    for table in tables:
        log = TableLog(str(table))
        log.refresh()
        files += len(log.files)
        now += sum(file.size + (file.vector["sizeInBytes"] if file.vector else 0) for file in log.files.values())
        kept += sum(stat.st_size for _, stat in files_below(table))
        for path in (table / "_delta_log").glob("*.*"):
            logs += path.stat().st_size
            log_files += 1
    return Storage(files, now, kept, logs, log_files, min(_scan(tables) for _ in range(_SCANS)))


def limits(fresh: Storage, loaded: Storage) -> list[Limit]:
    """Compare tables after a load with what they were when just copied (as `theirs`)."""
    return [
        Limit("files", "data files after the load (theirs: just copied)", "rate", loaded.files, fresh.files),
        Limit("bytes_now", "bytes of the newest versions", "bytes", loaded.bytes_now, fresh.bytes_now),
        Limit("bytes_kept", "bytes on disk, earlier versions included", "bytes", loaded.bytes_kept, fresh.bytes_kept),
        Limit("log_bytes", "bytes of Delta's logs", "bytes", loaded.log_bytes, fresh.log_bytes),
        Limit("scan", "a full scan by deltalake", "seconds", loaded.scan, fresh.scan),
    ]


def _scan(tables: Sequence[Place]) -> float:
    began = time.monotonic()
    for table in tables:
        opened = DeltaTable(str(table))
        columns = ", ".join(f'max("{field.name}")' for field in opened.schema().fields)
        QueryBuilder().register("t", opened).execute(f"SELECT count(*), {columns} FROM t").read_all()
    return time.monotonic() - began
