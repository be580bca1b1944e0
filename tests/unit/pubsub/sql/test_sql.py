"""The statements: how they parse, and PostgreSQL's error texts and positions for what does not."""

from __future__ import annotations

import pytest

from pubsub.errors import DuplicateObject, FeatureNotSupported, PubsubError, SqlSyntaxError
from pubsub.protocol.lsn import INVALID_LSN, Lsn
from pubsub.sql.identifiers import QualifiedName
from pubsub.sql.options import SubscriptionOptions
from pubsub.sql.parser import parse, parse_one, parse_statement
from pubsub.sql.source import Source
from pubsub.sql.statements import (
    AddPublication,
    AlterSubscription,
    Connection,
    CreateSubscription,
    Disable,
    DropPublication,
    DropSubscription,
    Enable,
    Owner,
    RefreshPublication,
    RefreshSequences,
    Rename,
    ResyncTable,
    Select,
    SetOptions,
    SetPublication,
    Show,
    Skip,
    command_tag,
    to_sql,
)

CREATE = "CREATE SUBSCRIPTION s CONNECTION 'dbname=x' PUBLICATION p"


def options_of(text: str) -> SubscriptionOptions:
    statement = parse_one(f"{CREATE} WITH ({text})")
    assert isinstance(statement, CreateSubscription)
    return statement.options


def test_create_subscription() -> None:
    statement = parse_one("create subscription \"My Sub\" connection 'host=h password=''x y''' publication P, \"Q q\";")
    assert statement == CreateSubscription("My Sub", "host=h password='x y'", ("p", "Q q"), SubscriptionOptions())
    assert isinstance(statement, CreateSubscription)
    assert statement.slot_name == "My Sub"
    assert command_tag(statement) == "CREATE SUBSCRIPTION"


def test_options_are_read_as_postgresql_reads_them() -> None:
    found = options_of(
        "enabled = Off, \"copy_data\" = 0, slot_name = My_Slot, streaming, synchronous_commit = 'ON', origin = NONE, "
        "batch_rows = 1000, batch_bytes = '64MB', batch_age = 250, target = 'Sales', on_table_error = Isolate, "
        "failover = 1, stop_lsn = '0/16B3748'"
    )
    assert (found.enabled, found.copy_data, found.slot_name, found.streaming) == (False, False, "my_slot", "on")
    assert (found.synchronous_commit, found.origin, found.failover) == ("on", "none", True)
    assert (found.batch_rows, found.batch_bytes, found.batch_age) == (1000, 64 << 20, 0.25)
    assert (found.target, found.on_table_error) == ("Sales", "isolate")
    assert found.stop_lsn == Lsn.parse("0/16B3748")
    assert options_of("stop_lsn = none").stop_lsn is None
    assert [options_of(f"wal_receiver_timeout = {text}").wal_receiver_timeout for text in ("'10s'", "0", "-1")] == [
        10,
        0,
        None,
    ]
    found = options_of("retain_dead_tuples = false, max_retention_duration = 100")
    assert (found.retain_dead_tuples, found.max_retention_duration) == (False, 100)


@pytest.mark.parametrize(
    "text", ["CREATE SUBSCRIPTION s SERVER f PUBLICATION p WITH (enabled = false)", 'ALTER SUBSCRIPTION s SERVER "F"']
)
def test_a_foreign_server_is_refused_by_name(text: str) -> None:
    with pytest.raises(PubsubError, match=r"SUBSCRIPTION \.\.\. SERVER is not supported") as caught:
        parse_one(text)
    assert caught.value.sqlstate == "0A000"
    assert caught.value.hint is not None
    assert "service file" in caught.value.hint
    with pytest.raises(PubsubError, match="syntax error at end of input"):
        parse_one(text.split(" SERVER", maxsplit=1)[0] + " SERVER")


def test_connect_false_turns_off_what_needs_the_publisher() -> None:
    found = options_of("connect = false")
    assert (found.enabled, found.create_slot, found.copy_data) == (False, False, False)


def test_slot_name_none_is_not_the_default() -> None:
    statement = parse_one(f"{CREATE} WITH (slot_name = NONE, enabled = false, create_slot = false)")
    assert isinstance(statement, CreateSubscription)
    assert statement.slot_name is None


