"""PostgreSQL's types as Arrow and Delta types, and its text as their values, by the type contract (contract.py).

`shaped_type` returns a column's type; `from_text` converts a column of PostgreSQL's text output to it, all rows at
once.  Each value is converted exactly or refused (InvalidText): nothing is rounded, clipped or made NULL.  The text
must come from a session with datestyle ISO, TimeZone UTC, bytea_output hex and extra_float_digits above 0 (every
connection to a publisher sets them).

A natural type refuses the values that Delta lacks: infinity, BC and years past 9999 in dates and timestamps, NaN in
numeric.  Values that Arrow's own casts would let through (hexadecimal integers, floats out of range as infinity or
zero, a year 0) are checked here.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.errors import FeatureNotSupported, InvalidValue
from pubsub.protocol.arrays import Bytes, bitmap, contents, slices, validity
from pubsub.protocol.contract import ARRAYS, BY_OID, COMPOSITES, JSONB, VARIANT
from pubsub.protocol.nested import OtherShape, array_parts, record_parts
from pubsub.protocol.shapes import TypeShape
from pubsub.protocol.variant import variants

UNSAFE_NAME: Final = frozenset(" ,;{}()\n\t=")
"""Characters not allowed in a Parquet column's name without column mapping (Delta: DeltaColumnMapping, SchemaUtils)."""

MAX_DECIMAL_PRECISION: Final = 38
"""Digits of Delta's widest decimal."""

NUMERICOID: Final = 1700

