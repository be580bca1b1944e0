"""An output gives way in the midst of a transaction, whatever it sends of it."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from pubsub.errors import PubsubError
from walsender.decode import changes as c
from walsender.decode.assembly import BATCH, Changes, Rules
from walsender.decode.output import Ending, Origin, Output


class Plugin:
    """A plugin that counts its rows."""

    def __init__(self) -> None:
        self.rows = 0
        self.ended = False

    def begin(self, _txn: object) -> None: ...

    def row(self, *_: object) -> bool:
        self.rows += 1
        return True

    def commit(self, _txn: object) -> None:
        self.ended = True


@pytest.mark.parametrize("few", [True, False])
@pytest.mark.parametrize("error", [KeyError("x"), MemoryError(), OSError("x"), PubsubError("x", sqlstate="22023")])
def test_whatever_a_plugin_raises_ends_its_output(error: Exception, few: bool) -> None:
    """Nothing more is sent: neither the transaction's rest nor a later one."""

    class Raising(Plugin):
        def row(self, *_: object) -> bool:
            super().row()
            raise error

    plugin: Any = Raising()
    texts: Any = None
    failures: list[PubsubError] = []
    rules = Rules("key", "key", False, lambda _: False, lambda _: False)
    output = Output(plugin, texts, rules, on_failure=failures.append)
    output.views[7] = SimpleNamespace(entry=None)  # type: ignore[assignment]
    frames = [c.HEAD.pack(c.INSERT, 3, 7, 100) + b"row"] * (2 if few else 10 * BATCH)
    txn: Any = SimpleNamespace(txn=SimpleNamespace(xid=3, first_lsn=50), errors={})
    for _ in range(2):
        output.send(txn, Ending(200, 210, 0, Origin()), Changes(frames, {output}, 1))
        assert output.proceed()
    assert (plugin.rows, plugin.ended, output.waits) == (1, False, False)
    (failure,) = failures
    if isinstance(error, PubsubError):
        assert failure is error
    else:
        assert failure.sqlstate == "XX000"
        assert type(error).__name__ in failure.message


@pytest.mark.parametrize("is_published", [True, False])
def test_a_large_transaction_is_sent_in_steps(is_published: bool) -> None:
    plugin: Any = Plugin()
    texts: Any = None
    steps = 0

    def may_go_on() -> bool:
        nonlocal steps
        steps += 1
        return False

    rules = Rules("key", "key", False, lambda _: False, lambda _: False)
    output = Output(plugin, texts, rules, may_go_on=may_go_on)
    if is_published:
        output.views[7] = SimpleNamespace(entry=None)  # type: ignore[assignment]
    frames = [c.HEAD.pack(c.INSERT, 3, 7, 100) + b"row"] * (10 * BATCH)
    txn: Any = SimpleNamespace(txn=SimpleNamespace(xid=3, first_lsn=50), errors={})
    output.send(txn, Ending(200, 210, 0, Origin()), Changes(frames, {output}, 1))
    while output.waits:
        before = plugin.rows
        # One step and no more, as if a client had no room, or a signal had come.
        output.may_go_on = iter([True, False]).__next__
        output.proceed()
        assert plugin.rows - before <= BATCH
        steps += 1
    assert plugin.ended
    assert plugin.rows == (10 * BATCH if is_published else 0)
    assert steps > 10


def test_a_plugin_that_may_be_slow_gives_way_after_a_few_changes() -> None:
    plugin: Any = Plugin()
    texts: Any = None
    rules = Rules("key", "key", False, lambda _: False, lambda _: False)
    output = Output(plugin, texts, rules, step=8)
    output.views[7] = SimpleNamespace(entry=None)  # type: ignore[assignment]
    frames = [c.HEAD.pack(c.INSERT, 3, 7, 100) + b"row"] * 20
    txn: Any = SimpleNamespace(txn=SimpleNamespace(xid=3, first_lsn=50), errors={})
    output.may_go_on = iter([True, False]).__next__
    output.send(txn, Ending(200, 210, 0, Origin()), Changes(frames, {output}, 1))
    rows = [plugin.rows]
    while output.waits:
        output.may_go_on = iter([True, False]).__next__
        output.proceed()
        rows.append(plugin.rows)
    assert rows == [8, 16, 20, 20]


def test_a_subscriber_that_begins_behind_a_message_does_not_get_it() -> None:
    """A stream's position after a message is the end of its record; one that began there got the message again."""
    did: list[object] = []

    class Saying(Plugin):
        def message(self, _txn: object, lsn: int, *_: object) -> None:
            did.append(lsn)

    plugin: Any = Saying()
    texts: Any = None
    output = Output(plugin, texts, Rules("key", "key", False, lambda _: False, lambda _: False))
    for start in (100, 160, 200):
        output.joining.append((start, partial(did.append, f"from {start}")))
    output.message(None, 100, 160, 3, b"p", b"c")
    output.message(None, 160, 200, 3, b"p", b"c")
    assert did == ["from 100", 160, "from 160", 200]
