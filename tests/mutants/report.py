"""docs/mutants.md: the faults, and what saw each when it was run last."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final

from tests.mutants.harmless import HARMLESS
from tests.mutants.plant import Fault

PATH: Final = Path("docs/mutants.md")
_ROW: Final = re.compile(r"^\| `([^`]+)` \| (.*) \| ([^|]*) \|$")
NOT_RUN: Final = "not run"
_HEAD: Final = """# Planted faults

`python -m tests.mutants` plants one fault at a time into a copy of the checkout, and runs the tests of its place
(tests/mutants/places.py). It writes this table: what each fault does, and the first test that failed. A fault that no narrow
test sees may be seen by a scenario, which is not run here; `harmless` says why it changes nothing that matters.

"""


def read() -> dict[str, str]:
    """Return what saw each fault, by the fault's name and what it does."""
    if not PATH.exists():
        return {}
    rows = (_ROW.match(line) for line in PATH.read_text().splitlines())
    return {f"{row[1]} {row[2]}": row[3].strip() for row in rows if row is not None}


def key(fault: Fault) -> str:
    return f"{fault.name} {fault.said}"


def write(listed: Sequence[Fault], results: Mapping[str, str]) -> None:
    """Write the table anew."""
    rows = [(fault, _result(fault, results)) for fault in listed]
    counts = Counter(_kind(result) for _, result in rows)
    figures = f"{len(rows)} faults: " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()) + ".\n\n"
    table = "| fault | what it does | seen by |\n|---|---|---|\n"
    table += "".join(f"| `{fault.name}` | {fault.said} | {result} |\n" for fault, result in rows)
    PATH.write_text(_HEAD + figures + table)


def _result(fault: Fault, results: Mapping[str, str]) -> str:
    if fault.name in HARMLESS:
        return f"harmless: {HARMLESS[fault.name]}"
    return results.get(key(fault), NOT_RUN)


def _kind(result: str) -> str:
    if result in (NOT_RUN, "not seen"):
        return result
    return "harmless" if result.startswith("harmless") else "seen"
