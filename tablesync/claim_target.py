"""Decide whether a copy may fill a Delta table: one that it creates, one without rows, or one of the same subscription."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Final

from apply.schema_changes import attributes
from apply.schema_changes.table_definition import definition_json
from catalog.records import Subscription, SubscriptionRel
from pubsub.delta import past, sources
from pubsub.delta import table as delta
from pubsub.delta.alter import join
from pubsub.delta.housekeeping.retention import retention_properties
from pubsub.delta.log.transactions import commit_retrying
from pubsub.delta.places import is_reached
from pubsub.delta.spark.engine import Engine
from pubsub.delta.table import TargetTable
from pubsub.errors import NotInPrerequisiteState, UndefinedTable
from pubsub.masks import VARIABLE
from pubsub.setting_tables import HousekeepingSettings
from pubsub.sql.layouts import Layout

# Delta writes a checkpoint within every so-manieth commit, which takes seconds.  Housekeeping writes them beside the
# commits (housekeeping/upkeep.py), and long before.
_CHECKPOINT_INTERVAL: Final = 10_000

_MASK_KEY: Final = "pubsub.mask_key"


async def claim_target(
    target: TargetTable,
    subscription: Subscription,
    node_id: str,
    engine: Engine,
    housekeeping: HousekeepingSettings,
    start_spark: Callable[[], Awaitable[None]],
    properties: Mapping[str, str] | None = None,
    relation: SubscriptionRel | None = None,
) -> None:
    """Create the Delta table if it is missing, or require that its rows may be replaced: none, or our own.

    A new table has these `properties`, lies as the subscription says of `relation`, and keeps removed files and its log as
    `housekeeping` says.  A table that somebody else made becomes ours by its properties, so that a later copy may replace what
    this one brings; it also leaves checkpoints to housekeeping, unless it says itself how often Delta is to write one.
    One of several sources is joined instead (`_join`).
    Awaits `start_spark` if only Spark can create the table.  Raises NotInPrerequisiteState and UndefinedTable; Conflict
    if the table was altered at this moment.
    """
    identity = {
        "pubsub.node": node_id,
        "pubsub.subscription": str(subscription.oid),
        "pubsub.publisher": f"{subscription.publisher_system_identifier}/{subscription.publisher_database}",
    }
    checkpoints: dict[str, str] = {}
    if housekeeping.enabled and is_reached(target.path):
        checkpoints[delta.CHECKPOINT_INTERVAL] = str(_CHECKPOINT_INTERVAL)
    if target.source is not None:
        await _join(target, subscription, node_id, engine, checkpoints, housekeeping, start_spark, identity, relation)
        return
    if await asyncio.to_thread(delta.exists, target.path):
        have = await asyncio.to_thread(delta.properties, target.path)
        # The publisher may differ: a RESYNC may have changed it.
        ours = all(have.get(name) == identity[name] for name in ("pubsub.node", "pubsub.subscription"))
        past.refuse_to_replace(target, have)
        sources.refuse_unfit(target, have)
        if ours:
            await _as_closed(target, have, engine)
            return  # the copy's commit adds missing columns
        if await asyncio.to_thread(delta.row_count, target.path) > 0:
            raise NotInPrerequisiteState(
                f'the Delta table for "{target.relation}" holds rows already',
                detail=f'It lies at "{target.path}".',
                hint="Move it away, use WITH (copy_data = false), or choose another target.",
            )
        await asyncio.to_thread(delta.check_columns, target)

        def claim(before: Mapping[str, str]) -> dict[str, str]:
            # Attributes of another subscription's copy, which may have the value with which a column began.
            kept = {name: value for name, value in before.items() if name != attributes.PROPERTY}
            return {**checkpoints, **kept, **identity, **delta.mode_of(target), **_mask_key(target)}

        await engine.run_without_spark(engine.transactions.change_properties, target.path, claim)
        return
    _require_creation(target, subscription)
    kept = (
        dict(properties or {})
        | checkpoints
        | retention_properties(housekeeping.deleted_file_retention, housekeeping.log_retention)
    )
    layout = _layout(subscription, relation)
    target = replace(target, partitioned_by=layout.partition_by, clustered_by=layout.cluster_by)
    known = {**layout.properties, **identity, **kept, **_mask_key(target)}
    # Only Spark's statement checks a layout.
    if layout or not await engine.run_without_spark(delta.create_empty, engine.transactions, target, known):
        await start_spark()
        await engine.run(delta.create, target, known)


def _layout(subscription: Subscription, relation: SubscriptionRel | None) -> Layout:
    if relation is None:
        return Layout()
    return subscription.options.layouts.beside(relation.beside).of(relation.schema, relation.published_name)


def _require_creation(target: TargetTable, subscription: Subscription) -> None:
    if not subscription.options.create_tables:
        raise UndefinedTable(
            f'Delta table for "{target.relation}" does not exist',
            detail=f'It should lie at "{target.path}".',
            hint="Create it, or use WITH (create_tables = true).",
        )


async def _join(
    target: TargetTable,
    subscription: Subscription,
    node_id: str,
    engine: Engine,
    checkpoints: Mapping[str, str],
    housekeeping: HousekeepingSettings,
    start_spark: Callable[[], Awaitable[None]],
    identity: Mapping[str, str],
    relation: SubscriptionRel | None,
) -> None:
    """Make a Delta table of several sources, or give one that is there the columns that it lacks; make the source this
    subscription's.

    Raises NotInPrerequisiteState if it does not fit, or has rows of the source that are not ours; DuplicateObject if another
    node has the source.
    """
    source = target.source
    assert source is not None
    if not await asyncio.to_thread(delta.exists, target.path):
        _require_creation(target, subscription)
        layout = _layout(subscription, relation)
        kept = retention_properties(housekeeping.deleted_file_retention, housekeeping.log_retention)
        known = {**layout.properties, "pubsub.node": node_id, **checkpoints, **kept}
        if layout or not await engine.run_without_spark(delta.create_empty, engine.transactions, target, known):
            await start_spark()
            await engine.run(delta.create, target, known)
    have = await asyncio.to_thread(delta.properties, target.path)
    sources.refuse_unfit(target, have)
    if not sources.refuse_owned(target, have, node_id, subscription.oid):
        await asyncio.to_thread(sources.refuse_rows, target)
    await engine.run_without_spark(join, engine.transactions, target)

    def claim(before: Mapping[str, str]) -> dict[str, str]:
        # At this moment another node may have the source.
        sources.refuse_owned(target, before, node_id, subscription.oid)
        kept = {name: value for name, value in before.items() if name != attributes.property_of(target)}
        return {
            **kept,
            sources.owner_property(source): sources.owner(node_id, subscription.oid, identity["pubsub.publisher"]),
        }

    def commit() -> None:
        # Others may join at this moment, too.
        commit_retrying(
            f'take source "{source.value}" of the Delta table of "{target.relation}"',
            lambda: engine.transactions.change_properties(target.path, claim),
        )

    await engine.run_without_spark(commit)


def _mask_key(target: TargetTable) -> dict[str, str]:
    """Return the property that says by which key a history is masked, whose rows no copy replaces."""
    return {_MASK_KEY: target.masks.fingerprint} if target.keeps_past and target.masks.are_keyed else {}


async def _as_closed(target: TargetTable, have: Mapping[str, str], engine: Engine) -> None:
    """Bring the properties of a table with columns that are left out or masked up to date before it is copied again.

    The attributes of an earlier copy, which nobody needs now, may have the value with which such a column began.  A history
    remembers the key of its masks.  Raises NotInPrerequisiteState if it has rows under another one.
    """
    wanted = _mask_key(target)
    if _MASK_KEY in wanted.keys() & have.keys() and have[_MASK_KEY] != wanted[_MASK_KEY]:
        await _require_no_rows(target)
    if wanted.items() <= have.items() and not (target.closed and attributes.PROPERTY in have):
        return

    def change(before: Mapping[str, str]) -> dict[str, str]:
        kept = {name: value for name, value in before.items() if not target.closed or name != attributes.PROPERTY}
        return {**kept, **wanted}

    await engine.run_without_spark(engine.transactions.change_properties, target.path, change)


async def _require_no_rows(target: TargetTable) -> None:
    if await asyncio.to_thread(delta.row_count, target.path) > 0:
        raise NotInPrerequisiteState(
            f'the history of table "{target.relation}" is masked by another key than {VARIABLE}',
            hint=past.another_history(target),
        )


def columns_of_earlier_copies(target: TargetTable, relation: SubscriptionRel, app_id: str) -> Sequence[str]:
    """Return the columns that the Delta table has from its earlier copies, also those that the publisher dropped since.

    There are none in a table whose columns stay whatever the publisher does: they are the past's, or other sources'.  `app_id`:
    that of the last copy.
    """
    if target.source is not None or target.keeps_past or not delta.exists(relation.path):
        return ()
    known = attributes.current(relation.definition, delta.properties(relation.path), app_id)
    held = delta.read_schema(relation.path).names
    return () if known is None else [name for name in known.names.values() if name in held]


def made_definition(relation: SubscriptionRel, app_id: str) -> str | None:
    """Return the definition of a Delta table that was created for this joining of `relation`; None if there is none.

    A table of an earlier joining, whose `app_id` was another, is not meant: it may have been altered since.
    """
    if not delta.exists(relation.path):
        return None
    said = delta.properties(relation.path).get(attributes.PROPERTY)
    made = attributes.read(said)
    if said is None or made is None or made.app_id != app_id:
        return None
    return definition_json(delta.load(relation.path, relation.qualified_name, None), said)
