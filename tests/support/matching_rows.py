"""Delta tables that have the rows which meet a condition (the option where), beside SELECT … WHERE at the publisher."""

from __future__ import annotations

from collections.abc import Mapping

from tests.support.replica import Replica


class Filtered:
    """A subscription's tables with their conditions, as SQL of the publisher's; `live`: the column that is NULL in rows that count."""

    def __init__(self, replica: Replica, conditions: Mapping[str, str], live: str | None = None) -> None:
        self.replica = replica
        self.live = live
        self.conditions = dict(conditions)

    def assert_equal(self, *, caught_up: bool = True) -> None:
        """Each Delta table has the publisher's rows that meet its condition, in the publisher's columns."""
        if caught_up:
            self.replica.caught_up()
        for table, condition in self.conditions.items():
            wanted = [dict(row) for row in self._publishers(table, condition)]
            names = list(self._columns(table))
            rows = [row for row in self.replica.rows(table) if self.live is None or row[self.live] is None]
            found = [{name: row[name] for name in names} for row in rows]
            assert sorted(map(repr, found)) == sorted(map(repr, wanted)), table

    def assert_verified(self, *, repair: bool = False) -> None:
        """`pubsub verify` finds the tables equal."""
        report = self.replica.node.run(self.replica.node._node.verify(self.replica.name, (), repair=repair))
        outcomes = {one.relation: (one.outcome, one.reason) for one in report.tables}
        assert {outcome for outcome, _ in outcomes.values()} == {"equal"}, outcomes

    def _columns(self, table: str) -> list[str]:
        statement = (
            f"SELECT attname FROM pg_attribute WHERE attrelid = '{table}'::regclass AND attnum > 0 AND NOT attisdropped"
        )
        return [name for (name,) in self.replica.query(f"{statement} ORDER BY attnum")]

    def _publishers(self, table: str, condition: str) -> list[dict[str, object]]:
        names = self._columns(table)
        listed = ", ".join(f'"{name}"' for name in names)
        return [
            dict(zip(names, row, strict=True))
            for row in self.replica.query(f"SELECT {listed} FROM {table} WHERE {condition}")
        ]
