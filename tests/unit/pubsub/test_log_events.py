"""docs/log-events.md has every event that the program logs, and no other."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).parents[3]
ROOMS = ("pubsub", "catalog", "apply", "tablesync", "launcher", "walsender")


def logged() -> dict[str, str]:
    """Return the level of each event with a text of its own."""
    found: dict[str, str] = {}
    for room in ROOMS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.Call(
                        func=ast.Attribute(value=ast.Name(id="logger"), attr="info" | "warning" | "error" as level),
                        args=[ast.Constant(value=str(event)), *_],
                    ):
                        found[event] = level
    return found


def test_every_event_is_listed_by_its_level() -> None:
    text = (ROOT / "docs" / "log-events.md").read_text()
    sections = dict(zip(("error", "warning", "info"), text.split("\n## ")[1:], strict=True))
    listed = {
        event: level
        for level, section in sections.items()
        for row in section.splitlines()
        if row.startswith("| `")
        for event in re.findall(r"`([^`]+)`", row.split(" | ")[0])
    }
    assert listed == logged()


def test_the_logger_has_one_name() -> None:
    """Calls under another name would not be found above, and `log` is a table's log."""
    names = {
        (str(path.relative_to(ROOT)), ast.unparse(node.targets[0]))
        for room in ROOMS
        for path in (ROOT / room).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Assign) and ast.unparse(node.value) == "structlog.get_logger()"
    }
    assert names
    assert {name for _, name in names} == {"logger"}, names
