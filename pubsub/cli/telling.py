"""Print a command's error in a few lines, whatever it was."""

from __future__ import annotations

import sys
from typing import Final

from pubsub.errors import PubsubError

CANCELED: Final = "ERROR:  canceling statement due to user request"
"""What a command says that a signal has ended (postgres.c: ProcessInterrupts)."""


def tell(error: Exception, *, verbose: bool) -> None:
    """Print an error as PostgreSQL prints it; if it was not foreseen and `verbose`, print its traceback first."""
    if isinstance(error, PubsubError):
        print(error.report(verbose=verbose), file=sys.stderr)
        return
    from launcher.failures import traced, typed

    known = typed(error)
    if verbose:
        print(traced(error), file=sys.stderr)
    elif known.hint is None:
        known.hint = "pubsub --verbose tells where it happened."
    print(known.report(verbose=verbose), file=sys.stderr)
