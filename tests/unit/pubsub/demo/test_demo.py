"""The demo's own logic: its measurements, display, options and interruption."""

from __future__ import annotations

import io
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import deltalake
import pyarrow as pa
import pytest
from rich.console import Console

from pubsub.demo.__main__ import main
from pubsub.demo.falsify import falsify
from pubsub.demo.figures import Batch, Rate, batches, copies, lags, percentile
from pubsub.demo.interruption import Interrupted, Interruption
from pubsub.demo.load import Rates
from pubsub.demo.node import MARKER, DemoFailed, DemoNode
from pubsub.demo.own import candidate
from pubsub.demo.processes import descendants, is_alive, jvm_of, kill_tree, memory, name_of
from pubsub.demo.progress import Waiter, first_error
from pubsub.demo.report import Figures, report
from pubsub.demo.screen import Reader, Screen, picture, summaries
from pubsub.protocol.lsn import Lsn


def table(name: str = "public.t", state: str = "r", copied: int | None = None, **more: object) -> dict[str, object]:
    known = {"name": name, "state": state, "lsn": None, "rows_copied": copied, "rows_estimated": 100}
    return {**known, "error": None, "hint": None, **more}


def status(*tables: dict[str, object], **more: object) -> dict[str, object]:
    known = {"name": "s", "received_lsn": "0/50", "flush_lsn": "0/40", "lag_bytes": 2048, "lag_seconds": 1.5}
    found = {**known, "rows_applied": 0, "error": None, "hint": None, "tables": list(tables), **more}
    return {"node": "1", "subscriptions": [found]}


# figures


def test_lag_counts_from_the_earlier_of_two_answers() -> None:
    times, lsns = [0.0, 1.0, 2.0, 3.0], [Lsn(10), Lsn(20), Lsn(20), Lsn(30)]
    # 15 was committed between 0 and 1, 25 between 2 and 3, nothing between 1 and 2.
    assert lags(times, lsns, [Batch(Lsn(15), Lsn(25), 5.0)], 0.0) == [3.0, 5.0]


def test_lag_looks_only_at_what_was_committed_since() -> None:
    times, lsns = [0.0, 1.0, 2.0], [Lsn(10), Lsn(20), Lsn(30)]
    committed = [Batch(Lsn(15), Lsn(20), 2.5), Batch(Lsn(25), Lsn(25), 4.0)]
    assert lags(times, lsns, committed, 0.0) == [2.5, 3.0]
    assert lags(times, lsns, committed, 1.0) == [3.0]


def test_lag_leaves_out_what_no_sample_reached() -> None:
    assert lags([0.0, 1.0], [Lsn(10), Lsn(20)], [Batch(Lsn(25), Lsn(30), 9.0)], 0.0) == []


def test_percentiles_are_of_the_values() -> None:
    values = [float(n) for n in range(1, 101)]
    assert (percentile(values, 50), percentile(values, 95), percentile(values, 100)) == (50.0, 95.0, 100.0)
    assert percentile([7.0], 95) == 7.0
    assert percentile([], 95) is None


def test_a_batch_is_visible_with_its_last_table(tmp_path: Path) -> None:
    for name, first, last, at in (("a", "0/10", "0/30", 5.0), ("b", "0/20", "0/30", 7.0), ("b", "0/40", "0/40", 9.0)):
        log = tmp_path / name / "_delta_log"
        log.mkdir(parents=True, exist_ok=True)
        entry = log / f"{len(list(log.iterdir())):020d}.json"
        metadata = json.dumps({"first": first, "last": last})
        entry.write_text(json.dumps({"commitInfo": {"userMetadata": metadata}}) + "\n" + json.dumps({"add": {}}))
        os.utime(entry, (at, at))
    (tmp_path / "a" / "_delta_log" / "00000000000000000009.json").write_text(json.dumps({"commitInfo": {}}))
    (tmp_path / "a" / "_delta_log" / "_staged.json").write_text("not an entry")
    assert batches([tmp_path / "a", tmp_path / "b"]) == [
        Batch(Lsn(0x10), Lsn(0x30), 7.0),
        Batch(Lsn(0x40), Lsn(0x40), 9.0),
    ]


def test_copies_are_read_from_the_daemons_log() -> None:
    events = [
        {"event": "daemon has started", "timestamp": "2030-01-01T00:00:00Z"},
        {"event": "copy has started", "relation": "public.a", "timestamp": "2030-01-01T00:00:01Z"},
        {"event": "copy has started", "relation": "public.a", "timestamp": "2030-01-01T00:00:05Z"},
        {"event": "copy has started", "relation": "public.b", "timestamp": "2030-01-01T00:00:05Z"},
        {"event": "copy is done", "relation": "public.a", "timestamp": "2030-01-01T00:00:07.5Z"},
    ]
    (found,) = copies(events)
    assert (found.relation, found.seconds) == ("public.a", 2.5)


