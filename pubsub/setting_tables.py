"""The tables of pubsub.toml: [catalog], [housekeeping], [copies], [walsender], [http], [tracing], [verify] and
[spark].

Each is a model of its own, whose values settings.Settings reads and shows.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import datetime, time, timedelta
from typing import Annotated, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.parameters import Parameter

_WINDOW: Final = re.compile(r"\s*(\d\d?):(\d\d)\s*-\s*(\d\d?):(\d\d)\s*")
# Hadoop's settings that hold a secret by their names; then Spark's own (spark.authenticate.secret, spark.executorEnv.X_PASSWORD …).
_SECRET: Final = re.compile(
    r"^spark\.hadoop\..*(secret|key|password|token|credential|sas)|secret|password|token|credential|account\.key|access[._]?key",
    re.IGNORECASE,
)

_STATEMENT_ROWS: Final = 1_000_000
MAX_WORKERS: Final = 262143

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
        Parameter("walsender.max_replication_slots", "", 0, MAX_WORKERS),
        Parameter("walsender.max_wal_senders", "", 0, MAX_WORKERS),
        Parameter("walsender.max_connections", "", 1, MAX_WORKERS),
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

#: Parameters of the table [copies] that are numbers.
_COPIES: Final = {
    parameter.name.removeprefix("copies."): parameter for parameter in (Parameter("copies.max_rate", "kB", 0),)
}


def reader(parameter: Parameter) -> BeforeValidator:
    """Return a validator that converts the file's value to bytes, seconds or a count."""

    def read(value: object) -> float | int:
        units = parameter.parse(value)
        return units * parameter.factor if parameter.is_time else units * int(parameter.factor)

    return BeforeValidator(read)


class Table(BaseModel):
    """A table of the file; unknown names are refused."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CatalogSettings(Table):
    """The table [catalog]; `url` may hold a password."""

    url: str | None = Field(default=None, repr=False)

    def shown(self) -> dict[str, str]:
        """Return the URL by its full name, as SHOW prints it: without its secrets, or as asterisks if it is not libpq's."""
        from pubsub.sql.conninfo import MASK, mask_conninfo

        url = self.url or ""
        is_known = url.startswith(("postgresql://", "postgres://")) or not url
        return {"catalog.url": mask_conninfo(url) if is_known else MASK}


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


class HousekeepingSettings(Table):
    """The table [housekeeping]: what the daemon does to keep Delta tables small (launcher/housekeeper.py).

    `merge_files`: merge small data files, and rewrite those with many deleted rows.  `deleted_file_retention`,
    `log_retention`: how long a removed file, and a commit, stays, in seconds.  Within `window` VACUUM runs, logs are
    cleaned, and files with deleted rows are rewritten.
    """

    enabled: bool = True
    merge_files: bool = True
    deleted_file_retention: Annotated[float, reader(_HOUSEKEEPING["deleted_file_retention"])] = 3600.0
    log_retention: Annotated[float, reader(_HOUSEKEEPING["log_retention"])] = 3600.0
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


