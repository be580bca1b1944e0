"""When which subscription is verified by itself, and what the log says of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from launcher.verifier import tell
from tests.support.captured_logs import captured_logs


def report(**outcomes: str) -> Mapping[str, Any]:
    """Return the document of `pubsub verify --json`."""
    tables = {
        f"public.{name}": {"outcome": outcome.replace("_", " "), "reason": f"{outcome} for a reason", "hint": None}
        for name, outcome in outcomes.items()
    }
    return {"subscription": "s", "lsn": "0/10", "seconds": 1.5, "tables": tables}


def told(**outcomes: str) -> list[tuple[str, str, Any]]:
    with captured_logs() as entries:
        tell(report(**outcomes))
    return [(one["log_level"], one["event"], one.get("relation", one.get("tables"))) for one in entries]


def test_each_outcome_has_an_event_of_its_own() -> None:
    """Nothing is called equal that was not compared, and nothing different that could not be."""
    assert told(a="equal", b="equal") == [("info", "tables are equal", 2)]
    assert told(a="not compared") == [("warning", "tables were not compared", "public.a")]
    assert told(a="failed") == [("error", "verification of tables failed", "public.a")]
    assert told(a="equal", b="not compared", c="failed", d="different", e="different") == [
        ("error", "tables differ from the publisher's", "public.d, public.e"),
        ("error", "verification of tables failed", "public.c"),
        ("warning", "tables were not compared", "public.b"),
        ("info", "tables are equal", 1),
    ]


def test_only_some_of_many_tables_are_named() -> None:
    ((_, _, named),) = told(**{f"t{number}": "different" for number in range(7)})
    assert named == "public.t0, public.t1, public.t2, public.t3, public.t4 and 2 more"
