"""Functions of jsonb (jsonb_op.c, jsonfuncs.c)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from decimal import Decimal
from typing import Any, Final

from pubsub.errors import PubsubError
from walsender.rowfilter.functions.json_values import Document, Json, as_text, contains
from walsender.rowfilter.functions.values import FixedFunction, Maker, Settings, fixed

_MISSING: Final = object()


def _field(value: Json, key: str) -> Any:
    return value.get(key, _MISSING) if isinstance(value, dict) else _MISSING


def _element(value: Json, place: int) -> Any:
    if not isinstance(value, list):
        return _MISSING
    return value[place] if -len(value) <= place < len(value) else _MISSING


def _at_path(value: Any, path: Sequence[bytes | None], encoding: str) -> Any:
    for step in path:
        if step is None:
            return _MISSING
        text = step.decode(encoding)
        if isinstance(value, dict):
            value = _field(value, text)
        elif isinstance(value, list):
            try:
                value = _element(value, int(text))
            except ValueError:
                return _MISSING
        else:
            return _MISSING
        if value is _MISSING:
            return _MISSING
    return value


def _found(find: Callable[[Any, Any, str], Any], *, text: bool) -> Maker:
    def make(types: tuple[int, ...], settings: Settings) -> FixedFunction | None:
        if types[0] != 3802:
            return None
        encoding = settings.encoding

        def applied(document: Document, what: Any) -> Any:
            value = find(document.value, what, encoding)
            if value is _MISSING:
                return None
            if not text:
                return Document(value)
            written = as_text(value)
            return None if written is None else written.encode(encoding)

        return applied

    return make


def _by_key(value: Json, key: bytes, encoding: str) -> Any:
    return _field(value, key.decode(encoding))


def _by_place(value: Json, place: int, _: str) -> Any:
    # A scalar by itself is stored as an array of one element.
    return _element(value if isinstance(value, dict | list) else [value], place)


def _exists(value: Json, key: str) -> bool:
    """Return whether `key` is a key of an object, a string in an array, or a string by itself."""
    if isinstance(value, dict):
        return key in value
    if isinstance(value, list):
        return any(isinstance(one, str) and one == key for one in value)
    return isinstance(value, str) and value == key


def _exist(which: Callable[[list[bool]], bool]) -> Maker:
    def make(types: tuple[int, ...], settings: Settings) -> FixedFunction:
        def applied(document: Document, keys: bytes | Sequence[bytes | None]) -> bool:
            wanted = [keys] if isinstance(keys, bytes) else [one for one in keys if one is not None]
            return which([_exists(document.value, one.decode(settings.encoding)) for one in wanted])

        return applied

    return make


_TYPE_NAMES: Final[tuple[tuple[type, bytes], ...]] = (
    (dict, b"object"),
    (list, b"array"),
    (str, b"string"),
    (bool, b"boolean"),
    (Decimal, b"number"),
)


def _type_name(document: Document) -> bytes:
    return next((name for kind, name in _TYPE_NAMES if isinstance(document.value, kind)), b"null")


def _length(document: Document) -> int:
    if isinstance(document.value, list):
        return len(document.value)
    what = "an object" if isinstance(document.value, dict) else "a scalar"
    raise PubsubError(f"cannot get array length of {what}", sqlstate="22023")


FUNCTIONS: Final[dict[str, Maker]] = {
    "jsonb_eq": fixed(lambda a, b: a == b),
    "jsonb_ne": fixed(lambda a, b: a != b),
    "jsonb_contains": fixed(lambda a, b: contains(a.value, b.value)),
    "jsonb_contained": fixed(lambda a, b: contains(b.value, a.value)),
    "jsonb_exists": _exist(all),
    "jsonb_exists_any": _exist(any),
    "jsonb_exists_all": _exist(all),
    "jsonb_object_field": _found(_by_key, text=False),
    "jsonb_object_field_text": _found(_by_key, text=True),
    "jsonb_array_element": _found(_by_place, text=False),
    "jsonb_array_element_text": _found(_by_place, text=True),
    "jsonb_extract_path": _found(_at_path, text=False),
    "jsonb_extract_path_text": _found(_at_path, text=True),
    "jsonb_typeof": fixed(_type_name),
    "jsonb_array_length": fixed(_length),
}
