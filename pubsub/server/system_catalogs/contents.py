"""The rows of the system catalogs, from the state of a node's catalog.

A replicated table is a relation with the oid that it has at its publisher, where no other table here has it.
"""

from __future__ import annotations

import json
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from catalog.beside import derived_oid, shown_oid
from catalog.records import State, SubscriptionRel
from catalog.system_views import VIEWS
from pubsub.delta import change_rows, versions
from pubsub.delta.soft_deletes import DELETED_AT
from pubsub.server.system_catalogs.definitions import Row, definitions
from pubsub.server.system_catalogs.functions import format_type

DATABASE: Final = "pubsub"
DATABASE_OID: Final = 1
OWNER_OID: Final = 10
"""The bootstrap superuser's, who owns everything."""
OWNER: Final = "pubsub"
_CATALOG_OID, _TOAST_OID, _PUBLIC_OID, _INFORMATION_OID = 11, 99, 2200, 13000
_FIRST_NORMAL: Final = 16384
_DELTA: Final = 16383
"""The access method of Delta tables."""
_FIRST_ROLE: Final = 16000
_TEXT: Final = 25
# The columns that a table in mode history has besides the publisher's: text, bigint, timestamptz, text[].
_HISTORY: Final = {
    change_rows.OP: (_TEXT, -1),
    change_rows.LSN: (20, -1),
    change_rows.SEQ: (20, -1),
    change_rows.COMMIT_TIME: (1184, -1),
    change_rows.XID: (20, -1),
    change_rows.UNCHANGED: (1009, -1),
}

#: The columns of a table whose deleted, or ended, rows stay.
_MARKS: Final = {
    DELETED_AT: (1184, -1),
    versions.VALID_FROM: (1184, -1),
    versions.VALID_TO: (1184, -1),
    versions.VALID_FROM_LSN: (20, -1),
    versions.VALID_TO_LSN: (20, -1),
}
_METADATA: Final = {"lsn": (20, -1), "commit_time": (1184, -1), "xid": (20, -1), "op": (_TEXT, -1)}


@dataclass(frozen=True, slots=True)
class Attribute:
    """A column of a table."""

    name: str
    type_oid: int
    modifier: int
    not_null: bool


@dataclass(frozen=True, slots=True)
class Table:
    """A replicated table as a relation.  `key`: the numbers of its key's columns, from 1."""

    oid: int
    schema: str
    name: str
    rows: int
    attributes: tuple[Attribute, ...]
    key: tuple[int, ...]
    path: str
    comment: str
    relation: SubscriptionRel

    @property
    def index_oid(self) -> int:
        return derived_oid(self.oid, "index")


@dataclass(frozen=True, slots=True)
class Contents:
    """What changes: the rows of the catalogs of one state, by catalog."""

    tables: tuple[Table, ...]
    schemas: Mapping[str, int]
    roles: Mapping[str, int]
    rows: Mapping[str, list[Row]] = field(default_factory=dict)


def oids(state: State) -> dict[tuple[int, int], int]:
    """Return the oid of each table, by (subscription, relid)."""
    counts = Counter(one.relid for one in state.relations)
    return {
        (one.subid, one.relid): one.relid
        if counts[one.relid] == 1 and one.relid >= _FIRST_NORMAL and one.beside is None
        else derived_oid(one.subid, str(one.relid))
        for one in state.relations
    }


def tables(state: State) -> list[Table]:
    """Return the replicated tables; of the sources of a Delta table the first, with the rows of all."""
    numbers = oids(state)
    rows = {(one.subid, one.relid): one.rows or 0 for one in state.rows}
    counted = Counter[str]()
    for one in state.relations:
        counted[one.path] += rows.get((one.subid, one.relid), 0)
    seen: set[str] = set()
    names = {one.oid: one.name for one in state.subscriptions}
    found = []
    for one in state.relations:
        if one.whose is not None:
            if one.path in seen:
                continue
            seen.add(one.path)
        definition: dict[str, Any] = json.loads(one.definition or "{}")
        typed = one.column_types
        columns = definition.get("columns") or list(typed)
        key = one.row_key
        if one.mode == "history":
            typed = _HISTORY | typed
        else:
            typed = {name: _METADATA[kind] for kind, name in one.metadata} | _MARKS | typed
            typed |= {} if one.source is None else {one.source.column: (_TEXT, -1)}
        attributes = tuple(Attribute(name, *typed.get(name, (_TEXT, -1)), name in key) for name in columns)
        said = f'Subscription "{names.get(one.subid, "")}", state {one.state.value}'
        found.append(
            Table(
                numbers[one.subid, one.relid],
                *one.place,
                counted[one.path],
                attributes,
                tuple(columns.index(name) + 1 for name in key if name in columns),
                one.path,
                f"{said}. Delta table: {one.path}",
                one,
            )
        )
    return found


