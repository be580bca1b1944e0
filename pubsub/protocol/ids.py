"""The protocol's identifiers: integer types that must not be confused.

Both are unsigned 32-bit; 0 means "none" in PostgreSQL (InvalidOid, InvalidTransactionId).
"""

from __future__ import annotations

from typing import NewType

Oid = NewType("Oid", int)
Xid = NewType("Xid", int)
