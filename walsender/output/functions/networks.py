"""Functions of inet and cidr (network.c)."""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Final

from pubsub.protocol.output.texts import inet_out
from walsender.output.functions.values import FixedFunction, Maker, Settings


def _number(value: bytes) -> int:
    return int.from_bytes(value[2:], "big")


def _width(value: bytes) -> int:
    return 8 * (len(value) - 2)


def _prefix(value: bytes, bits: int) -> int:
    return _number(value) >> _width(value) - bits


def _compare(a: bytes, b: bytes) -> int:
    """network_cmp_internal: first the bits that both networks have, then how many those are, then the address."""
    if a[0] != b[0]:
        return a[0] - b[0]
    bits = min(a[1], b[1])
    for x, y in ((_prefix(a, bits), _prefix(b, bits)), (a[1], b[1]), (_number(a), _number(b))):
        if x != y:
            return 1 if x > y else -1
    return 0


def _comparison(holds: Callable[[int, int], bool]) -> Maker:
    return _fixed(lambda a, b: holds(_compare(a, b), 0))


def _within(a: bytes, b: bytes) -> bool:
    """Whether a's network is b's or lies in it."""
    return a[0] == b[0] and a[1] >= b[1] and _prefix(a, b[1]) == _prefix(b, b[1])


def _overlap(a: bytes, b: bytes) -> bool:
    bits = min(a[1], b[1])
    return a[0] == b[0] and _prefix(a, bits) == _prefix(b, bits)


def _host(value: bytes) -> bytes:
    return inet_out(value[:1] + bytes((_width(value),)) + value[2:])


def _fixed(function: FixedFunction) -> Maker:
    def make(types: tuple[int, ...], _: Settings) -> FixedFunction:
        return function

    return make


FUNCTIONS: Final[dict[str, Maker]] = {
    "network_eq": _comparison(operator.eq),
    "network_ne": _comparison(operator.ne),
    "network_lt": _comparison(operator.lt),
    "network_le": _comparison(operator.le),
    "network_gt": _comparison(operator.gt),
    "network_ge": _comparison(operator.ge),
    "network_sub": _fixed(lambda a, b: a[1] > b[1] and _within(a, b)),
    "network_subeq": _fixed(_within),
    "network_sup": _fixed(lambda a, b: b[1] > a[1] and _within(b, a)),
    "network_supeq": _fixed(lambda a, b: _within(b, a)),
    "network_overlap": _fixed(_overlap),
    "host": _fixed(_host),
    "family": _fixed(lambda value: 4 if value[0] == 2 else 6),
    "masklen": _fixed(lambda value: value[1]),
}