def contents(state: State, settings: Sequence[tuple[str, str, str]], users: Iterable[str] = ()) -> Contents:
    """Return what the catalogs show of a state, of a node's settings (name, setting, description), and of roles."""
    found = tables(state)
    schemas = {
        "pg_catalog": _CATALOG_OID,
        "pg_toast": _TOAST_OID,
        "public": _PUBLIC_OID,
        "information_schema": _INFORMATION_OID,
    }
    for name in sorted({one.schema for one in found}):
        schemas.setdefault(name, zlib.crc32(name.encode()) >> 2 | 1 << 29)
    roles = {OWNER: OWNER_OID}
    for number, name in enumerate(sorted(set(users) - {OWNER})):
        roles[name] = _FIRST_ROLE + number
    known = Contents(tuple(found), schemas, roles)
    rows: dict[str, list[Row]] = {
        "pg_namespace": [{"oid": oid, "nspname": name, "nspowner": OWNER_OID} for name, oid in schemas.items()],
        "pg_class": _classes(known),
        "pg_attribute": _attributes(known),
        "pg_index": _indexes(known),
        "pg_constraint": _constraints(known),
        "pg_description": [
            {"objoid": one.oid, "classoid": 1259, "objsubid": 0, "description": one.comment} for one in found
        ],
        "pg_authid": _roles(roles),
        "pg_roles": _roles(roles),
        "pg_settings": [
            {"name": name, "setting": value, "short_desc": description, "category": "pubsub", "context": "sighup",
             "vartype": "string", "source": "configuration file", "boot_val": value, "reset_val": value,
             "pending_restart": False}
            for name, value, description in settings
        ],
        "pg_tables": [
            {"schemaname": one.schema, "tablename": one.name, "tableowner": OWNER, "hasindexes": bool(one.key),
             "hasrules": False, "hastriggers": False, "rowsecurity": False}
            for one in found
        ],
        "pg_stat_user_tables": [
            {"relid": one.oid, "schemaname": one.schema, "relname": one.name, "n_live_tup": one.rows} for one in found
        ],
    }  # fmt: skip
    for name, view in VIEWS.items():
        columns = [column for column, _ in view.columns]
        rows[name] = [dict(zip(columns, row, strict=True)) for row in view.rows(state)]
    numbers = oids(state)
    numbers = {(subid, shown_oid(subid, relid)): number for (subid, relid), number in numbers.items()}
    for row in rows["pg_subscription_rel"]:
        # As pg_class has it, so that the two can be joined.
        row["srrelid"] = numbers.get((row["srsubid"], row["srrelid"]), row["srrelid"])  # type: ignore[index]
    return Contents(known.tables, schemas, roles, rows | _information(known))


def _classes(known: Contents) -> list[Row]:
    rows: list[Row] = []
    for one in known.tables:
        shared = {
            "relnamespace": known.schemas[one.schema], "relowner": OWNER_OID, "relpersistence": "p", "relispopulated": True,
            "relhassubclass": False, "relisshared": False, "relhasrules": False, "relhastriggers": False,
            "relrowsecurity": False, "relforcerowsecurity": False, "relispartition": False, "reltablespace": 0,
            "reloftype": 0, "reltoastrelid": 0, "relallvisible": 0, "relfilenode": 0, "relrewrite": 0, "relchecks": 0,
        }  # fmt: skip
        rows.append(
            {**shared, "oid": one.oid, "relname": one.name, "relkind": "r", "relam": _DELTA, "reltuples": one.rows,
             "relpages": 1 + one.rows // 100, "relnatts": len(one.attributes), "relhasindex": bool(one.key),
             "relreplident": "d" if one.key else "f", "reltype": 0}
        )  # fmt: skip
        if one.key:
            rows.append(
                {**shared, "oid": one.index_oid, "relname": f"{one.name}_pkey", "relkind": "i", "relam": 403,
                 "reltuples": one.rows, "relpages": 1, "relnatts": len(one.key), "relhasindex": False, "relreplident": "n",
                 "reltype": 0}
            )  # fmt: skip
    return rows


def _attributes(known: Contents) -> list[Row]:
    rows: list[Row] = []
    types = {row["oid"]: row for row in definitions().types}
    for table in known.tables:
        sets = [(table.oid, list(enumerate(table.attributes, 1)))]
        if table.key:
            keyed = [(place, table.attributes[number - 1]) for place, number in enumerate(table.key, 1)]
            sets.append((table.index_oid, keyed))
        for relid, numbered in sets:
            rows += [_attribute(relid, number, one, types) for number, one in numbered]
    return rows


