"""repl_gram.py parses what commands.py builds; any text is a command, SQL or a typed error."""

from __future__ import annotations

import contextlib

from hypothesis import example, given, settings
from hypothesis import strategies as st

from pubsub.errors import PubsubError
from pubsub.protocol import commands
from pubsub.protocol.lsn import Lsn
from walsender import repl_gram as gram

texts = st.text(st.characters(exclude_characters="\0"), max_size=15) | st.sampled_from(
    ['"', '""', "'", "a\\'b", "a'; DROP", "E'\\n'", "SLOT", "a,b", " ", "", "日本", "A.B", "\n", "$1"]
)
options = st.dictionaries(texts, texts, max_size=4)
snapshots: st.SearchStrategy[commands.Snapshot] = st.sampled_from(["export", "nothing", "use"])


@given(texts, st.integers(0, (1 << 64) - 1), options)
@settings(max_examples=200)
def test_start_replication(slot: str, lsn: int, given_options: dict[str, str]) -> None:
    parsed = gram.parse_command(commands.start_replication(slot, lsn, given_options))
    assert parsed == gram.StartLogicalReplication(slot, Lsn(lsn), tuple(given_options.items()))


@given(texts, texts, snapshots, st.booleans(), st.booleans(), st.booleans())
def test_create_replication_slot(
    slot: str, plugin: str, snapshot: commands.Snapshot, temporary: bool, two_phase: bool, failover: bool
) -> None:
    text = commands.create_replication_slot(
        slot,
        plugin,
        snapshot=snapshot,
        temporary=temporary,
        two_phase=two_phase,
        failover=failover,
        server_version=180000,
    )
    assert gram.parse_command(text) == gram.CreateReplicationSlot(
        slot, plugin, temporary, snapshot, two_phase, failover
    )


@given(texts, st.booleans())
def test_drop_replication_slot(slot: str, wait: bool) -> None:
    assert gram.parse_command(commands.drop_replication_slot(slot, wait=wait)) == gram.DropReplicationSlot(slot, wait)


@given(texts, st.booleans(), st.none() | st.booleans())
def test_alter_replication_slot(slot: str, failover: bool, two_phase: bool | None) -> None:
    text = commands.alter_replication_slot(slot, failover=failover, two_phase=two_phase)
    assert gram.parse_command(text) == gram.AlterReplicationSlot(slot, failover, two_phase)


@given(st.lists(texts, min_size=1, max_size=5))
def test_a_list_of_names_is_split_again(names: list[str]) -> None:
    assert gram.split_identifiers(commands.join_identifiers(names)) == tuple(names)


@given(
    st.sampled_from([140000, 150000, 160004, 170000, 180004]),
    st.lists(texts, min_size=1, max_size=3),
    st.sampled_from(["off", "on", "parallel"]),
    st.booleans(),
    st.sampled_from(["any", "none"]),
    st.booleans(),
)
def test_the_options_of_pgoutput_reach_the_walsender(
    version: int,
    publications: list[str],
    streaming: commands.Streaming,
    binary: bool,
    origin: commands.OriginFilter,
    two_phase: bool,
) -> None:
    asked = commands.pgoutput_options(
        version, publications, streaming=streaming, binary=binary, origin=origin, two_phase=two_phase
    )
    command = gram.parse_command(commands.start_replication("s", 0, asked))
    assert isinstance(command, gram.StartLogicalReplication)
    parameters = gram.parse_pgoutput_options(command.options)
    assert parameters.publications == tuple(publications)
    assert parameters.binary == binary
    assert parameters.two_phase == (two_phase and version >= 150000)
    assert parameters.origin == (origin if version >= 160000 else "any")
    assert (parameters.streaming == "off") == (streaming == "off")
    assert (parameters.streaming == "parallel") == commands.streams_in_parallel(asked)


words = st.sampled_from(
    [
        *("START_REPLICATION", "CREATE_REPLICATION_SLOT", "DROP_REPLICATION_SLOT", "ALTER_REPLICATION_SLOT", "SHOW"),
        *("SLOT", "LOGICAL", "PHYSICAL", "TIMELINE", "TEMPORARY", "USE_SNAPSHOT", "TWO_PHASE", "WAIT", "0/0", "1"),
        *("(", ")", ",", ";", ".", "a", '"B"', "'c'", '"', "'", "99999999999", "0/123456789", "é", "%"),
    ]
)


@given(st.lists(words, max_size=9).map(" ".join) | texts)
@settings(max_examples=400)
@example("START_REPLICATION 0/123456789")
def test_any_text_is_a_command_or_sql_or_a_typed_error(text: str) -> None:
    with contextlib.suppress(PubsubError):
        gram.parse_command(text)
