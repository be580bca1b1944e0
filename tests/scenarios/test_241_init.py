"""`pubsub init`: a role without any right on a server that is not prepared, up to the first rows in Delta."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from pubsub.cli.app import app
from pubsub.cli.init import SETTINGS
from pubsub.delta.spark.spark_session import Spark
from pubsub.settings import Settings
from pubsub.sql.identifiers import quote_qualified
from pubsub.testing.compare import compare_tables
from pubsub.testing.fixtures import Database
from pubsub.testing.servers import EmbeddedPostgres
from tests.support.replica import PATIENCE, RunningNode, wait_until

TO_CHANGE = "To be changed on the publisher"


def init(home: Path, *arguments: str) -> Result:
    ran = CliRunner().invoke(app, ["--home", str(home), "init", *arguments])
    if ran.exception is not None and not isinstance(ran.exception, SystemExit):
        raise ran.exception
    return ran


def changes(ran: Result) -> list[str]:
    """Return the lines that the publisher's administrator is given."""
    assert ran.exit_code == 1, ran.output
    _, found, rest = ran.stdout.partition(TO_CHANGE)
    assert found, ran.output
    return [line.strip() for line in rest.splitlines()[1:] if line.startswith("    ")]


def carry_out(server: EmbeddedPostgres, dbname: str, lines: list[str]) -> None:
    """Do what the lines say, and nothing else."""
    for line in lines:
        if not line.startswith("--"):
            server.execute(line, dbname)
        elif line == "-- and restart the server":
            server.restart()
        elif "pg_hba.conf" not in line:
            file = server.data_dir / "pg_hba.conf"
            file.write_text(line.removeprefix("--").strip().replace("scram-sha-256", "trust") + "\n" + file.read_text())


def test_from_nothing_to_rows(spark: Spark, tmp_path: Path) -> None:
    """Each time what the output says is done, word by word; in the end the tables are in Delta."""
    unprepared = EmbeddedPostgres("18")
    del unprepared._settings["wal_level"]  # on the command line it would go before what ALTER SYSTEM sets
    with unprepared as server:
        server.create_database("shop")
        server.execute(
            """
            CREATE TABLE "Odd Orders" (id int PRIMARY KEY, t text);
            INSERT INTO "Odd Orders" SELECT g, 'x' FROM generate_series(1, 100) g;
            CREATE SCHEMA more;
            CREATE TABLE more.items (id int PRIMARY KEY);
            INSERT INTO more.items VALUES (7);
            CREATE ROLE newcomer LOGIN
            """,
            "shop",
        )
        file = server.data_dir / "pg_hba.conf"
        file.write_text("host all postgres 127.0.0.1/32 trust\nlocal all all trust\n")
        server.execute("SELECT pg_reload_conf()")
        conninfo = server.conninfo("shop", user="newcomer")
        home = tmp_path / "node"
        tables = ("--table", '"Odd Orders"', "--table", "more.items")

        first = changes(init(home, conninfo, "--yes", *tables))
        assert first[1] == "--   host shop newcomer 127.0.0.1/32 scram-sha-256"
        carry_out(server, "shop", first)

        second = changes(init(home, conninfo, "--yes", *tables))
        assert second == [
            "ALTER SYSTEM SET wal_level = logical;",
            "-- and restart the server",
            "ALTER ROLE newcomer REPLICATION;",
            'CREATE PUBLICATION shop FOR TABLE public."Odd Orders", more.items WITH (publish_via_partition_root = true);',
            "GRANT USAGE ON SCHEMA public TO newcomer;",
            'GRANT SELECT ON TABLE public."Odd Orders" TO newcomer;',
            "GRANT USAGE ON SCHEMA more TO newcomer;",
            "GRANT SELECT ON TABLE more.items TO newcomer;",
        ]
        assert not home.exists()
        carry_out(server, "shop", second)

        ran = init(home, conninfo, "--yes")
        assert ran.exit_code == 0, ran.output
        assert "CREATE SUBSCRIPTION\n" in ran.stdout
        assert (home / "pubsub.toml").read_text() == SETTINGS
        with RunningNode(home, spark) as node:
            node.wait_for_catchup("shop")
            for relation in node.relations("shop"):
                assert (
                    compare_tables(
                        server.conninfo("shop"), quote_qualified(relation.schema, relation.name), relation.path
                    )
                    is None
                )
            assert {relation.name for relation in node.relations("shop")} == {"Odd Orders", "items"}
            node.execute("DROP SUBSCRIPTION shop")


