"""What a window is: its own clauses, and those of the window that it names (parse_clause.c: transformWindowDefinitions)."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Final, NamedTuple

from pubsub.errors import PubsubError
from pubsub.node.select.scope import folded

_WINDOWING_ERROR: Final = "42P20"


class Window(NamedTuple):
    """sqlglot's nodes of PARTITION BY and ORDER BY, and the frame; None: the default one."""

    partition: tuple[Any, ...] = ()
    order: tuple[Any, ...] = ()
    frame: Any = None


def defined(nodes: Iterable[Any]) -> dict[str, Window]:
    """Return the windows of a WINDOW clause by name; each may name those before it.  Raises PubsubError (42P20, 42704)."""
    found: dict[str, Window] = {}
    for node in nodes:
        name = folded(node.this)
        if name in found:
            raise PubsubError(f'window "{name}" is already defined', sqlstate=_WINDOWING_ERROR)
        own, base = _own(node), node.args.get("alias")
        found[name] = own if base is None else _extended(own, folded(base), found)
    return found


def window_of(node: Any, named: Mapping[str, Window]) -> Window:
    """Return the window of an OVER.  Raises PubsubError (42P20, 42704)."""
    own, base = _own(node), node.args.get("alias")
    if base is None:
        return own
    # OVER w and OVER (w) are one node: the window as it is.
    return _named(folded(base), named) if own == Window() else _extended(own, folded(base), named)


def _own(node: Any) -> Window:
    order = node.args.get("order")
    return Window(
        tuple(node.args.get("partition_by") or ()),
        tuple(order.expressions) if order is not None else (),
        node.args.get("spec"),
    )


def _named(name: str, named: Mapping[str, Window]) -> Window:
    if name not in named:
        raise PubsubError(f'window "{name}" does not exist', sqlstate="42704")
    return named[name]


def _extended(own: Window, name: str, named: Mapping[str, Window]) -> Window:
    base = _named(name, named)
    if own.partition:
        raise PubsubError(f'cannot override PARTITION BY clause of window "{name}"', sqlstate=_WINDOWING_ERROR)
    if own.order and base.order:
        raise PubsubError(f'cannot override ORDER BY clause of window "{name}"', sqlstate=_WINDOWING_ERROR)
    if base.frame is not None:
        raise PubsubError(f'cannot copy window "{name}" because it has a frame clause', sqlstate=_WINDOWING_ERROR)
    return Window(base.partition, own.order or base.order, own.frame)