def _attribute(relid: int, number: int, one: Attribute, types: Mapping[int, Row]) -> Row:
    found = types.get(one.type_oid, types[_TEXT])
    return {
        "attrelid": relid, "attname": one.name, "atttypid": found["oid"], "attlen": found["typlen"], "attnum": number,
        "atttypmod": one.modifier, "attndims": found["typndims"], "attbyval": found["typbyval"], "attalign": found["typalign"],
        "attstorage": found["typstorage"], "attcompression": "", "attnotnull": one.not_null, "atthasdef": False,
        "atthasmissing": False, "attidentity": "", "attgenerated": "", "attisdropped": False, "attislocal": True,
        "attinhcount": 0, "attcollation": found["typcollation"],
    }  # fmt: skip


def _indexes(known: Contents) -> list[Row]:
    return [
        {"indexrelid": one.index_oid, "indrelid": one.oid, "indnatts": len(one.key), "indnkeyatts": len(one.key),
         "indisunique": True, "indnullsnotdistinct": False, "indisprimary": True, "indisexclusion": False,
         "indimmediate": True, "indisclustered": False, "indisvalid": True, "indcheckxmin": False, "indisready": True,
         "indislive": True, "indisreplident": False, "indkey": " ".join(map(str, one.key)),
         "indoption": " ".join("0" for _ in one.key)}
        for one in known.tables
        if one.key
    ]  # fmt: skip


def _constraints(known: Contents) -> list[Row]:
    return [
        {"oid": derived_oid(one.oid, "constraint"), "conname": f"{one.name}_pkey", "connamespace": known.schemas[one.schema],
         "contype": "p", "condeferrable": False, "condeferred": False, "conenforced": True, "convalidated": True,
         "conrelid": one.oid, "contypid": 0, "conindid": one.index_oid, "conparentid": 0, "confrelid": 0,
         "conislocal": True, "coninhcount": 0, "connoinherit": True, "conperiod": False,
         "conkey": "{" + ",".join(map(str, one.key)) + "}"}
        for one in known.tables
        if one.key
    ]  # fmt: skip


def _roles(roles: Mapping[str, int]) -> list[Row]:
    return [
        {"oid": oid, "rolname": name, "rolsuper": True, "rolinherit": True, "rolcreaterole": False, "rolcreatedb": False,
         "rolcanlogin": True, "rolreplication": True, "rolbypassrls": True, "rolconnlimit": -1}
        for name, oid in roles.items()
    ]  # fmt: skip


def _information(known: Contents) -> dict[str, list[Row]]:
    """Return the rows of information_schema's views."""
    types = {row["oid"]: row for row in definitions().types}
    names: list[tuple[str, str, Sequence[tuple[str, int, int, bool]], str]] = [
        (one.schema, one.name, [(a.name, a.type_oid, a.modifier, a.not_null) for a in one.attributes], "BASE TABLE")
        for one in known.tables
    ]
    columns: list[Row] = []
    for schema, name, attributes, _ in names:
        for number, (column, oid, modifier, not_null) in enumerate(attributes, 1):
            row = types.get(oid, types[_TEXT])
            numeric = {21: (16, 2, 0), 23: (32, 2, 0), 20: (64, 2, 0), 700: (24, 2, None), 701: (53, 2, None)}.get(oid)
            if oid == 1700 and modifier >= 4:
                numeric = (modifier - 4 >> 16 & 0xFFFF, 10, modifier - 4 & 0x7FF)
            precision, radix, scale = numeric or (None, 10 if oid == 1700 else None, None)
            columns.append(
                {"table_catalog": DATABASE, "table_schema": schema, "table_name": name, "column_name": column,
                 "ordinal_position": number, "is_nullable": "NO" if not_null else "YES",
                 "data_type": "ARRAY" if row["typelem"] and row["typcategory"] == "A" else format_type(row["oid"], -1),
                 "character_maximum_length": modifier - 4 if oid in (1042, 1043) and modifier >= 4 else None,
                 "numeric_precision": precision, "numeric_precision_radix": radix, "numeric_scale": scale,
                 "datetime_precision": 6 if oid in (1114, 1184, 1083, 1266) else 0 if oid == 1082 else None,
                 "udt_catalog": DATABASE, "udt_schema": "pg_catalog", "udt_name": row["typname"],
                 "dtd_identifier": str(number), "is_self_referencing": "NO", "is_identity": "NO", "is_generated": "NEVER",
                 "identity_cycle": "NO", "is_updatable": "NO"}
            )  # fmt: skip
    keyed = [one for one in known.tables if one.key]
    return {
        "information_schema.schemata": [
            {"catalog_name": DATABASE, "schema_name": name, "schema_owner": OWNER} for name in known.schemas
        ],
        "information_schema.tables": [
            {"table_catalog": DATABASE, "table_schema": schema, "table_name": name, "table_type": kind,
             "is_insertable_into": "NO", "is_typed": "NO"}
            for schema, name, _, kind in names
        ],
        "information_schema.columns": columns,
        "information_schema.table_constraints": [
            {"constraint_catalog": DATABASE, "constraint_schema": one.schema, "constraint_name": f"{one.name}_pkey",
             "table_catalog": DATABASE, "table_schema": one.schema, "table_name": one.name,
             "constraint_type": "PRIMARY KEY", "is_deferrable": "NO", "initially_deferred": "NO", "enforced": "YES"}
            for one in keyed
        ],
        "information_schema.key_column_usage": [
            {"constraint_catalog": DATABASE, "constraint_schema": one.schema, "constraint_name": f"{one.name}_pkey",
             "table_catalog": DATABASE, "table_schema": one.schema, "table_name": one.name,
             "column_name": one.attributes[number - 1].name, "ordinal_position": place}
            for one in keyed
            for place, number in enumerate(one.key, 1)
        ],
        "information_schema.information_schema_catalog_name": [{"catalog_name": DATABASE}],
        "information_schema.enabled_roles": [{"role_name": name} for name in known.roles],
    }  # fmt: skip


