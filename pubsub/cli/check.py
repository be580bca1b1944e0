"""`pubsub check`: print what will and will not work, with a publisher and on this machine, one finding after the other."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from pubsub.errors import PubsubError
from pubsub.settings import Settings

if TYPE_CHECKING:
    from pubsub.cli.common import Common
    from pubsub.publisher.check import Finding

_MARKS: Final = {"ok": "ok", "warning": "WARNING", "error": "ERROR"}


async def run_check(common: Common, conninfo: str | None, publications: Sequence[str]) -> int:
    """Print the findings; return 1 if something will not work.  Raises PubsubError if the publisher cannot be asked."""
    from pubsub.node.check import check_clock, check_leftovers, check_node, published_bytes
    from pubsub.publisher.check import check

    settings = Settings.load(common.home)
    findings: list[Finding] = []
    size = None
    if conninfo is not None:
        findings += await check(conninfo, publications)
        # Without these, that the publisher cannot be asked is among the findings already.
        with suppress(PubsubError):
            findings += await check_leftovers(settings, conninfo)
            findings.append(await check_clock(conninfo))
            size = await published_bytes(conninfo, list(publications))
    findings += await check_node(settings, size)
    for finding in findings:
        print("\n".join(lines(finding)))
    return 1 if any(finding.severity == "error" for finding in findings) else 0


def lines(finding: Finding) -> Iterator[str]:
    """Yield a finding's lines: what it is, why, and what to change on the publisher."""
    yield f"{_MARKS[finding.severity]}:  {finding.message}"
    for label, text in (("DETAIL", finding.detail), ("HINT", finding.hint)):
        if text:
            yield f"    {label}:  {text}"
    for line in finding.change:
        yield f"    {line}"
