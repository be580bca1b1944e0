"""pubsub.toml: a node's settings, with PostgreSQL's names, units, bounds and defaults where PostgreSQL has them.

    wal_receiver_timeout = "60s"
    logical_decoding_work_mem = "64MB"
    [catalog]
    url = "postgresql://host/database"
    [housekeeping]
    deleted_file_retention = "1h"
    [walsender]
    upstream = "host=db.example.org dbname=shop user=me"
    listen = "0.0.0.0:6432"
    [http]
    listen = "127.0.0.1:9187"
    [spark]
    master = "local[*]"
    conf = { "spark.driver.memory" = "2g" }

A number without a unit is in the parameter's own unit, as in postgresql.conf (guc.c: parse_int, convert_to_base_unit).
The values are kept in bytes and seconds.  Errors are PubsubErrors with the texts of guc.c; the first one is raised.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.nearest import nearest
from pubsub.parameters import INT_MAX, Parameter

FILE_NAME: Final = "pubsub.toml"
_WINDOW: Final = re.compile(r"\s*(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)\s*")
# Hadoop's settings that hold a secret by their names; then Spark's own (spark.authenticate.secret, spark.executorEnv.X_PASSWORD …).
_SECRET: Final = re.compile(
    r"^spark\.hadoop\..*(secret|key|password|token|credential|sas)|secret|password|token|credential|account\.key|access[._]?key",
    re.IGNORECASE,
)

_STATEMENT_ROWS: Final = 1_000_000
_MAX_WORKERS: Final = 262143

#: Parameters of guc_tables.c with the same units and bounds; those from max_message_size on are not PostgreSQL's.  The
#: defaults are the same too, except that of max_logical_replication_workers, since a worker here is no process.
PARAMETERS: Final = {
    parameter.name: parameter
    for parameter in (
        Parameter("wal_receiver_timeout", "ms", 0),
        Parameter("wal_receiver_status_interval", "s", 0, INT_MAX // 1000),
        Parameter("wal_retrieve_retry_interval", "ms", 1),
        Parameter("max_logical_replication_workers", "", 0, _MAX_WORKERS),
        Parameter("max_sync_workers_per_subscription", "", 0, _MAX_WORKERS),
        Parameter("max_parallel_apply_workers_per_subscription", "", 0, 1024),
        Parameter("max_resyncs_per_day", "", 0, 1000),
        Parameter("logical_decoding_work_mem", "kB", 64),
        Parameter("max_message_size", "kB", 64),
        Parameter("catalog_poll_interval", "ms", 10),
        Parameter("catalog_timeout", "ms", 0),
        Parameter("drain_timeout", "ms", 0),
    )
}


#: Parameters of the table [housekeeping] that are numbers; SHOW and messages write "housekeeping." before them.
_HOUSEKEEPING: Final = {
    parameter.name.removeprefix("housekeeping."): parameter
    for parameter in (
        Parameter("housekeeping.deleted_file_retention", "s", 60),
        Parameter("housekeeping.log_retention", "s", 60),
    )
}

#: Parameters of the table [walsender] that are numbers; SHOW and messages write "walsender." before them.
_WALSENDER: Final = {
    parameter.name.removeprefix("walsender."): parameter
    for parameter in (
        Parameter("walsender.max_slot_wal_keep_size", "MB", -1),
        Parameter("walsender.idle_replication_slot_timeout", "s", 0),
        Parameter("walsender.max_replication_slots", "", 0, _MAX_WORKERS),
        Parameter("walsender.max_wal_senders", "", 0, _MAX_WORKERS),
        Parameter("walsender.max_connections", "", 1, _MAX_WORKERS),
        Parameter("walsender.authentication_timeout", "s", 1, 600),
    )
}


#: Parameters of the table [verify] that are numbers.
_VERIFY: Final = {
    parameter.name.removeprefix("verify."): parameter
    for parameter in (
        Parameter("verify.interval", "s", 0),
        Parameter("verify.timeout", "s", 0),
        Parameter("verify.connections", "", 1, 100),
        Parameter("verify.max_rate", "kB", 0),
        Parameter("verify.sample_rows", "", 1),
    )
}


#: Parameters of the table [http] that are numbers.
_HTTP: Final = {parameter.name.removeprefix("http."): parameter for parameter in (Parameter("http.ready_lag", "s", 1),)}


#: Settings that are connection strings, which may hold passwords.
_CONNECTIONS: Final = frozenset({"catalog.url", "walsender.upstream", "walsender.wal_source"})


def _reader(name: str) -> BeforeValidator:
    """Return a validator that converts the file's value to bytes, seconds or a count."""
    parameter = (
        PARAMETERS.get(name) or _HOUSEKEEPING.get(name) or _WALSENDER.get(name) or _VERIFY.get(name) or _HTTP[name]
    )

    def read(value: object) -> float | int:
        units = parameter.parse(value)
        return units * parameter.factor if parameter.is_time else units * int(parameter.factor)

    return BeforeValidator(read)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CatalogSettings(_Table):
    """The table [catalog]; `url` may hold a password."""

    url: str | None = Field(default=None, repr=False)