@pytest.mark.parametrize(
    ("text", "message", "sqlstate"),
    [
        ("foo", 'unrecognized subscription parameter: "foo"', "42601"),
        ("refresh = true", 'unrecognized subscription parameter: "refresh"', "42601"),
        ("lsn = '0/1'", 'unrecognized subscription parameter: "lsn"', "42601"),
        ('"Enabled" = true', 'unrecognized subscription parameter: "Enabled"', "42601"),
        ("enabled = 2", "enabled requires a Boolean value", "42601"),
        ("enabled = yes", "enabled requires a Boolean value", "42601"),
        ("enabled = 1.0", "enabled requires a Boolean value", "42601"),
        ("connect = false, enabled", "connect = false and enabled = true are mutually exclusive options", "42601"),
        (
            "connect = false, create_slot = on",
            "connect = false and create_slot = true are mutually exclusive options",
            "42601",
        ),
        (
            "copy_data = true, connect = false",
            "connect = false and copy_data = true are mutually exclusive options",
            "42601",
        ),
        ("slot_name = NONE", "subscription with slot_name = NONE must also set enabled = false", "42601"),
        (
            "slot_name = NONE, enabled = true",
            "slot_name = NONE and enabled = true are mutually exclusive options",
            "42601",
        ),
        (
            "slot_name = NONE, enabled = false",
            "subscription with slot_name = NONE must also set create_slot = false",
            "42601",
        ),
        ("slot_name = ''", 'replication slot name "" is too short', "42602"),
        ("slot_name = 'Foo'", 'replication slot name "Foo" contains invalid character', "42602"),
        ("slot_name = foo.bar", 'replication slot name "foo.bar" contains invalid character', "42602"),
        (f"slot_name = '{'a' * 64}'", f'replication slot name "{"a" * 64}" is too long', "42622"),
        ("slot_name", "slot_name requires a parameter", "42601"),
        ("streaming = foo", 'streaming requires a Boolean value or "parallel"', "42601"),
        ("synchronous_commit = foo", 'invalid value for parameter "synchronous_commit": "foo"', "22023"),
        ("origin = foo", 'unrecognized origin value: "foo"', "22023"),
        ("on_table_error = retry", 'unrecognized on_table_error value: "retry"', "22023"),
        ("target = ''", 'invalid value for parameter "target": ""', "22023"),
        ("batch_rows = 0", '0 is outside the valid range for parameter "batch_rows" (1 .. 2147483647)', "22023"),
        ("batch_age = '1 year'", 'invalid value for parameter "batch_age": "1 year"', "22023"),
        ("retain_dead_tuples = on", "retain_dead_tuples is not supported", "0A000"),
        ("max_retention_duration = '10s'", "max_retention_duration requires an integer value", "42601"),
        ("max_retention_duration", "max_retention_duration requires an integer value", "42601"),
        ("max_retention_duration = -5", 'option "max_retention_duration" cannot be negative', "22023"),
        ("wal_receiver_timeout = foo", 'invalid value for parameter "wal_receiver_timeout": "foo"', "22023"),
        (
            "wal_receiver_timeout = -2",
            '-2 ms is outside the valid range for parameter "wal_receiver_timeout" (0 ms .. 2147483647 ms)',
            "22023",
        ),
        ("stop_lsn = '0/x'", 'invalid input syntax for type pg_lsn: "0/x"', "22P02"),
    ],
)
def test_bad_options_in_postgresql_s_words(text: str, message: str, sqlstate: str) -> None:
    with pytest.raises(PubsubError) as caught:
        options_of(text)
    assert (caught.value.message, caught.value.sqlstate) == (message, sqlstate)


def test_a_redundant_option_is_pointed_at() -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        parse_one("CREATE SUBSCRIPTION s CONNECTION '' PUBLICATION p\n  WITH (enabled, ENABLED = true)")
    assert caught.value.report(verbose=True) == (
        "ERROR:  42601: conflicting or redundant options\n"
        "LINE 2:   WITH (enabled, ENABLED = true)\n"
        "                         ^"
    )


@pytest.mark.parametrize(
    ("action", "expected"),
    [
        ("ENABLE", Enable()),
        ("DISABLE;", Disable()),
        ("CONNECTION 'x'", Connection("x")),
        ("REFRESH PUBLICATION", RefreshPublication()),
        ("refresh Sequences", RefreshSequences()),
        ("REFRESH PUBLICATION WITH (copy_data = off)", RefreshPublication(copy_data=False)),
        ("SET PUBLICATION a, b WITH (refresh = false)", SetPublication(("a", "b"), refresh=False)),
        ("ADD PUBLICATION a WITH (copy_data = false)", AddPublication(("a",), copy_data=False)),
        ("DROP PUBLICATION a", DropPublication(("a",))),
        ("SKIP (lsn = '0/16B3748')", Skip(Lsn(0x16B3748))),
        ("SKIP (lsn = NONE)", Skip(INVALID_LSN)),
        ('RENAME TO "New"', Rename("New")),
        ("OWNER TO bob", Owner("bob")),
        ("OWNER TO CURRENT_USER", Owner("current_user", keyword=True)),
        ('OWNER TO "current_user"', Owner("current_user")),
        (
            'RESYNC TABLE public.Orders, "T"',
            ResyncTable((QualifiedName("public", "orders"), QualifiedName(None, "T"))),
        ),
    ],
)
def test_alter_subscription(action: str, expected: object) -> None:
    assert parse_one(f"ALTER SUBSCRIPTION s {action}") == AlterSubscription("s", expected)  # type: ignore[arg-type]


