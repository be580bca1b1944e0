"""pubsub.toml: names, units, bounds and defaults."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.setting_descriptions import DESCRIPTIONS
from pubsub.setting_tables import DailyWindow, Table
from pubsub.settings import PARAMETERS, Settings


def load(home: Path, text: str) -> Settings:
    (home / "pubsub.toml").write_text(text)
    return Settings.load(home)


def test_without_a_file_postgresql_s_defaults_hold(tmp_path: Path) -> None:
    settings = Settings.load(tmp_path)
    assert dict(settings.show_all()) == {
        "catalog.url": "",
        "catalog_poll_interval": "1s",
        "catalog_timeout": "30s",
        "copies.max_rate": "0",
        "copies.window": "",
        "drain_timeout": "30s",
        "housekeeping.deleted_file_retention": "1h",
        "housekeeping.enabled": "on",
        "housekeeping.log_retention": "1h",
        "housekeeping.merge_files": "on",
        "housekeeping.window": "",
        "spark.master": "local[*]",
        "spark.packages": "",
        "spark.statement_rows": "0",
        "tracing.endpoint": "",
        "verify.connections": "1",
        "verify.interval": "0",
        "verify.max_rate": "0",
        "verify.sample": "off",
        "verify.sample_rows": "10000",
        "verify.timeout": "1h",
        "verify.window": "",
        "http.hosts": "",
        "http.listen": "",
        "http.page": "on",
        "http.ready_lag": "1min",
        "logical_decoding_work_mem": "64MB",
        "max_logical_replication_workers": "1000",
        "max_message_size": "1GB",
        "max_parallel_apply_workers_per_subscription": "2",
        "max_resyncs_per_day": "1",
        "max_sync_workers_per_subscription": "2",
        "restore_command": "",
        "restore_timeout": "10min",
        "wal_receiver_status_interval": "10s",
        "wal_receiver_timeout": "1min",
        "wal_retrieve_retry_interval": "5s",
        "warehouse": str(tmp_path / "warehouse"),
        "worker_processes": "1",
        "walsender.allow_trust": "off",
        "walsender.archive_directory": "",
        "walsender.auth_file": "",
        "walsender.authentication_timeout": "1min",
        "walsender.idle_replication_slot_timeout": "0",
        "walsender.listen": "",
        "walsender.max_connections": "100",
        "walsender.max_replication_slots": "10",
        "walsender.max_slot_wal_keep_size": "-1",
        "walsender.max_wal_senders": "10",
        "walsender.primary_slot_name": "",
        "walsender.require_tls": "off",
        "walsender.restore_command": "",
        "walsender.ssl_cert_file": "",
        "walsender.ssl_key_file": "",
        "walsender.unix_socket": "on",
        "walsender.upstream": "",
        "walsender.wal_source": "",
    }
    assert settings.catalog_location == tmp_path / "catalog.db"
    assert settings.warehouse_uri == str(tmp_path / "warehouse")


def test_units_become_bytes_and_seconds(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        wal_receiver_timeout = "1.5min"
        wal_receiver_status_interval = 3          # seconds, as in postgresql.conf
        wal_retrieve_retry_interval = 250         # milliseconds
        logical_decoding_work_mem = 1024          # kilobytes
        max_message_size = "2MB"
        """,
    )
    assert settings.wal_receiver_timeout == 90.0
    assert settings.wal_receiver_status_interval == 3.0
    assert settings.wal_retrieve_retry_interval == 0.25
    assert settings.logical_decoding_work_mem == 1024 * 1024
    assert settings.max_message_size == 2 * 1024 * 1024


def test_copies(tmp_path: Path) -> None:
    found = load(tmp_path, '[copies]\nwindow = "22:00-6:00"\nmax_rate = "20MB"')
    assert found.copies.max_rate == 20 << 20
    assert (found.show("copies.window"), found.show("copies.max_rate")) == ("22:00-06:00", "20MB")


