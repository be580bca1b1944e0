"""Choose a column's type: PostgreSQL's types as Arrow's and Delta's, by the type contract (type_contract.py).

`shaped_type` returns a column's Arrow type, `spark_ddl` that type's name in Delta.  text.columns and binary.columns
convert values to it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import pyarrow as pa

from pubsub.errors import FeatureNotSupported
from pubsub.protocol.shapes import TypeShape
from pubsub.protocol.type_contract import ARRAYS, BY_OID, COMPOSITES, JSONB, VARIANT

UNSAFE_NAME: Final = frozenset(" ,;{}()\n\t=")
"""Characters not allowed in a Parquet column's name without column mapping (Delta: DeltaColumnMapping, SchemaUtils)."""


def folded_name(name: str) -> str:
    """Return a form of a column's name that is equal for names that Delta does not tell apart.

    Spark compares as Java's String.equalsIgnoreCase does: letter by letter, in upper case and then in lower case, where
    a letter without a single counterpart stays.  Thus "ſ" is "s" and "ı" is "i", but "ß" is not "ss".
    """
    return "".join(_folded(letter) for letter in name)


def _folded(letter: str) -> str:
    upper = letter.upper()
    # Only "İ" has a longer lower case; Java's Character.toLowerCase gives its "i" without the dot.
    return (upper if len(upper) == 1 else letter).lower()[0]


MAX_DECIMAL_PRECISION: Final = 38
"""Digits of Delta's widest decimal."""

NUMERICOID: Final = 1700

_SPARK_NAMES: Final[dict[pa.DataType, str]] = {
    pa.bool_(): "BOOLEAN",
    pa.int16(): "SMALLINT",
    pa.int32(): "INT",
    pa.int64(): "BIGINT",
    pa.float32(): "FLOAT",
    pa.float64(): "DOUBLE",
    pa.date32(): "DATE",
    pa.timestamp("us"): "TIMESTAMP_NTZ",
    pa.timestamp("us", "UTC"): "TIMESTAMP",
    pa.binary(): "BINARY",
    pa.string(): "STRING",
}


def delta_type(
    type_oid: int, type_modifier: int, type_kind: str = "b", type_name: str = "", choice: str = "natural"
) -> pa.DataType:
    """Return the Arrow type (pyarrow.DataType) of a column; arrays and composites are text here (see `shaped_type`).

    `type_oid` and `type_modifier` are those of the base type if the column's type is a domain; `type_kind` is
    pg_type.typtype; `type_name` (format_type's) is used only in the error; `choice` is "natural" or "text".  Raises
    FeatureNotSupported for a pseudo-type.  Numeric's type modifier follows numeric.c: make_numeric_typmod,
    numeric_typmod_precision, numeric_typmod_scale.
    """
    if type_kind == "p":
        raise FeatureNotSupported(f"a column of pseudo-type {type_name or type_oid} cannot be replicated")
    rule = BY_OID.get(type_oid)
    if rule is None or rule.natural is None or choice == "text":
        return pa.string()
    if type_oid != NUMERICOID:
        return rule.natural
    if type_modifier >= 4:
        packed = type_modifier - 4
        precision = packed >> 16 & 0xFFFF
        scale = (packed & 0x7FF ^ 1024) - 1024  # eleven bits, signed
        if 0 <= scale <= precision <= MAX_DECIMAL_PRECISION:
            return pa.decimal128(precision, scale)
    return pa.string()


Choice = Callable[[tuple[str, ...]], str | None]
"""Maps a type's names to its choice in the option `types`; None if the option does not mention it."""


def shaped_type(shape: TypeShape, choice: Choice, own: str | None = None) -> pa.DataType:
    """Return the Arrow type of a column whose base type is `shape`.

    Arrays and composites are text by default; other types are natural.  `own` is the column's own choice and has
    precedence.  Types within a natural array or composite are natural too, unless the choice for that type is text.
    Raises FeatureNotSupported.
    """
    default = "text" if shape.element is not None or shape.kind == "c" else "natural"
    return _chosen(shape, own or choice(type_names(shape)) or default, choice)


def _chosen(shape: TypeShape, chosen: str, choice: Choice) -> pa.DataType:
    if chosen == "natural" and shape.element is not None:
        _refuse_delimiter(shape)
        return pa.list_(pa.field("element", _within(shape.element, choice)))
    if chosen == "natural" and shape.kind == "c":
        _refuse_attributes(shape)
        return pa.struct([pa.field(name, _within(attribute, choice)) for name, attribute in shape.attributes])
    if chosen == "variant":
        if shape.oid != JSONB:
            raise FeatureNotSupported(
                f"type {shape.name or shape.oid} cannot be replicated as variant", detail="Only jsonb can."
            )
        return VARIANT
    return delta_type(shape.oid, shape.modifier, shape.kind, shape.name, chosen)


def _within(shape: TypeShape, choice: Choice) -> pa.DataType:
    chosen = choice(type_names(shape)) or "natural"
    return _chosen(shape, "text" if chosen == "variant" else chosen, choice)  # only a whole column can be a VARIANT


def _refuse_delimiter(shape: TypeShape) -> None:
    if shape.delimiter != ",":
        raise FeatureNotSupported(
            f"type {shape.name} cannot be replicated as natural",
            detail=f'Its elements are divided by "{shape.delimiter}", not by commas.',
            hint="Leave it as text.",
        )


def _refuse_attributes(shape: TypeShape) -> None:
    """Refuse a composite that cannot be a STRUCT."""
    names = [name for name, _ in shape.attributes]
    reason = None
    if not names:
        reason = "It has no attributes."
    for index, name in enumerate(names):
        if UNSAFE_NAME & set(name):
            reason = f'Delta cannot hold a field with the name of attribute "{name}".'
        for other in names[:index]:
            if folded_name(name) == folded_name(other):
                reason = (
                    f'Attributes "{other}" and "{name}" differ only in case; Delta does not tell such fields apart.'
                )
    if reason is not None:
        raise FeatureNotSupported(
            f"composite type {shape.name} cannot be replicated as natural", detail=reason, hint="Leave it as text."
        )


def type_names(shape: TypeShape) -> tuple[str, ...]:
    """Return the names that the option `types` accepts for a type, its own first."""
    rule = BY_OID.get(shape.oid)
    if rule is not None:
        return rule.name, rule.sql_name
    if shape.element is not None:
        rule = BY_OID.get(shape.element.oid)
        of_element = () if rule is None else (f"{rule.name}[]", f"{rule.sql_name}[]")
        return *dict.fromkeys((*of_element, shape.name)), ARRAYS
    if shape.kind == "c":
        return shape.name, COMPOSITES
    return (shape.name,) if shape.name else ()


def spark_ddl(data_type: pa.DataType) -> str:
    """Return the name in Spark's DDL of a type that `shaped_type` returned."""
    if pa.types.is_decimal128(data_type):
        return f"DECIMAL({data_type.precision},{data_type.scale})"
    if data_type == VARIANT:
        return "VARIANT"
    if pa.types.is_list(data_type):
        return f"ARRAY<{spark_ddl(data_type.value_type)}>"
    if pa.types.is_struct(data_type):
        fields = (f"`{field.name.replace('`', '``')}`: {spark_ddl(field.type)}" for field in data_type)
        return f"STRUCT<{', '.join(fields)}>"
    return _SPARK_NAMES[data_type]


def is_nested(data_type: pa.DataType) -> bool:
    """Whether the type is nested or VARIANT: its values have no order and cannot be keys."""
    return bool(pa.types.is_nested(data_type))
