"""Statements that insert names of catalog objects, which change, and values of types that are not built in."""

from __future__ import annotations

SETUP = """
CREATE EXTENSION hstore;
CREATE EXTENSION citext;
CREATE EXTENSION ltree;
CREATE EXTENSION cube;
CREATE ROLE "walsender's role";
CREATE ROLE walsender_plain;
CREATE SCHEMA "S p";
CREATE TYPE "S p"."Ty pe" AS (a regclass, b text);
CREATE DOMAIN "S p".tabs AS regclass;
CREATE TYPE oidrange AS RANGE (subtype = oid);
CREATE TABLE "S p".seen (a int);
CREATE TABLE seen (a int);
CREATE TABLE pg_class (a int);
CREATE FUNCTION alone(int) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION many(int, "S p"."Ty pe") RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION many(text[], double precision, VARIADIC character varying[]) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION "S p"."Fu nc"() RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION abs(text) RETURNS int LANGUAGE sql AS 'SELECT 1';
CREATE FUNCTION pi() RETURNS float8 LANGUAGE sql AS 'SELECT 3.0::float8';
CREATE OPERATOR public.## (FUNCTION = numeric_add, LEFTARG = numeric, RIGHTARG = numeric);
CREATE OPERATOR "S p".@#@ (FUNCTION = numeric_uminus, RIGHTARG = numeric);
CREATE TEXT SEARCH CONFIGURATION "S p".conf (COPY = english);
CREATE TEXT SEARCH CONFIGURATION english (COPY = pg_catalog.english);
CREATE TEXT SEARCH DICTIONARY dict (TEMPLATE = simple);
CREATE COLLATION "S p".coll (locale = 'C');
CREATE TABLE names (
    id int PRIMARY KEY, c regclass, ty regtype, p regproc, pa regprocedure, o regoper, oo regoperator, r regrole,
    n regnamespace, cf regconfig, d regdictionary, co regcollation, ac aclitem, cs regclass[], tys regtype[], row "S p"."Ty pe",
    tab "S p".tabs, rng oidrange
);
ALTER TABLE names REPLICA IDENTITY FULL;
CREATE TABLE acls (id int PRIMARY KEY, a aclitem[]);
CREATE TABLE paths (id int PRIMARY KEY, j jsonpath, js jsonpath[]);
CREATE TABLE extensions (id int PRIMARY KEY, c citext, h hstore, l ltree, cs citext[], hs hstore[], ls ltree[]);
CREATE TABLE conditions (id int PRIMARY KEY, q lquery, t ltxtquery, qs lquery[]);
CREATE TABLE cubes (id int PRIMARY KEY, c cube);
CREATE TYPE label;
CREATE FUNCTION label_in(cstring) RETURNS label LANGUAGE internal IMMUTABLE STRICT AS 'textin';
CREATE FUNCTION label_out(label) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'textout';
CREATE FUNCTION label_send(label) RETURNS bytea LANGUAGE internal IMMUTABLE STRICT AS 'textsend';
CREATE TYPE label (INPUT = label_in, OUTPUT = label_out, SEND = label_send, DEFAULT = 'none');
CREATE TYPE answer;
CREATE FUNCTION answer_in(cstring) RETURNS answer LANGUAGE internal IMMUTABLE STRICT AS 'int4in';
CREATE FUNCTION answer_out(answer) RETURNS cstring LANGUAGE internal IMMUTABLE STRICT AS 'int4out';
CREATE TYPE answer (INPUT = answer_in, OUTPUT = answer_out, INTERNALLENGTH = 4, PASSEDBYVALUE, DEFAULT = 42);
CREATE TABLE bases (id int PRIMARY KEY, l label, a answer, ls label[]);
CREATE TABLE correlated (a int, b int, c int);
CREATE STATISTICS correlations ON a, b, c FROM correlated;
CREATE TABLE kept (id int PRIMARY KEY, d pg_ndistinct, f pg_dependencies, m pg_mcv_list, t pg_node_tree);
CREATE PUBLICATION p FOR ALL TABLES;
CREATE PUBLICATION without_acls FOR TABLE names, paths, extensions, conditions, cubes, bases, kept;
"""

