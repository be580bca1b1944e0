"""A column's type as a tree: an array's elements, a composite's attributes, down to types without parts."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TypeShape:
    """A type, with domains resolved to their base type.

    `modifier` is atttypmod, which an array's elements share; `kind` is pg_type.typtype; `name` is format_type's,
    without the modifier.  `element` is an array's element type, `delimiter` the character between elements;
    `attributes` are a composite's, in order.
    """

    oid: int
    modifier: int = -1
    kind: str = "b"
    name: str = ""
    element: TypeShape | None = None
    delimiter: str = ","
    attributes: tuple[tuple[str, TypeShape], ...] = ()

    def all(self) -> Iterator[TypeShape]:
        """Yield this type and all types within it."""
        yield self
        if self.element is not None:
            yield from self.element.all()
        for _, attribute in self.attributes:
            yield from attribute.all()
