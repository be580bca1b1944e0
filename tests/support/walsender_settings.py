"""Values whose text depends on session settings, and the settings of databases."""

from __future__ import annotations

SETTINGS: dict[str, dict[str, str]] = {
    "a zone with summer time": {"timezone": "America/New_York"},
    "a zone whose offset has seconds, German": {"timezone": "Africa/Monrovia", "datestyle": "German"},
    "SQL, day first": {"timezone": "Europe/Dublin", "datestyle": "SQL, DMY", "intervalstyle": "sql_standard"},
    "SQL, month first": {"timezone": "Asia/Gaza", "datestyle": "SQL, MDY", "intervalstyle": "iso_8601"},
    "Postgres, day first": {
        "timezone": "Asia/Kolkata",
        "datestyle": "Postgres, DMY",
        "intervalstyle": "postgres_verbose",
        "extra_float_digits": "0",
        "bytea_output": "escape",
    },
    "Postgres, month first": {
        "timezone": "<+0330>-3:30<abcdefghijkl>-4:45:10,M3.2.0/5,M11.1.0",
        "datestyle": "Postgres, MDY",
        "extra_float_digits": "-15",
    },
    "other names": {
        "datestyle": "ISO, YMD",
        "timezone": "Etc/GMT",
        "extra_float_digits": "3",
        "quote_all_identifiers": "on",
        "search_path": "own, pg_catalog",
        "default_transaction_read_only": "on",
    },
}
"""Settings to make by ALTER DATABASE, by a name for each database."""

_TABLES = """CREATE TABLE public.moments (id int PRIMARY KEY, at timestamptz, plain timestamp, day date, clock time, zoned timetz,
                             span tstzrange, days daterange, moments timestamptz[]);
CREATE TABLE public.intervals (id int PRIMARY KEY, i interval, list interval[]);
CREATE DOMAIN public.measure AS float8;
CREATE TABLE public.numbers (id int PRIMARY KEY, f float8, r real, m public.measure, p point, l lseg, pa path, b box, po polygon,
                             li line, c circle, list float8[]);
CREATE TABLE public.bytes (id int PRIMARY KEY, b bytea, list bytea[]);
CREATE SCHEMA own;
CREATE TYPE own.mood AS ENUM ('a', 'b');
CREATE TYPE public.mood AS ENUM ('c');
CREATE TABLE own.named (id int PRIMARY KEY, o own.mood, p public.mood, c regclass, t regtype, f regproc);
CREATE PUBLICATION p FOR ALL TABLES"""

_CHANGES = r"""SET default_transaction_read_only = off;
-- From before there were zones to after the rules begin anew, at any time of the day.
INSERT INTO public.moments
  SELECT n, m, u, u::date, u::time, timetz '04:05:06.7+03:30', tstzrange(m, m + interval '1 day'), daterange(u::date, NULL),
         ARRAY[m, NULL]
    FROM generate_series(1, 3000) n,
         LATERAL (SELECT timestamptz '1799-01-01 00:00:00+00' + n * interval '123 days 05:07:11.123') _ (m),
         LATERAL (SELECT m AT TIME ZONE 'UTC') _u (u);
INSERT INTO public.moments (id, at)
  SELECT 10000 + n, timestamptz '1883-11-18 15:00:00+00' + n * interval '7 minutes 13 s' FROM generate_series(0, 100) n;
INSERT INTO public.moments (id, at)
  SELECT 11000 + n, timestamptz '2031-03-01 00:00:00+00' + n * interval '30 minutes' FROM generate_series(0, 1600) n;
INSERT INTO public.moments (id, at)
  SELECT 13000 + n, timestamptz '9990-03-01 00:00:00+00' + n * interval '8 hours' FROM generate_series(0, 1100) n;
INSERT INTO public.moments (id, at, plain, day) VALUES
  (20000, 'infinity', 'infinity', 'infinity'),
  (20001, '-infinity', '-infinity', '-infinity'),
  (20002, '4714-11-24 00:00:00+00 BC', '4714-11-24 00:00:00 BC', '4714-11-24 BC'),
  (20003, '0001-12-31 23:59:59.5+00 BC', '0001-12-31 23:59:59.000001 BC', '0001-01-01 BC'),
  (20004, '0001-01-01 00:00:00+00', '0001-01-01', '0001-01-01'),
  (20005, '294276-12-31 23:59:59.999999+00', '294276-12-31 23:59:59.999999', '5874897-12-31');
INSERT INTO public.intervals
  SELECT row_number() OVER (), i, ARRAY[i, NULL]
    FROM unnest(ARRAY[0, 1, -1, 14, -25, 24]) m, unnest(ARRAY[0, 1, -1, 30]) d,
         unnest(ARRAY[0, 1, -1, 0.5, -0.000001, 60, -61.25, 3600, -3725.000001, 360001]::float8[]) s,
         LATERAL (SELECT make_interval(months => m, days => d, secs => s)) _ (i);
INSERT INTO public.numbers
  SELECT row_number() OVER (), f, f::real, f, point(f, -f), lseg(point(f, 1), point(1, f)), path(polygon(b)), b, polygon(b),
         line(point(0, 0), point(1, f)), circle(point(f, 0), abs(f)), ARRAY[f, NULL]
    FROM unnest(ARRAY[0, '-0', 1, 1.0 / 3, -2.5, 1e15, 123456789012345680, 1e-5, 1e-4, 0.1, 1e22, 3e37, 'NaN']::float8[]) f,
         LATERAL (SELECT box(point(0, 0), point(f, f))) _ (b);
INSERT INTO public.numbers (id, f, r, p) VALUES (100, 'Infinity', '-Infinity', '(Infinity,NaN)');
INSERT INTO public.bytes
  SELECT n, b, ARRAY[b, NULL]
    FROM generate_series(0, 255) n, LATERAL (SELECT decode(lpad(to_hex(n), 2, '0') || '5c612722', 'hex')) _ (b);
INSERT INTO own.named VALUES (1, 'a', 'c', 'own.named', 'public.mood', 'pg_catalog.now'),
  (2, 'b', 'c', 'public.bytes', 'own.mood', NULL);
UPDATE public.numbers SET f = f;
DELETE FROM public.moments WHERE id < 5"""
STATEMENTS = _CHANGES.split(";\n")


def setup(name: str) -> str:
    """Return the SQL that makes SETTINGS[name] the database's and creates the tables."""
    settings = "".join(
        f"DO $$BEGIN EXECUTE format('ALTER DATABASE %I SET {key} = ''{value}''', current_database()); END$$;\n"
        for key, value in SETTINGS[name].items()
    )
    return settings + _TABLES
