"""Mutations of a sample, from a seed: bytes flipped, cut, repeated, moved, and numbers made huge."""

from __future__ import annotations

import random
from typing import Final

_HUGE: Final = (b"\xff" * 4, b"\x7f\xff\xff\xff", b"\xff\xff\xff\x7f", b"\x00" * 4, b"\x80" + bytes(3), b"\xff" * 8)
_TEXTS: Final = (
    b"null",
    b"{}",
    b"[]",
    b"-1",
    b"1e999",
    b"99999999999999999999",
    b'""',
    b'"',
    b"'",
    b"\\",
    b"\0",
    b"\n",
    b"true",
    b"$",
    b"../../x",
)


def mutated(chance: random.Random, samples: tuple[bytes, ...]) -> bytes:
    """Return a sample with one to four mutations."""
    data = bytearray(chance.choice(samples))
    for _ in range(chance.randint(1, 4)):
        at = chance.randrange(len(data) + 1)
        end = min(len(data), at + chance.choice((1, 2, 4, 8, 60)))
        match chance.randrange(8):
            case 0 if at < len(data):
                data[at] ^= 1 << chance.randrange(8)
            case 1:
                data[at:end] = chance.randbytes(end - at)
            case 2:
                del data[at:]
            case 3:
                del data[at:end]
            case 4:
                data[at:at] = data[at:end] * chance.choice((1, 2, 1000))
            case 5:
                huge = chance.choice(_HUGE)
                data[at : at + len(huge)] = huge
            case 6:
                data[at:end] = chance.choice(_TEXTS)
            case _:
                other = chance.choice(samples)
                begin = chance.randrange(len(other) + 1)
                data[at:at] = other[begin : begin + 100]
    return bytes(data)
