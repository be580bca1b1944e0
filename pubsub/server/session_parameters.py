"""A session's parameters: what SET, RESET and SHOW know, and what clients are told of (guc.c).

Times are shown in the session's TimeZone; the other parameters that clients set when they start are accepted and kept.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, tzinfo
from typing import Final
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from pubsub.errors import FeatureNotSupported, PubsubError, UndefinedObject
from pubsub.nearest import nearest

SERVER_VERSION: Final = "18.0"
_REPORTED: Final = {
    "application_name": "", "client_encoding": "UTF8", "DateStyle": "ISO, MDY", "default_transaction_read_only": "off",
    "in_hot_standby": "off", "integer_datetimes": "on", "IntervalStyle": "postgres", "is_superuser": "off",
    "scram_iterations": "4096", "search_path": '"$user", public', "server_encoding": "UTF8",
    "session_authorization": "", "standard_conforming_strings": "on", "TimeZone": "UTC",
}  # fmt: skip
_OTHERS: Final = {
    "backslash_quote": "safe_encoding", "bytea_output": "hex", "check_function_bodies": "on", "client_min_messages": "notice",
    "cursor_tuple_fraction": "0.1", "default_transaction_isolation": "read committed", "default_with_oids": "off",
    "escape_string_warning": "on", "extra_float_digits": "1", "geqo": "on", "idle_in_transaction_session_timeout": "0",
    "idle_session_timeout": "0", "jit": "off", "lc_messages": "C", "lc_monetary": "C", "lc_numeric": "C", "lc_time": "C",
    "lock_timeout": "0", "log_statement": "none", "role": "none", "row_security": "on", "session_replication_role": "origin",
    "statement_timeout": "0", "synchronize_seqscans": "on", "transaction_timeout": "0", "transaction_isolation": "read committed",
    "transaction_read_only": "off", "work_mem": "4MB", "xmloption": "content", "quote_all_identifiers": "off",
    "array_nulls": "on", "log_min_duration_statement": "-1", "enable_seqscan": "on", "restrict_nonsystem_relation_kind": "",
    "max_parallel_workers_per_gather": "0", "datestyle": "ISO, MDY", "exit_on_error": "off",
    "default_transaction_deferrable": "off",
}  # fmt: skip
_FIXED: Final = {
    "server_version_num": "180000", "max_identifier_length": "63", "max_index_keys": "32", "block_size": "8192",
    "wal_level": "logical", "data_checksums": "on", "lc_collate": "C", "lc_ctype": "C.UTF-8", "ssl": "off",
    "max_connections": "100", "port": "5432", "wal_sender_timeout": "1min", "default_tablespace": "",
    "default_table_access_method": "delta", "password_encryption": "scram-sha-256", "hot_standby": "on",
    "segment_size": "1GB", "wal_segment_size": "16MB", "autovacuum": "off",
}  # fmt: skip
_READ_ONLY: Final = frozenset(
    {
        "server_encoding",
        "is_superuser",
        "in_hot_standby",
        "integer_datetimes",
        "session_authorization",
        "server_version",
    }
)
_UTF8: Final = frozenset({"utf8", "unicode", "sqlascii", "auto", "default"})
_SECONDS: Final = {"": 0.001, "ms": 0.001, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "us": 0.000001}


class SessionParameters:
    """One session's parameters.  Names are compared without regard to case, as PostgreSQL does."""

    def __init__(self, started: Mapping[str, str], user: str, version: str, *, superuser: bool) -> None:
        """`started`: those of the startup message.  Raises PubsubError."""
        self._names: dict[str, str] = {}
        self._values: dict[str, str] = {}
        for name, value in {**_FIXED, **_OTHERS, **_REPORTED, "server_version": version}.items():
            self._names[name.lower()] = name
            self._values[name.lower()] = value
        self._values |= {"session_authorization": user, "is_superuser": "on" if superuser else "off"}
        self.zone: tzinfo | None = None
        for name, value in started.items():
            if name not in ("user", "database", "replication", "options") and not name.startswith("_pq_."):
                self.set(name, value)
        for name, value in re.findall(r"(?:-c\s*|--)([\w.]+)=((?:\\.|\S)*)", started.get("options", "")):
            self.set(name, re.sub(r"\\(.)", r"\1", value))
        self._defaults = dict(self._values)

    def reported(self) -> list[tuple[str, str]]:
        """Return the parameters that a client is told of at the beginning."""
        names = [*_REPORTED, "server_version"]
        return [(name, self._values[name.lower()]) for name in names]

    def is_reported(self, name: str) -> bool:
        return self._names.get(name.lower(), "") in _REPORTED

    def known(self, name: str) -> bool:
        return name.lower() in self._values

    def show(self, name: str) -> tuple[str, str]:
        """Return a parameter's name, as it is written, and value.  Raises UndefinedObject."""
        lower = name.lower()
        if lower not in self._values:
            raise self._unknown(name)
        return self._names.get(lower, name), self._values[lower]

    def values(self) -> Mapping[str, str]:
        return self._values

    def listed(self) -> list[tuple[str, str]]:
        return sorted((self._names.get(name, name), value) for name, value in self._values.items())

    def set(self, name: str, value: str | None) -> tuple[str, str]:
        """Set a parameter, None to its default; return its name and value.  Raises PubsubError."""
        lower = name.lower()
        if lower not in self._values and "." not in lower:
            raise self._unknown(name)
        shown = self._names.get(lower, name)
        if lower in _READ_ONLY or lower in _FIXED:
            raise PubsubError(f'parameter "{shown}" cannot be changed', sqlstate="55P02")
        if value is None:
            value = self._defaults.get(lower, "")
        if lower == "client_encoding" and re.sub(r"\W|_", "", value.lower()) not in _UTF8:
            raise PubsubError(f"conversion between {value} and UTF8 is not supported", sqlstate="22023")
        if lower == "datestyle" and not value.lower().startswith("iso"):
            raise FeatureNotSupported(f'DateStyle "{value}" is not supported: times are written in ISO 8601')
        if lower == "client_encoding":
            value = "UTF8"
        if lower == "timezone":
            value = self._zone(value)
        self._values[lower] = value
        if lower == "datestyle":
            self._values[lower] = "ISO, MDY"
        return shown, self._values[lower]

    def reset_all(self) -> None:
        self._values = dict(self._defaults)
        self._zone(self._values["timezone"])

    def _zone(self, value: str) -> str:
        text = value.strip().strip("'")
        if text.upper() in ("UTC", "GMT", "Z", "ETC/UTC", "DEFAULT", "LOCAL"):
            self.zone = UTC
            return "UTC"
        try:
            self.zone = ZoneInfo(text)
        except (ZoneInfoNotFoundError, ValueError, OSError):
            raise PubsubError(f'invalid value for parameter "TimeZone": "{value}"', sqlstate="22023") from None
        return text

    @property
    def statement_timeout(self) -> float | None:
        """Seconds that a statement may take; None: any."""
        match = re.fullmatch(r"\s*(\d+)\s*(\w*)\s*", self._values["statement_timeout"])
        seconds = int(match[1]) * _SECONDS.get(match[2], 0.001) if match is not None else 0
        return seconds or None

    def _unknown(self, name: str) -> UndefinedObject:
        best = nearest(name.lower(), self._values)
        return UndefinedObject(
            f'unrecognized configuration parameter "{name}"',
            hint=f'Perhaps you meant the parameter "{best}".' if best is not None else None,
        )
