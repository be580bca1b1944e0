"""Each column's canonical text, as an SQL expression for the publisher and as a function on Arrow arrays.

Both sides hash these texts, so they are equal if and only if the values are.  A cast to text is not always the output function
(true of a boolean, the blanks of a character(n), the netmask of an inet): concat() calls that for any type.  A text of
more than LONGEST bytes is hashed as the digits of its SHA-256, on both sides.

The texts of a row are hashed one after the other, each with the hash so far as its seed.  A NULL is hashed as a text that
is drawn for each comparison.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from pubsub.digest.hashing import Hashes, hash_texts
from pubsub.digest.texts import NOT_A_NUMBER, canonical_texts, digits
from pubsub.protocol.arrow_arrays import contents
from pubsub.publisher.definitions import ColumnDefinition
from pubsub.sql.identifiers import quote_identifier, quote_literal

LONGEST: Final = 256
# An expression of more columns would exceed the server's max_stack_depth.
_GROUP: Final = 50

#: Types whose cast to text is their output function, and quicker than concat(), by oid: int8, int2, int4, text, json,
#: oid, varchar, numeric, uuid, jsonb.
_CAST: Final = frozenset((20, 21, 23, 25, 114, 26, 1043, 1700, 2950, 3802))
#: Those of them whose texts are always short: all but text, json, varchar, numeric and jsonb.
_SHORT: Final = frozenset((20, 21, 23, 26, 2950))
#: Types that are stored as their texts, by oid: text, json, varchar.
_PLAIN: Final = frozenset((25, 114, 1043))
_VARCHAR: Final = 1043
#: Encodings in which the server's texts have the bytes that they have here.
_SAME_BYTES: Final = frozenset(("UTF8", "SQL_ASCII"))


@dataclass(frozen=True, slots=True)
class Form:
    """One column, by the Delta table's name.  In SQL, `{}` stands for the column, or for what `computed` made of it.

    `text`: the canonical text (NULL for NULL).  `computed`: an expression that is to be evaluated once, since `text` uses it
    more than once; None: the column itself.  `shown`: the text of the type's output function.  `long`: texts may have more
    than LONGEST bytes.  `encoded`: both sides hash the hexadecimal digits of the text's UTF-8, since the publisher's
    database has another encoding.  `published`: the publisher's name, if that is another one.
    """

    column: str
    kind: pa.DataType
    text: str
    shown: str
    computed: str | None = None
    long: bool = False
    encoded: bool = False
    published: str = ""

    @property
    def there(self) -> str:
        """The publisher's name."""
        return self.published or self.column

    @property
    def quoted(self) -> str:
        """The publisher's name in SQL."""
        return quote_identifier(self.there)

    def shown_sql(self) -> str:
        """Return the text of the type's output function, in SQL."""
        return self.shown.replace("{}", self.quoted)

    def text_sql(self) -> str:
        """Return the canonical text in SQL, for few rows: what is computed may be computed more than once."""
        made = self.quoted if self.computed is None else f"({self.computed.replace('{}', self.quoted)})"
        return self.text.replace("{}", made)

    def texts(self, column: pa.Array) -> pa.Array:
        """Return the canonical texts of a column of the Delta table: a string array, NULL for NULL."""
        texts = canonical_texts(column)
        if isinstance(texts, pa.ChunkedArray):
            texts = texts.combine_chunks()
        if self.encoded:
            texts = digits(texts)
        return _shortened(texts) if self.long else texts


