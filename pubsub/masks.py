"""The masked columns of a Delta table, and the key by which some are hashed (the option mask).

The key comes from the environment of the process that writes Delta tables, and is in no file of this program.  A table remembers
the fingerprint of its key, so that no other one is ever used beside it.
"""

from __future__ import annotations

import hashlib
import hmac
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from pubsub.errors import NotInPrerequisiteState
from pubsub.sql.mask_rules import MaskRule

MaskKey = bytes
VARIABLE: Final = "PUBSUB_MASK_KEY"
SHORTEST: Final = 16
"""Bytes."""
_GIVE_IT: Final = (
    f"Start the daemon with {VARIABLE}, at least {SHORTEST} bytes that nobody can guess, in its environment."
)


class WrongMaskKey(NotInPrerequisiteState):
    """The process was started without the key, or with another one: no table's own failure."""

    default_sqlstate = "F0000"


def configured_key() -> bytes | None:
    """Return the key in the environment; None if there is none.  Raises WrongMaskKey for one that is too short."""
    key = os.environb.get(VARIABLE.encode())
    if not key:
        return None
    if len(key) < SHORTEST:
        raise WrongMaskKey(f"{VARIABLE} has fewer than {SHORTEST} bytes", hint=_GIVE_IT)
    return key


def fingerprint_of(key: bytes) -> str:
    """Return what tells the key from others, and does not give it away."""
    return hmac.new(key, b"pubsub: the fingerprint of a mask key", hashlib.sha256).hexdigest()[:16]


def require_key(relation: str, fingerprint: str | None, given: bytes = b"") -> bytes:
    """Return the key: `given`, or that in the environment.

    `fingerprint`: that of the key that the table has; None: it has none yet.  Raises WrongMaskKey if there is no key, or
    another one.
    """
    key = given or configured_key()
    if key is None:
        raise WrongMaskKey(
            f'columns of table "{relation}" are masked by hash, and {VARIABLE} is not set', hint=_GIVE_IT
        )
    if fingerprint is not None and fingerprint_of(key) != fingerprint:
        raise WrongMaskKey(
            f'{VARIABLE} is not the key by which columns of table "{relation}" are masked',
            detail=f"The table's key has the fingerprint {fingerprint or '(none)'}, this one {fingerprint_of(key)}.",
            hint=f"Start the daemon with the table's key.  ALTER SUBSCRIPTION … RESYNC TABLE {relation} takes the new one.",
        )
    return key


@dataclass(frozen=True, slots=True)
class Masks:
    """The masked columns, by the Delta table's names; `fingerprint`: that of the key of those that are hashed."""

    rules: Mapping[str, MaskRule] = field(default_factory=dict)
    fingerprint: str = ""

    def __bool__(self) -> bool:
        return bool(self.rules)

    @property
    def absent(self) -> frozenset[str]:
        """The columns that are NULL, whose values are not read at all."""
        return frozenset(name for name, rule in self.rules.items() if rule.keeps_type)

    @property
    def are_keyed(self) -> bool:
        """Whether a column is hashed, which takes the key."""
        return any(rule.name == "hash" for rule in self.rules.values())

    def key(self, relation: str, given: bytes = b"") -> bytes:
        """Return the key (`given`, or the environment's); b"" if none is needed.  Raises WrongMaskKey."""
        return require_key(relation, self.fingerprint, given) if self.are_keyed else b""


NO_MASKS: Final = Masks()
