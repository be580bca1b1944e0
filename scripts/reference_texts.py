"""What the reference pages say of options and views; tests/unit/tests/test_site.py looks that each has its words."""

from __future__ import annotations

from typing import Final

#: Of the options of CREATE SUBSCRIPTION, in a line each.
OPTIONS: Final = {
    "connect": "Whether CREATE SUBSCRIPTION connects to the publisher. Without it nothing is made there.",
    "enabled": "Whether the workers start.",
    "create_slot": "Whether the replication slot is made.",
    "slot_name": "The slot on the publisher. `NONE`: there is none.",
    "copy_data": "Whether rows that are there already are copied.",
    "synchronous_commit": "Has no effect: a Delta commit is durable before it is reported.",
    "binary": "Whether the publisher sends values in binary form. Rows in Delta are the same.",
    "streaming": "How large transactions arrive: `off`, `on`, or staged while they are in progress (`parallel`).",
    "two_phase": "Whether prepared transactions are sent at PREPARE TRANSACTION.",
    "disable_on_error": "Whether an error disables the subscription. Without it the workers try again.",
    "password_required": "Has no effect: a node has one user.",
    "run_as_owner": "Has no effect: a node has one user.",
    "failover": "Whether the slot is synchronized to standbys. From PostgreSQL 17 on.",
    "origin": "`none`: only changes that have no origin on the publisher are sent.",
    "retain_dead_tuples": "`true` is refused: a Delta table has no dead tuples.",
    "max_retention_duration": "Has no effect without `retain_dead_tuples`.",
    "wal_receiver_timeout": "For this subscription in place of the setting; -1: the setting's.",
    "create_tables": "Whether Delta tables are made. Without it a missing one is refused.",
    "target": "The folder in the warehouse; by default the name of the publisher's database.",
    "source": "Whose rows they are, in Delta tables that other subscriptions write, too ([many sources](../many-sources.md)).",
    "source_column": "The column that says whose they are.",
    "gather": "Which of its tables are in one Delta table, each a source ([many sources](../many-sources.md#tables-of-one-database)).",
    "types": "For which types or columns another Delta type is wanted ([types](../types.md#a-choice-for-a-column)).",
    "on_table_error": "`isolate`: an error stops its table alone, and the others go on. `stop`: the subscription.",
    "schema_changes": "`refuse`: an ALTER TABLE stops as in PostgreSQL. `follow`: the Delta table is altered.",
    "dropped_columns": "Whether a column that was dropped on the publisher stays in Delta.",
    "batch_rows": "The most rows of a batch before it is committed.",
    "batch_bytes": "The most bytes of a batch before it is committed.",
    "batch_age": "The longest time, in seconds, that a batch takes more transactions in.",
    "stop_lsn": "Everything up to this LSN is applied, nothing after it; then the subscription is disabled.",
    "wal_archive": "A directory with the publisher's archived WAL, or `restore_command` ([slot loss](../slot-loss.md)).",
    "on_slot_loss": "`resync`: a slot that is lost costs a new copy. `stop`: somebody has to decide.",
    "new_tables": "`follow`: tables that are published later join by themselves ([new tables](../new-tables.md)).",
    "copy_first": "Tables that are copied before the others, in this order.",
    "partition_by": "Columns by which Delta tables are partitioned ([Delta tables](../delta.md#how-a-table-lies)).",
    "cluster_by": "Columns by which Delta tables are clustered ([Delta tables](../delta.md#how-a-table-lies)).",
    "table_properties": "Properties that Delta tables get ([Delta tables](../delta.md#how-a-table-lies)).",
    "mode": "`history`: every change is kept as a row ([histories](../history.md)); `scd2`: every version of a row, with the span in "
    "which it held ([versions](../scd2.md)); `mirror + history`: both, as two Delta tables; for all tables or for some.",
    "deletes": "`soft`: deleted rows stay, and say when they were deleted ([soft deletes](../soft-deletes.md)).",
    "truncate": "`ignore` or `soft`: what is truncated stays here, as it is or marked as deleted ([TRUNCATE](../truncate.md)).",
    "metadata": "Columns that say of each row which change made it ([metadata](../metadata.md)).",
    "columns": "The columns that tables have; others are left out ([left-out columns](../left-out-columns.md)).",
    "exclude": "The columns that are left out ([left-out columns](../left-out-columns.md)).",
    "mask": "Columns whose values are masked, and how ([masked columns](../masks.md)).",
    "rename": "Other names that columns have in Delta ([renamed columns](../renamed-columns.md)).",
    "where": "Which of the publisher's rows tables have ([matching rows](../matching-rows.md)).",
    "register": "Names that the Delta tables get in a catalog of Spark's ([catalogs](../catalogs.md)).",
    "comments": "Delta tables and their columns get the publisher's comments ([catalogs](../catalogs.md#comments)).",
}

#: Of the views.
VIEWS: Final = {
    "pg_subscription": "The subscriptions, with their options.",
    "pg_subscription_rel": "The tables and sequences of each subscription: state, directory, error, what was left out.",
    "pg_stat_subscription": "The workers, with their positions. A subscription without workers has one row.",
    "pg_stat_subscription_stats": "Counters of each subscription, until they are reset, and its last error.",
    "pg_replication_origin_status": "Up to where each subscription has been applied (`remote_lsn`, on the publisher).",
    "pg_stat_progress_copy": "Copies that run.",
    "pg_prepared_xacts": "Transactions that are prepared on the publisher and have no outcome yet.",
    "pubsub_sequences": "Sequences, as they were last synchronized ([sequences](../sequences.md)).",
    "pubsub_verification": "The last comparison of each table with the publisher's ([verify](../verify.md)).",
    "pubsub_daemons": "The daemons that run, or were killed, and the subscriptions that each has ([standby](../standby.md)).",
}
