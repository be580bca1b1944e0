"""The types of extended statistics, which a table has if pg_statistic_ext_data was copied into it.

Follows mvdistinct.c (pg_ndistinct_out), dependencies.c (pg_dependencies_out), statistics.h.
"""

from __future__ import annotations

from struct import Struct, error
from typing import Final

from pubsub.errors import DataCorrupted

_HEADER: Final = Struct("<III")
_NDISTINCT: Final = Struct("<di")
_DEPENDENCY: Final = Struct("<dh")


def ndistinct_out(value: bytes) -> bytes:
    """Return the text of a pg_ndistinct.  Raises DataCorrupted."""
    items = [f'"{", ".join(map(str, numbers))}": {int(ndistinct)}' for ndistinct, numbers in _items(value, _NDISTINCT)]
    return f"{{{', '.join(items)}}}".encode()


def ndistinct_out_19(value: bytes) -> bytes:
    """Return the text of a pg_ndistinct as 19 and later write it.  Raises DataCorrupted."""
    items = [
        f'{{"attributes": [{", ".join(map(str, numbers))}], "ndistinct": {int(ndistinct)}}}'
        for ndistinct, numbers in _items(value, _NDISTINCT)
    ]
    return f"[{', '.join(items)}]".encode()


def dependencies_out(value: bytes) -> bytes:
    """Return the text of a pg_dependencies.  Raises DataCorrupted."""
    items = [
        f'"{", ".join(map(str, numbers[:-1]))} => {numbers[-1]}": {degree:f}'
        for degree, numbers in _items(value, _DEPENDENCY)
        if numbers
    ]
    return f"{{{', '.join(items)}}}".encode()


def dependencies_out_19(value: bytes) -> bytes:
    """Return the text of a pg_dependencies as 19 and later write it.  Raises DataCorrupted."""
    items = [
        f'{{"attributes": [{", ".join(map(str, numbers[:-1]))}], "dependency": {numbers[-1]}, "degree": {degree:f}}}'
        for degree, numbers in _items(value, _DEPENDENCY)
        if numbers
    ]
    return f"[{', '.join(items)}]".encode()


def _items(value: bytes, layout: Struct) -> list[tuple[float, tuple[int, ...]]]:
    """Return each item's figure and the numbers of its columns."""
    found = []
    try:
        _, _, count = _HEADER.unpack_from(value)
        position = _HEADER.size
        for _ in range(count):
            figure, length = layout.unpack_from(value, position)
            position += layout.size
            numbers = Struct(f"<{max(length, 0)}h").unpack_from(value, position)
            position += 2 * len(numbers)
            found.append((figure, numbers))
    except error as short:
        raise DataCorrupted("extended statistics are too short") from short
    return found