def form_of(column: ColumnDefinition, kind: pa.DataType, encoding: str) -> Form:
    """Return the form of a publisher's column whose Delta column has the Arrow type `kind`.

    `encoding`: that of the publisher's database.
    """
    oid, kinds = int(column.base_type_oid), pa.types
    # A composite IS NOT NULL only if all of its attributes are.
    called = "CASE WHEN {} IS DISTINCT FROM NULL THEN pg_catalog.concat({}) END"
    shown = "{}::text" if oid in _CAST else called
    fixed = None
    if kinds.is_boolean(kind):
        fixed = "{}::text"
    elif kinds.is_floating(kind):
        send = "float8send" if kinds.is_float64(kind) else "float4send"
        fixed = f"CASE WHEN {{}} = 'NaN' THEN '{NOT_A_NUMBER}' ELSE encode({send}({{}}), 'hex') END"
    elif kinds.is_date32(kind):
        fixed = "encode(date_send({}), 'hex')"
    elif kinds.is_timestamp(kind):
        fixed = f"encode({'timestamp_send' if kind.tz is None else 'timestamptz_send'}({{}}), 'hex')"
    elif kinds.is_integer(kind) or kinds.is_decimal128(kind) or oid in _SHORT:
        fixed = shown
    if fixed is not None:
        return Form(column.name, kind, fixed, shown)
    if kinds.is_binary(kind):
        return Form(column.name, kind, _shortened_sql("encode({}, 'hex')", "octet_length({}) * 2"), shown, long=True)
    encoded = encoding not in _SAME_BYTES
    computed = f"encode(convert_to({shown}, 'UTF8'), 'hex')" if encoded else shown
    if _is_short(column):
        return Form(column.name, kind, computed, shown, encoded=encoded)
    if oid in _PLAIN and not encoded:
        return Form(column.name, kind, _shortened_sql("{}::text"), shown, long=True)
    return Form(column.name, kind, _shortened_sql("{}"), shown, computed, long=True, encoded=encoded)


def _is_short(column: ColumnDefinition) -> bool:
    """Return whether a varchar(n)'s texts, or their digits, cannot have more than LONGEST bytes."""
    return int(column.base_type_oid) == _VARCHAR and 4 <= column.base_typmod <= 4 + LONGEST // 8


def _shortened_sql(text: str, length: str | None = None) -> str:
    # encode's 'escape' would not do: SHA-256 takes bytea, and a cast from text would read backslashes.
    return (
        f"CASE WHEN {length or f'octet_length({text})'} <= {LONGEST} THEN {text}"
        f" ELSE encode(sha256(convert_to({text}, getdatabaseencoding())), 'hex') END"
    )


def _shortened(texts: pa.Array) -> pa.Array:
    long = pc.greater(pc.binary_length(texts), LONGEST)
    if not pc.any(long, min_count=0).as_py():
        return texts
    data, offsets = contents(texts)
    rows = np.flatnonzero(pc.fill_null(long, False).to_numpy(zero_copy_only=False))
    found = [hashlib.sha256(data[offsets[row] : offsets[row + 1]].tobytes()).hexdigest() for row in rows]
    places = np.full(len(texts), -1, np.int64)
    places[rows] = np.arange(len(rows))
    return pc.if_else(long, pa.array(found).take(pa.array(places, mask=places < 0)), texts)