def fixed_rows() -> dict[str, list[Row]]:
    """Return the rows that no state changes."""
    known = definitions()
    classes: list[Row] = []
    attributes: list[Row] = []
    types = {row["typname"]: row for row in known.types}
    by_oid = {row["oid"]: row for row in known.types}
    for schema, namespace in (("pg_catalog", _CATALOG_OID), ("information_schema", _INFORMATION_OID)):
        for name, (oid, kind, columns) in known.relations[schema].items():
            classes.append(
                {"oid": oid, "relname": name, "relnamespace": namespace, "reltype": 0, "reloftype": 0, "relowner": OWNER_OID,
                 "relam": 2 if kind == "r" else 0, "relfilenode": 0, "reltablespace": 0, "relpages": 0, "reltuples": -1,
                 "relallvisible": 0, "reltoastrelid": 0, "relhasindex": False, "relisshared": False, "relpersistence": "p",
                 "relkind": kind, "relnatts": len(columns), "relchecks": 0, "relhasrules": kind == "v",
                 "relhastriggers": False, "relhassubclass": False, "relrowsecurity": False, "relforcerowsecurity": False,
                 "relispopulated": True, "relreplident": "n", "relispartition": False, "relrewrite": 0}
            )  # fmt: skip
            attributes += [
                _attribute(oid, number, Attribute(column, types.get(type_, types["text"])["oid"], -1, False), by_oid)
                for number, (column, type_) in enumerate(columns, 1)
            ]
    return {
        "pg_class": classes,
        "pg_attribute": attributes,
        "pg_type": [
            {"typnamespace": _CATALOG_OID, "typowner": OWNER_OID, "typrelid": 0, "typisdefined": True, "typsubscript": "-",
             "typinput": f"{row['typname']}in", "typoutput": f"{row['typname']}out", "typreceive": f"{row['typname']}recv",
             "typsend": f"{row['typname']}send", "typmodin": "-", "typmodout": "-", "typanalyze": "-", **row}
            for row in known.types
        ],
        "pg_am": [
            {"oid": 2, "amname": "heap", "amhandler": "heap_tableam_handler", "amtype": "t"},
            {"oid": 403, "amname": "btree", "amhandler": "bthandler", "amtype": "i"},
            {"oid": _DELTA, "amname": "delta", "amhandler": "-", "amtype": "t"},
        ],
        "pg_database": [
            {"oid": DATABASE_OID, "datname": DATABASE, "datdba": OWNER_OID, "encoding": 6, "datlocprovider": "c",
             "datistemplate": False, "datallowconn": True, "dathasloginevt": False, "datconnlimit": -1,
             "dattablespace": 1663, "datcollate": "C", "datctype": "C.UTF-8"}
        ],
        "pg_tablespace": [
            {"oid": 1663, "spcname": "pg_default", "spcowner": OWNER_OID},
            {"oid": 1664, "spcname": "pg_global", "spcowner": OWNER_OID},
        ],
        "pg_collation": [
            {"oid": oid, "collname": name, "collnamespace": _CATALOG_OID, "collowner": OWNER_OID, "collprovider": provider,
             "collisdeterministic": True, "collencoding": -1}
            for oid, name, provider in ((100, "default", "d"), (950, "C", "c"), (951, "POSIX", "c"))
        ],
        "pg_language": [
            {"oid": oid, "lanname": name, "lanowner": OWNER_OID, "lanispl": False, "lanpltrusted": False}
            for oid, name in ((12, "internal"), (14, "sql"))
        ],
    }  # fmt: skip
