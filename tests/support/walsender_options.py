"""The options of both decodings in a random round, drawn from its seed among all valid combinations."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Final, Literal

Kind = Literal["bytes", "streams", "replay"]
KINDS: tuple[Kind, ...] = ("bytes", "streams", "replay")

EVERYTHING: Final = "p"
PUBLICATIONS: Final[dict[str, tuple[str, ...]]] = {
    EVERYTHING: ("CREATE PUBLICATION p FOR ALL TABLES",),
    "roots": ("CREATE PUBLICATION roots FOR ALL TABLES WITH (publish_via_partition_root)",),
    "parts": (
        (
            "CREATE PUBLICATION parts FOR TABLE t1 (id, a) WHERE (id % 3 <> 0), t2 WHERE (a > 3 OR b IS NULL), t3 (id, b), t4, "
            "p WHERE (id < 300) WITH (publish_via_partition_root)"
        ),
    ),
    "schemas": ("CREATE PUBLICATION schemas FOR TABLES IN SCHEMA public WITH (publish_via_partition_root)",),
    "parts,inserts": (
        "CREATE PUBLICATION parts FOR TABLE t1 WHERE (id > 100), t2 (id, a, b), p1 (id, b), p2 WHERE (id > 250)",
        "CREATE PUBLICATION inserts FOR TABLE t1 WHERE (a > 4 AND b LIKE '%a%'), t4 WITH (publish = 'insert, truncate')",
    ),
}
"""The statements that create publications, by the publication names that a decoding asks for."""
ALTERATIONS: Final[dict[str, tuple[str, ...]]] = {
    "roots": ("ALTER PUBLICATION roots SET (publish_via_partition_root = {truth})",),
    "parts": (
        "ALTER PUBLICATION parts SET (publish_via_partition_root = {truth})",
        "ALTER PUBLICATION parts SET (publish = '{actions}')",
        "ALTER PUBLICATION parts SET TABLE t1 (id, a) WHERE (id % 3 <> 0), t2 WHERE (a > 3), t3 (id, b), p WHERE (id < 300)",
        "ALTER PUBLICATION parts SET TABLE t1, t2 (id, a, b), t4 WHERE (id > 200), p (id, a)",
        "ALTER PUBLICATION parts DROP TABLE t1",
        "ALTER PUBLICATION parts ADD TABLE t1 WHERE (id > 50)",
    ),
    "schemas": (
        "ALTER PUBLICATION schemas SET (publish_via_partition_root = {truth})",
        "ALTER PUBLICATION schemas SET TABLES IN SCHEMA public, TABLES IN SCHEMA beside",
        "ALTER PUBLICATION schemas SET TABLES IN SCHEMA beside, TABLE t1, t2, p WHERE (id < 300)",
        "ALTER PUBLICATION schemas DROP TABLES IN SCHEMA beside",
        "ALTER PUBLICATION schemas ADD TABLES IN SCHEMA public",
    ),
    "parts,inserts": (
        "ALTER PUBLICATION inserts SET (publish = '{actions}')",
        "ALTER PUBLICATION inserts SET TABLE t1, t3, t4 WHERE (a IN (1, 2, 3))",
        "ALTER PUBLICATION parts DROP TABLE t1",
        "ALTER PUBLICATION parts ADD TABLE t1 WHERE (id < 150)",
    ),
}
"""The statements with which the sessions alter the publications during a round, by the same names."""
_NOBODY_WRITES: Final = (
    "DO $$ DECLARE one regclass; BEGIN FOR one IN SELECT oid FROM pg_class WHERE relkind IN ('r', 'p') AND relnamespace IN "
    "('public'::regnamespace, 'beside'::regnamespace) ORDER BY oid LOOP "
    "EXECUTE 'LOCK TABLE ' || one || ' IN SHARE ROW EXCLUSIVE MODE'; END LOOP; END $$; "
)


@dataclass(frozen=True)
class Asked:
    """The parameters of a decoding, ours and PostgreSQL's.  `two_phase` is the slot's; `options` are the plugin's."""

    plugin: str = "pgoutput"
    publications: str = EVERYTHING
    options: dict[str, str] = field(default_factory=dict)
    two_phase: bool = False
    work_mem: str = "64MB"

    def of_slot(self) -> dict[str, str]:
        """Return the options for START_REPLICATION."""
        return self.options | ({"publication_names": self.publications} if self.plugin == "pgoutput" else {})

    def arguments(self) -> list[str]:
        """Return the arguments for `walsender decode`."""
        given = dict(self.options)
        found = ["--plugin", self.plugin, "--work-mem", self.work_mem]
        if self.plugin == "pgoutput":
            found += ["--publication", self.publications, "--proto-version", given.pop("proto_version")]
        elif self.two_phase:
            given["two-phase"] = "on"
        return found + [part for name, value in given.items() for part in ("--option", f"{name}={value}")]

    def __str__(self) -> str:
        return " ".join(self.arguments())


def draw(version: str, kind: Kind, r: random.Random) -> Asked:
    """Draw what a round of this kind can compare: `streams` pgoutput's transactions, `replay` all rows as text."""
    newest = 4 if int(version) >= 16 else 3
    if kind == "replay":
        two_phase = r.random() < 0.5
        options = {"proto_version": "3", "two_phase": "on"} if two_phase else {"proto_version": "1"}
        return Asked(options=options | {"messages": "true"}, two_phase=two_phase, work_mem="4MB")
    if kind == "bytes" and r.random() < 0.25:
        names = ("include-xids", "include-timestamp", "skip-empty-xacts", "only-local", "include-rewrites")
        text = {name: "on" if r.random() < 0.5 else "off" for name in names if r.random() < 0.7}
        return Asked("test_decoding", options=text, two_phase=r.random() < 0.6, work_mem="4MB")
    streaming = {"bytes": "", "streams": r.choice(("on", "parallel")) if newest == 4 else "on"}[kind]
    two_phase = r.random() < 0.6
    least = 4 if streaming == "parallel" else 3 if two_phase else 2 if streaming else 1
    options = {"proto_version": str(r.randint(least, newest))}
    if streaming:
        options["streaming"] = streaming
    if two_phase:
        options["two_phase"] = "on"
    if r.random() < 0.7:
        options["messages"] = "true"
    if r.random() < 0.3:
        options["binary"] = "true"
    if newest == 4 and r.random() < 0.5:
        options["origin"] = r.choice(("any", "none"))
    publications = EVERYTHING if r.random() < 0.4 else r.choice(tuple(PUBLICATIONS))
    return Asked("pgoutput", publications, options, two_phase, "64kB" if kind == "streams" else "4MB")


def alteration(publications: str, r: random.Random) -> str:
    """Return a statement that changes what is published, or "" if nothing can change.

    It first locks the tables against writers, since a server's caches decide whether it sends the changes of a
    transaction in progress by the old or the new publication (walsender_decodings.ServerStream).
    """
    statements = ALTERATIONS.get(publications, ())
    if not statements:
        return ""
    actions = ", ".join(r.sample(("insert", "update", "delete", "truncate"), r.randint(1, 4)))
    return _NOBODY_WRITES + r.choice(statements).format(truth=r.choice(("true", "false")), actions=actions)
