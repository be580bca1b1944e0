"""Requests of commands to the daemon, and its answers: rows that both sides poll.

Commands such as DROP SUBSCRIPTION, RESYNC TABLE and DISABLE must wait until workers have ended, and only the daemon can
end them.  The command inserts a request, the daemon answers it, with an error or without, and the command reads and
deletes the answer.
"""

from __future__ import annotations

import asyncio
from typing import Any, Final

from sqlalchemy import delete, insert, select, update

from catalog import schema
from catalog.database import Database, now
from catalog.records import Request
from pubsub.concurrency import uncancelled
from pubsub.errors import PubsubError

_POLL: Final = 0.05
_T = schema.request


class RequestTimeoutError(PubsubError):
    """The daemon did not answer in time, and the request was withdrawn."""

    default_sqlstate = "57014"


class Requests(Database):
    """The part of the catalog that carries requests."""

    async def request(
        self, kind: str, subid: int | None = None, payload: dict[str, Any] | None = None, timeout: float = 60.0
    ) -> dict[str, Any]:
        """Ask the daemon and wait for its answer, `timeout` seconds at most; return what it found, if that was asked for.

        Raises the error that the daemon answered (a PubsubError with its fields), or RequestTimeoutError.  A timeout or
        cancellation withdraws the request, so that the daemon does not carry it out afterwards.
        """
        asking = asyncio.ensure_future(self._ask(kind, subid, payload or {}))
        try:
            request_id = await asyncio.shield(asking)
        except asyncio.CancelledError:
            await asyncio.shield(self._withdraw(await asking))
            raise
        answered = False
        try:
            async with asyncio.timeout(timeout):
                while True:
                    if (found := await self._take_answer(request_id)) is not None:
                        answered = True
                        return found
                    await asyncio.sleep(_POLL)
        except TimeoutError:
            raise RequestTimeoutError(
                f"the daemon did not answer within {timeout:g} seconds",
                hint="Look at the daemon's log, then try again.",
            ) from None
        finally:
            if not answered:
                await asyncio.shield(self._withdraw(request_id))

    request.interruptible = True  # type: ignore[attr-defined]

    @uncancelled
    async def _ask(self, kind: str, subid: int | None, payload: dict[str, Any]) -> int:
        async with self._write(bump=True) as connection:
            done = await connection.execute(
                insert(_T).values(kind=kind, subid=subid, payload=payload, created=now(), answered=False)
            )
            key = done.inserted_primary_key
            assert key is not None
            return int(key[0])

    async def pending_requests(self) -> list[Request]:
        """Return the requests without an answer, oldest first."""
        async with self._read() as connection:
            rows = await connection.execute(select(_T).where(_T.c.answered.is_(False)).order_by(_T.c.id))
            return [Request(row.id, row.kind, row.subid, row.payload, row.created) for row in rows]

    async def answer(
        self, request_id: int, error: PubsubError | str | None = None, result: dict[str, Any] | None = None
    ) -> bool:
        """Answer a request, whose payload is forgotten; return False if it was withdrawn or already answered.

        A command that was killed takes no answer: its request stays, and the payload may have keys of rows.
        """
        async with self._write(bump=True) as connection:
            done = await connection.execute(
                update(_T)
                .where(_T.c.id == request_id, _T.c.answered.is_(False))
                .values(answered=True, error=_error_json(error), result=result, payload={})
            )
            return done.rowcount == 1

    @uncancelled
    async def _take_answer(self, request_id: int) -> dict[str, Any] | None:
        """Return the answer's result, {} without one; None if there is no answer yet."""
        query = select(_T.c.answered, _T.c.error, _T.c.result).where(_T.c.id == request_id)
        async with self._read() as connection:
            row = (await connection.execute(query)).one_or_none()
        if row is None:
            raise PubsubError("the request to the daemon was removed from the catalog", sqlstate="55000")
        if not row.answered:
            return None
        await self._withdraw(request_id)
        if row.error is not None:
            raise PubsubError(**row.error)
        return row.result or {}

    @uncancelled
    async def _withdraw(self, request_id: int) -> None:
        async with self._write(bump=False) as connection:
            await connection.execute(delete(_T).where(_T.c.id == request_id))


def _error_json(error: PubsubError | str | None) -> dict[str, str | None] | None:
    if error is None:
        return None
    if isinstance(error, str):
        return {"message": error}
    return error.fields()
