"""pubsub.toml: a node's settings, with PostgreSQL's names, units, bounds and defaults where PostgreSQL has them.

    wal_receiver_timeout = "60s"
    logical_decoding_work_mem = "64MB"
    [catalog]
    url = "postgresql://host/database"
    [housekeeping]
    deleted_file_retention = "1h"
    [spark]
    master = "local[*]"
    conf = { "spark.driver.memory" = "2g" }

A number without a unit is in the parameter's own unit, as in postgresql.conf (guc.c: parse_int, convert_to_base_unit).
The values are kept in bytes and seconds.  Errors are PubsubErrors with the texts of guc.c; the first one is raised.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Annotated, Any, Final, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from pubsub.daily_window import DailyWindow
from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.nearest import nearest
from pubsub.parameters import INT_MAX, Parameter

FILE_NAME: Final = "pubsub.toml"

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


def _reader(name: str) -> BeforeValidator:
    """Return a validator that converts the file's value to bytes, seconds or a count."""
    parameter = PARAMETERS.get(name) or _HOUSEKEEPING[name]

    def read(value: object) -> float | int:
        units = parameter.parse(value)
        return units * parameter.factor if parameter.is_time else units * int(parameter.factor)

    return BeforeValidator(read)


class _Table(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class CatalogSettings(_Table):
    """The table [catalog]; `url` may hold a password."""

    url: str | None = Field(default=None, repr=False)


def _window(value: object) -> DailyWindow:
    if isinstance(value, DailyWindow):
        return value
    if not isinstance(value, str):
        raise PubsubError(f'invalid value for parameter "housekeeping.window": "{value}"', sqlstate="22023")
    return DailyWindow.parse(value)


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
    window: Annotated[DailyWindow, BeforeValidator(_window)] = DailyWindow.parse("")

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
    def least_statement_rows(self) -> int:
        """`statement_rows`, or else its default: 0 with a local master, where our files are always faster.

        On a cluster a statement's fixed cost of one to two seconds is small beside what the daemon alone needs to find
        a million keys and write their rows.
        """
        if self.statement_rows is not None:
            return self.statement_rows
        return 0 if self.master.startswith("local") else _STATEMENT_ROWS

    def session_conf(self) -> dict[str, str]:
        """Return the configuration of a session: `conf`, and the packages unless `conf` names some itself.

        Raises FeatureNotSupported for a remote Spark.
        """
        if self.remote is not None:
            raise FeatureNotSupported('parameter "spark.remote" is not supported', hint='Use "spark.master".')
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
    logical_decoding_work_mem: Annotated[int, _reader("logical_decoding_work_mem")] = 64 << 20
    max_message_size: Annotated[int, _reader("max_message_size")] = 1 << 30
    catalog_poll_interval: Annotated[float, _reader("catalog_poll_interval")] = 1.0
    catalog_timeout: Annotated[float, _reader("catalog_timeout")] = 30.0
    drain_timeout: Annotated[float, _reader("drain_timeout")] = 30.0
    warehouse: str | None = None
    catalog: CatalogSettings = CatalogSettings()
    housekeeping: HousekeepingSettings = HousekeepingSettings()
    spark: SparkSettings = SparkSettings()

    @classmethod
    def load(cls, home: Path) -> Self:
        """Read pubsub.toml in `home`; without the file every default holds.  Raises PubsubError."""
        path = home / FILE_NAME
        try:
            text = path.read_text(encoding="utf-8")
        except (FileNotFoundError, NotADirectoryError):
            text = ""
        except (OSError, UnicodeDecodeError) as error:
            raise PubsubError(f'could not read configuration file "{path}": {error}', sqlstate="58030") from error
        try:
            return cls.read(tomllib.loads(text), home)
        except tomllib.TOMLDecodeError as error:
            raise PubsubError(
                f'configuration file "{path}" contains errors', sqlstate="F0000", detail=f"{error}."
            ) from error
        except PubsubError as error:
            error.context = error.context or f'configuration file "{path}"'
            raise

    @classmethod
    def read(cls, values: dict[str, Any], home: Path) -> Self:
        """Build settings from the values of a file, or of a test.  Raises PubsubError."""
        known: dict[str, type[_Table]] = {
            "": cls,
            "catalog": CatalogSettings,
            "housekeeping": HousekeepingSettings,
            "spark": SparkSettings,
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
            shown = "" if name == "catalog.url" else f': "{first["input"]}"'
            raise PubsubError(f'invalid value for parameter "{name}"{shown}', sqlstate="22023") from None
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
        """The root of the Delta tables, without a trailing slash; by default a plain path in the node's directory."""
        return (self.warehouse or str(self.home / "warehouse")).rstrip("/")

    @property
    def spill_directory(self) -> Path:
        """The directory for changes that exceed logical_decoding_work_mem."""
        return self.home / "spill"

    def show(self, name: str) -> str:
        """Return a parameter's value as SHOW prints it.  Raises UndefinedObject."""
        housekeeping = self.housekeeping.shown()
        if name.lower() in housekeeping:
            return housekeeping[name.lower()]
        parameter = PARAMETERS.get(name.lower())
        if parameter is None:
            best = nearest(name.lower(), [*PARAMETERS, *housekeeping])
            raise UndefinedObject(
                f'unrecognized configuration parameter "{name}"',
                hint=f'Perhaps you meant the parameter "{best}".' if best is not None else None,
            )
        return parameter.show(round(getattr(self, parameter.name) / parameter.factor))

    def show_all(self) -> list[tuple[str, str]]:
        """Return all names and values as SHOW ALL prints them, ordered by name."""
        return [(name, self.show(name)) for name in sorted([*PARAMETERS, *self.housekeeping.shown()])]


def _unrecognized(full: str, name: str, prefix: str, table: type[_Table]) -> UndefinedObject:
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
            raise PubsubError(f'invalid value for parameter "spark.conf.{prefix}{name}": "{value}"', sqlstate="22023")
    return found