def test_set_changes_only_what_it_names() -> None:
    statement = parse_one("ALTER SUBSCRIPTION s SET (slot_name = NONE, batch_age = '2s')")
    assert isinstance(statement, AlterSubscription)
    assert isinstance(statement.action, SetOptions)
    before = SubscriptionOptions(slot_name="x", batch_rows=7, origin="none")
    after = before.merge(statement.action.options)
    assert (after.slot_name, after.batch_age, after.batch_rows, after.origin) == (None, 2.0, 7, "none")


@pytest.mark.parametrize("name", ["enabled", "connect", "create_slot", "copy_data", "target", "lsn"])
def test_set_takes_only_what_can_change_later(name: str) -> None:
    with pytest.raises(PubsubError, match=f'unrecognized subscription parameter: "{name}"'):
        parse_one(f"ALTER SUBSCRIPTION s SET ({name} = '1')")


@pytest.mark.parametrize(
    ("text", "message", "sqlstate"),
    [
        ("SKIP (lsn = '0/0')", "invalid WAL location (LSN): 0/0", "22023"),
        ("SKIP (lsn = 'x')", 'invalid input syntax for type pg_lsn: "x"', "22P02"),
        ("SKIP (xid = 1)", 'unrecognized subscription parameter: "xid"', "42601"),
        ("SET PUBLICATION a, a", 'publication name "a" used more than once', "42710"),
        ("OWNER TO public", 'role "public" does not exist', "42704"),
        ("OWNER TO none", 'role name "none" is reserved', "42939"),
        ("RESYNC TABLE a.b.c", "cross-database references are not implemented: a.b.c", "0A000"),
    ],
)
def test_bad_alterations(text: str, message: str, sqlstate: str) -> None:
    with pytest.raises(PubsubError) as caught:
        parse_one(f"ALTER SUBSCRIPTION s {text}")
    assert (caught.value.message, caught.value.sqlstate) == (message, sqlstate)


def test_publications_are_added_and_dropped_as_postgresql_does() -> None:
    assert SetPublication(("c",)).apply(("a", "b"), "s") == ("c",)
    assert AddPublication(("c",)).apply(("a", "b"), "s") == ("a", "b", "c")
    assert DropPublication(("a",)).apply(("a", "b"), "s") == ("b",)
    with pytest.raises(DuplicateObject, match='publication "a" is already in subscription "s"'):
        AddPublication(("a",)).apply(("a", "b"), "s")
    with pytest.raises(PubsubError, match='publication "c" is not in subscription "s"'):
        DropPublication(("c",)).apply(("a", "b"), "s")
    with pytest.raises(PubsubError, match="cannot drop all the publications from a subscription"):
        DropPublication(("a", "b")).apply(("a", "b"), "s")


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("DROP SUBSCRIPTION s", DropSubscription("s")),
        ("drop subscription if exists s cascade;", DropSubscription("s", if_exists=True, cascade=True)),
        ("DROP SUBSCRIPTION s RESTRICT", DropSubscription("s")),
        ("SHOW ALL", Show(None)),
        ("SHOW Wal_Receiver_Timeout;", Show("wal_receiver_timeout")),
        ("SHOW a.b", Show("a.b")),
        ("SHOW TIME ZONE", Show("timezone")),
        ("SHOW time", Show("time")),
    ],
)
def test_drop_and_show(text: str, expected: object) -> None:
    assert parse_one(text) == expected