def test_a_rate_is_over_the_last_seconds() -> None:
    rate = Rate(5.0)
    assert rate.add(0.0, 100) == 0.0
    assert rate.add(1.0, 200) == 100.0
    assert rate.add(5.0, 600) == 100.0
    assert rate.add(10.0, 600) == 0.0
    assert rate.fastest == 100.0
    assert rate.add(11.0, 50) == 0.0  # starts anew


def test_the_report_says_what_was_not_seen() -> None:
    nothing = Figures([], {}, {}, 0.0, [], None, 0, 0, 0)
    assert "nothing was written" in report(nothing)
    assert "not seen" in report(nothing)


def test_the_report() -> None:
    found = copies(
        [
            {"event": "copy has started", "relation": "public.a", "timestamp": "2030-01-01T00:00:00Z"},
            {"event": "copy is done", "relation": "public.a", "timestamp": "2030-01-01T00:00:02Z"},
        ]
    )
    text = report(
        Figures([(found[0], 1000)], {"s": 300}, {"s": 90.0}, 10.0, [0.5, 1.0, 2.0], 77, 200 << 20, 900 << 20, 5 << 20)
    )
    assert "1,000 rows of 1 tables in 2.0 s: 500 rows/s" in text
    assert "300 row changes in 10.0 s: 30 rows/s" in text
    assert "p50 1.00 s, p95 2.00 s, max 2.00 s" in text
    assert "Python 200 MB, its JVM 900 MB" in text
    assert "77 transactions" in text


# the view


def test_the_view_shows_states_rows_rates_and_lag() -> None:
    reader = Reader()
    reader.read(status(table(state="d", copied=10)), 0.0)
    lines = reader.read(status(table(state="d", copied=40), table("public.u", "i"), rows_applied=8), 2.0)
    (line,) = summaries(lines)
    assert line == "s: di  copied 40 rows  15 rows/s  applied 8 changes  4/s  lag 1.5 s 2 kB"
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(picture(lines, "now"))
    shown = console.export_text()
    assert "40 of ~100" in shown
    assert "d  copying" in shown
    assert "i  waiting" in shown


@pytest.mark.parametrize("state", list("idfwcsr"))
def test_the_view_names_every_state(state: str) -> None:
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(picture(Reader().read(status(table(state=state)), 0.0), ""))
    assert f"{state}  " in console.export_text()


def test_the_view_shows_what_failed() -> None:
    found = status(table(error="no such thing", hint="look"), error="gone")
    (line,) = summaries(Reader().read(found, 0.0))
    assert line.endswith("ERROR: gone")
    console = Console(file=io.StringIO(), width=120, record=True)
    console.print(picture(Reader().read(found, 0.0), ""))
    assert "s: public.t: no such thing" in console.export_text()
    assert first_error(found) == "s: public.t: no such thing\nHINT:  look"
    assert first_error(status(table())) is None


# waiting


class FakeNode(DemoNode):
    """A node with a given status."""

    def __init__(self, tmp_path: Path, document: dict[str, object]) -> None:
        super().__init__(tmp_path, Interruption(), print)
        self._status = document


@pytest.mark.parametrize(
    ("document", "lsn", "expected"),
    [
        (status(table()), 0x40, True),
        (status(table()), 0x41, False),
        (status(table(), table("public.u", "s")), 0x40, False),
        ({"subscriptions": []}, 0, False),
    ],
)
def test_caught_up_is_ready_and_durable(tmp_path: Path, document: dict[str, object], lsn: int, expected: bool) -> None:
    screen = Screen(quiet=True, console=Console(file=io.StringIO()))
    waiter = Waiter(FakeNode(tmp_path, document), Interruption(), screen)
    assert waiter.caught_up(["s"], Lsn(lsn)) is expected


def test_a_wait_without_progress_ends(tmp_path: Path) -> None:
    screen = Screen(quiet=True, console=Console(file=io.StringIO()))
    waiter = Waiter(FakeNode(tmp_path, status(table(state="d", error="torn"))), Interruption(), screen)
    with pytest.raises(DemoFailed, match=r"nothing has moved for 0 seconds: copying: s: public\.t: torn"):
        waiter.until(lambda: False, "copying", patience=0.0)


# interruption


