"""An exception of an output plugin that is no PubsubError, as an error of its stream.

PostgreSQL's plugins raise errors by ereport only; a user's own in Python can raise anything, and so can a mistake here.
"""

from __future__ import annotations

import sys
import traceback

from pubsub.errors import PubsubError


def failure_of(plugin: object, error: Exception) -> PubsubError:
    """Return what ends the stream; a PubsubError is that itself.  Any other's traceback goes to standard error.

    `plugin`: the plugin, or its class.
    """
    if isinstance(error, PubsubError):
        return error
    traceback.print_exception(error)
    sys.stderr.flush()
    kind = plugin if isinstance(plugin, type) else type(plugin)
    return PubsubError(
        f'output plugin "{kind.__module__}.{kind.__qualname__}" has failed: {type(error).__name__}: {error}',
        sqlstate="XX000",
        hint="The server's log has the traceback.",
    )