@pytest.mark.parametrize(
    ("text", "message", "position"),
    [
        ("foo", 'syntax error at or near "foo"', 0),
        ("CREATE", "syntax error at end of input", 6),
        ("CREATE SUBSCRIPTION", "syntax error at end of input", 19),
        ("CREATE SUBSCRIPTION user CONNECTION 'a' PUBLICATION p", 'syntax error at or near "user"', 20),
        ("CREATE SUBSCRIPTION s CONNECTION a PUBLICATION p", 'syntax error at or near "a"', 33),
        ("CREATE SUBSCRIPTION s CONNECTION 'a' PUBLICATON p", 'syntax error at or near "PUBLICATON"', 37),
        ("CREATE SUBSCRIPTION s CONNECTION 'a' PUBLICATION p q", 'syntax error at or near "q"', 51),
        ("CREATE SUBSCRIPTION s CONNECTION 'a' PUBLICATION p,;", 'syntax error at or near ";"', 51),
        (f"{CREATE} WITH ()", 'syntax error at or near ")"', len(CREATE) + 7),
        (f"{CREATE} WITH (enabled true)", 'syntax error at or near "true"', len(CREATE) + 15),
        (f"{CREATE} WITH (enabled = 'a' 'b')", "syntax error at or near \"'b'\"", len(CREATE) + 21),
        ("CREATE SUBSCRIPTION s CONNECTION b'01' PUBLICATION p", "syntax error at or near \"b'01'\"", 33),
        ("ALTER SUBSCRIPTION s", "syntax error at end of input", 20),
        ("ALTER SUBSCRIPTION s ENABLE x", 'syntax error at or near "x"', 28),
        ("ALTER SUBSCRIPTION s SET ()", 'syntax error at or near ")"', 26),
        ("ALTER SUBSCRIPTION s RENAME TO select", 'syntax error at or near "select"', 31),
        ("DROP SUBSCRIPTION a b;", 'syntax error at or near "b"', 20),
        ("DROP SUBSCRIPTION if foo", 'syntax error at or near "foo"', 21),
        ("DROP SUBSCRIPTION if exists", "syntax error at end of input", 27),
        ("SHOW 1", 'syntax error at or near "1"', 5),
        ("SELECT 1 WHERE", "syntax error at end of input", 14),
        ("SELECT * FROM (SELECT 1", "syntax error at end of input", 23),
        ("SELECT 1 1x", 'trailing junk after numeric literal at or near "1x"', 9),
        ("", "syntax error at end of input", 0),
    ],
)
def test_syntax_errors_point_where_postgresql_s_do(text: str, message: str, position: int) -> None:
    with pytest.raises(SqlSyntaxError) as caught:
        parse_one(text)
    assert (caught.value.message, caught.value.position) == (message, position)


def test_syntax_comes_before_options() -> None:
    with pytest.raises(SqlSyntaxError, match='at or near "x"'):
        parse_one(f"{CREATE} WITH (foo = 1) x")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("CREATE PUBLICATION p", "CREATE PUBLICATION is not supported on a node that does not publish"),
        ("drop publication p", "DROP PUBLICATION is not supported on a node that does not publish"),
        ("CREATE TABLE t (a int)", "CREATE TABLE is not supported"),
        ("INSERT INTO t VALUES (1)", "INSERT is not supported"),
        ("SELECT * INTO t FROM u", "SELECT INTO is not supported"),
        ("SELECT * FROM t FOR UPDATE", "FOR UPDATE is not supported"),
        (
            "WITH x AS (DELETE FROM t RETURNING *) SELECT * FROM x",
            "a data-modifying WITH query is not supported",
        ),
    ],
)
def test_other_statements_are_refused(text: str, message: str) -> None:
    with pytest.raises(FeatureNotSupported) as caught:
        parse_one(text)
    assert caught.value.message == message


@pytest.mark.parametrize(
    ("text", "tables"),
    [
        ("SELECT 1", []),
        ("SELECT * FROM Pg_Subscription s", [(None, "pg_subscription")]),
        ('SELECT * FROM public."T" JOIN b ON true', [("public", "T"), (None, "b")]),
        (
            "WITH a AS (SELECT * FROM c) SELECT * FROM a, public.a, generate_series(1, 2)",
            [(None, "c"), ("public", "a")],
        ),
        ("SELECT (SELECT max(x) FROM d) FROM e WHERE y IN (SELECT 1 FROM f) UNION SELECT 1 FROM e", None),
        ("TABLE t", [(None, "t")]),
        ("(SELECT 1 FROM g)", [(None, "g")]),
    ],
)
def test_a_query_s_tables(text: str, tables: list[tuple[str | None, str]] | None) -> None:
    statement = parse_one(f" {text} ; ")
    assert isinstance(statement, Select)
    assert statement.sql == text
    names = (
        {QualifiedName(*table) for table in tables}
        if tables is not None
        else {QualifiedName(None, name) for name in "def"}
    )
    assert set(statement.tables) == names