def test_a_signal_ends_a_wait() -> None:
    interruption = Interruption()
    task = interruption.start(lambda: interruption.sleep(60.0))
    interruption.note(signal.SIGTERM)
    with pytest.raises(Interrupted, match="SIGTERM"):
        task.result()
    with pytest.raises(Interrupted):
        interruption.check()


def test_a_task_gives_its_value_or_its_error() -> None:
    interruption = Interruption()
    assert interruption.run(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruption.run(lambda: 1 // 0)


def test_a_process_is_waited_for() -> None:
    interruption = Interruption()
    with subprocess.Popen([sys.executable, "-c", "raise SystemExit(3)"], text=True) as process:
        assert interruption.wait(process, 60.0) == 3
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True) as process:
        with pytest.raises(TimeoutError):
            interruption.wait(process, 0.0)
        process.kill()


# a falsified value


def test_one_value_is_falsified_and_nothing_else(tmp_path: Path) -> None:
    path = str(tmp_path / "t")
    for rows in ([("a", "one"), ("b", "two")], [("0", None), ("c", "three")]):
        keys, names = zip(*rows, strict=True)
        deltalake.write_deltalake(path, pa.table({"id": keys, "name": pa.array(names, pa.string())}), mode="append")
    assert falsify(Path(path), "id", "name") == "a"
    found = deltalake.DeltaTable(path).to_pyarrow_table().to_pylist()
    expected = {"0": None, "a": "one falsified", "b": "two", "c": "three"}
    assert {row["id"]: row["name"] for row in found} == expected
    assert len(found) == 4


# the node's directory


def test_a_directory_that_is_not_a_demos_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "precious").write_text("x")
    with pytest.raises(DemoFailed, match="was not made by a demo"):
        DemoNode(tmp_path, Interruption(), print).make_fresh()
    assert (tmp_path / "precious").exists()


def test_a_demo_starts_from_nothing(tmp_path: Path) -> None:
    home = tmp_path / "home"
    DemoNode(home, Interruption(), print).make_fresh()
    (home / "catalog.db").write_text("old")
    DemoNode(home, Interruption(), print).make_fresh()
    assert [path.name for path in home.iterdir()] == [MARKER]


def test_the_log_is_shown_for_people(tmp_path: Path) -> None:
    node = DemoNode(tmp_path, Interruption(), print)
    assert node.log_tail() == ""
    entry = {
        "timestamp": "2030-01-01T10:11:12.5Z",
        "level": "error",
        "event": "worker failed",
        "reason": "x",
        "hint": None,
    }
    node.log.write_text("first\n" * 20 + json.dumps(entry) + "\n")
    lines = node.log_tail(3).splitlines()
    assert lines[1:] == ["  first", "  first", "  10:11:12 error   worker failed  reason=x"]
    assert [event["event"] for event in node.events()] == ["worker failed"]


# the user's own database


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        (("s", "t", 5, True, True, True, True), None),
        (("s", "t", 5, True, True, True, False), "would refuse its UPDATEs"),
        (("s", "t", 5, True, False, True, True), "owner"),
        (("s", "t", 5, False, True, True, True), "permission denied"),
        (("s", "t", 5, True, True, False, True), "unlogged"),
    ],
)
def test_tables_that_cannot_be_followed_are_left_out(row: tuple[object, ...], reason: str | None) -> None:
    found = candidate(row).reason
    assert (found is None) if reason is None else (found is not None and reason in found)


def test_a_table_that_was_never_analyzed_has_no_negative_rows() -> None:
    assert candidate(("s", "t", -1, True, True, True, True)).rows == 0


# options


def test_gentle_writers_still_write() -> None:
    assert Rates(600, 3).gentle() == Rates(120, 1)
    assert Rates(0, 10).shown == "as many as possible transactions/s on pgbench, 10 transactions/s on orders"


@pytest.mark.parametrize("arguments", [["--seconds", "0"], ["--scale", "x"], ["--tps", "-1"], ["what"]])
def test_wrong_usage(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    assert "usage" in capsys.readouterr().err


# processes


def test_a_tree_of_processes_is_killed() -> None:
    script = "import subprocess, sys; p = subprocess.Popen(['sleep', '600']); print(p.pid, flush=True); p.wait()"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        child = int(process.stdout.readline())
        assert descendants(process.pid) == [child]
        assert name_of(process.pid).startswith("python")
        assert memory(process.pid, "VmHWM") > 1 << 20
        assert jvm_of(process.pid) is None
        kill_tree(process.pid)
        assert not is_alive(child)
        assert not is_alive(process.pid)
    assert memory(process.pid, "VmHWM") == 0
