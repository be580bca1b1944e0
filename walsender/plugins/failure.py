"""An exception of an output plugin that is no PubsubError, as an error of its stream.

PostgreSQL's plugins raise errors by ereport only; a user's own in Python can raise anything, and so can a mistake here.
"""

from __future__ import annotations

import sys
import traceback

from pubsub.errors import PubsubError


def failure_of(plugin: object, error: BaseException) -> PubsubError:
    """Return what ends the stream; a PubsubError is that itself.  Any other's traceback goes to standard error.

    `plugin`: the plugin, or its class.
    """
    if isinstance(error, PubsubError) and _is_text(error):
        return error
    traceback.print_exception(error)
    sys.stderr.flush()
    kind = plugin if isinstance(plugin, type) else type(plugin)
    return PubsubError(
        f'output plugin "{kind.__module__}.{kind.__qualname__}" has failed: {said(error)}',
        sqlstate="XX000",
        hint="The server's log has the traceback.",
    )


def said(error: BaseException) -> str:
    """Return an exception's type and words, whatever these raise."""
    try:
        words = str(error)
    except BaseException:
        words = "<exception str() failed>"
    return f"{type(error).__name__}: {words}"


def _is_text(error: PubsubError) -> bool:
    """Return whether an error can be told: a user's plugin may have made it of anything."""
    fields = (error.detail, error.hint, error.context)
    return all(isinstance(one, str) for one in (error.message, error.sqlstate)) and all(
        one is None or isinstance(one, str) for one in fields
    )