@dataclass(frozen=True, slots=True)
class DailyWindow:
    """A window of the day in which work may be done, such as "22:00-04:00"; it may cross midnight.

    From `begin`, inclusive, to `end`, exclusive, in the machine's own time; the whole day if they are equal."""

    begin: time
    end: time

    @classmethod
    def parse(cls, text: str) -> Self:
        """Parse "HH:MM-HH:MM"; 24:00 is midnight, and an empty text the whole day.  Raises PubsubError (22023)."""
        if not text.strip():
            return cls(time(), time())
        match = _WINDOW.fullmatch(text)
        try:
            if match is None:
                raise ValueError
            hours, minutes, until_hours, until_minutes = map(int, match.groups())
            if (until_hours, until_minutes) == (24, 0):
                until_hours = 0
            return cls(time(hours, minutes), time(until_hours, until_minutes))
        except ValueError:
            raise PubsubError(
                f'"{text}" is no window of the day', sqlstate="22023", hint='Write it as in "22:00-04:00".'
            ) from None

    def __str__(self) -> str:
        return "" if self.begin == self.end else f"{self.begin:%H:%M}-{self.end:%H:%M}"

    def wait(self, now: datetime) -> float:
        """Return the seconds until the window opens; 0 while it is open."""
        at = now.time()
        if self.begin == self.end:
            return 0.0
        if self.begin < self.end:
            open_ = self.begin <= at < self.end
        else:
            open_ = at >= self.begin or at < self.end
        if open_:
            return 0.0
        opens = datetime.combine(now.date(), self.begin, now.tzinfo)
        if opens <= now:
            opens += timedelta(days=1)
        return (opens - now).total_seconds()


def _window(name: str) -> BeforeValidator:
    """Return a validator that reads a daily window; `name`: the parameter's full name."""

    def read(value: object) -> DailyWindow:
        if isinstance(value, DailyWindow):
            return value
        if not isinstance(value, str):
            raise PubsubError(f'invalid value for parameter "{name}": "{value}"', sqlstate="22023")
        return DailyWindow.parse(value)

    return BeforeValidator(read)