def test_a_script_s_statements_come_in_order() -> None:
    script = "SHOW ALL; -- one\n;\nSELECT ';' /* ; */;\nDROP SUBSCRIPTION s"
    assert parse(script) == [Show(None), Select("SELECT ';' /* ; */", ()), DropSubscription("s")]
    assert parse_statement("; ") is None
    with pytest.raises(SqlSyntaxError, match="multiple commands"):
        parse_one(script)


def test_passwords_show_in_neither_repr_nor_str() -> None:
    for statement in (
        parse_one("CREATE SUBSCRIPTION s CONNECTION 'host=h password=secret' PUBLICATION p"),
        parse_one("ALTER SUBSCRIPTION s CONNECTION 'postgresql://u:secret@h/d'"),
    ):
        assert "secret" not in repr(statement) + str(statement)
        assert "secret" in to_sql(statement)


def test_a_name_that_is_cut_gives_a_notice() -> None:
    notices: list[str] = []
    statement = parse_one(f"DROP SUBSCRIPTION {'a' * 70}", notices)
    assert statement == DropSubscription("a" * 63)
    assert notices == [f'identifier "{"a" * 70}" will be truncated to "{"a" * 63}"']


@pytest.mark.parametrize(
    ("statement", "hint"),
    [
        ("CREATE SUBSCRIPTION s CONNECTION '' PUBLICATION p WITH (copy_dta = false)", "copy_data"),
        ("ALTER SUBSCRIPTION s SET (strem = on)", None),
        ("ALTER SUBSCRIPTION s SET (streamin = on)", "streaming"),
        ("ALTER SUBSCRIPTION s REFRESH PUBLICATION WITH (copydata = false)", "copy_data"),
        ("ALTER SUBSCRIPTION s SKIP (lns = '0/1')", None),
        ("ALTER SUBSCRIPTION s SET (nothing_like_it = 1)", None),
    ],
)
def test_a_mistyped_option_brings_the_nearest_to_mind(statement: str, hint: str | None) -> None:
    with pytest.raises(PubsubError, match="unrecognized subscription parameter") as caught:
        parse(statement)
    assert caught.value.hint == (None if hint is None else f'Perhaps you meant the option "{hint}".')


def test_a_malformed_amount_names_the_units() -> None:
    with pytest.raises(PubsubError) as caught:
        parse("ALTER SUBSCRIPTION s SET (batch_age = 'fast')")
    assert caught.value.message == 'invalid value for parameter "batch_age": "fast"'
    assert caught.value.hint == 'Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".'


def test_a_source_is_given_when_the_subscription_is_created() -> None:
    """With a column of its own name, and not with options that would concern other sources' rows."""
    found = options_of("source = 'tenant 7'")
    assert (found.source, found.source_column) == ("tenant 7", "_pubsub_source")
    assert found.layouts.sharing.source_of("s", "t") == Source("_pubsub_source", "tenant 7")
    assert options_of("source = a, source_column = tenant").sharing.source_of("s", "t") == Source("tenant", "a")
    assert options_of("binary").layouts.sharing.source_of("s", "t") is None
    gathered = options_of("gather = 't_*.* (all)', source_column = tenant")
    assert gathered.sharing.source_of("t_1", "o") == Source("tenant", "t_1")
    for text, message in (
        ("source = ''", "invalid value for parameter"),
        (f"source = '{'x' * 201}'", "invalid value for parameter"),
        ("source = '__HIVE_DEFAULT_PARTITION__'", "invalid value for parameter"),
        ("source = 'a\nb'", "invalid value for parameter"),
        ("source = a, source_column = 'a b'", "invalid value for parameter"),
        ("source_column = tenant", "source_column requires a source"),
        ("source = a, mode = 'public.t (history)'", "mutually exclusive"),
        ("source = a, gather = 'a.* (b)'", "mutually exclusive"),
        ("gather = 'a.* (b)', dropped_columns = drop", "mutually exclusive"),
        ("gather = 'a'", "invalid value for parameter"),
        ("source = a, dropped_columns = drop", "mutually exclusive"),
        ("source = a, register = lake", "mutually exclusive"),
        ("source = a, cluster_by = 'public.t (a)'", "mutually exclusive"),
        ("source = a, partition_by = 'public.t (a)'", "mutually exclusive"),
    ):
        with pytest.raises(PubsubError, match=message):
            options_of(text)
    with pytest.raises(PubsubError, match="unrecognized subscription parameter"):
        parse_one("ALTER SUBSCRIPTION s SET (source = a)")