_SPARK_NAMES: Final[dict[Any, str]] = {
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

_FIRST_DAY: Final = -719_162  # 0001-01-01, in days from 1970-01-01
_LAST_DAY: Final = 2_932_896  # 9999-12-31
_MICROSECONDS_PER_DAY: Final = 86_400_000_000
_SHOWN_CHARACTERS: Final = 100


def printable(text: bytes) -> str:
    """Return a value's beginning on one line, for a message."""
    shown = text[: 4 * _SHOWN_CHARACTERS].decode("utf-8", "backslashreplace")
    if len(shown) > _SHOWN_CHARACTERS:
        shown = shown[:_SHOWN_CHARACTERS] + "…"
    return shown.replace("\n", "\\n").replace("\r", "\\r")


class InvalidText(InvalidValue):
    """A text that the target type cannot hold exactly: `text`, at `index` in the array, from 0."""

    def __init__(self, index: int, text: bytes, target: str, sqlstate: str) -> None:
        shown = printable(text)
        if sqlstate == "22021":
            message = f'invalid byte sequence for encoding "UTF8" in value "{shown}"'
        else:
            message = f'value "{shown}" can not be held exactly by Delta type {target}'
        super().__init__(message, sqlstate=sqlstate)
        self.index = index
        self.text = text
        self.target = target


class BadValue(Exception):
    """Some value of the array does not fit; `from_text` finds which."""


def delta_type(
    type_oid: int, type_modifier: int, type_kind: str = "b", type_name: str = "", choice: str = "natural"
) -> Any:
    """Return the Arrow type (pyarrow.DataType) of a column; arrays and composites are text here (see `shaped_type`).

    `type_oid` and `type_modifier` are those of the base type if the column's type is a domain; `type_kind` is
    pg_type.typtype; `type_name` (format_type's) is used only in the error; `choice` is "natural" or "text".  Raises
    FeatureNotSupported for a pseudo-type.  Numeric's type modifier follows numeric.c: make_numeric_typmod,
    numeric_typmod_precision, numeric_typmod_scale.
    """
    if type_kind == "p":
        raise FeatureNotSupported(f"a column of pseudo-type {type_name or type_oid} can not be replicated")
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


def shaped_type(shape: TypeShape, choice: Choice, own: str | None = None) -> Any:
    """Return the Arrow type of a column whose base type is `shape`.

    Arrays and composites are text by default; other types are natural.  `own` is the column's own choice and has
    precedence.  Types within a natural array or composite are natural too, unless the choice for that type is text.
    Raises FeatureNotSupported.
    """
    default = "text" if shape.element is not None or shape.kind == "c" else "natural"
    return _chosen(shape, own or choice(type_names(shape)) or default, choice)


def _chosen(shape: TypeShape, chosen: str, choice: Choice) -> Any:
    if chosen == "natural" and shape.element is not None:
        _refuse_delimiter(shape)
        return pa.list_(pa.field("element", _within(shape.element, choice)))
    if chosen == "natural" and shape.kind == "c":
        _refuse_attributes(shape)
        return pa.struct([pa.field(name, _within(attribute, choice)) for name, attribute in shape.attributes])
    if chosen == "variant":
        if shape.oid != JSONB:
            raise FeatureNotSupported(
                f"type {shape.name or shape.oid} can not be replicated as variant", detail="Only jsonb can."
            )
        return VARIANT
    return delta_type(shape.oid, shape.modifier, shape.kind, shape.name, chosen)


def _within(shape: TypeShape, choice: Choice) -> Any:
    chosen = choice(type_names(shape)) or "natural"
    return _chosen(shape, "text" if chosen == "variant" else chosen, choice)  # only a whole column can be a VARIANT


def _refuse_delimiter(shape: TypeShape) -> None:
    if shape.delimiter != ",":
        raise FeatureNotSupported(
            f"type {shape.name} can not be replicated as natural",
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
            reason = f'Delta can not hold a field with the name of attribute "{name}".'
        for other in names[:index]:
            if name.lower() == other.lower():
                reason = (
                    f'Attributes "{other}" and "{name}" differ only in case; Delta does not tell such fields apart.'
                )
    if reason is not None:
        raise FeatureNotSupported(
            f"composite type {shape.name} can not be replicated as natural", detail=reason, hint="Leave it as text."
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


def spark_ddl(data_type: Any) -> str:
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


def is_nested(data_type: Any) -> bool:
    """Whether the type is nested or VARIANT: its values have no order and cannot be keys."""
    return bool(pa.types.is_nested(data_type))


def nulls(count: int, kind: Any) -> Any:
    """Return `count` NULLs.  Arrow's own NULLs of a VARIANT have NULL parts too, which cannot be written to a file."""
    if kind != VARIANT:
        return pa.nulls(count, kind)
    empty = pa.repeat(pa.scalar(b"", pa.binary()), count)
    return pa.StructArray.from_arrays([empty, empty], fields=list(kind), mask=pa.repeat(True, count))


def repeated(value: Any, count: int) -> Any:
    """Return an array with `count` times the same value (a pyarrow Scalar)."""
    return pa.repeat(value, count) if value.is_valid else nulls(count, value.type)


def from_text(values: Any, target: Any) -> Any:
    """Convert PostgreSQL's text to values of `target`: a pyarrow Array to one of the same length, NULLs kept.

    `values` is a binary or string array (32-bit offsets); a NULL has no bytes.  Raises InvalidText for the first value
    that does not fit.
    """
    if pa.types.is_string(values.type):
        values = values.view(pa.binary())
    if is_nested(target):
        return nested_values(values, target, lambda: _nested(values, target), bytes)
    convert, sqlstate = _converter(target)
    try:
        return convert(values, target)
    except (pa.ArrowInvalid, BadValue) as error:
        index = first_refused(values, target, convert)
        raise InvalidText(index, values[index].as_py(), spark_ddl(target), sqlstate) from error


def nested_values(values: Any, target: Any, convert: Callable[[], Any], out: Callable[[bytes], bytes]) -> Any:
    """Return what `convert` returns; turn its OtherShape or InvalidText into InvalidText with the whole value's text.

    `out` writes that text.  The `index` of both errors must be the row's.
    """
    try:
        return convert()
    except OtherShape as error:
        raise InvalidText(error.index, out(values[error.index].as_py()), spark_ddl(target), "22P02") from error
    except InvalidText as error:
        text = out(values[error.index].as_py())
        raise InvalidText(error.index, text, spark_ddl(target), str(error.sqlstate)) from error


def list_array(offsets: Any, elements: Callable[[], Any], target: Any, valid: Any) -> Any:
    """Build arrays of type `target` from what `elements` returns; row i has the elements offsets[i] to offsets[i + 1].

    Raises InvalidText with the row's index instead of the element's.
    """
    try:
        children = elements()
    except InvalidText as error:
        error.index = int(np.searchsorted(offsets, error.index, side="right")) - 1
        raise
    return pa.Array.from_buffers(
        target,
        len(offsets) - 1,
        [bitmap(valid), pa.py_buffer(np.ascontiguousarray(offsets, np.int32))],
        children=[children],
    )


def struct_array(children: list[Any], target: Any, valid: Any, count: int) -> Any:
    """Build `count` composites of type `target` from their attributes `children`."""
    return pa.Array.from_buffers(target, count, [bitmap(valid)], children=children)


def _nested(values: Any, target: Any) -> Any:
    valid = validity(values)
    if target == VARIANT:
        return variants(values)
    if pa.types.is_list(target):
        parts = array_parts(values)
        return list_array(parts.offsets, lambda: from_text(parts.texts, target.value_type), target, valid)
    texts = record_parts(values, target.num_fields)
    children = [from_text(text, field.type) for text, field in zip(texts, target, strict=True)]
    return struct_array(children, target, valid, len(values))


def first_refused(values: Any, target: Any, convert: Callable[[Any, Any], Any]) -> int:
    """Return the index of the first value that does not convert, by bisection; there must be at least one."""
    good, bad = 0, len(values)  # values[:good] converts, values[:bad] does not
    while bad - good > 1:
        middle = (good + bad) // 2
        try:
            convert(values[good:middle], target)
        except (pa.ArrowInvalid, BadValue):
            bad = middle
        else:
            good = middle
    return good


def _converter(target: Any) -> tuple[Callable[[Any, Any], Any], str]:
    """Return the function that converts text to `target`, and the SQLSTATE for a value that does not fit."""
    kinds = pa.types
    if kinds.is_string(target):
        return _text, "22021"
    if kinds.is_integer(target):
        return _integer, "22003"
    if kinds.is_decimal128(target):
        return _parse, "22003"
    if kinds.is_timestamp(target) or kinds.is_date32(target):
        return _date_or_timestamp, "22008"
    if kinds.is_boolean(target):
        return _boolean, "22P02"
    if kinds.is_float32(target) or kinds.is_float64(target):
        return _float, "22003"
    if kinds.is_binary(target):
        return _bytea, "22P02"
    raise FeatureNotSupported(f"PostgreSQL's text can not be read as Arrow type {target}")


def _text(values: Any, target: Any) -> Any:
    return values.cast(target)  # checks UTF-8, copies nothing


def _parse(values: Any, target: Any) -> Any:
    """Parse with Arrow's own parser.  It works on bytes, so the text need not be checked as UTF-8 first."""
    return values.view(pa.string()).cast(target)


def _integer(values: Any, target: Any) -> Any:
    data, _ = contents(values)
    if data.size and data.max() > ord("9"):  # Arrow reads 0x1F
        raise BadValue
    return _parse(values, target)


def _float(values: Any, target: Any) -> Any:
    result = _parse(values, target)
    numbers = result.to_numpy(zero_copy_only=False)
    # PostgreSQL writes these values only so; any other text with such a result was out of range, or not PostgreSQL's.
    for found, names in (
        (np.isinf(numbers), ["Infinity", "-Infinity"]),
        (numbers == 0, ["0", "-0"]),
        (np.isnan(numbers), ["NaN"]),
    ):
        if found.any():
            texts = values.filter(pa.array(found)).drop_null()
            if not pc.all(pc.is_in(texts, pa.array([name.encode() for name in names])), min_count=0).as_py():
                raise BadValue
    return result


def _date_or_timestamp(values: Any, target: Any) -> Any:
    result = _parse(values, target)
    days = pa.types.is_date32(target)
    unit = 1 if days else _MICROSECONDS_PER_DAY
    bounds = pc.min_max(result.view(pa.int32() if days else pa.int64()))
    least, greatest = bounds["min"].as_py(), bounds["max"].as_py()
    if least is not None and not (_FIRST_DAY * unit <= least and greatest < (_LAST_DAY + 1) * unit):
        raise BadValue
    return result


def _boolean(values: Any, target: Any) -> Any:
    data, offsets = contents(values)
    valid = validity(values)
    first = data.take(offsets[:-1], mode="clip") if data.size else np.zeros(len(values), np.uint8)
    true = first == ord("t")
    good = (np.diff(offsets) == 1) & (true | (first == ord("f")))
    if not (good if valid is None else good | ~valid).all():
        raise BadValue
    return pa.Array.from_buffers(target, len(values), [bitmap(valid), bitmap(true)])


def _bytea(values: Any, target: Any) -> Any:
    """Decode hexadecimal, "\\x6162" (bytea.c: byteaout with bytea_output hex).

    All values are decoded as one run of digit pairs; each value's "\\x" counts as a pair, and its byte is left out
    afterwards.
    """
    valid = validity(values)
    data, offsets = contents(values if valid is None else pc.fill_null(values, b"\\x"))
    count = len(values)
    if count == 0:
        return pa.array([], target)
    lengths = np.diff(offsets)
    if (lengths < 2).any() or (lengths & 1).any():
        raise BadValue
    starts = offsets[:-1]
    if (data[starts] != ord("\\")).any() or (data[starts + 1] != ord("x")).any():
        raise BadValue
    nibbles = _NIBBLES[data]
    if np.count_nonzero(nibbles > 15) != 2 * count:  # the prefixes alone
        raise BadValue
    pairs: Bytes = nibbles[0::2] << np.uint8(4) | nibbles[1::2]
    return slices(pairs, starts // 2 + 1, offsets[1:] // 2, target, valid=valid)


def _nibbles() -> Bytes:
    table = np.full(256, 16, np.uint8)
    for digits in (b"0123456789abcdef", b"0123456789ABCDEF"):
        table[np.frombuffer(digits, np.uint8)] = np.arange(16, dtype=np.uint8)
    return table


_NIBBLES: Final = _nibbles()
