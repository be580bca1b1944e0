"""What a Delta table with soft deletes must hold: the publisher's rows, and those that triggers there have seen leave a key."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
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


#: Does the same with all rows that a TRUNCATE takes.
WATCH_TRUNCATE = """
CREATE FUNCTION empty_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    INSERT INTO gone_{table} SELECT clock_timestamp(), taken.* FROM {table} taken;
    RETURN NULL;
END $$;
CREATE TRIGGER empty BEFORE TRUNCATE ON {table} FOR EACH STATEMENT EXECUTE FUNCTION empty_{table}();
"""


def watch(table: str, key: str = "id", *, truncate: bool = False) -> str:
    """Return SQL that makes the triggers; `truncate`: what is truncated is kept, too."""
    names = [name.strip() for name in key.split(",")]
    old, new = (", ".join(f"{row}.{name}" for name in names) for row in ("OLD", "NEW"))
    made = WATCH.format(table=table, key=key, old=old, new=new)
    return made + WATCH_TRUNCATE.format(table=table) if truncate else made


def assert_soft(
    replica: Replica, table: str, columns: str = "id, v", since: datetime | None = None
) -> list[dict[str, Any]]:
    """Check all rows of the Delta table, as `assert_rows`, once it has caught up."""
    replica.caught_up()
    return assert_rows(replica.rows(table), replica.query, table, columns, since)


def assert_rows(
    rows: list[dict[str, Any]],
    ask: Callable[[str], list[tuple[Any, ...]]],
    table: str,
    columns: str,
    since: datetime | None = None,
) -> list[dict[str, Any]]:
    """Check all rows of a Delta table; return those that are marked as deleted.  `ask`: runs a query on the publisher.

    `since`: when the table was ready; of the rows that were deleted before, those that it has are rows of the publisher's.
    """
    names = [name.strip() for name in columns.split(",")]

    def of(chosen: list[dict[str, Any]]) -> Counter[Any]:
        return Counter(tuple(row[name] for name in names) for row in chosen)

    marked = [row for row in rows if row["_pubsub_deleted_at"] is not None]
    live = Counter(ask(f"SELECT {columns} FROM {table}"))
    assert of([row for row in rows if row["_pubsub_deleted_at"] is None]) == live, "rows that the publisher has"
    gone = Counter(ask(f"SELECT {columns} FROM gone_{table}"))
    if since is None:
        assert of(marked) == gone, "rows that it had"
    else:
        late = Counter(ask(f"SELECT {columns} FROM gone_{table} WHERE gone_at > '{since.isoformat()}'"))
        assert late <= of(marked) <= gone, "rows that were deleted since"
    # Each has the time of a commit, which came after its deletion and before now.
    at: dict[Any, datetime] = dict(ask(f"SELECT {names[0]}, gone_at FROM gone_{table}"))
    ((now,),) = ask("SELECT clock_timestamp()")
    for row in marked:
        assert at[row[names[0]]] <= row["_pubsub_deleted_at"] <= now, row
    return marked
