"""Row filters (not yet)."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from pubsub.errors import FeatureNotSupported
from walsender.historic.relation import RelationInfo
from walsender.types.layout import Raw

Filter = Callable[[list[Raw]], bool]


class RowFilterCompiler:
    def __init__(self, builtins: object) -> None:
        self._builtins = builtins

    def any_of(self, nodes: Sequence[str], relation: RelationInfo) -> Filter:
        raise FeatureNotSupported("row filters")
