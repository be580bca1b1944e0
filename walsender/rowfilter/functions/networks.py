"""Functions of inet and cidr (network.c)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from pubsub.protocol.output.texts import inet_out
from walsender.rowfilter.functions.comparison import COMPARE
from walsender.rowfilter.functions.values import Maker, fixed


def _number(value: bytes) -> int:
    return int.from_bytes(value[2:], "big")


def _width(value: bytes) -> int:
    return 8 * (len(value) - 2)


def _prefix(value: bytes, bits: int) -> int:
    return _number(value) >> _width(value) - bits


def _compare(a: bytes, b: bytes) -> int:
    """Compare the bits that both networks have, then how many each has, then the addresses (network_cmp_internal)."""
    if a[0] != b[0]:
        return a[0] - b[0]
    bits = min(a[1], b[1])
    for x, y in ((_prefix(a, bits), _prefix(b, bits)), (a[1], b[1]), (_number(a), _number(b))):
        if x != y:
            return 1 if x > y else -1
    return 0


def _comparison(holds: Callable[[int, int], bool]) -> Maker:
    return fixed(lambda a, b: holds(_compare(a, b), 0))


def _within(a: bytes, b: bytes) -> bool:
    """Return whether a's network is b's or lies in it."""
    return a[0] == b[0] and a[1] >= b[1] and _prefix(a, b[1]) == _prefix(b, b[1])


def _overlap(a: bytes, b: bytes) -> bool:
    bits = min(a[1], b[1])
    return a[0] == b[0] and _prefix(a, bits) == _prefix(b, bits)


def _host(value: bytes) -> bytes:
    return inet_out(value[:1] + bytes((_width(value),)) + value[2:])


FUNCTIONS: Final[dict[str, Maker]] = {
    **{f"network_{name}": _comparison(holds) for name, holds in COMPARE.items()},
    "network_sub": fixed(lambda a, b: a[1] > b[1] and _within(a, b)),
    "network_subeq": fixed(_within),
    "network_sup": fixed(lambda a, b: b[1] > a[1] and _within(b, a)),
    "network_supeq": fixed(lambda a, b: _within(b, a)),
    "network_overlap": fixed(_overlap),
    "host": fixed(_host),
    "family": fixed(lambda value: 4 if value[0] == 2 else 6),
    "masklen": fixed(lambda value: value[1]),
}