@dataclass(frozen=True, slots=True)
class RowForm:
    """A row's hashes: `key` of the columns that identify it (all columns, without a key), and of the whole row.

    The key's hash is the seed of the rest.  `seed` and `null` are drawn for each comparison, so that what collides in one
    does not in the next.
    """

    key: tuple[Form, ...]
    rest: tuple[Form, ...]
    has_key: bool
    seed: int = field(default_factory=lambda: secrets.randbelow((1 << 63) - 1) + 1)
    null: str = field(default_factory=lambda: f"NULL {secrets.token_hex(8)}")

    @classmethod
    def of(cls, forms: Sequence[Form], key: Sequence[str]) -> RowForm:
        """Return the form of rows with these columns."""
        by_name = {form.column: form for form in forms}
        if not key:
            return cls(tuple(forms), (), False)
        rest = tuple(form for form in forms if form.column not in key)
        return cls(tuple(by_name[name] for name in key), rest, True)

    @property
    def forms(self) -> tuple[Form, ...]:
        """All columns, the key's first."""
        return (*self.key, *self.rest)

    @property
    def columns(self) -> tuple[str, ...]:
        """The columns' names, the key's first."""
        return tuple(form.column for form in self.forms)

    @property
    def key_columns(self) -> tuple[str, ...]:
        """The names of the columns that identify a row; none without a key."""
        return tuple(form.column for form in self.key) if self.has_key else ()

    @property
    def published_names(self) -> dict[str, str]:
        """The publisher's names of the columns, by the Delta table's."""
        return {form.column: form.there for form in self.forms}

    def select(self, source: str) -> str:
        """Return SQL after FROM with the columns `k`, a row's key hash, and `h`, its own, of the rows of `source`.

        `source` is SQL after FROM, too, conditions included; tableoid and ctid of its rows are passed on as `oid` and `at`.
        """
        forms = self.forms
        names = {form.there for form in forms}
        prefix = "x"
        while any(name.startswith(prefix) for name in names):
            prefix += "_"
        listed = [
            f"{form.quoted if form.computed is None else form.computed.replace('{}', form.quoted)} AS {prefix}{place}"
            for place, form in enumerate(forms)
        ]
        texts = [form.text.replace("{}", f"{prefix}{place}") for place, form in enumerate(forms)]
        keys, rest = texts[: len(self.key)], texts[len(self.key) :]
        # OFFSET 0 keeps the planner from evaluating a hash, or a computed text, once for each place that names it.
        inner = f"SELECT tableoid AS oid, ctid AS at, {', '.join(listed)} FROM {source}"
        if any(form.computed is not None for form in forms):
            inner = f"SELECT * FROM ({inner} OFFSET 0) computed"
        hashed = f"SELECT {self._chain(keys, str(self.seed))} AS k, * FROM ({inner}) listed OFFSET 0"
        if not rest:
            return f"(SELECT k, k AS h, oid, at FROM ({hashed}) keyed) hashed"
        return f"(SELECT k, {self._chain(rest, 'k')} AS h, oid, at FROM ({hashed}) keyed) hashed"

    def _chain(self, texts: Sequence[str], seed: str) -> str:
        """Return the hash of texts, one after the other; of many, that of the hashes of groups that begin with one seed."""
        if len(texts) > _GROUP:
            groups = [self._chain(texts[at : at + _GROUP], seed) for at in range(0, len(texts), _GROUP)]
            return self._hash(f"pg_catalog.concat_ws(' ', {', '.join(groups)})", seed)
        found = seed
        for text in texts:
            found = self._hash(f"coalesce({text}, {quote_literal(self.null)})", found)
        return found

    @staticmethod
    def _hash(text: str, seed: str) -> str:
        return f'pg_catalog.hashtextextended({text} COLLATE "C", {seed})'

    def hashes(self, rows: pa.RecordBatch) -> tuple[Hashes, Hashes]:
        """Return the hashes of the keys and of the rows.  `rows` has the columns, by name."""
        keys = self.key_hashes(rows)
        return keys, self._hashes(self.rest, rows, keys) if self.rest else keys

    def key_hashes(self, rows: pa.RecordBatch) -> Hashes:
        """Return the hashes of the keys alone."""
        return self._hashes(self.key, rows, np.full(rows.num_rows, self.seed, np.uint64))

    def _hashes(self, forms: Sequence[Form], rows: pa.RecordBatch, seeds: Hashes) -> Hashes:
        if len(forms) > _GROUP:
            groups = [
                self._hashes(forms[at : at + _GROUP], rows, seeds).view(np.int64) for at in range(0, len(forms), _GROUP)
            ]
            texts = pc.binary_join_element_wise(*(pa.array(group).cast(pa.string()) for group in groups), " ")
            return hash_texts(texts, seeds)
        found = seeds
        for form in forms:
            texts = form.texts(rows.column(rows.schema.get_field_index(form.column)))
            found = hash_texts(pc.fill_null(texts, self.null) if texts.null_count else texts, found)
        return found