_JSON_PATHS = (
    "$",
    "strict $.a.b[*].c",
    "$.*",
    "$.**",
    "$.**{2}",
    "$.**{2 to 5}",
    "$.**{last}",
    "$.**{last to 5}",
    "$.**{3 to last}.x",
    "$[0, 1 to last, last - 1]",
    '$.a ? (@.b > 1 && (@.c == "x\\"y\\n" || !(@.d <= 2.50)))',
    "$.a ? (exists (@.b)) ? ((@ > 1) is unknown)",
    "-$.a + +$.b * ($.c - 1) / 2 % 3",
    "($.a + 1) * 2",
    "$.a - ($.b - $.c)",
    "(1).type()",
    "1.5e10",
    '"k".size()',
    '$var."quo ted".keyvalue()',
    '$.a.abs().floor().ceiling().double().datetime("YYYY")',
    "$.a.datetime()",
    '$ ? (@ like_regex "^a.*" flag "ims")',
    '$ ? (@ like_regex "a\\\\d" flag "q")',
    '$ ? (@ starts with "ab" && @ != null && @ <> true && @ == false)',
    "$ ? (@ starts with $x)",
    "$.a[$.b ? (@ > 1)]",
    "true",
    "null",
    "(($))",
    "(-1).abs()",
    '$.""',
)
_JSON_PATHS_17 = (
    "$.bigint().boolean().date().integer().number().string()",
    "$.decimal().decimal(4).decimal(4, 2).decimal(-4, -2)",
    "$.time().time(3).time_tz().time_tz(2).timestamp().timestamp(0).timestamp_tz(6).timestamp_tz()",
)


_LQUERIES = (
    "a",
    "*",
    "a.b.c",
    "*.a",
    "a.*",
    "*{2}.b",
    "*{,3}",
    "*{2,}",
    "*{1,4}.x",
    "!a",
    "*{0}",
    "*{0,5}",
    "a{0}",
    "a{3}",
    "a{,}",
    "a{2,}.b",
    "a{,4}",
    "!a.*.!b*@%",
    "!a|b.c",
    "a@|b*|c%@*.d",
    "!a|b{1,2}.c",
)
_LTXTQUERIES = (
    "a",
    "!a",
    "a & b | c",
    "a | b & c",
    "!(a | b)",
    "!(a & b)",
    "!!a",
    "(a | b) & (c | d)",
    "a@ & b* & c% | !d%@*",
    "!(!(a | b) & c)",
    "((a | b) | c) | d",
    "a & (b & (c | d))",
)
_CUBES = (
    "(1)",
    "(1, 2, 3)",
    "(1, 2), (3, 4)",
    "(1.5, 2), (1.5, 2)",
    "(0)",
    "(1e300, -1e-300), (NaN, Infinity)",
    "(-0)",
)


_FROM_19 = (
    'CREATE DATABASE "walsender\'s database"',
    "CREATE TABLE databases (id int PRIMARY KEY, d regdatabase, ds regdatabase[], o oid8, os oid8[])",
    """INSERT INTO databases VALUES (1, 'postgres', '{template1,NULL,-}', '18446744073709551615', '{0,1}'),
    (2, '"walsender''s database"', '{}', '0', NULL), (3, '-', NULL, NULL, NULL), (4, 999999, NULL, 123456789012, NULL)""",
    'DROP DATABASE "walsender\'s database"',
    "UPDATE databases SET o = 7",
)
"""Values of types that came with 19; a database's name changes meanwhile."""


