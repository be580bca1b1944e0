"""The rules of the option mask: what a Delta table has instead of the values of a publisher's column.

    null            NULL; the column keeps its type
    redact          *** for every value; NULL stays NULL
    truncate 4      the first four characters of the value's text
    hash            HMAC-SHA-256 of the value's text, in 64 hexadecimal digits (pubsub.masking); NULL stays NULL

Columns with other rules than null are text.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

from pubsub.sql.lexer import Kind, Token

Name = Literal["null", "redact", "truncate", "hash"]
_PLAIN: Final[dict[str, Name]] = {"null": "null", "redact": "redact", "hash": "hash"}
_LONGEST: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class MaskRule:
    """One rule; `length`: that of truncate, in characters."""

    name: Name
    length: int = 0

    def __str__(self) -> str:
        return f"truncate {self.length}" if self.name == "truncate" else self.name

    @property
    def keeps_type(self) -> bool:
        """Whether the column has the type that it would have without a mask; else it is text."""
        return self.name == "null"

    @property
    def tells_values_apart(self) -> bool:
        """Whether different values stay different, as those of a key must."""
        return self.name == "hash"

    @classmethod
    def parse(cls, text: str) -> MaskRule:
        """Return the rule that `str` has written."""
        name, _, length = text.partition(" ")
        return cls("truncate", int(length)) if name == "truncate" else cls(_PLAIN[name])


def rule_of(tokens: Sequence[Token]) -> MaskRule | None:
    """Return the rule that these tokens name; None if they name none."""
    named = tokens[0].value if tokens and tokens[0].kind is Kind.WORD else ""
    if len(tokens) == 1 and named in _PLAIN:
        return MaskRule(_PLAIN[named])
    if len(tokens) == 2 and named == "truncate" and tokens[1].kind is Kind.NUMBER:
        digits = tokens[1].value
        if digits.isdecimal() and digits.isascii() and len(digits) <= 10 and int(digits) <= _LONGEST:
            return MaskRule("truncate", int(digits))
    return None
