"""What a column's type is made of: elements of an array, attributes of a composite, down to types that hold no others."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TypeShape:
    """A type below its domains.  `modifier` is atttypmod's, which an array's elements share; `kind` pg_type.typtype; `name`
    format_type's, without a modifier.

    `element` is an array's, with `delimiter` between the elements; `attributes` a composite's, in order.
    """

    oid: int
    modifier: int = -1
    kind: str = "b"
    name: str = ""
    element: TypeShape | None = None
    delimiter: str = ","
    attributes: tuple[tuple[str, TypeShape], ...] = ()

    def all(self) -> Iterator[TypeShape]:
        """This one and each that it holds."""
        yield self
        if self.element is not None:
            yield from self.element.all()
        for _, attribute in self.attributes:
            yield from attribute.all()