def test_housekeeping(tmp_path: Path) -> None:
    kept = load(
        tmp_path,
        """
        [housekeeping]
        enabled = false
        merge_files = false
        deleted_file_retention = "2d"
        log_retention = "1000h"
        window = "22:00-4:00"
        """,
    )
    assert kept.housekeeping.deleted_file_retention == 2 * 86400
    assert (kept.show("housekeeping.enabled"), kept.show("housekeeping.merge_files")) == ("off", "off")
    assert kept.show("housekeeping.log_retention") == "1000h"
    assert kept.show("Housekeeping.window") == "22:00-04:00"
    alone = load(tmp_path, '[housekeeping]\ndeleted_file_retention = "10min"')
    assert alone.housekeeping.log_retention == 600, "the log follows, since Delta refuses a shorter one"


def test_the_server_for_subscribers(tmp_path: Path) -> None:
    text = """
        [walsender]
        upstream = "host=h password=secret"
        listen = "[::1]:6432"
        max_slot_wal_keep_size = "1GB"
        authentication_timeout = "1min"
        """
    found = load(tmp_path, text)
    assert found.walsender.place() == ("::1", 6432)
    assert found.walsender.max_slot_wal_keep_size == 1 << 30
    assert "secret" not in repr(found)
    assert "secret" not in str(found.show_all())
    with pytest.raises(PubsubError, match="invalid place to listen on") as caught:
        load(tmp_path, '[walsender]\nlisten = "6432"')
    assert caught.value.context is not None


def test_every_setting_is_shown(tmp_path: Path) -> None:
    """Of [spark] but what is Spark's own: its conf is passed on unchanged, and its remote is refused."""
    shown = {name for name, _ in Settings(home=tmp_path).show_all()}
    names = set()
    for name, field in Settings.model_fields.items():
        inner = field.annotation
        if isinstance(inner, type) and issubclass(inner, Table):
            names |= {f"{name}.{one}" for one in inner.model_fields}
        else:
            names.add(name)
    assert names - shown == {"home", "spark.conf", "spark.remote"}
    assert shown <= names


def test_every_setting_is_described(tmp_path: Path) -> None:
    settings = Settings(home=tmp_path)
    assert {name for name, _ in settings.show_all()} == set(DESCRIPTIONS)
    described = settings.describe_all()
    assert ("http.page", "on", "Whether there is a page for people, which shows texts of errors.") in described
    assert [(name, value) for name, value, _ in described] == settings.show_all()


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("postgresql://u:secret@h:5432/d", "postgresql://u:********@h:5432/d"),
        ("postgresql+psycopg://u:secret@h/d?sslmode=require", "********"),
        ("sqlite:////secret.db", "********"),
    ],
)
def test_where_the_catalog_is_is_shown_without_a_password(tmp_path: Path, url: str, shown: str) -> None:
    found = load(tmp_path, f'[catalog]\nurl = "{url}"')
    assert found.show("catalog.url") == shown
    assert "secret" not in str(found.show_all())


def test_what_spark_is_used_is_shown(tmp_path: Path) -> None:
    found = load(
        tmp_path,
        'warehouse = "s3://lake/"\n[spark]\nmaster = "spark://h:7077"\npackages = ["a:b:1", "c:d:2"]',
    )
    assert [found.show(f"spark.{name}") for name in ("master", "packages", "statement_rows")] == [
        "spark://h:7077",
        "a:b:1, c:d:2",
        "1000000",
    ]
    assert found.show("warehouse") == "s3a://lake"


def test_tracing(tmp_path: Path) -> None:
    assert (
        load(tmp_path, '[tracing]\nendpoint = "https://c.example:4318/otlp"')
        .show("tracing.endpoint")
        .startswith("https")
    )
    for wrong in ("localhost:4318", "http://user:secret@c:4318", "ftp://c", "http://c?a=b"):
        with pytest.raises(PubsubError, match=r'invalid value for parameter "tracing\.endpoint"') as caught:
            load(tmp_path, f'[tracing]\nendpoint = "{wrong}"')
        assert "secret" not in caught.value.report(verbose=True)


