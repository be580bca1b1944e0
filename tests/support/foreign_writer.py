"""Another program that writes a Delta table: a Spark of its own, with Delta's own store for local files.

    python -m tests.support.foreign_writer TABLE [NAME=VALUE…]

The settings are Spark's.
For the first line on its standard input it does every kind of statement once, to rows of its own with ids above
1,000,000; for each further line those that met a conflict before, and so did nothing.  The line says how often such a
one is tried again.  Then it prints, as JSON, its rows that are in the table, and the statements made and refused.
"""

from __future__ import annotations

import itertools
import json
import sys
from collections.abc import Sequence

from pyspark.sql import SparkSession

from pubsub import jars
from pubsub.delta.spark.spark_session import BASE_CONF

FIRST = 1_000_000
Rows = dict[int, str]
_CONFLICTS = ("Concurrent", "MetadataChanged", "ProtocolChanged")


def insert(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    return f"INSERT INTO {table} (id, n) VALUES ({FIRST + number}, 'inserted')", rows | {FIRST + number: "inserted"}


def update(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    one = min(rows, default=FIRST)
    return f"UPDATE {table} SET n = 'updated' WHERE id = {one}", rows | dict.fromkeys(rows.keys() & {one}, "updated")


def merge(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    source = {**dict.fromkeys([*rows][-1:], "merged"), FIRST + number: "merged"}
    listed = ", ".join(f"({one}, '{n}')" for one, n in source.items())
    return (
        f"MERGE INTO {table} t USING (SELECT * FROM VALUES {listed} AS v (id, n)) s ON t.id = s.id "
        "WHEN MATCHED THEN UPDATE SET n = s.n WHEN NOT MATCHED THEN INSERT (id, n) VALUES (s.id, s.n)"
    ), rows | source


def delete(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    one = min(rows, default=FIRST)
    return f"DELETE FROM {table} WHERE id = {one}", {each: n for each, n in rows.items() if each != one}


def set_property(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    return f"ALTER TABLE {table} SET TBLPROPERTIES ('other.number' = '{number}')", rows


def add_column(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    return f"ALTER TABLE {table} ADD COLUMNS (extra_{number} INT)", rows


def optimize(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    return f"OPTIMIZE {table}", rows


def vacuum(table: str, number: int, rows: Rows) -> tuple[str, Rows]:
    return f"VACUUM {table}", rows


KINDS = (insert, set_property, update, merge, optimize, insert, delete, vacuum, add_column)


def session(settings: Sequence[str] = ()) -> SparkSession:
    """Start a Spark that knows nothing of this program; `settings`: more of its configuration, as name=value."""
    builder = SparkSession.Builder().master("local[1]").config("spark.driver.memory", "1g")
    builder = builder.config("spark.jars", ",".join(map(str, jars.class_path())))
    for name, value in BASE_CONF.items():
        if "logStore" not in name:
            builder = builder.config(name, value)
    for setting in settings:
        builder = builder.config(*setting.split("=", 1))
    spark = builder.getOrCreate()
    spark.sparkContext.setLogLevel("OFF")
    return spark


def merge_files(spark: SparkSession, path: str) -> None:
    """Merge the table's files, unless others write it meanwhile."""
    try:
        spark.sql(f"OPTIMIZE delta.`{path}`").collect()
    except Exception as error:
        if not any(name in str(error) for name in _CONFLICTS):
            raise


def main() -> None:
    path = sys.argv[1]
    spark = session(sys.argv[2:])
    print("ready", flush=True)
    rows: dict[int, str] = {}
    numbers = itertools.count(1)
    todo = list(KINDS)
    for line in sys.stdin:
        made: list[str] = []
        refused: list[str] = []
        kinds, todo = todo, []
        for kind in kinds:
            number = next(numbers)
            for _ in range(int(line) + 1):
                statement, after = kind(f"delta.`{path}`", number, rows)
                name = " ".join(statement.split()[:1] + statement.split("`")[-1].split()[:1])
                try:
                    spark.sql(statement).collect()
                except Exception as error:
                    if not any(name in str(error) for name in _CONFLICTS):
                        raise
                    refused.append(name)
                else:
                    rows = after
                    made.append(name)
                    break
            else:
                todo.append(kind)
        print(json.dumps({"rows": rows, "made": made, "refused": refused}), flush=True)
    spark.stop()


if __name__ == "__main__":
    main()
