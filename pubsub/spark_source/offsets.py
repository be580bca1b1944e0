"""A stream's offsets: places in a history, as JSON in the query's checkpoint.

    {"lsn": "0/16B3748", "generation": 1, "table": "5f0c…"}

All rows up to the LSN have been read: those of its transaction, and those of the copies up to the generation that has been
made at this LSN (change_rows.Place).  `table` is the id that Delta gave the table when it was made, so that another table at
the same path is not taken for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from pubsub.delta.change_rows import Place
from pubsub.errors import NotInPrerequisiteState, PubsubError
from pubsub.protocol.lsn import Lsn

_ANOTHER: Final = "Start another query, with another checkpoint: it begins with the history's first rows."


def as_json(place: Place, table_id: str) -> dict[str, Any]:
    """Return the offset of a place in the table with this id."""
    return {"lsn": str(place.lsn), "generation": place.generation, "table": table_id}


def place_of(offset: Mapping[str, Any], table_id: str, path: str) -> Place:
    """Return the place of an offset in the table at `path`, whose id is `table_id`.

    Raises NotInPrerequisiteState if it is an offset in another table, and PubsubError (22023) if it is none.
    """
    match offset:
        case {"lsn": str(lsn), "generation": int(generation), "table": str(table)}:
            if table != table_id:
                raise NotInPrerequisiteState(
                    f'the Delta table at "{path}" is not the one that the query has read up to now',
                    detail="It was removed or moved away, and made anew.",
                    hint=_ANOTHER,
                )
            return Place(Lsn.parse(lsn), generation)
        case _:
            raise PubsubError(f"the checkpoint's offset is none of this source: {dict(offset)}", sqlstate="22023")
