"""The protocol's identifiers: integers that must not be mixed up.

Both are unsigned 32-bit; 0 is PostgreSQL's "none" (InvalidOid, InvalidTransactionId).
"""

from __future__ import annotations

from typing import NewType

Oid = NewType("Oid", int)
Xid = NewType("Xid", int)
