"""A change as it lies in the reorder buffer: one frame of bytes.

    header    kind (1), subtransaction (4), relation's number in the registry (4), LSN (8), little-endian
    payload   insert, chunk     the tuple as a row (layout.py)
              update, delete    length of the old row (4; 0: none), old row, new row
              truncate          flags (1), numbers of the relations (4 each)
              message           length of the prefix (4), prefix, content

The rows are the WAL's own bytes; they are not decoded before the transaction is sent.
"""

from __future__ import annotations

from struct import Struct
from typing import Final

HEAD: Final = Struct("<BIIQ")
HEAD_BYTES: Final = HEAD.size
OLD_LENGTH: Final = Struct("<I")
HEAD_OLD: Final = Struct("<BIIQI")
"""The header of an update or delete with the length of its old row."""
PAYLOAD: Final = HEAD_BYTES + OLD_LENGTH.size
"""Where the old row of an update or delete starts."""

INSERT: Final = 1
UPDATE: Final = 2
DELETE: Final = 3
TRUNCATE: Final = 4
MESSAGE: Final = 5
TOAST_CHUNK: Final = 6
SPEC_INSERT: Final = 7
SPEC_CONFIRM: Final = 8
SPEC_ABORT: Final = 9
INSERT_MORE: Final = 10
"""An insert followed by more rows of its multi-insert, whose TOAST chunks all came before the first row."""
