"""Output plugins of users' own: entry points of the group `pubsub.output_plugins`, from name to class.

A name from a client is looked up among these and never imported: what is not registered is not there.
"""

from __future__ import annotations

from functools import cache
from importlib.metadata import EntryPoint, entry_points
from typing import Any, Final

from pubsub.errors import PubsubError, UndefinedFile
from walsender.plugins.failure import said
from walsender.plugins.plugin import Plugin

GROUP: Final = "pubsub.output_plugins"
BUILT_IN: Final = ("pgoutput", "test_decoding")


@cache
def _known() -> dict[str, EntryPoint]:
    return {one.name: one for one in entry_points(group=GROUP) if one.name not in BUILT_IN}


def names() -> tuple[str, ...]:
    """Return the names of all plugins, the built-in ones first."""
    return (*BUILT_IN, *sorted(_known()))


def check(name: str) -> None:
    """Raise UndefinedFile if there is no such plugin."""
    if name not in names():
        raise UndefinedFile(f'there is no output plugin "{name}"', hint=f"There are {', '.join(names())}.")


def load(name: str) -> type[Plugin[Any]]:
    """Return the class of a registered plugin.  Raises UndefinedFile, and PubsubError for a class that is none."""
    check(name)
    found = _known()[name]
    try:
        loaded = found.load()
    except BaseException as error:
        # Also a module that calls sys.exit(): the server itself loads it to know what its output is.
        raise PubsubError(
            f'could not load output plugin "{name}": {said(error)}', sqlstate="58P01", detail=f"It is {found.value}."
        ) from error
    if not (isinstance(loaded, type) and issubclass(loaded, Plugin)):
        raise PubsubError(
            f'output plugin "{name}" is no class derived from walsender.plugins.plugin.Plugin',
            sqlstate="42809",
            detail=f"It is {found.value}.",
        )
    return loaded