def statements(version: str) -> tuple[str, ...]:
    """Return statements with extensions' types, jsonpath, and names of catalog objects, which change in between."""
    paths = _JSON_PATHS + (_JSON_PATHS_17 if int(version) >= 17 else ())
    quoted = [path.replace("'", "''") for path in paths]
    return (
        *(f"INSERT INTO paths VALUES ({number}, '{path}')" for number, path in enumerate(quoted)),
        "UPDATE paths SET js = ARRAY[j, NULL, '$.\"a,b\"']",
        """INSERT INTO extensions VALUES (1, 'CiText "q"', 'a=>1, "b c"=>NULL, "q\\"\\\\"=>"", ü=>é', 'Top.a_1.x', '{A,"b c"}',
        ARRAY['x=>y'::hstore, ''], '{a.b,c}'), (2, '', '', '', '{}', NULL, NULL)""",
        (
            "INSERT INTO extensions SELECT 3, repeat('X', 5000), hstore(array_agg('k' || g), array_agg(md5(g::text))), "
            "string_agg('l' || g, '.')::ltree FROM generate_series(1, 300) g"
        ),
        "UPDATE extensions SET c = 'other' WHERE id = 3",
        *(f"INSERT INTO conditions (id, q) VALUES ({number}, '{one}')" for number, one in enumerate(_LQUERIES)),
        *(
            f"INSERT INTO conditions (id, t) VALUES (100 + {number}, '{one}')"
            for number, one in enumerate(_LTXTQUERIES)
        ),
        "INSERT INTO conditions VALUES (200, 'a', 'b', '{a.b,*,NULL,\"!a|b{1,2}.c\"}')",
        *(f"INSERT INTO cubes VALUES ({number}, '{one}')" for number, one in enumerate(_CUBES)),
        "INSERT INTO cubes SELECT 100, cube(array_agg(g::float8 / 3)) FROM generate_series(1, 100) g",
        "INSERT INTO bases (id) VALUES (1)",
        "INSERT INTO bases VALUES (2, 'a \"b\"', '-7', ARRAY['x, y'::label, NULL]), (3, NULL, NULL, '{}')",
        "INSERT INTO correlated SELECT g % 10, g % 5, g % 7 FROM generate_series(1, 200) g",
        "ANALYZE correlated",
        "INSERT INTO kept SELECT 1, stxdndistinct, stxddependencies, stxdmcv FROM pg_statistic_ext_data",
        "INSERT INTO kept (id, t) SELECT 2, ev_action FROM pg_rewrite WHERE rulename = '_RETURN' LIMIT 1",
        """INSERT INTO names SELECT 1, '"S p".seen', '"S p"."Ty pe"[]', 'alone', 'many(int, "S p"."Ty pe")', 'public.##',
        '"S p".@#@(none, numeric)', '"walsender''s role"', '"S p"', '"S p".conf', 'dict', '"S p".coll',
        makeaclitem('walsender_plain'::regrole, '"walsender''s role"'::regrole, 'SELECT', true),
        '{seen,public.pg_class,pg_catalog.pg_class,names_pkey}', '{int,"timestamp with time zone",text[],bpchar,bit,
        "\\"char\\"",regclass}',
        ROW('seen', 'x')::"S p"."Ty pe", 'names', '[2,5)'""",
        """INSERT INTO names SELECT 2, 'pg_proc', 'int', 'boolin', 'boolin(cstring)', 'pg_catalog.||/', '+(int,int)',
        'walsender_plain',
        'pg_catalog', 'pg_catalog.english', 'simple', 'pg_catalog."C"', '=r/walsender_plain'""",
        """INSERT INTO names SELECT 3, 'seen', 'names', '"S p"."Fu nc"', 'abs(text)', '0', '0', '-', 'public', 'public.english',
        'english_stem', '"default"', 'walsender_plain=arwdDxtXUCTc*/walsender_plain'""",
        "INSERT INTO names SELECT 4, '-', '-', '-', '-', NULL, '##(numeric,numeric)', '-', '-', '-', '-', '-'",
        (
            "INSERT INTO names SELECT 5, 999999, 999999, 999999, 999999, 999999, 999999, 999999, 999999, 999999, 999999, 999999, "
            "NULL, '{999999,0}'"
        ),
        "INSERT INTO names (id, p, pa) SELECT 6, 'pg_catalog.pi', 'public.pi()'",
        "INSERT INTO names (id, p) SELECT 1000 + row_number() OVER (ORDER BY oid), oid FROM pg_proc WHERE oid::int % 4 = 0",
        "INSERT INTO names (id, pa) SELECT 10000 + row_number() OVER (ORDER BY oid), oid FROM pg_proc WHERE oid::int % 4 = 1",
        "INSERT INTO names (id, o, oo) SELECT 20000 + row_number() OVER (ORDER BY oid), oid, oid FROM pg_operator",
        "INSERT INTO names (id, ty) SELECT 30000 + row_number() OVER (ORDER BY oid), oid FROM pg_type",
        "INSERT INTO names (id, c) SELECT 40000 + row_number() OVER (ORDER BY oid), oid FROM pg_class",
        "INSERT INTO acls SELECT row_number() OVER (ORDER BY oid), relacl FROM pg_class WHERE relacl IS NOT NULL",
        # The named objects change; values written before keep their text.
        (
            "BEGIN; INSERT INTO names (id, c) VALUES (50001, 'seen'); ALTER TABLE seen RENAME TO looked_at; "
            "INSERT INTO names (id, c) VALUES (50002, 'looked_at'); COMMIT"
        ),
        (
            "BEGIN; INSERT INTO names (id, c, cs) VALUES (50003, 'looked_at', '{looked_at}'); SAVEPOINT s; "
            "ALTER TABLE looked_at RENAME TO never; INSERT INTO names (id, c) VALUES (50004, 'never'); ROLLBACK TO s; "
            "INSERT INTO names (id, c) VALUES (50005, 'looked_at'); COMMIT"
        ),
        "DROP FUNCTION alone",
        "VACUUM FULL pg_proc",
        "VACUUM FULL pg_authid",
        "UPDATE names SET id = 7 WHERE id = 1",
        "ALTER ROLE walsender_plain RENAME TO walsender_other",
        'ALTER SCHEMA "S p" RENAME TO sp',
        "UPDATE names SET id = id + 100 WHERE id < 8",
        "CREATE TABLE later (a int); INSERT INTO names (id, c) VALUES (50006, 'later'); DROP TABLE later",
        "DELETE FROM names WHERE id BETWEEN 100 AND 110",
        *(_FROM_19 if int(version) >= 19 else ()),
        'DROP ROLE walsender_other, "walsender\'s role"',
    )
