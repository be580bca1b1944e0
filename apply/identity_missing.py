"""Name the replica identity on the publisher because of which a change does not identify its row."""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import Final

from catalog.beside import oid_of
from catalog.records import Subscription
from pubsub.errors import NotInPrerequisiteState, PubsubError

#: How long the publisher is asked, in seconds: the error is told without an answer, too.
_PATIENCE: Final = 10.0
#: So many tables are named at most.
_NAMED: Final = 5


class IdentityMissing(NotInPrerequisiteState):
    """An update or a delete does not have the columns that identify its row."""


async def explain(error: PubsubError, subscription: Subscription) -> None:
    """Add to an IdentityMissing which tables of the publisher it comes from, and what to set there.

    Does nothing to other errors, and none if the publisher does not answer.
    """
    if not isinstance(error, IdentityMissing) or error.relid is None:
        return
    from pubsub.publisher import definitions, publication
    from pubsub.publisher.connection import Connection
    from pubsub.publisher.replica_identities import unfit_identities

    oid = oid_of(error.relid)
    with suppress(PubsubError, TimeoutError):
        async with (
            asyncio.timeout(_PATIENCE),
            await Connection.connect(subscription.conninfo, application_name=subscription.name) as connection,
        ):
            published = await publication.published_tables(connection, subscription.publications, oid)
            definition = await definitions.table_definition(connection, oid)
            attnames = published[0].attnames if published else None
            found = (await unfit_identities(connection, [(definition, attnames)]))[definition.oid]
            if found:
                details = [*([error.detail] if error.detail else []), *(one.detail for one in found[:_NAMED])]
                # In the detail, because what stops alone gets a hint of its own about this.
                details.append(
                    "What has been sent stays without the columns: afterwards RESYNC TABLE copies the table anew."
                )
                error.detail = " ".join(details)
                error.hint = f"On the publisher: {' '.join(one.change for one in found[:_NAMED])}"
