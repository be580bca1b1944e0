"""Replication commands as stock subscribers of 15, 16 and 18 send them."""

from __future__ import annotations

import pytest

from pubsub.errors import FeatureNotSupported, InvalidValue
from pubsub.protocol import commands
from pubsub.protocol.lsn import Lsn


def test_the_slot_of_a_subscription() -> None:
    create = commands.create_replication_slot
    assert (
        create("sub15", snapshot="nothing", server_version=150004)
        == "CREATE_REPLICATION_SLOT \"sub15\" LOGICAL pgoutput (SNAPSHOT 'nothing')"
    )
    assert (
        create("sub18", snapshot="nothing", failover=True, server_version=180004)
        == "CREATE_REPLICATION_SLOT \"sub18\" LOGICAL pgoutput (FAILOVER, SNAPSHOT 'nothing')"
    )
    assert (
        create("s", snapshot="use", temporary=True, two_phase=True, failover=True, server_version=180004)
        == "CREATE_REPLICATION_SLOT \"s\" TEMPORARY LOGICAL pgoutput (TWO_PHASE, FAILOVER, SNAPSHOT 'use')"
    )
    assert (
        create("old", snapshot="export", server_version=140010)
        == 'CREATE_REPLICATION_SLOT "old" LOGICAL pgoutput EXPORT_SNAPSHOT'
    )


def test_a_slot_option_that_the_server_lacks_is_refused() -> None:
    with pytest.raises(FeatureNotSupported):
        commands.create_replication_slot("s", snapshot="use", failover=True, server_version=160000)
    with pytest.raises(FeatureNotSupported):
        commands.create_replication_slot("s", snapshot="use", two_phase=True, server_version=140000)


def test_start_as_a_stock_subscriber_of_each_version() -> None:
    def start(version: int, streaming: commands.Streaming, two_phase: bool = False) -> str:
        options = commands.pgoutput_options(version, ["p1"], streaming=streaming, origin="none", two_phase=two_phase)
        return commands.start_replication("sub", 0, options)

    head = 'START_REPLICATION SLOT "sub" LOGICAL 0/0 '
    assert start(150000, "parallel") == head + "(proto_version '3', streaming 'on', publication_names '\"p1\"')"
    for version in (160000, 180000):
        assert start(version, "parallel") == head + (
            "(proto_version '4', streaming 'parallel', origin 'none', publication_names '\"p1\"')"
        )
        assert start(version, "parallel", two_phase=True) == head + (
            "(proto_version '4', streaming 'parallel', two_phase 'on', origin 'none', publication_names '\"p1\"')"
        )


def test_the_protocol_does_not_depend_on_what_is_streamed() -> None:
    versions = (130000, 140000, 150000, 160000, 170000, 180000)
    assert [commands.protocol_version(version) for version in versions] == [1, 2, 3, 4, 4, 4]
    assert commands.pgoutput_options(180000, ["p"])["proto_version"] == "4"


def test_streaming_off_is_not_sent() -> None:
    assert commands.pgoutput_options(180000, ["p"]) == {
        "proto_version": "4",
        "origin": "any",
        "publication_names": '"p"',
    }


def test_options_that_a_server_does_not_know_are_left_out() -> None:
    options = commands.pgoutput_options(
        130000, ["p"], streaming="parallel", binary=True, origin="none", two_phase=True, messages=True
    )
    assert options == {"proto_version": "1", "publication_names": '"p"'}


def test_all_options() -> None:
    options = commands.pgoutput_options(
        180000, ["p"], streaming="on", binary=True, origin="none", two_phase=True, messages=True
    )
    assert options == {
        "proto_version": "4",
        "streaming": "on",
        "two_phase": "on",
        "origin": "none",
        "publication_names": '"p"',
        "binary": "true",
        "messages": "true",
    }


def test_a_stream_abort_has_its_lsn_only_under_parallel() -> None:
    def parallel(version: int, streaming: commands.Streaming) -> bool:
        return commands.streams_in_parallel(commands.pgoutput_options(version, ["p"], streaming=streaming))

    assert parallel(160000, "parallel")
    assert not parallel(160000, "on")
    assert not parallel(150000, "parallel")
    assert not parallel(180000, "off")


def test_publications_are_quoted_twice() -> None:
    options = commands.pgoutput_options(150000, ["""we,ird "p'\\ub""", "P 2"])
    assert options["publication_names"] == '''"we,ird ""p'\\ub","P 2"'''
    command = commands.start_replication("s", Lsn.parse("1/1B1D650"), options)
    assert command == (
        'START_REPLICATION SLOT "s" LOGICAL 1/1B1D650 '
        """(proto_version '3', publication_names '"we,ird ""p''\\ub","P 2"')"""
    )


def test_a_plain_int_is_a_position_too() -> None:
    assert commands.start_replication("s", 0x1_0000_002A, {}) == 'START_REPLICATION SLOT "s" LOGICAL 1/2A'


def test_no_publications() -> None:
    with pytest.raises(ValueError, match="at least one publication"):
        commands.pgoutput_options(180000, [])


def test_drop_and_alter() -> None:
    assert commands.drop_replication_slot("s", wait=True) == 'DROP_REPLICATION_SLOT "s" WAIT'
    assert commands.drop_replication_slot("s", wait=False) == 'DROP_REPLICATION_SLOT "s"'
    assert commands.alter_replication_slot("s", failover=False) == 'ALTER_REPLICATION_SLOT "s" (FAILOVER false)'
    assert (
        commands.alter_replication_slot("s", failover=True, two_phase=False)
        == 'ALTER_REPLICATION_SLOT "s" (FAILOVER true, TWO_PHASE false)'
    )
    with pytest.raises(ValueError, match="nothing to alter"):
        commands.alter_replication_slot("s")


def test_quoting() -> None:
    assert commands.quote_identifier('a"b') == '"a""b"'
    assert commands.quote_string("a'b\\") == "'a''b\\'"
    for quote in (commands.quote_identifier, commands.quote_string):
        with pytest.raises(InvalidValue):
            quote("a\0b")
