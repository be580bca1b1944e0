"""`pubsub check`: prints what will and will not work with a publisher, one finding after the other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

_MARKS: Final = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}


async def run_check(conninfo: str, publications: Sequence[str]) -> int:
    """Print the findings; return 1 if something will not work.  Raises PubsubError if the publisher cannot be asked."""
    from pubsub.publisher.check import check

    findings = await check(conninfo, publications)
    for finding in findings:
        print(f"{_MARKS[finding.severity]}:  {finding.message}")
        for label, text in (("DETAIL", finding.detail), ("HINT", finding.hint)):
            if text:
                print(f"    {label}:  {text}")
    return 1 if any(finding.severity == "error" for finding in findings) else 0