def test_a_reload_changes_in_place_what_is_read_again(tmp_path: Path) -> None:
    settings = load(tmp_path, "")
    held = settings
    assert settings.take_over(load(tmp_path, 'wal_receiver_timeout = "2min"\nmax_sync_workers_per_subscription = 5'))
    assert (held.wal_receiver_timeout, held.show("max_sync_workers_per_subscription")) == (120.0, "5")
    assert settings == load(tmp_path, 'wal_receiver_timeout = "2min"\nmax_sync_workers_per_subscription = 5')
    # All or nothing.
    assert not settings.take_over(load(tmp_path, 'wal_receiver_timeout = "3min"\n[http]\nready_lag = "5min"'))
    assert settings.wal_receiver_timeout == 120.0
    served = load(tmp_path, '[walsender]\nupstream = "host=h"')
    assert not served.take_over(load(tmp_path, 'wal_receiver_timeout = "3min"\n[walsender]\nupstream = "host=h"'))
    assert served.take_over(load(tmp_path, 'drain_timeout = "3min"\n[walsender]\nupstream = "host=h"'))


def test_http(tmp_path: Path) -> None:
    found = load(tmp_path, '[http]\nlisten = "127.0.0.1:9187"\nready_lag = "5min"').http
    assert (found.place(), found.ready_lag) == (("127.0.0.1", 9187), 300.0)
    assert load(tmp_path, "").http.place() is None
    found = load(tmp_path, '[http]\nhosts = "a.example,  b "').http
    assert (found.names, found.shown()["http.hosts"]) == (("a.example", "b"), "a.example, b")
    with pytest.raises(PubsubError, match="invalid place to listen on"):
        load(tmp_path, '[http]\nlisten = "9187"')


@pytest.mark.parametrize("prefix", ["", "spark.hadoop."])
def test_a_listing_of_s3_that_reads_wrong_snapshots_is_refused(prefix: str, tmp_path: Path) -> None:
    def read(value: str) -> Settings:
        return Settings.read({"spark": {"conf": {f"{prefix}delta.enableFastS3AListFrom": value}}}, tmp_path)

    with pytest.raises(FeatureNotSupported, match="enableFastS3AListFrom"):
        read("true")
    assert read("false").spark.conf


@pytest.mark.parametrize("text", ['[spark]\nremote = "sc://x"', '[spark.conf]\n"spark.remote" = "sc://x"'])
def test_spark_connect_is_refused(tmp_path: Path, text: str) -> None:
    with pytest.raises(FeatureNotSupported, match=r"spark\.remote"):
        load(tmp_path, text)


@pytest.mark.parametrize(
    "text",
    [
        '[spark.conf]\n"spark.master" = "spark://x:7077"',
        'spark.conf.spark.master = "local[2]"',
        "spark.remote = 'sc://x'",
    ],
)
def test_the_master_is_named_in_one_place(tmp_path: Path, text: str) -> None:
    """Whether Spark is on a cluster, with packages for its executors and an address that they reach, is asked of this one."""
    with pytest.raises(FeatureNotSupported) as caught:
        load(tmp_path, text)
    assert caught.value.hint is not None
    assert 'master = "spark://host:7077" in the table [spark]' in caught.value.hint
    assert load(tmp_path, '[spark]\nmaster = "spark://x:7077"').spark.is_local is False


