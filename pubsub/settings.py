"""pubsub.toml: a node's settings, with PostgreSQL's names, units, bounds and defaults where PostgreSQL has them.

    wal_receiver_timeout = "60s"
    logical_decoding_work_mem = "64MB"
    [catalog]
    url = "postgresql://host/database"
    [housekeeping]
    deleted_file_retention = "1h"
    [copies]
    window = "22:00-04:00"
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

import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, Self

from pydantic import ValidationError

from pubsub.errors import PubsubError, UndefinedObject
from pubsub.nearest import nearest
from pubsub.parameters import INT_MAX, Parameter
from pubsub.setting_tables import (
    MAX_WORKERS,
    CatalogSettings,
    CopiesSettings,
    HousekeepingSettings,
    HttpSettings,
    SparkSettings,
    Table,
    TracingSettings,
    VerifySettings,
    WalsenderSettings,
    reader,
)

FILE_NAME: Final = "pubsub.toml"


#: Parameters of guc_tables.c with the same units and bounds; those from max_message_size on are not PostgreSQL's.  The
#: defaults are the same too, except that of max_logical_replication_workers, since a worker here is no process.
PARAMETERS: Final = {
    parameter.name: parameter
    for parameter in (
        Parameter("wal_receiver_timeout", "ms", 0),
        Parameter("wal_receiver_status_interval", "s", 0, INT_MAX // 1000),
        Parameter("wal_retrieve_retry_interval", "ms", 1),
        Parameter("max_logical_replication_workers", "", 0, MAX_WORKERS),
        Parameter("max_sync_workers_per_subscription", "", 0, MAX_WORKERS),
        Parameter("max_parallel_apply_workers_per_subscription", "", 0, 1024),
        Parameter("max_resyncs_per_day", "", 0, 1000),
        Parameter("worker_processes", "", 1, 64),
        Parameter("logical_decoding_work_mem", "kB", 64),
        Parameter("max_message_size", "kB", 64),
        Parameter("catalog_poll_interval", "ms", 10),
        Parameter("catalog_timeout", "ms", 0),
        Parameter("drain_timeout", "ms", 0),
        Parameter("restore_timeout", "ms", 0),
    )
}


#: Those that a reload changes in what runs; the workers start again for any other.
_RELOADED: Final = frozenset(
    {
        "wal_receiver_timeout",
        "wal_receiver_status_interval",
        "wal_retrieve_retry_interval",
        "max_sync_workers_per_subscription",
        "max_resyncs_per_day",
        "catalog_poll_interval",
        "drain_timeout",
    }
)


#: Settings that are connection strings, which may hold passwords.
_CONNECTIONS: Final = frozenset({"catalog.url", "walsender.upstream", "walsender.wal_source"})


class Settings(Table):
    """A node's settings.  Sizes are in bytes, times in seconds; a timeout of 0 means none."""

    home: Path
    wal_receiver_timeout: Annotated[float, reader(PARAMETERS["wal_receiver_timeout"])] = 60.0
    wal_receiver_status_interval: Annotated[float, reader(PARAMETERS["wal_receiver_status_interval"])] = 10.0
    wal_retrieve_retry_interval: Annotated[float, reader(PARAMETERS["wal_retrieve_retry_interval"])] = 5.0
    max_logical_replication_workers: Annotated[int, reader(PARAMETERS["max_logical_replication_workers"])] = 1000
    max_sync_workers_per_subscription: Annotated[int, reader(PARAMETERS["max_sync_workers_per_subscription"])] = 2
    max_parallel_apply_workers_per_subscription: Annotated[
        int, reader(PARAMETERS["max_parallel_apply_workers_per_subscription"])
    ] = 2
    max_resyncs_per_day: Annotated[int, reader(PARAMETERS["max_resyncs_per_day"])] = 1
    """How often a subscription with `on_slot_loss = resync` may be copied anew within 24 hours."""
    worker_processes: Annotated[int, reader(PARAMETERS["worker_processes"])] = 1
    """How many processes share the subscriptions (launcher/share.py)."""
    logical_decoding_work_mem: Annotated[int, reader(PARAMETERS["logical_decoding_work_mem"])] = 64 << 20
    max_message_size: Annotated[int, reader(PARAMETERS["max_message_size"])] = 1 << 30
    """The most bytes of one message, or of a copied row; a process may need five times as many (docs/transactions.md)."""
    catalog_poll_interval: Annotated[float, reader(PARAMETERS["catalog_poll_interval"])] = 1.0
    catalog_timeout: Annotated[float, reader(PARAMETERS["catalog_timeout"])] = 30.0
    drain_timeout: Annotated[float, reader(PARAMETERS["drain_timeout"])] = 30.0
    restore_command: str | None = None
    """The command that fetches a publisher's archived WAL, for subscriptions with `wal_archive = restore_command`."""
    restore_timeout: Annotated[float, reader(PARAMETERS["restore_timeout"])] = 600.0
    warehouse: str | None = None
    catalog: CatalogSettings = CatalogSettings()
    housekeeping: HousekeepingSettings = HousekeepingSettings()
    copies: CopiesSettings = CopiesSettings()
    walsender: WalsenderSettings = WalsenderSettings()
    spark: SparkSettings = SparkSettings()
    verify: VerifySettings = VerifySettings()
    http: HttpSettings = HttpSettings()
    tracing: TracingSettings = TracingSettings()

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
        known: dict[str, type[Table]] = {
            "": cls,
            "catalog": CatalogSettings,
            "housekeeping": HousekeepingSettings,
            "copies": CopiesSettings,
            "walsender": WalsenderSettings,
            "spark": SparkSettings,
            "verify": VerifySettings,
            "http": HttpSettings,
            "tracing": TracingSettings,
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
        if settings.warehouse is not None and _path_of(settings.warehouse) == "":
            raise PubsubError(
                f'invalid value for parameter "warehouse": "{settings.warehouse}"',
                sqlstate="22023",
                hint='A URI of a local directory is "file:///path".',
            )
        settings.spark.refuse_unsupported()
        settings.walsender.place()
        settings.http.place()
        settings.tracing.require_url()
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

    def take_over(self, found: Settings) -> bool:
        """Change in place what differs from `found`, if whatever reads these settings reads them again; else return False.

        The server for subscribers waits for its upstream server by a wal_receiver_timeout of its own, as of its start.
        """
        differing = {name for name in type(self).model_fields if getattr(self, name) != getattr(found, name)}
        if not differing <= _RELOADED or ("wal_receiver_timeout" in differing and self.walsender.upstream is not None):
            return False
        for name in differing:
            # Frozen for everybody else: a reload alone may change what a process has in common.
            object.__setattr__(self, name, getattr(found, name))
        return True

    @property
    def catalog_location(self) -> str | Path:
        """The catalog's location for `Catalog.open`: the URL in the settings, else a file in the node's directory."""
        return self.catalog.url or self.home / "catalog.db"

    @property
    def warehouse_uri(self) -> str:
        """The root of the Delta tables, without a trailing slash; by default a plain path in the node's directory.

        A relative path is one there, too, wherever a program of the node is started.  s3:// is s3a://, since Hadoop takes
        only that for its own, and hdfs:/// has the name node of fs.defaultFS.
        """
        given = self.warehouse or "warehouse"
        if given.startswith("file:"):
            return f"file://{_path_of(given)}"
        if "://" not in given:
            return str(self.home / given)
        found = given.rstrip("/")
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
        of_tables = self._shown_besides()
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
        """Return all names and values as SHOW prints them, ordered by name."""
        return [(name, self.show(name)) for name in sorted([*PARAMETERS, *self._shown_besides()])]

    def describe_all(self) -> list[tuple[str, str, str]]:
        """Return the rows of SHOW ALL: name, setting and description, ordered by name."""
        from pubsub.setting_descriptions import DESCRIPTIONS

        return [(name, value, DESCRIPTIONS[name]) for name, value in self.show_all()]

    def _shown_besides(self) -> dict[str, str]:
        """Return what is not among PARAMETERS, as SHOW prints it, by full name: texts, and the file's tables."""
        tables = (
            self.catalog, self.housekeeping, self.copies, self.walsender, self.verify, self.http, self.tracing, self.spark,
        )  # fmt: skip
        of_tables = {name: value for table in tables for name, value in table.shown().items()}
        return {"warehouse": self.warehouse_uri, "restore_command": self.restore_command or "", **of_tables}


def _path_of(uri: str) -> str | None:
    """Return the path that a file URI has, "" if it is not absolute; None for anything else."""
    if not uri.startswith("file:"):
        return None
    path = uri.removeprefix("file:").removeprefix("//").rstrip("/")
    return path if path.startswith("/") else ""


def _unrecognized(full: str, name: str, prefix: str, table: type[Table]) -> UndefinedObject:
    best = nearest(name, (known for known in table.model_fields if known != "home"))
    shown = f"{prefix}.{best}" if prefix else best
    hint = f'Perhaps you meant the parameter "{shown}".' if best is not None else None
    return UndefinedObject(f'unrecognized configuration parameter "{full}"', hint=hint)


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
