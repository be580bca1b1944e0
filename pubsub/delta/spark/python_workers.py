"""The process from which Spark forks its Python workers (spark.python.daemon.module), with their imports already done.

Spark ends idle workers after a minute; each new one would otherwise spend a second on imports before its first row.
"""

from __future__ import annotations

# ruff: noqa: F401
import numpy
import psycopg
import pyarrow.compute
import pyarrow.csv
import pyarrow.parquet
from pyspark.daemon import manager

import pubsub.delta.files.data_files
import pubsub.protocol.text.copy_csv
import pubsub.publisher.connection

if __name__ == "__main__":
    manager()
