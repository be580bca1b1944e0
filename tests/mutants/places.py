"""The hot places, and the tests that ought to see a fault there: narrow ones, which run first and mostly alone."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final


@dataclass(frozen=True, slots=True)
class Place:
    """A file, the most faults that are planted in it, and its tests.  `only`: names of its functions; empty: all."""

    file: str
    faults: int
    tests: tuple[str, ...]
    only: tuple[str, ...] = ()


_UNIT: Final = "tests/unit"
_REORDERBUFFER: Final = f"{_UNIT}/pubsub/reorderbuffer"
_DURABILITY: Final = f"{_UNIT}/walsender/test_durability.py"

PLACES: Final = (
    Place("walsender/feed/spool.py", 24, (_DURABILITY,)),
    Place("walsender/slots/slot.py", 20, (_DURABILITY, f"{_UNIT}/walsender/test_server.py")),
    Place("walsender/checked_files.py", 6, (_DURABILITY,)),
    Place("walsender/feed/commits.py", 14, (_DURABILITY, f"{_UNIT}/walsender/test_server.py")),
    Place("walsender/xlog/reader.py", 16, (f"{_UNIT}/walsender/test_reader.py",)),
    Place("apply/pipeline/trigger.py", 10, (f"{_UNIT}/apply/test_trigger.py", f"{_UNIT}/apply/test_pipeline.py")),
    Place("apply/pipeline/feedback.py", 12, (f"{_UNIT}/apply/test_feedback.py", f"{_UNIT}/apply/test_pipeline.py")),
    Place("apply/pipeline/dispatch.py", 16, (f"{_UNIT}/apply/test_dispatch.py", f"{_UNIT}/apply/test_pipeline.py")),
    Place("apply/ready.py", 6, (f"{_UNIT}/apply/test_ready.py",)),
    Place("apply/handover.py", 8, (f"{_UNIT}/apply/test_handover.py",)),
    Place("apply/twophase.py", 14, (f"{_UNIT}/apply/test_twophase.py",)),
    Place("apply/publisher_identity.py", 12, (f"{_UNIT}/apply/test_publisher_identity.py",)),
    Place(
        "pubsub/reorderbuffer/durable.py",
        8,
        (f"{_UNIT}/apply/test_twophase.py", f"{_REORDERBUFFER}/test_spill_files.py"),
    ),
    Place(
        "pubsub/reorderbuffer/files.py",
        10,
        (f"{_REORDERBUFFER}/test_durable_names.py", f"{_REORDERBUFFER}/test_spill_files.py"),
    ),
    Place("launcher/worker_slots.py", 8, (f"{_UNIT}/launcher/test_worker_slots.py",)),
    Place("launcher/copies_at_once.py", 8, (f"{_UNIT}/launcher/test_copies_at_once.py",)),
    Place("catalog/relations.py", 12, (f"{_UNIT}/catalog/test_catalog.py",)),
)
