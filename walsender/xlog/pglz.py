"""PostgreSQL's own compression, the reading half (pg_lzcompress.c: pglz_decompress).

A control byte stands before every eight items.  Its bits say what they are: 1, a tag of 2 or 3 bytes that points at
earlier output; 0, a literal byte.
"""

from __future__ import annotations

from pubsub.errors import DataCorrupted


def decompress(source: bytes, raw_size: int, *, whole: bool = True) -> bytes:
    """Return the `raw_size` bytes that `source` was made from.

    Raises DataCorrupted if it gives another number of bytes.  With `whole` false, bytes may be left over in `source`.
    """
    out = bytearray()
    position = 0
    end = len(source)
    size = 0
    try:
        while position < end and size < raw_size:
            control = source[position]
            position += 1
            if control == 0 and position + 8 <= end and size + 8 <= raw_size:
                out += source[position : position + 8]
                position += 8
                size += 8
                continue
            for _ in range(8):
                if position >= end or size >= raw_size:
                    break
                if control & 1:
                    first = source[position]
                    length = (first & 0x0F) + 3
                    offset = ((first & 0xF0) << 4) | source[position + 1]
                    position += 2
                    if length == 18:
                        length += source[position]
                        position += 1
                    if offset == 0 or offset > size:
                        raise DataCorrupted("compressed data is corrupted", detail="A pglz tag points before the data.")
                    length = min(length, raw_size - size)
                    start = size - offset
                    if offset >= length:
                        out += out[start : start + length]
                    else:
                        piece = bytes(out[start:])
                        out += (piece * (length // offset + 1))[:length]
                    size += length
                else:
                    out.append(source[position])
                    position += 1
                    size += 1
                control >>= 1
    except IndexError:
        raise DataCorrupted("compressed data is corrupted", detail="pglz data ends within a tag.") from None
    if size != raw_size or (whole and position != end):
        raise DataCorrupted(
            "compressed data is corrupted", detail=f"pglz data gives {size} bytes where {raw_size} were expected."
        )
    return bytes(out)
