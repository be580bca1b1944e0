"""What a Delta table must hold that ignores TRUNCATE: what triggers on the publisher have kept."""

from __future__ import annotations

from collections import Counter
from typing import Any

from tests.support.replica import Replica

#: Keeps in kept_<table> the rows as every change but TRUNCATE leaves them.
_KEEP = """
CREATE TABLE kept_{table} AS TABLE {table};
CREATE FUNCTION keep_{table}() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP <> 'INSERT' THEN
        DELETE FROM kept_{table} WHERE {key} = OLD.{key};
    END IF;
    IF TG_OP <> 'DELETE' THEN
        DELETE FROM kept_{table} WHERE {key} = NEW.{key};
        INSERT INTO kept_{table} SELECT NEW.*;
    END IF;
    RETURN NULL;
END $$;
CREATE TRIGGER keep AFTER INSERT OR UPDATE OR DELETE ON {table} FOR EACH ROW EXECUTE FUNCTION keep_{table}();
"""


def keep(table: str, key: str = "id") -> str:
    """Return SQL that makes the triggers."""
    return _KEEP.format(table=table, key=key)


def assert_kept(replica: Replica, table: str, columns: str = "id, v") -> list[dict[str, Any]]:
    """Check all rows of the Delta table, once it has caught up; return them."""
    replica.caught_up()
    names = [name.strip() for name in columns.split(",")]
    rows = replica.rows(table)
    kept = Counter(replica.query(f"SELECT {columns} FROM kept_{table}"))
    assert Counter(tuple(row[name] for name in names) for row in rows) == kept
    return rows
