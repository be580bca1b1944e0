"""The messages of a command that are not errors (elog.h)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

#: Severities that a client sees unless it asks for more (client_min_messages = notice).
SHOWN: Final = frozenset({"NOTICE", "WARNING"})


@dataclass(frozen=True, slots=True)
class Notice:
    """A message that is not an error (elog.h): NOTICE, WARNING, LOG or DEBUG1."""

    message: str
    severity: str = "NOTICE"
    detail: str | None = None
    hint: str | None = None

    def report(self) -> str:
        """Format the notice as psql prints it."""
        rest = [("DETAIL", self.detail), ("HINT", self.hint)]
        return "\n".join([f"{self.severity}:  {self.message}", *(f"{label}:  {text}" for label, text in rest if text)])

    def __str__(self) -> str:
        return self.report()
