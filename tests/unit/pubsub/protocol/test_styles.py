"""Texts under a session's settings, without a server; test_070 compares them with servers."""

from __future__ import annotations

import struct

import pytest

from pubsub.protocol.output.styles import REPEAT, Styles, TimeZone

# One hour east, and two in "summer", the second half of every 400 years.
ZONE = TimeZone((0, REPEAT // 2), (3600, 7200), ("A", "B"), end=REPEAT)


@pytest.mark.parametrize("turns", [-3, -1, 0, 1, 700])
def test_a_time_zone_rule_repeats(turns: int) -> None:
    rule = TimeZone(ZONE.since, ZONE.offsets, ZONE.names, ZONE.end, is_rule=True)
    for moment in (0, REPEAT // 2 - 1, REPEAT // 2, REPEAT - 1):
        assert rule.at(moment + turns * REPEAT) == ZONE.at(moment)


def test_the_first_offset_holds_before_the_first_change() -> None:
    assert ZONE.at(-1) == ZONE.at(-REPEAT) == (3600, "A")


def test_default_styles_need_no_output_functions() -> None:
    assert Styles().outputs() == {}
    assert set(Styles(zone=ZONE).outputs()) == {1184}


@pytest.mark.parametrize(
    ("styles", "text"),
    [
        (Styles(), b"2000-01-02 22:30:00.5+00"),
        (Styles(zone=ZONE), b"2000-01-02 23:30:00.5+01"),
        (Styles(zone=ZONE, date="SQL"), b"01/02/2000 23:30:00.5 A"),
        (Styles(zone=ZONE, date="SQL", day_first=True), b"02/01/2000 23:30:00.5 A"),
        (Styles(zone=ZONE, date="German"), b"02.01.2000 23:30:00.5 A"),
        (Styles(zone=ZONE, date="Postgres"), b"Sun Jan 02 23:30:00.5 2000 A"),
        (Styles(date="Postgres", day_first=True), b"Sun 02 Jan 22:30:00.5 2000 UTC"),
    ],
)
def test_moments(styles: Styles, text: bytes) -> None:
    value = struct.pack("<q", ((24 + 22) * 3600 + 30 * 60) * 1_000_000 + 500_000)
    assert styles.timestamptz_out(value) == text


@pytest.mark.parametrize(
    ("style", "microseconds", "days", "months", "text"),
    [
        ("iso_8601", 0, 0, 0, b"PT0S"),
        ("iso_8601", -3_725_000_001, 1, -14, b"P-1Y-2M1DT-1H-2M-5.000001S"),
        ("sql_standard", 0, 0, 0, b"0"),
        ("sql_standard", -3_725_000_001, 0, 0, b"-1:02:05.000001"),
        ("sql_standard", 3_600_000_000, -1, 0, b"+0-0 -1 +1:00:00"),
        ("sql_standard", 0, 0, -14, b"-1-2"),
        ("postgres_verbose", 0, 0, 0, b"@ 0"),
        ("postgres_verbose", -1_000_000, 0, 0, b"@ 1 sec ago"),
        ("postgres_verbose", 1_500_000, -2, 1, b"@ 1 mon -2 days 1.5 secs"),
    ],
)
def test_intervals(style: str, microseconds: int, days: int, months: int, text: bytes) -> None:
    out = Styles(interval=style).outputs()[1186]
    assert out(struct.pack("<qii", microseconds, days, months)) == text


@pytest.mark.parametrize(
    ("digits", "double", "single"),
    [(0, b"0.333333333333333", b"0.333333"), (-15, b"0.3", b"0.3"), (-5, b"0.3333333333", b"0.3")],
)
def test_floats(digits: int, double: bytes, single: bytes) -> None:
    outputs = Styles(float_digits=digits).outputs()
    assert outputs[701](struct.pack("<d", 1 / 3)) == double
    assert outputs[700](struct.pack("<f", 1 / 3)) == single
    assert outputs[600](struct.pack("<dd", 1 / 3, 2)) == b"(" + double + b",2)"


def test_bytea() -> None:
    assert Styles(bytea_escape=True).outputs()[17](b"a'\\\x00\x7f\xff ~") == rb"a'\\\000\177\377 ~"