def test_the_settings_that_are_written_are_the_defaults(tmp_path: Path) -> None:
    (tmp_path / "pubsub.toml").write_text(SETTINGS)
    assert Settings.load(tmp_path) == Settings(home=tmp_path)
    # Each line that is commented out is one that could be used, and says the default.
    used = re.sub(r"(?m)^#(?=[a-z_]+ = )", "", SETTINGS)
    assert used != SETTINGS
    used = used.replace('warehouse = "warehouse"', f'warehouse = "{tmp_path}/warehouse"')
    (tmp_path / "pubsub.toml").write_text(used)
    loaded = Settings.load(tmp_path)
    assert loaded.show_all() != Settings(home=tmp_path).show_all()  # [http] listens
    assert {
        name for (name, one), (_, other) in zip(loaded.show_all(), Settings(home=tmp_path).show_all(), strict=True)
        if one != other
    } == {"http.listen"}  # fmt: skip


def test_a_dry_run_makes_nothing(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY)")
    ran = init(tmp_path / "node", f"{database.conninfo} password=hidden", "--dry-run", "--subscription", "s")
    assert ran.exit_code == 0, ran.output
    assert f"CREATE PUBLICATION {database.name} FOR ALL TABLES WITH (publish_via_partition_root = true);" in ran.stdout
    assert "CREATE SUBSCRIPTION s CONNECTION" in ran.stdout
    assert "hidden" not in ran.output
    assert database.query("SELECT count(*) FROM pg_publication") == [(0,)]
    assert not (tmp_path / "node").exists()


#: Writes of each kind to each table; a table that is published without a replica identity refuses them.
WRITES = """
UPDATE keyed SET t = 'b'; DELETE FROM keyed;
UPDATE full_rows SET t = 'b'; DELETE FROM full_rows;
UPDATE keyless SET t = 'b'; DELETE FROM keyless;
UPDATE late SET t = 'b'; DELETE FROM late;
UPDATE whole SET t = 'b'; DELETE FROM whole;
UPDATE "In Parts" SET t = 'b'; DELETE FROM "In Parts";
UPDATE parent SET t = 'b'; DELETE FROM parent;
UPDATE made SET t = 'b'; DELETE FROM made;
"""


