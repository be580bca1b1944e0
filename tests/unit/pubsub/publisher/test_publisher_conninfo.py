"""Connection strings: parsing by libpq, looking up hosts beforehand, and hiding secrets."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Mapping
from typing import Any

import pytest

from pubsub.errors import ConnectionFailure, PubsubError
from pubsub.publisher.conninfo import Host, format_conninfo, parse_conninfo, resolve_hosts, split_report, with_hosts


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("PGHOST", "PGHOSTADDR", "PGPORT", "PGSERVICE", "PGSERVICEFILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.mark.parametrize(
    "conninfo",
    [
        "host=h port=5433 dbname='a b' user=u password='it''s'",
        "host=/run/postgresql options='-c work_mem=1MB -c search_path=a\\ b'",
        r"password='\\\'x' dbname=d",
        "postgresql://u:p%20w@h:5433,i:5434/d?target_session_attrs=read-write&sslmode=verify-full",
        "service=s",
        "",
    ],
)
def test_format_is_the_inverse_of_parse(conninfo: str) -> None:
    parameters = parse_conninfo(conninfo) if "''" not in conninfo else {"password": "it's", "dbname": "a b"}
    assert parse_conninfo(format_conninfo(parameters)) == parameters


def test_uri_and_keywords_mean_the_same() -> None:
    assert parse_conninfo("postgresql://u:p@h:5433/d") == parse_conninfo("user=u password=p host=h port=5433 dbname=d")


@pytest.mark.parametrize(
    ("conninfo", "secret"),
    [
        ("host=x password=open sesame", "sesame"),
        ('host=x password=open"sesame more', "sesame"),
        ("postgresql://u:se same@[::1/db", "same"),
        ("postgresql://u:sesame@h:5/db?hots=1", "sesame"),
        ("postgresql://u:sesame@[::1/db", "sesame"),
        ("postgresql://h/db?password=sesame&hots=1", "sesame"),
        ("postgresql://h/db?password=ses%zzame", "ses"),
    ],
)
def test_a_malformed_string_is_not_shown_after_a_secret(conninfo: str, secret: str) -> None:
    with pytest.raises(PubsubError) as caught:
        parse_conninfo(conninfo)
    assert caught.value.sqlstate == "42601"
    assert caught.value.message.startswith("invalid connection string syntax: ")
    assert secret not in caught.value.report()
    assert caught.value.__cause__ is None
    assert caught.value.__suppress_context__


def test_a_malformed_string_without_a_secret_is_shown() -> None:
    with pytest.raises(PubsubError, match='invalid connection option "hots"'):
        parse_conninfo("hots=x")


def _answers(monkeypatch: pytest.MonkeyPatch, names: Mapping[str, list[str]]) -> None:
    async def getaddrinfo(self: Any, host: str, port: Any, **options: Any) -> Any:
        if host not in names:
            raise socket.gaierror(-2, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0)) for address in names[host]]

    monkeypatch.setattr(asyncio.BaseEventLoop, "getaddrinfo", getaddrinfo)


async def test_each_address_of_each_name_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, {"a": ["10.0.0.1", "10.0.0.2", "10.0.0.1"]})
    parameters = {"host": "a,/run/postgresql,192.0.2.1,nowhere", "port": "1,2,3,4", "dbname": "d"}
    hosts = await resolve_hosts(parameters)
    assert hosts == [
        Host("a", "10.0.0.1", "1"),
        Host("a", "10.0.0.2", "1"),
        Host("/run/postgresql", "", "2"),
        Host("192.0.2.1", "192.0.2.1", "3"),
    ]
    assert with_hosts(parameters, hosts) == {
        "host": "a,a,/run/postgresql,192.0.2.1",
        "hostaddr": "10.0.0.1,10.0.0.2,,192.0.2.1",
        "port": "1,1,2,3",
        "dbname": "d",
    }


async def test_one_port_serves_all_hosts(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, {"a": ["10.0.0.1"], "b": ["10.0.0.2"]})
    hosts = await resolve_hosts({"host": "a,b", "port": "5"})
    assert [host.port for host in hosts] == ["5", "5"]


async def test_no_name_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, {})
    with pytest.raises(ConnectionFailure) as caught:
        await resolve_hosts({"host": "a,b"})
    assert caught.value.message == 'could not translate host name "a" to address: Name or service not known'
    assert caught.value.detail is not None
    assert '"b"' in caught.value.detail


@pytest.mark.parametrize(
    "parameters",
    [
        {},
        {"host": "a", "hostaddr": "10.0.0.9"},
        {"service": "s"},
        {"host": "a,b", "port": "1,2,3"},
    ],
)
async def test_parameters_left_to_libpq(monkeypatch: pytest.MonkeyPatch, parameters: dict[str, str]) -> None:
    _answers(monkeypatch, {})
    assert await resolve_hosts(parameters) == []
    assert with_hosts(parameters, []) == parameters


async def test_the_environment_names_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    _answers(monkeypatch, {"a": ["10.0.0.1"]})
    monkeypatch.setenv("PGHOST", "a")
    monkeypatch.setenv("PGPORT", "7")
    assert await resolve_hosts({}) == [Host("a", "10.0.0.1", "7")]


def test_split_report() -> None:
    text = (
        'connection to server at "h", port 1 failed: Connection refused\n'
        "\tIs the server running on that host\n"
        "\tand accepting TCP/IP connections?\n"
        'connection to server at "i", port 1 failed: FATAL:  no\n'
        "DETAIL:  Really not.\n"
        "HINT:  Ask.\n"
        'connection to server at "i", port 1 failed: FATAL:  no\n'
    )
    assert split_report(text) == (
        'connection to server at "h", port 1 failed: Connection refused',
        'connection to server at "i", port 1 failed: FATAL:  no\nReally not.',
        "Is the server running on that host and accepting TCP/IP connections? Ask.",
    )
    assert split_report("only this\n") == ("only this", None, None)


def test_a_name_of_another_encoding_stays_as_it_is() -> None:
    """Of a database in LATIN1 the name may be no UTF-8."""
    parameters = parse_conninfo("postgresql://r%E9@/d%E9")
    assert (parameters["user"], parameters["dbname"]) == ("r\udce9", "d\udce9")
    assert parse_conninfo(format_conninfo(parameters)) == parameters
