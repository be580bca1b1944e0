"""A table whose deleted rows stay (the option deletes = soft): a column of its own has when each was deleted.

    _pubsub_deleted_at   when the publisher committed the deletion; NULL in a row that the publisher's table has

There is at most one row of each key.  A deleted one is not a row to changes: an INSERT of its key takes its place, and an UPDATE
or DELETE does not find it.
"""

from __future__ import annotations

from typing import Final

import pyarrow as pa

DELETED_AT: Final = "_pubsub_deleted_at"
FIELD: Final = pa.field(DELETED_AT, pa.timestamp("us", tz="UTC"))