@pytest.mark.parametrize("owner", [False, True], ids=["superuser", "owner"])
def test_the_publisher_goes_on_writing(database: Database, tmp_path: Path, owner: bool) -> None:
    """What the new publication holds is judged before it is made: from then on PostgreSQL would refuse the writes."""
    role = f"owner_{database.name}"
    database.execute(f"CREATE ROLE {role} LOGIN REPLICATION; GRANT CREATE ON DATABASE {database.name} TO {role}")
    try:
        database.execute(
            f"""
            {f"GRANT CREATE ON SCHEMA public TO {role}; SET ROLE {role};" if owner else ""}
            CREATE TABLE keyed (id int PRIMARY KEY, t text);
            CREATE TABLE full_rows (id int, t text);
            ALTER TABLE full_rows REPLICA IDENTITY FULL;
            CREATE TABLE keyless (id int, t text);
            CREATE TABLE late (id int PRIMARY KEY DEFERRABLE, t text);
            CREATE TABLE whole (id int PRIMARY KEY, t text) PARTITION BY RANGE (id);
            CREATE TABLE whole_1 PARTITION OF whole FOR VALUES FROM (0) TO (10);
            CREATE TABLE whole_2 PARTITION OF whole FOR VALUES FROM (10) TO (20);
            CREATE TABLE "In Parts" (id int, t text) PARTITION BY RANGE (id);
            CREATE TABLE "Part 1" PARTITION OF "In Parts" (PRIMARY KEY (id)) FOR VALUES FROM (0) TO (10);
            CREATE TABLE "Part 2" PARTITION OF "In Parts" FOR VALUES FROM (10) TO (20);
            CREATE TABLE parent (id int PRIMARY KEY, t text);
            CREATE TABLE child () INHERITS (parent);
            CREATE TABLE made (t text, id int GENERATED ALWAYS AS (length(t)) STORED PRIMARY KEY);
            INSERT INTO keyed VALUES (1, 'a');
            INSERT INTO full_rows VALUES (1, 'a');
            INSERT INTO keyless VALUES (1, 'a');
            INSERT INTO late VALUES (1, 'a');
            INSERT INTO whole VALUES (1, 'a'), (11, 'a');
            INSERT INTO "In Parts" VALUES (1, 'a'), (11, 'a');
            INSERT INTO parent VALUES (1, 'a');
            INSERT INTO child VALUES (1, 'a');
            INSERT INTO made VALUES ('a');
            """
        )
        conninfo = database.server.conninfo(database.name, user=role) if owner else database.conninfo
        ran = init(tmp_path / "node", conninfo, "--yes", "--publication", "p")
        database.execute(WRITES)
        assert ran.exit_code == 0, ran.output
        published = database.query("SELECT tablename FROM pg_publication_tables WHERE pubname = 'p' ORDER BY 1")
        assert [name for (name,) in published] == ["full_rows", "keyed", "parent", "whole"]
        for left_out, change in (
            ("keyless", "keyless"),
            ("late", "late"),
            ("In Parts", '"Part 2"'),
            ("child", "child"),
            ("made", "made"),
        ):
            assert f'WARNING:  table "public.{left_out}" is left out of the publication' in ran.stdout
            assert f"    ALTER TABLE public.{change} REPLICA IDENTITY FULL;\n" in ran.stdout
        assert 'ALTER TABLE public."Part 1"' not in ran.stdout
        ran = CliRunner().invoke(app, ["--home", str(tmp_path / "node"), "sql", "DROP SUBSCRIPTION p"])
        assert ran.exit_code == 0, ran.output
    finally:
        database.execute(f"REASSIGN OWNED BY {role} TO CURRENT_USER; DROP OWNED BY {role}; DROP ROLE {role}")


def test_a_table_without_a_key_is_not_published_by_name(database: Database, tmp_path: Path) -> None:
    database.execute(
        """
        CREATE TABLE t (id int PRIMARY KEY);
        CREATE TABLE keyless (id int);
        CREATE TABLE parent (id int PRIMARY KEY);
        CREATE TABLE child () INHERITS (parent)
        """
    )
    tables = ("--table", "t", "--table", "keyless", "--table", "parent")
    assert changes(init(tmp_path / "node", database.conninfo, "--yes", *tables))[:2] == [
        "ALTER TABLE public.keyless REPLICA IDENTITY FULL;",
        "ALTER TABLE public.child REPLICA IDENTITY FULL;",
    ]
    assert database.query("SELECT count(*) FROM pg_publication") == [(0,)]
    assert not (tmp_path / "node").exists()


