"""Why a worker starts again from its origin: none of these is a failure."""

from __future__ import annotations

from pubsub.errors import PubsubError


class StartAgain(PubsubError):
    """The worker must decide again from its origin: not a failure."""

    default_sqlstate = "57P01"


class Overtaken(StartAgain):
    """A table is not what a commit to it was worked out for: a worker of the same subscription, in another process, has written it.

    That process was taken for dead, or has a copy of this node's directory: it may do so again, so the next attempt is not made at
    once.  Nothing of the commit is in the table.
    """

    def __init__(self, relation: str, detail: str) -> None:
        super().__init__(f'the Delta table of "{relation}" was changed by another process', detail=detail)
