"""Delta tables that stand beside the mirror of a published table, which mode = 'mirror + history' asks for.

Each is a relation of the subscription by itself, with a copy, states and commits of its own.  Its relid is the oid of the published
table with a number of its mode above the 32 bits of an oid; its name is that of the table with the mode at its end:

    16384                public.orders               the mirror
    16384 + (1 << 32)    public.orders_history       each change of public.orders
    16384 + (2 << 32)    public.orders_scd2          each version of its rows
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping
from typing import Final

from pubsub.protocol.ids import Oid
from pubsub.sql.layout_rules import Mode, name_beside

_BITS: Final = 32
_NUMBERS: Final[Mapping[Mode, int]] = {"history": 1, "scd2": 2}
_MODES: Final[Mapping[int, Mode]] = {number: mode for mode, number in _NUMBERS.items()}


def relid_of(oid: int, beside: Mode | None) -> int:
    """Return the relid of a published table, or of what stands beside it in that mode."""
    return oid if beside is None else oid | _NUMBERS[beside] << _BITS


def oid_of(relid: int) -> Oid:
    """Return the published table's oid."""
    return Oid(relid & (1 << _BITS) - 1)


def mode_of(relid: int) -> Mode | None:
    """Return in which mode the relation stands beside a mirror; None: it does not."""
    return _MODES.get(relid >> _BITS)


def published_name_of(relid: int, name: str) -> str:
    """Return the published table's name, by the relation's."""
    return name.removesuffix(name_beside("", mode_of(relid)))


def shown_oid(subid: int, relid: int) -> int:
    """Return what views show: the published table's oid, or one of its own for what stands beside a mirror."""
    return relid if mode_of(relid) is None else derived_oid(subid, str(relid))


def derived_oid(oid: int, what: str) -> int:
    """Return another oid, always the same, of those that PostgreSQL comes to last."""
    return zlib.crc32(f"{oid} {what}".encode()) >> 2 | 1 << 30