def test_no_table_can_be_published(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE keyless (id int)")
    found = changes(init(tmp_path / "node", database.conninfo, "--yes"))
    assert found[0] == "ALTER TABLE public.keyless REPLICA IDENTITY FULL;"
    assert found[1].startswith("CREATE PUBLICATION")
    assert "FOR ALL TABLES" in found[1]
    assert database.query("SELECT count(*) FROM pg_publication") == [(0,)]


def test_a_publication_that_is_of_no_use_is_dropped(database: Database, tmp_path: Path) -> None:
    database.execute('CREATE TABLE t (id int PRIMARY KEY, "Id" int)')
    ran = init(tmp_path / "node", database.conninfo, "--yes")
    assert ran.exit_code == 1
    assert 'columns "id", "Id" of table "public.t" differ only in case' in ran.stdout
    assert "DROP PUBLICATION" in ran.stdout
    assert database.query("SELECT count(*) FROM pg_publication") == [(0,)]
    # As much if it is the subscription that cannot be made; a publication of others stays.
    database.execute('ALTER TABLE t DROP "Id"; CREATE PUBLICATION theirs FOR TABLE t')
    ran = init(tmp_path / "node", database.conninfo, "--yes", "--publication", "theirs", "--subscription", "s")
    assert ran.exit_code == 0, ran.output
    for publication in ("ours", "theirs"):
        ran = init(tmp_path / "node", database.conninfo, "--yes", "--publication", publication, "--subscription", "s")
        assert ran.exit_code == 1
        assert 'ERROR:  subscription "s" already exists' in ran.stderr
        assert database.query("SELECT pubname FROM pg_publication") == [("theirs",)]
    ran = CliRunner().invoke(app, ["--home", str(tmp_path / "node"), "sql", "DROP SUBSCRIPTION s"])
    assert ran.exit_code == 0, ran.output


@pytest.mark.parametrize("how", ["--yes", "--dry-run"])
def test_one_of_several_publications_is_not_guessed(database: Database, tmp_path: Path, how: str) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q")
    ran = init(tmp_path / "node", database.conninfo, how)
    assert ran.exit_code == 1
    assert 'there are several publications: "p", "q"' in ran.stderr
    assert "--publication" in ran.stderr
    assert database.query("SELECT count(*) FROM pg_publication") == [(2,)]


def test_nothing_is_overwritten(database: Database, tmp_path: Path) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t")
    settings = tmp_path / "pubsub.toml"
    settings.write_text('wal_receiver_timeout = "61s"\n')
    ran = init(tmp_path, database.conninfo, "--yes", "--subscription", "s1")
    assert ran.exit_code == 0, ran.output
    assert settings.read_text() == 'wal_receiver_timeout = "61s"\n'
    # A second time it is the statement that refuses.
    ran = init(tmp_path, database.conninfo, "--yes", "--subscription", "s1")
    assert ran.exit_code == 1
    assert 'ERROR:  subscription "s1" already exists' in ran.stderr
    ran = init(tmp_path, database.conninfo, "--yes", "--publication", "p", "--table", "t")
    assert 'ERROR:  publication "p" already exists' in ran.stderr
    ran = CliRunner().invoke(app, ["--home", str(tmp_path), "sql", "DROP SUBSCRIPTION s1"])
    assert ran.exit_code == 0, ran.output


def test_without_a_terminal_nobody_is_asked(database: Database, tmp_path: Path) -> None:
    ran = init(tmp_path, database.conninfo)
    assert ran.exit_code == 2
    assert "--yes" in ran.stderr


@pytest.mark.parametrize(
    "answer",
    ["", *(pytest.param(answer, marks=pytest.mark.full) for answer in ("n", None))],
    ids=["yes", "no", "SIGINT"],
)
def test_it_asks_on_a_terminal(database: Database, tmp_path: Path, answer: str | None) -> None:
    database.execute("CREATE TABLE t (id int PRIMARY KEY); CREATE PUBLICATION p FOR TABLE t; CREATE PUBLICATION q")
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "pubsub.cli", "--home", str(tmp_path / "node"), "init"],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
    )
    os.close(theirs)
    said = ""
    try:
        for question, given in (
            ("The publisher", database.conninfo),
            ("(there are p, q)", "p"),
            ("Make the subscription? [Y/n]", answer),
        ):

            def asked(question: str = question) -> bool:
                nonlocal said
                said += os.read(ours, 4096).decode(errors="replace")
                return question in said

            wait_until(asked, f"{question} in {said}")
            if given is None:
                process.send_signal(signal.SIGINT)
            else:
                os.write(ours, f"{given}\n".encode())
        try:
            while more := os.read(ours, 4096):
                said += more.decode(errors="replace")
        except OSError:
            pass  # the end of a terminal whose last process has ended
        assert process.wait(PATIENCE) == {"": 0, "n": 1, None: 130}[answer], said
        assert ("ERROR:  canceling statement due to user request" in said) == (answer is None)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    made = database.query("SELECT count(*) FROM pg_replication_slots WHERE database = current_database()")
    assert made == [(1 if answer == "" else 0,)]
    if answer == "":
        ran = CliRunner().invoke(app, ["--home", str(tmp_path / "node"), "sql", "DROP SUBSCRIPTION p"])
        assert ran.exit_code == 0, ran.output
