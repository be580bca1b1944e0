"""How a command tells an error: in a few lines, whatever it was."""

from __future__ import annotations

import sys

from pubsub.errors import PubsubError


def tell(error: Exception, *, verbose: bool) -> None:
    """Print an error as PostgreSQL prints it, be it one that nobody foresaw: then its traceback is before it when verbose."""
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