class HousekeepingSettings(_Table):
    """The table [housekeeping]: what the daemon does to keep Delta tables small (launcher/housekeeper.py).

    `merge_files`: merge small data files, and rewrite those with many deleted rows.  `deleted_file_retention`,
    `log_retention`: how long a removed file, and a commit, stays, in seconds.  Within `window` VACUUM runs, logs are
    cleaned, and files with deleted rows are rewritten.
    """

    enabled: bool = True
    merge_files: bool = True
    deleted_file_retention: Annotated[float, _reader("deleted_file_retention")] = 3600.0
    log_retention: Annotated[float, _reader("log_retention")] = 3600.0
    window: Annotated[DailyWindow, _window("housekeeping.window")] = DailyWindow.parse("")

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them."""
        shown = {
            "housekeeping.enabled": "on" if self.enabled else "off",
            "housekeeping.merge_files": "on" if self.merge_files else "off",
            "housekeeping.window": str(self.window),
        }
        for name, parameter in _HOUSEKEEPING.items():
            shown[parameter.name] = parameter.show(round(getattr(self, name) / parameter.factor))
        return shown


class WalsenderSettings(_Table):
    """The table [walsender]: the node's server for subscribers and psql (pubsub/backend, walsender/server, pubsub/server).

    `upstream`: the connection string of the server whose WAL is decoded; None: there is none.  `wal_source`: that of a standby of
    it to receive the WAL from instead.  `listen`: HOST:PORT for TCP.  `primary_slot_name`: a physical slot where the WAL comes
    from.  `archive_directory` or `restore_command` (with %f, %p as PostgreSQL's): where WAL comes from that is no longer kept.
    `auth_file`: users and their SCRAM verifiers (pubsub/backend/users.py); with it
    clients authenticate here, without it at the upstream server.  Files are relative to the node's directory.
    `unix_socket`: whether to listen on a socket in the node's directory, too.  `max_slot_wal_keep_size`: bytes; below 0 there
    is no limit.  `idle_replication_slot_timeout`: seconds; 0: none.
    """

    upstream: str | None = Field(default=None, repr=False)
    wal_source: str | None = Field(default=None, repr=False)
    listen: str | None = None
    primary_slot_name: str | None = None
    archive_directory: str | None = None
    restore_command: str | None = None
    ssl_cert_file: str | None = None
    ssl_key_file: str | None = None
    auth_file: str | None = None
    unix_socket: bool = True
    max_slot_wal_keep_size: Annotated[int, _reader("max_slot_wal_keep_size")] = -1
    idle_replication_slot_timeout: Annotated[float, _reader("idle_replication_slot_timeout")] = 0.0
    max_replication_slots: Annotated[int, _reader("max_replication_slots")] = 10
    max_wal_senders: Annotated[int, _reader("max_wal_senders")] = 10
    max_connections: Annotated[int, _reader("max_connections")] = 100
    authentication_timeout: Annotated[float, _reader("authentication_timeout")] = 60.0

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them; the upstream's connection string without its secrets."""
        from pubsub.sql.conninfo import mask_conninfo

        texts = (
            "listen",
            "primary_slot_name",
            "archive_directory",
            "restore_command",
            "ssl_cert_file",
            "ssl_key_file",
            "auth_file",
        )
        shown = {f"walsender.{name}": getattr(self, name) or "" for name in texts}
        for name in ("upstream", "wal_source"):
            shown[f"walsender.{name}"] = mask_conninfo(getattr(self, name) or "")
        shown["walsender.unix_socket"] = "on" if self.unix_socket else "off"
        for name, parameter in _WALSENDER.items():
            value = getattr(self, name)
            shown[parameter.name] = "-1" if value < 0 else parameter.show(round(value / parameter.factor))
        return shown

    def place(self) -> tuple[str, int] | None:
        """Return host and port of `listen`; None without it.  Raises PubsubError (22023)."""
        return None if self.listen is None else _place(self.listen, "localhost:6432")


class HttpSettings(_Table):
    """The table [http]: metrics, health, readiness and a page (pubsub/monitoring).

    `listen`: HOST:PORT, port 0 for a free one; None: nothing listens.  Whoever reaches it may read.  `page`: whether there is a
    page, which shows the texts of errors and events, too.  `ready_lag`: how far a subscription may lag behind, in seconds, and
    still count as ready.
    """

    listen: str | None = None
    page: bool = True
    ready_lag: Annotated[float, _reader("ready_lag")] = 60.0

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them."""
        shown = {"http.listen": self.listen or "", "http.page": "on" if self.page else "off"}
        for name, parameter in _HTTP.items():
            shown[parameter.name] = parameter.show(round(getattr(self, name) / parameter.factor))
        return shown

    def place(self) -> tuple[str, int] | None:
        """Return host and port of `listen`; None without it.  Raises PubsubError (22023)."""
        return None if self.listen is None else _place(self.listen, "127.0.0.1:9187")


def _place(listen: str, example: str) -> tuple[str, int]:
    """Parse HOST:PORT, the host in brackets if it has colons.  Raises PubsubError (22023)."""
    host, _, port = listen.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise PubsubError(
            f'invalid place to listen on: "{listen}"', sqlstate="22023", hint=f'Give HOST:PORT, such as "{example}".'
        )
    return host.removeprefix("[").removesuffix("]"), int(port)


class VerifySettings(_Table):
    """The table [verify]: how tables are compared with the publisher's, and when by themselves (launcher/verifier.py).

    `interval`: how often the daemon verifies each subscription, in seconds (0: never), within `window`; with `sample` only
    `sample_rows` rows of each table.  `connections`: sessions on the publisher, each of which takes one core there at most;
    `max_rate`: bytes of its tables that they read per second (0: no limit).  `timeout`: how long a verification may hold a
    snapshot there, in seconds (0: no limit).
    """

    interval: Annotated[float, _reader("interval")] = 0.0
    window: Annotated[DailyWindow, _window("verify.window")] = DailyWindow.parse("")
    sample: bool = False
    sample_rows: Annotated[int, _reader("sample_rows")] = 10_000
    connections: Annotated[int, _reader("connections")] = 1
    max_rate: Annotated[int, _reader("max_rate")] = 0
    timeout: Annotated[float, _reader("timeout")] = 3600.0

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them."""
        shown = {"verify.window": str(self.window), "verify.sample": "on" if self.sample else "off"}
        for name, parameter in _VERIFY.items():
            shown[parameter.name] = parameter.show(round(getattr(self, name) / parameter.factor))
        return shown


# A setting of Delta's store for S3, in lower case.
_FAST_LISTING: Final = "delta.enablefasts3alistfrom"


#: What helps on such a cluster.
OWN_PASSWORDS: Final = (
    "Or give the executors the password: in ~/.pgpass there, or in a file there that passfile in the CONNECTION, or "
    "spark.executorEnv.PGPASSFILE in [spark.conf], names."
)


class SparkSettings(_Table):
    """The table [spark]: which Spark to use.  `conf` is passed on unchanged and overrides this program's settings.

    `statement_rows`: a batch of so many changes to a table is written by a statement of Spark's on its executors, even if
    the table takes our files; 0: never.
    """

    master: str = "local[*]"
    remote: str | None = None
    packages: tuple[str, ...] = Field(default=(), strict=False)
    conf: dict[str, str] = Field(default={}, repr=False)
    statement_rows: Annotated[int | None, Field(ge=0)] = None

    @property
    def is_local(self) -> bool:
        """Whether Spark runs in the daemon's own JVM, not on a cluster."""
        return self.master.startswith("local")

    @property
    def is_private(self) -> bool:
        """Whether what this Spark's programs say to each other is kept from others."""
        return self.unprotected is None

    @property
    def unprotected(self) -> tuple[str, str, str] | None:
        """Return a warning (message, detail, hint) if others may speak to this Spark, or read what its programs say to each other.

        A local Spark makes a secret of its own; on a cluster its programs need one in common.
        """
        on = {name for name, value in self.conf.items() if value.strip().lower() == "true"}
        missing = [] if "spark.authenticate" in on else ["spark.authenticate"]
        if not on & {"spark.network.crypto.enabled", "spark.ssl.rpc.enabled"}:
            missing.append("spark.network.crypto.enabled")
        if self.is_local or not missing:
            return None
        return (
            f'Spark on "{self.master}" is open to its network: {" and ".join(missing)} not set',
            "Whoever reaches the driver can run code in it.  Executors are not sent the passwords of a CONNECTION.",
            f"Set them in [spark.conf], with the secret of the cluster.  {OWN_PASSWORDS}",
        )

    @property
    def least_statement_rows(self) -> int:
        """`statement_rows`, or else its default: 0 with a local master, where our files are always faster.

        On a cluster a statement's fixed cost of one to two seconds is small beside what the daemon alone needs to find
        a million keys and write their rows.
        """
        if self.statement_rows is not None:
            return self.statement_rows
        return 0 if self.is_local else _STATEMENT_ROWS

    def session_conf(self) -> dict[str, str]:
        """Return the configuration of a session: `conf`, and the packages unless `conf` names some itself."""
        packages = {"spark.jars.packages": ",".join(self.packages)} if self.packages else {}
        return packages | self.conf


class Settings(_Table):
    """A node's settings.  Sizes are in bytes, times in seconds; a timeout of 0 means none."""

    home: Path
    wal_receiver_timeout: Annotated[float, _reader("wal_receiver_timeout")] = 60.0
    wal_receiver_status_interval: Annotated[float, _reader("wal_receiver_status_interval")] = 10.0
    wal_retrieve_retry_interval: Annotated[float, _reader("wal_retrieve_retry_interval")] = 5.0
    max_logical_replication_workers: Annotated[int, _reader("max_logical_replication_workers")] = 1000
    max_sync_workers_per_subscription: Annotated[int, _reader("max_sync_workers_per_subscription")] = 2
    max_parallel_apply_workers_per_subscription: Annotated[
        int, _reader("max_parallel_apply_workers_per_subscription")
    ] = 2
    max_resyncs_per_day: Annotated[int, _reader("max_resyncs_per_day")] = 1
    """How often a subscription with `on_slot_loss = resync` may be copied anew within 24 hours."""
    logical_decoding_work_mem: Annotated[int, _reader("logical_decoding_work_mem")] = 64 << 20
    max_message_size: Annotated[int, _reader("max_message_size")] = 1 << 30
    """The most bytes of one message, or of a copied row; a process may need five times as many (docs/transactions.md)."""
    catalog_poll_interval: Annotated[float, _reader("catalog_poll_interval")] = 1.0
    catalog_timeout: Annotated[float, _reader("catalog_timeout")] = 30.0
    drain_timeout: Annotated[float, _reader("drain_timeout")] = 30.0
    warehouse: str | None = None
    catalog: CatalogSettings = CatalogSettings()
    housekeeping: HousekeepingSettings = HousekeepingSettings()
    walsender: WalsenderSettings = WalsenderSettings()
    spark: SparkSettings = SparkSettings()
    verify: VerifySettings = VerifySettings()
    http: HttpSettings = HttpSettings()

    @classmethod
    def load(cls, home: Path, more: Mapping[str, Any] = MappingProxyType({})) -> Self:
        """Read pubsub.toml in `home`; without the file every default holds.  Raises PubsubError.

        `more`: values as a file has them, which go before the file's; those in a table, too.
        """
        path = home / FILE_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise PubsubError(f'could not read configuration file "{path}": {error}', sqlstate="58030") from error
        try:
            values = tomllib.loads(text)
            for name, value in more.items():
                held = values.get(name)
                values[name] = {**held, **value} if isinstance(held, dict) and isinstance(value, Mapping) else value
            return cls.read(values, home)
        except tomllib.TOMLDecodeError as error:
            raise PubsubError(
                f'configuration file "{path}" contains errors', sqlstate="F0000", detail=f"{error}."
            ) from error
        except RecursionError as error:
            raise PubsubError(
                f'configuration file "{path}" contains errors', sqlstate="F0000", detail="It is nested too deep."
            ) from error
        except PubsubError as error:
            error.context = error.context or f'configuration file "{path}"'
            raise

    @classmethod
    def read(cls, values: dict[str, Any], home: Path) -> Self:
        """Build settings from the values of a file, or of a test.  Raises PubsubError; FeatureNotSupported for spark.remote."""
        known: dict[str, type[_Table]] = {
            "": cls,
            "catalog": CatalogSettings,
            "housekeeping": HousekeepingSettings,
            "walsender": WalsenderSettings,
            "spark": SparkSettings,
            "verify": VerifySettings,
            "http": HttpSettings,
        }
        for prefix, table in known.items():
            names = values.get(prefix, {}) if prefix else values
            if not isinstance(names, dict):
                raise PubsubError(f'parameter "{prefix}" must be a table', sqlstate="22023")
            for name in names:
                if name not in table.model_fields or name == "home":
                    full = f"{prefix}.{name}" if prefix else name
                    raise _unrecognized(full, name, prefix, table)
        spark = values.get("spark")
        if isinstance(spark, dict) and isinstance(spark.get("conf"), dict):
            values = values | {"spark": spark | {"conf": _flat(spark["conf"])}}
        kept = values.get("housekeeping", {})
        if "deleted_file_retention" in kept and "log_retention" not in kept:
            # Delta refuses a log that is kept for a shorter time than removed files.
            values = values | {"housekeeping": kept | {"log_retention": kept["deleted_file_retention"]}}
        try:
            settings = cls(home=home.absolute(), **values)
        except ValidationError as error:
            first = error.errors()[0]
            name = ".".join(str(part) for part in first["loc"])
            secret = name.startswith("spark.conf") or name in _CONNECTIONS
            shown = "" if secret else f': "{first["input"]}"'
            raise PubsubError(f'invalid value for parameter "{name}"{shown}', sqlstate="22023") from None
        if settings.spark.remote is not None or "spark.remote" in settings.spark.conf:
            raise FeatureNotSupported(
                'parameter "spark.remote" is not supported',
                detail="Commits are made by Delta's classes in Spark's driver, which a Spark Connect client cannot call.",
                hint='Use "spark.master", such as "spark://host:7077": the daemon is the driver then.',
            )
        for name, value in settings.spark.conf.items():
            if name.lower().removeprefix("spark.hadoop.") == _FAST_LISTING and value.strip().lower() != "false":
                raise FeatureNotSupported(
                    f'parameter "spark.conf.{name}" is not supported',
                    detail="With it Delta reads wrong snapshots of tables on S3.",
                    hint="Remove it.",
                )
        settings.walsender.place()
        settings.http.place()
        if settings.walsender.archive_directory and settings.walsender.restore_command:
            raise PubsubError(
                'parameters "walsender.archive_directory" and "walsender.restore_command" cannot both be set',
                sqlstate="22023",
                hint="A WAL archive is one of the two.",
            )
        if settings.housekeeping.log_retention < settings.housekeeping.deleted_file_retention:
            raise PubsubError(
                'parameter "housekeeping.log_retention" must not be less than "housekeeping.deleted_file_retention"',
                sqlstate="22023",
                detail="Versions whose files are kept must stay readable.",
            )
        return settings

    @property
    def catalog_location(self) -> str | Path:
        """The catalog's location for `Catalog.open`: the URL in the settings, else a file in the node's directory."""
        return self.catalog.url or self.home / "catalog.db"

    @property
    def warehouse_uri(self) -> str:
        """The root of the Delta tables, without a trailing slash; by default a plain path in the node's directory.

        s3:// is s3a://, since Hadoop takes only that for its own, and hdfs:/// has the name node of fs.defaultFS.
        """
        found = (self.warehouse or str(self.home / "warehouse")).rstrip("/")
        if found.startswith("hdfs:///"):
            from pubsub.object_stores import hadoop_settings

            default = hadoop_settings(self.spark.conf).get("fs.defaultFS", "")
            return found if not default.startswith("hdfs://") else default.rstrip("/") + found.removeprefix("hdfs://")
        return f"s3a://{found.removeprefix('s3://')}" if found.startswith("s3://") else found

    @property
    def spill_directory(self) -> Path:
        """The directory for changes that exceed logical_decoding_work_mem."""
        return self.home / "spill"

    def show(self, name: str) -> str:
        """Return a parameter's value as SHOW prints it.  Raises UndefinedObject."""
        of_tables = self._shown_of_tables()
        if name.lower() in of_tables:
            return of_tables[name.lower()]
        parameter = PARAMETERS.get(name.lower())
        if parameter is None:
            best = nearest(name.lower(), [*PARAMETERS, *of_tables])
            raise UndefinedObject(
                f'unrecognized configuration parameter "{name}"',
                hint=f'Perhaps you meant the parameter "{best}".' if best is not None else None,
            )
        return parameter.show(round(getattr(self, parameter.name) / parameter.factor))

    def show_all(self) -> list[tuple[str, str]]:
        """Return all names and values as SHOW ALL prints them, ordered by name."""
        return [(name, self.show(name)) for name in sorted([*PARAMETERS, *self._shown_of_tables()])]

    def _shown_of_tables(self) -> dict[str, str]:
        """Return the values of the file's tables whose values may be shown, by full name."""
        return self.housekeeping.shown() | self.walsender.shown() | self.verify.shown() | self.http.shown()


def _unrecognized(full: str, name: str, prefix: str, table: type[_Table]) -> UndefinedObject:
    best = nearest(name, (known for known in table.model_fields if known != "home"))
    shown = f"{prefix}.{best}" if prefix else best
    hint = f'Perhaps you meant the parameter "{shown}".' if best is not None else None
    return UndefinedObject(f'unrecognized configuration parameter "{full}"', hint=hint)


def names_secret(conf: str) -> bool:
    """Return whether a setting of [spark.conf] holds a secret, by its name."""
    return _SECRET.search(conf) is not None


def _flat(conf: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Flatten Spark's conf to strings.

    TOML reads an unquoted spark.driver.memory as nested tables, and true as a boolean: both are accepted.
    """
    found: dict[str, str] = {}
    for name, value in conf.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{prefix}{name}.")
        elif isinstance(value, bool):
            found[prefix + name] = "true" if value else "false"
        elif isinstance(value, str | int | float):
            found[prefix + name] = str(value)
        else:
            # The value may be a secret.
            raise PubsubError(f'invalid value for parameter "spark.conf.{prefix}{name}"', sqlstate="22023")
    return found
