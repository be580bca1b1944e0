"""What a Delta table with soft deletes must hold: the publisher's rows, and those that triggers there have seen leave a key."""

from __future__ import annotations

from collections import Counter
from datetime import datetime
from typing import Any

from tests.support.replica import Replica

#: Keeps in gone_<table> the last row of each key that has none now, as a deletion or a change of the key left it, and when.
WATCH = """
CREATE TABLE gone_{table} (gone_at timestamptz, LIKE {table});
CREATE FUNCTION watch_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' AND (TG_OP = 'DELETE' OR ({old}) IS DISTINCT FROM ({new})) THEN
        DELETE FROM gone_{table} WHERE ({key}) = ({old});
        INSERT INTO gone_{table} SELECT clock_timestamp(), OLD.*;
    END IF;
    IF TG_OP <> 'DELETE' THEN
        DELETE FROM gone_{table} WHERE ({key}) = ({new});
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER watch AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION watch_{table}();
"""


def watch(table: str, key: str = "id") -> str:
    """Return SQL that makes the triggers."""
    names = [name.strip() for name in key.split(",")]
    old, new = (", ".join(f"{row}.{name}" for name in names) for row in ("OLD", "NEW"))
    return WATCH.format(table=table, key=key, old=old, new=new)


def assert_soft(
    replica: Replica, table: str, columns: str = "id, v", since: datetime | None = None
) -> list[dict[str, Any]]:
    """Check all rows of the Delta table, once it has caught up; return those that are marked as deleted.

    `since`: when the table was ready; of the rows that were deleted before, those that it has are rows of the publisher's.
    """
    replica.caught_up()
    names = [name.strip() for name in columns.split(",")]
    rows = replica.rows(table)

    def of(chosen: list[dict[str, Any]]) -> Counter[Any]:
        return Counter(tuple(row[name] for name in names) for row in chosen)

    marked = [row for row in rows if row["_pubsub_deleted_at"] is not None]
    assert of([row for row in rows if row["_pubsub_deleted_at"] is None]) == Counter(
        replica.query(f"SELECT {columns} FROM {table}")
    ), "rows that the publisher has"
    gone = Counter(replica.query(f"SELECT {columns} FROM gone_{table}"))
    if since is None:
        assert of(marked) == gone, "rows that it had"
    else:
        assert of(marked) <= gone
        late = Counter(replica.query(f"SELECT {columns} FROM gone_{table} WHERE gone_at > '{since.isoformat()}'"))
        assert late <= of(marked), "rows that were deleted since"
    _check_times(replica, table, names[0], marked)
    return marked


def _check_times(replica: Replica, table: str, key: str, marked: list[dict[str, Any]]) -> None:
    """Check that each row was marked with the time of a commit, which came after its deletion and before now."""
    at: dict[Any, datetime] = dict(replica.query(f"SELECT {key}, gone_at FROM gone_{table}"))
    ((now,),) = replica.query("SELECT clock_timestamp()")
    for row in marked:
        assert at[row[key]] <= row["_pubsub_deleted_at"] <= now, row