@pytest.mark.parametrize(
    ("given", "where"),
    [
        ("lake", "{home}/lake"),
        ("./lake/", "{home}/lake"),
        ("../lake", "{home}/../lake"),
        ("/data/lake/", "/data/lake"),
        ("file:/data/lake", "file:///data/lake"),
        ("file:///data/lake/", "file:///data/lake"),
        ("abfss://c@a/lake/", "abfss://c@a/lake"),
    ],
)
def test_a_warehouse_is_the_same_for_all_of_a_node_s_programs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, given: str, where: str
) -> None:
    """Wherever they are started, which matters for a relative path of the home, too."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "node").mkdir()
    found = load(Path("node"), f'warehouse = "{given}"')
    monkeypatch.chdir("/")
    assert found.warehouse_uri == where.format(home=tmp_path / "node")


@pytest.mark.parametrize("given", ["file:lake", "file://lake", "file://host/lake"])
def test_a_warehouse_s_uri_has_an_absolute_path(tmp_path: Path, given: str) -> None:
    with pytest.raises(PubsubError, match='invalid value for parameter "warehouse": "file:') as caught:
        load(tmp_path, f'warehouse = "{given}"')
    assert caught.value.sqlstate == "22023"


_TIMES = 'Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".'


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("wal_reciever_timeout = 1", 'unrecognized configuration parameter "wal_reciever_timeout"'),
        ("[spark]\nmastr = 'x'", 'unrecognized configuration parameter "spark.mastr"'),
        ("home = '/x'", 'unrecognized configuration parameter "home"'),
        ("[wal]", 'unrecognized configuration parameter "wal"'),
    ],
)
def test_an_unknown_name_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UndefinedObject) as caught:
        load(tmp_path, text)
    assert caught.value.message == message
    assert caught.value.context == f'configuration file "{tmp_path / "pubsub.toml"}"'


@pytest.mark.parametrize(
    ("text", "message", "hint"),
    [
        (
            'wal_receiver_timeout = "5 parsec"',
            'invalid value for parameter "wal_receiver_timeout": "5 parsec"',
            'Valid units for this parameter are "us", "ms", "s", "min", "h", and "d".',
        ),
        (
            'logical_decoding_work_mem = "1m"',
            'invalid value for parameter "logical_decoding_work_mem": "1m"',
            'Valid units for this parameter are "B", "kB", "MB", "GB", and "TB".',
        ),
        (
            'logical_decoding_work_mem = "1kB"',
            '1 kB is outside the valid range for parameter "logical_decoding_work_mem" (64 kB .. 2147483647 kB)',
            None,
        ),
        (
            "max_sync_workers_per_subscription = -1",
            '-1 is outside the valid range for parameter "max_sync_workers_per_subscription" (0 .. 262143)',
            None,
        ),
        (
            "max_sync_workers_per_subscription = 1e300",
            'invalid value for parameter "max_sync_workers_per_subscription": "1e+300"',
            "Value exceeds integer range.",
        ),
        ("wal_receiver_timeout = true", 'invalid value for parameter "wal_receiver_timeout": "True"', _TIMES),
        ("wal_receiver_timeout = nan", 'invalid value for parameter "wal_receiver_timeout": "nan"', _TIMES),
        ('wal_receiver_timeout = "fast"', 'invalid value for parameter "wal_receiver_timeout": "fast"', _TIMES),
        ("spark = 3", 'parameter "spark" must be a table', None),
        ("[spark]\nmaster = 3", 'invalid value for parameter "spark.master": "3"', None),
        ('[copies]\nwindow = "25:00-26:00"', '"25:00-26:00" is no window of the day', 'Write it as in "22:00-04:00".'),
        ("housekeeping = 3", 'parameter "housekeeping" must be a table', None),
        (
            '[housekeeping]\nlog_retention = "30s"',
            '30 s is outside the valid range for parameter "housekeeping.log_retention" (60 s .. 2147483647 s)',
            None,
        ),
        (
            '[housekeeping]\nlog_retention = "30min"',
            'parameter "housekeeping.log_retention" must not be less than "housekeeping.deleted_file_retention"',
            None,
        ),
        ('[housekeeping]\nwindow = "night"', '"night" is no window of the day', 'Write it as in "22:00-04:00".'),
        ("[housekeeping]\nwindow = 22", 'invalid value for parameter "housekeeping.window": "22"', None),
    ],
)
def test_a_bad_value_is_refused_in_postgresql_s_words(
    tmp_path: Path, text: str, message: str, hint: str | None
) -> None:
    with pytest.raises(PubsubError) as caught:
        load(tmp_path, text)
    assert (caught.value.message, caught.value.hint) == (message, hint)
    assert caught.value.sqlstate == "22023"


def test_a_file_that_is_not_toml_is_named(tmp_path: Path) -> None:
    with pytest.raises(PubsubError, match="contains errors") as caught:
        load(tmp_path, "wal_receiver_timeout =")
    assert caught.value.sqlstate == "F0000"
    assert caught.value.detail is not None


def test_spark_conf_takes_quoted_and_dotted_names(tmp_path: Path) -> None:
    settings = load(
        tmp_path,
        """
        [spark]
        master = "spark://host:7077"
        packages = ["a:b:1"]
        [spark.conf]
        "spark.driver.memory" = "2g"
        spark.ui.enabled = false
        spark.executor.cores = 2
        """,
    )
    assert settings.spark.master == "spark://host:7077"
    assert settings.spark.packages == ("a:b:1",)
    assert settings.spark.conf == {
        "spark.driver.memory": "2g",
        "spark.ui.enabled": "false",
        "spark.executor.cores": "2",
    }


def test_a_catalog_that_keeps_no_names_is_refused(tmp_path: Path) -> None:
    """Spark's own forgets them with its JVM, unless it is Hive's; others have to be configured."""
    spark = load(tmp_path, "").spark
    spark.require_catalogs([])
    for name, words in (
        ("lake", 'catalog "lake" does not exist'),
        ("spark_catalog", 'catalog "spark_catalog" keeps no tables'),
    ):
        with pytest.raises(UndefinedObject, match=words) as refused:
            spark.require_catalogs([name])
        assert refused.value.hint
    load(tmp_path, "[spark.conf]\n'spark.sql.catalogImplementation' = 'hive'").spark.require_catalogs(["spark_catalog"])
    spark = load(
        tmp_path, "[spark.conf]\n'spark.sql.catalog.lake' = 'x'\n'spark.sql.catalog.spark_catalog' = 'y'"
    ).spark
    spark.require_catalogs(["lake", "spark_catalog"])


def test_large_batches_are_a_statement_s_on_a_cluster(tmp_path: Path) -> None:
    def least(text: str) -> int:
        return load(tmp_path, text).spark.least_statement_rows

    assert least("") == 0
    assert least("[spark]\nmaster = 'local[4]'") == 0
    assert least("[spark]\nmaster = 'spark://host:7077'") == 1_000_000
    assert least("[spark]\nmaster = 'spark://host:7077'\nstatement_rows = 0") == 0
    assert least("[spark]\nstatement_rows = 5") == 5
    with pytest.raises(PubsubError, match=r'parameter "spark\.statement_rows": "-1"'):
        least("[spark]\nstatement_rows = -1")


def test_a_password_in_the_catalog_s_url_does_not_show(tmp_path: Path) -> None:
    settings = load(tmp_path, '[catalog]\nurl = "postgresql://me:secret@host/db"')
    assert settings.catalog_location == "postgresql://me:secret@host/db"
    assert "secret" not in repr(settings)
    with pytest.raises(PubsubError) as caught:
        load(tmp_path, "[catalog]\nurl = ['secret']")
    assert "secret" not in caught.value.report(verbose=True)
    assert caught.value.__cause__ is None


@pytest.mark.parametrize(
    "text",
    [
        "[walsender]\nwal_source = ['secret']",
        "[walsender]\nupstream = ['secret']",
        "walsender = 'secret'",
        "catalog = 'secret'",
        "[spark]\nconf = 'secret'",
        "[spark.conf]\n'spark.hadoop.fs.s3a.secret.key' = ['secret']",
        "[catalog]\nurl = 'secret",
    ],
)
def test_a_value_that_may_be_a_secret_is_in_no_message(tmp_path: Path, text: str) -> None:
    with pytest.raises(PubsubError) as caught:
        load(tmp_path, text)
    assert "secret" not in caught.value.report(verbose=True).replace("secret.key", "")
    assert "secret" not in str(caught.value.__cause__)


def test_show_prints_the_largest_unit_that_keeps_the_value_whole() -> None:
    timeout = PARAMETERS["wal_receiver_timeout"]
    assert [timeout.show(value) for value in (0, 1, 90_000, 3_600_000)] == ["0", "1ms", "90s", "1h"]


def test_show_knows_only_parameters(tmp_path: Path) -> None:
    settings = Settings.load(tmp_path)
    assert settings.show("WAL_Receiver_Timeout") == "1min"
    with pytest.raises(UndefinedObject, match="unrecognized configuration parameter"):
        settings.show("home")


@pytest.mark.parametrize(
    ("text", "name", "hint"),
    [
        ("wal_reciever_timeout = 3", "wal_reciever_timeout", "wal_receiver_timeout"),
        ("[catalog]\nurll = 'x'", "catalog.urll", "catalog.url"),
        ("nope = 3", "nope", None),
        ("hom = 'x'", "hom", None),
    ],
)
def test_a_mistyped_name_brings_the_nearest_to_mind(tmp_path: Path, text: str, name: str, hint: str | None) -> None:
    with pytest.raises(PubsubError) as caught:
        load(tmp_path, text)
    assert caught.value.message == f'unrecognized configuration parameter "{name}"'
    assert caught.value.hint == (None if hint is None else f'Perhaps you meant the parameter "{hint}".')


@pytest.mark.parametrize(
    ("spark", "missing"),
    [
        ({}, None),
        ({"master": "local[4]"}, None),
        ({"master": "spark://host:7077"}, "spark.authenticate and spark.network.crypto.enabled"),
        ({"master": "yarn", "conf": {"spark.authenticate": "true"}}, "spark.network.crypto.enabled"),
        ({"master": "yarn", "conf": {"spark.network.crypto.enabled": "true"}}, "spark.authenticate"),
        ({"master": "yarn", "conf": {"spark.authenticate": "TRUE", "spark.ssl.rpc.enabled": "true"}}, None),
        ({"master": "yarn", "conf": {"spark.authenticate": "true", "spark.network.crypto.enabled": "true"}}, None),
    ],
)
def test_a_cluster_that_is_open_to_its_network(tmp_path: Path, spark: dict[str, Any], missing: str | None) -> None:
    """Another user of the network may otherwise fetch the task of a copy, with its connection string."""
    told = Settings.read({"spark": spark}, tmp_path).spark.unprotected
    assert (told[0].partition(": ")[2] if told else None) == (f"{missing} not set" if missing else None)


def wait(window: str, at: str) -> float:
    hour, minute = map(int, at.split(":"))
    return DailyWindow.parse(window).wait(datetime(2026, 5, 4, hour, minute, tzinfo=UTC)) / 3600


def test_a_window_of_the_day() -> None:
    assert [wait("01:00-04:00", at) for at in ("00:00", "01:00", "03:59", "04:00", "23:00")] == [1, 0, 0, 21, 2]


def test_a_window_across_midnight() -> None:
    assert [wait("22:00-04:00", at) for at in ("21:00", "22:00", "00:00", "03:59", "04:00")] == [1, 0, 0, 0, 18]


def test_the_whole_day() -> None:
    for text in ("", "00:00-24:00", "05:00-05:00"):
        assert str(DailyWindow.parse(text)) == ""
        assert wait(text, "12:34") == 0
    assert str(DailyWindow.parse("22:00-4:00")) == "22:00-04:00"


@pytest.mark.parametrize("text", ["always", "22-4", "25:00-03:00", "22:60-23:00", "22:00", "22:00-04:00-05:00"])
def test_what_is_no_window(text: str) -> None:
    with pytest.raises(PubsubError) as raised:
        DailyWindow.parse(text)
    assert raised.value.hint == 'Write it as in "22:00-04:00".'
