"""Timelines: the timeline of each WAL position (timeline.c: readTimeLineHistory, tliOfPointInHistory)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, Self

from pubsub.errors import DataCorrupted, PubsubError
from pubsub.protocol.lsn import Lsn

_FOREVER: Final = 1 << 64


@dataclass(frozen=True, slots=True)
class TimelineHistory:
    """`entries`: (timeline, the LSN where it ends, exclusive), oldest first; the last timeline has no end."""

    entries: tuple[tuple[int, int], ...]

    @classmethod
    def only(cls, timeline: int) -> Self:
        """Return the history of a timeline without known ancestors."""
        return cls(((timeline, _FOREVER),))

    @property
    def newest(self) -> int:
        return self.entries[-1][0]

    def timeline_of(self, lsn: int) -> int:
        """Return the timeline that the WAL at `lsn` belongs to."""
        return next(timeline for timeline, end in self.entries if lsn < end)

    def end_of(self, timeline: int) -> int | None:
        """Return where a timeline ends; None if it has no end or is not in this history."""
        return next((end for one, end in self.entries if one == timeline and end != _FOREVER), None)

    def start_of(self, timeline: int) -> int | None:
        """Where a timeline began, 0 for the first that is known; None if it is none of these."""
        ends = [0, *(end for _, end in self.entries)]
        return next((start for (one, _), start in zip(self.entries, ends, strict=False) if one == timeline), None)

    def timelines_of_segment(self, lsn: int, segment_size: int) -> list[int]:
        """Return the timelines with WAL in the segment that contains `lsn`, newest first."""
        start = lsn - lsn % segment_size
        found: list[int] = []
        begin = 0
        for timeline, end in self.entries:
            if begin < start + segment_size and end > start:
                found.append(timeline)
            begin = end
        return found[::-1]


def parse_history(timeline: int, text: str) -> TimelineHistory:
    """Parse a history file: lines of timeline, switch point and reason, separated by tabs.  Raises DataCorrupted."""
    entries: list[tuple[int, int]] = []
    for line in text.splitlines():
        stripped = line.strip()
        if not stripped or stripped.startswith("#"):
            continue
        fields = stripped.split(None, 2)
        try:
            entries.append((int(fields[0]), int(Lsn.parse(fields[1]))))
        except (IndexError, ValueError, PubsubError) as error:
            raise DataCorrupted(f"syntax error in the history of timeline {timeline}: {line}") from error
    entries.append((timeline, _FOREVER))
    return TimelineHistory(tuple(entries))