class CopiesSettings(Table):
    """The table [copies]: what initial copies may ask of a publisher, and when (launcher/copies_at_once.py).

    Copies begin within `window`; one that has begun goes on behind its end, since its slot retains WAL.  `max_rate`: bytes per
    second that the copy of one table reads (0: no limit).
    """

    window: Annotated[DailyWindow, _window("copies.window")] = DailyWindow.parse("")
    max_rate: Annotated[int, reader(_COPIES["max_rate"])] = 0

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them."""
        shown = {"copies.window": str(self.window)}
        for name, parameter in _COPIES.items():
            shown[parameter.name] = parameter.show(round(getattr(self, name) / parameter.factor))
        return shown


class WalsenderSettings(Table):
    """The table [walsender]: the node's server for subscribers and psql (pubsub/backend, walsender/server, pubsub/server).

    `upstream`: the connection string of the server whose WAL is decoded; None: there is none.  `wal_source`: that of a standby of
    it to receive the WAL from instead.  `listen`: HOST:PORT for TCP.  `primary_slot_name`: a physical slot where the WAL comes
    from.  `archive_directory` or `restore_command` (with %f, %p as PostgreSQL's): where WAL comes from that is no longer kept.
    `auth_file`: users and their SCRAM verifiers (pubsub/backend/users.py); with it
    clients authenticate here, without it at the upstream server.  Files are relative to the node's directory.
    `allow_trust`: whether clients of other hosts may be let in at the upstream server without having been asked for anything.
    `require_tls`: whether clients over TCP must use TLS.
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
    allow_trust: bool = False
    require_tls: bool = False
    unix_socket: bool = True
    max_slot_wal_keep_size: Annotated[int, reader(_WALSENDER["max_slot_wal_keep_size"])] = -1
    idle_replication_slot_timeout: Annotated[float, reader(_WALSENDER["idle_replication_slot_timeout"])] = 0.0
    max_replication_slots: Annotated[int, reader(_WALSENDER["max_replication_slots"])] = 10
    max_wal_senders: Annotated[int, reader(_WALSENDER["max_wal_senders"])] = 10
    max_connections: Annotated[int, reader(_WALSENDER["max_connections"])] = 100
    authentication_timeout: Annotated[float, reader(_WALSENDER["authentication_timeout"])] = 60.0

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
        for name in ("allow_trust", "require_tls", "unix_socket"):
            shown[f"walsender.{name}"] = "on" if getattr(self, name) else "off"
        for name, parameter in _WALSENDER.items():
            value = getattr(self, name)
            shown[parameter.name] = "-1" if value < 0 else parameter.show(round(value / parameter.factor))
        return shown

    def place(self) -> tuple[str, int] | None:
        """Return host and port of `listen`; None without it.  Raises PubsubError (22023)."""
        return None if self.listen is None else _place(self.listen, "localhost:6432")


class TracingSettings(Table):
    """The table [tracing]: traces of batches (pubsub/tracing.py).

    `endpoint`: the URL of a collector that takes OTLP by HTTP, without the path of traces; None: as OpenTelemetry's variables say.
    """

    endpoint: str | None = None

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them."""
        return {"tracing.endpoint": self.endpoint or ""}

    def require_url(self) -> None:
        """Raise PubsubError (22023) if `endpoint` is no URL of HTTP."""
        if self.endpoint and not re.fullmatch(r"https?://[^/?#\s@]+(/[^?#\s]*)?", self.endpoint):
            raise PubsubError(
                'invalid value for parameter "tracing.endpoint"',
                sqlstate="22023",
                hint='It is a collector\'s URL, such as "http://localhost:4318"; headers are in OTEL_EXPORTER_OTLP_HEADERS.',
            )


class HttpSettings(Table):
    """The table [http]: metrics, health, readiness and a page (pubsub/monitoring).

    `listen`: HOST:PORT, port 0 for a free one; None: nothing listens.  Whoever reaches it may read.  `page`: whether there is a
    page, which shows the texts of errors and events, too.  `hosts`: names under which the page is asked for, comma-separated, such as
    a proxy's; addresses, localhost, the machine's name and that of `listen` always count.  `ready_lag`: how far a subscription
    may lag behind, in seconds, and still count as ready.
    """

    listen: str | None = None
    page: bool = True
    hosts: str = ""
    ready_lag: Annotated[float, reader(_HTTP["ready_lag"])] = 60.0

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them."""
        shown = {
            "http.hosts": ", ".join(self.names),
            "http.listen": self.listen or "",
            "http.page": "on" if self.page else "off",
        }
        for name, parameter in _HTTP.items():
            shown[parameter.name] = parameter.show(round(getattr(self, name) / parameter.factor))
        return shown

    @property
    def names(self) -> tuple[str, ...]:
        """The names of `hosts`."""
        return tuple(one.strip() for one in self.hosts.split(",") if one.strip())

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


class VerifySettings(Table):
    """The table [verify]: how tables are compared with the publisher's, and when by themselves (launcher/verifier.py).

    `interval`: how often the daemon verifies each table, in seconds (0: never), within `window`; with `sample` only
    `sample_rows` rows of each table.  `connections`: sessions on the publisher, each of which takes one core there at most;
    `max_rate`: bytes of its tables that they read per second (0: no limit).  `timeout`: how long a verification may hold a
    snapshot there, in seconds (0: no limit).
    """

    interval: Annotated[float, reader(_VERIFY["interval"])] = 0.0
    window: Annotated[DailyWindow, _window("verify.window")] = DailyWindow.parse("")
    sample: bool = False
    sample_rows: Annotated[int, reader(_VERIFY["sample_rows"])] = 10_000
    connections: Annotated[int, reader(_VERIFY["connections"])] = 1
    max_rate: Annotated[int, reader(_VERIFY["max_rate"])] = 0
    timeout: Annotated[float, reader(_VERIFY["timeout"])] = 3600.0

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them."""
        shown = {"verify.window": str(self.window), "verify.sample": "on" if self.sample else "off"}
        for name, parameter in _VERIFY.items():
            shown[parameter.name] = parameter.show(round(getattr(self, name) / parameter.factor))
        return shown


# A setting of Delta's store for S3, in lower case.
_FAST_LISTING: Final = "delta.enablefasts3alistfrom"


_HINT_TO_MASTER: Final = 'Set the cluster as master = "spark://host:7077" in the table [spark]'

#: What helps on such a cluster.
OWN_PASSWORDS: Final = (
    "Or give the executors the password: in ~/.pgpass there, or in a file there that passfile in the CONNECTION, or "
    "spark.executorEnv.PGPASSFILE in [spark.conf], names."
)


class SparkSettings(Table):
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

    def require_catalogs(self, names: Iterable[str]) -> None:
        """Raise UndefinedObject for a catalog of Spark's that is not configured, or that forgets its tables with the JVM."""
        for name in sorted(names):
            if f"spark.sql.catalog.{name}" in self.conf:
                continue
            if name != "spark_catalog":
                raise UndefinedObject(
                    f'catalog "{name}" does not exist',
                    detail=f'[spark.conf] has no "spark.sql.catalog.{name}".',
                    hint="spark_catalog is the one that is always there.",
                )
            if self.conf.get("spark.sql.catalogImplementation") != "hive":
                raise UndefinedObject(
                    'catalog "spark_catalog" keeps no tables',
                    detail="Without a Hive metastore it is in the memory of Spark's JVM.",
                    hint='Set "spark.sql.catalogImplementation" = "hive" in [spark.conf], and where the metastore is.',
                )

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

    def shown(self) -> dict[str, str]:
        """Return the values by full name, as SHOW prints them, but `conf`: what is in there is Spark's, and may be secret."""
        return {
            "spark.master": self.master,
            "spark.packages": ", ".join(self.packages),
            "spark.statement_rows": str(self.least_statement_rows),
        }

    def refuse_unsupported(self) -> None:
        """Refuse what Delta, or this program, cannot work with.  Raises FeatureNotSupported."""
        if self.remote is not None or "spark.remote" in self.conf:
            raise FeatureNotSupported(
                'parameter "spark.remote" is not supported',
                detail="Commits are made by Delta's classes in Spark's driver, which a Spark Connect client cannot call.",
                hint=f"{_HINT_TO_MASTER}: the daemon is the driver then.",
            )
        if "spark.master" in self.conf:
            raise FeatureNotSupported(
                'parameter "spark.conf.spark.master" is not supported',
                detail="What the daemon does for a cluster would not be done: it would listen where no executor reaches it.",
                hint=f"{_HINT_TO_MASTER}.",
            )
        for name, value in self.conf.items():
            if name.lower().removeprefix("spark.hadoop.") == _FAST_LISTING and value.strip().lower() != "false":
                raise FeatureNotSupported(
                    f'parameter "spark.conf.{name}" is not supported',
                    detail="With it Delta reads wrong snapshots of tables on S3.",
                    hint="Remove it.",
                )

    def session_conf(self) -> dict[str, str]:
        """Return the configuration of a session: `conf`, and the packages unless `conf` names some itself."""
        packages = {"spark.jars.packages": ",".join(self.packages)} if self.packages else {}
        return packages | self.conf


def names_secret(conf: str) -> bool:
    """Return whether a setting of [spark.conf] holds a secret, by its name."""
    return _SECRET.search(conf) is not None
