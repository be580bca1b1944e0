"""A window of the day, such as "22:00-04:00", in which work may be done; it may cross midnight."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Final, Self

from pubsub.errors import PubsubError

_WINDOW: Final = re.compile(r"\s*(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)\s*")


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """From `begin`, inclusive, to `end`, exclusive, in the machine's own time; the whole day if they are equal."""

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "HH:MM-HH:MM"; 24:00 is midnight, and an empty text the whole day.  Raises PubsubError (22023)."""
        if not text.strip():
            return cls(time(), time())
        match = _WINDOW.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            hours, minutes, until_hours, until_minutes = map(int, match.groups())
            if (until_hours, until_minutes) == (24, 0):
                until_hours = 0
            return cls(time(hours, minutes), time(until_hours, until_minutes))
        except ValueError:
            raise PubsubError(
                f'"{text}" is no window of the day', sqlstate="22023", hint='Write it as in "22:00-04:00".'
            ) from None

    def __str__(self) -> str:
        return "" if self.begin == self.end else f"{self.begin:%H:%M}-{self.end:%H:%M}"

    def wait(self, now: datetime) -> float:
        """Return the seconds until the window opens; 0 while it is open."""
        at = now.time()
        if self.begin == self.end:
            return 0.0
        if self.begin < self.end:
            open_ = self.begin <= at < self.end
        else:
            open_ = at >= self.begin or at < self.end
        if open_:
            return 0.0
        opens = datetime.combine(now.date(), self.begin, now.tzinfo)
        if opens <= now:
            opens += timedelta(days=1)
        return (opens - now).total_seconds()
