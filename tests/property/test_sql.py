"""Every statement on subscriptions prints as SQL that parses back to it, alone and in a script."""

from __future__ import annotations

import contextlib
import itertools
import re
from decimal import Decimal

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pubsub.errors import PubsubError
from pubsub.protocol.lsn import Lsn
from pubsub.sql import options as o
from pubsub.sql.identifiers import (
    QualifiedName,
    decode_path,
    encode_path,
    parse_qualified_name,
    quote_identifier,
    quote_literal,
)
from pubsub.sql.lexer import split, tokenize
from pubsub.sql.options import Option, SubscriptionOptions, resolve
from pubsub.sql.parser import parse, parse_one, script_statements
from pubsub.sql.statements import (
    AddPublication,
    AlterAction,
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
    SetOptions,
    SetPublication,
    Show,
    Skip,
    Statement,
    to_sql,
)

characters = st.characters(exclude_characters="\0", exclude_categories=["Cs"])
texts = st.text(characters, max_size=20) | st.sampled_from(["'", "\\", "a'b", "$$", "--", "/*", ";", "a\n'b'", "E'\\"])
names = st.text(characters, min_size=1, max_size=15) | st.sampled_from(
    ["select", "user", "none", "int", "Sub", "a.b", 'a"b', "left", "é", "current_user"]
)
publications = st.lists(names, min_size=1, max_size=3, unique=True).map(tuple)
booleans = st.booleans().map(lambda value: "true" if value else "off")
_values: dict[str, st.SearchStrategy[object]] = {
    **dict.fromkeys(o.CREATE_OPTIONS, booleans),
    "slot_name": st.from_regex("[a-z0-9_]{1,20}", fullmatch=True),
    "synchronous_commit": st.sampled_from(["on", "off", "local", "remote_apply"]),
    "streaming": st.sampled_from(["on", "off", "parallel"]),
    "two_phase": st.just("false"),
    "binary": st.sampled_from(["true", "false"]),
    "origin": st.sampled_from(["any", "none"]),
    "target": st.text(characters, min_size=1, max_size=10),
    "source": st.sampled_from(["tenant_7", "none", "it's \u00fc", "a\\b"]),
    "gather": st.sampled_from(["", "tenant_*.* (tenants)", 'public.o_*_1 (public.o), "A".b (c."D")']),
    "source_column": st.sampled_from(["_pubsub_source", "tenant", "T"]),
    "copy_first": st.sampled_from(["", 's."T t", public.*', "*"]),
    "partition_by": st.sampled_from(["", "public.t (a)", 's.* (a, "B b"), * (c)']),
    "cluster_by": st.sampled_from(["", "public.u (a, b)"]),
    "table_properties": st.sampled_from(["", '* (team = "a b"), s.t (delta.enableChangeDataFeed = true)']),
    "mode": st.sampled_from(["", "history", "scd2", "public.t (history), public.u (scd2), s.* (mirror)"]),
    "deletes": st.sampled_from(["", "soft", "public.t (soft), s.* (hard)"]),
    "register": st.sampled_from(["", "lake", "lake.shop", 'public.t (lake.shop."All of it"), * (spark_catalog.s)']),
    "truncate": st.sampled_from(["", "ignore", "public.t (ignore), s.* (soft), * (follow)"]),
    "metadata": st.sampled_from(["", "* (lsn)", 'public.t (op, commit_time "changed at"), s.* (xid x)']),
    "columns": st.sampled_from(["", 'public.t (a, "B b")']),
    "exclude": st.sampled_from(["", "s.* (a), public.t (b)"]),
    "mask": st.sampled_from(["", "s.* (a hash, b null), public.t (b truncate 4, c redact)"]),
    "rename": st.sampled_from(["", 's.* (a b), public.t (b "C c", "D d" b)', "* (id id)"]),
    "where": st.sampled_from(["", "s.* (a = 1 AND (b OR NOT c)), public.t (d <> 'it''s (odd)')", '* ("A a" IS NULL)']),
    "new_tables": st.sampled_from(["ignore", "follow"]),
    "on_slot_loss": st.sampled_from(["stop", "resync"]),
    "wal_archive": st.sampled_from(["none", "/archive", "restore_command", "/with 'quotes' and, more"]),
    "on_table_error": st.sampled_from(["stop", "isolate"]),
    "schema_changes": st.sampled_from(["follow", "refuse"]),
    "dropped_columns": st.sampled_from(["keep", "drop"]),
    "types": st.sampled_from(["", "date text", 'public."T".c natural, numeric text']),
    "batch_rows": st.integers(1, 2**31 - 1),
    "batch_bytes": st.integers(1 << 16, 1 << 40),
    "batch_age": st.integers(1, 2**31 - 1),
    "retain_dead_tuples": st.just("off"),
    "max_retention_duration": st.integers(0, 2**31 - 1),
    "wal_receiver_timeout": st.integers(-1, 2**31 - 1),
    "stop_lsn": st.integers(0, 2**64 - 1).map(lambda lsn: str(Lsn(lsn))) | st.just("none"),
}


