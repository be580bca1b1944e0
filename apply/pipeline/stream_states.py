"""Tell which messages a stream may send where: its states, and the steps between them, as a table (worker.c: apply_dispatch).

    outside ──B──► transaction ──C──► outside
            ──b──► prepared ─────P──► outside
            ──S──► block ────────E──► outside     c, A and p, which end a streamed transaction, come outside

A message that has no step from the present state ends the stream as a ProtocolViolation.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final

from pubsub.errors import ProtocolViolation


class Inside(enum.Enum):
    """What the messages that come now belong to."""

    OUTSIDE = "no transaction"
    TRANSACTION = "a transaction that is sent whole"
    PREPARED = "a transaction that is sent whole, and will be prepared"
    BLOCK = "a block of a streamed transaction"


_OUTSIDE, _TRANSACTION, _PREPARED, _BLOCK = Inside
_ANYWHERE: Final = {state: state for state in Inside}
_WITHIN: Final = {state: state for state in Inside if state is not _OUTSIDE}
_ONLY_OUTSIDE: Final = {_OUTSIDE: _OUTSIDE}

#: By a message's type: the steps that it makes, and what is said where it makes none.
_STEPS: Final[Mapping[int, tuple[Mapping[Inside, Inside], str]]] = {
    ord(kind): (steps, refusal)
    for kind, steps, refusal in (
        ("B", {_OUTSIDE: _TRANSACTION}, "BEGIN inside a transaction"),
        ("C", {_TRANSACTION: _OUTSIDE}, "COMMIT outside a transaction"),
        ("b", {_OUTSIDE: _PREPARED}, "BEGIN PREPARE inside a transaction"),
        # Of a transaction that changed nothing some releases send P alone.
        ("P", {_PREPARED: _OUTSIDE, _OUTSIDE: _OUTSIDE}, "PREPARE outside a prepared transaction"),
        ("K", _ONLY_OUTSIDE, "the outcome of a prepared transaction inside a transaction"),
        ("r", _ONLY_OUTSIDE, "the outcome of a prepared transaction inside a transaction"),
        ("S", {_OUTSIDE: _BLOCK}, "STREAM START message inside a transaction"),
        ("E", {_BLOCK: _OUTSIDE}, "STREAM STOP message without STREAM START"),
        ("A", _ONLY_OUTSIDE, "STREAM ABORT message without STREAM STOP"),
        ("c", _ONLY_OUTSIDE, "STREAM COMMIT message without STREAM STOP"),
        ("p", _ONLY_OUTSIDE, "STREAM PREPARE message without STREAM STOP"),
        ("T", _WITHIN, "TRUNCATE outside a transaction"),
        ("R", _ANYWHERE, ""),
        ("Y", _ANYWHERE, ""),
        ("M", _ANYWHERE, ""),
        ("O", _ANYWHERE, ""),
    )
}


def after(kind: int, inside: Inside) -> Inside:
    """Return the state after a message of type `kind`, which is no row's.  Raises ProtocolViolation if it may not come now."""
    steps, refusal = _STEPS[kind]
    state = steps.get(inside)
    if state is None:
        raise ProtocolViolation(refusal)
    return state
