"""Keep what the dispatcher knows of a streamed transaction in progress; its rows are in the reorder buffer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from apply.pipeline.relation_cache import Announced
from pubsub.protocol import pgoutput


@dataclass(slots=True)
class StreamedTransaction:
    """A streamed transaction in progress.

    `relations`: its Relation messages.  Of its last part: `since_part`: bytes of frames since,
    `relations_before_part`: how many Relation messages came before.
    """

    xid: int
    relations: list[Announced] = field(default_factory=list)
    since_part: int = 0
    relations_before_part: int = 0

    def begin_part(self) -> None:
        """Note that all that was received belongs to parts."""
        self.relations_before_part = len(self.relations)
        self.since_part = 0

    def known_before_part(self, cache: Mapping[int, pgoutput.Relation]) -> dict[int, pgoutput.Relation]:
        """Return the relation cache as it is where the next part begins; `cache`: as it is outside the transaction."""
        return {**cache, **{one.relation.oid: one.relation for one in self.relations[: self.relations_before_part]}}

    def abort(self, subxid: int) -> bool:
        """Forget the Relation messages of a subtransaction; return whether there were any."""
        left = [one for one in self.relations if one.xid != subxid]
        announced = len(left) < len(self.relations)
        self.relations[:] = left
        return announced