def option_sets(allowed: tuple[str, ...], least: int) -> st.SearchStrategy[SubscriptionOptions]:
    """Draw options as `resolve` makes them from a statement's own; leave out contradictory ones."""
    chosen = st.lists(st.sampled_from(allowed), min_size=least, unique=True)
    given_values = chosen.flatmap(lambda found: st.fixed_dictionaries({name: _values[name] for name in found}))

    def build(values: dict[str, object]) -> SubscriptionOptions | None:
        try:
            return resolve([Option(name, value) for name, value in values.items()], allowed)  # type: ignore[arg-type]
        except PubsubError as error:
            if "mutually exclusive" in error.message or "requires a source" in error.message:
                return None
            raise

    return given_values.map(build).filter(lambda found: found is not None)  # type: ignore[return-value]


lsns = st.integers(0, 2**64 - 1).map(Lsn)
actions: st.SearchStrategy[AlterAction] = st.one_of(
    st.just(Enable()),
    st.just(Disable()),
    texts.map(Connection),
    st.builds(RefreshPublication, st.booleans()),
    st.builds(RefreshSequences),
    st.builds(SetPublication, publications, st.booleans(), st.booleans()),
    st.builds(AddPublication, publications, st.booleans(), st.booleans()),
    st.builds(DropPublication, publications, st.booleans()),
    option_sets(o.SET_OPTIONS, 1).map(SetOptions),
    lsns.map(Skip),
    names.map(Rename),
    names.filter(lambda name: name not in ("public", "none")).map(Owner),
    st.sampled_from(["current_role", "current_user", "session_user"]).map(lambda role: Owner(role, keyword=True)),
    st.lists(st.builds(QualifiedName, st.none() | names, names), min_size=1, max_size=3).map(
        lambda tables: ResyncTable(tuple(tables))
    ),
)
statements: st.SearchStrategy[Statement] = st.one_of(
    st.builds(CreateSubscription, names, texts, publications, option_sets(o.CREATE_OPTIONS, 0)),
    st.builds(AlterSubscription, names, actions),
    st.builds(DropSubscription, names, st.booleans(), st.booleans()),
    st.builds(Show, st.none() | st.from_regex("[a-z][a-z_]{0,10}", fullmatch=True).filter(lambda name: name != "all")),
)


@given(statements)
@settings(max_examples=300, deadline=None)
def test_printed_statements_parse_back(statement: Statement) -> None:
    assert parse_one(to_sql(statement)) == statement


@example([DropSubscription("if", False, False)], ";")
@given(st.lists(statements, max_size=4), st.sampled_from([";", " ; ", ";\n-- a ; comment\n", "/* ; */;;"]))
@settings(max_examples=100, deadline=None)
def test_a_script_parses_to_its_statements(script: list[Statement], separator: str) -> None:
    assert parse(separator.join(map(to_sql, script))) == script


@given(statements)
@settings(max_examples=100, deadline=None)
def test_statements_cut_short_raise_only_typed_errors(statement: Statement) -> None:
    text = to_sql(statement)
    for end in range(len(text)):
        with contextlib.suppress(PubsubError):
            parse_one(text[:end])


@given(st.text(st.sampled_from("aZ1 '\"\\$eEuU&/*-;()=.,\n\0é"), max_size=30))
@settings(max_examples=500, deadline=None)
def test_any_text_gives_statements_or_a_typed_error(text: str) -> None:
    found, rest = split(text)
    place = 0
    for part in [*found, rest]:
        place = text.index(part, place) + len(part)
    for part in script_statements(text):
        try:
            tokens = tokenize(part)
        except PubsubError:
            continue
        assert all(0 <= token.start < token.end <= len(part) for token in tokens)
        assert all(one.end <= other.start for one, other in itertools.pairwise(tokens))


@given(st.text(characters, max_size=20))
@settings(max_examples=200)
def test_literals_and_names_read_back(text: str) -> None:
    assert [token.value for token in tokenize(quote_literal(text))] == [text]
    if text:
        name = text[:15]
        assert [token.value for token in tokenize(quote_identifier(name))] == [name]
        assert parse_qualified_name(f"{quote_identifier(name)}.{quote_identifier(name)}") == QualifiedName(name, name)


@given(st.text(st.characters(exclude_categories=["Cs"]), min_size=1, max_size=20))
@settings(max_examples=200)
def test_names_in_paths_are_safe_and_read_back(name: str) -> None:
    part = encode_path(name)
    assert decode_path(part) == name
    assert re.fullmatch("[A-Za-z0-9_-]+", part)


@given(st.decimals(allow_nan=False, allow_infinity=False) | st.integers(-(10**12), 10**12))
@settings(max_examples=200)
def test_numbers_are_values_of_options(number: Decimal | int) -> None:
    """The grammar takes any number; the option says what is wrong with it."""
    text = f"CREATE SUBSCRIPTION s CONNECTION '' PUBLICATION p WITH (batch_rows = {number})"
    try:
        statement = parse_one(text)
    except PubsubError as error:
        if "batch_rows" not in error.message:
            raise
    else:
        assert isinstance(statement, CreateSubscription)
        assert statement.options.batch_rows == round(number)
