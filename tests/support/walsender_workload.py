"""Statements whose decoded changes are compared: every kind of change once."""

from __future__ import annotations

SETUP = """
CREATE TYPE mood AS ENUM ('sad', 'ok', 'happy');
CREATE TYPE pair AS (a int, b text, c numeric);
CREATE DOMAIN posint AS int CHECK (VALUE > 0);
CREATE DOMAIN postext AS posint;
CREATE TYPE frange AS RANGE (subtype = float8);
CREATE SCHEMA "Other Schema";
CREATE TABLE plain (id int PRIMARY KEY, t text, n numeric);
CREATE TABLE nokey (a int, b text);
CREATE TABLE ridfull (a int, b text, c float8);
ALTER TABLE ridfull REPLICA IDENTITY FULL;
CREATE TABLE ridnothing (a int PRIMARY KEY, b text);
ALTER TABLE ridnothing REPLICA IDENTITY NOTHING;
CREATE TABLE ridindex (a int PRIMARY KEY, b text NOT NULL, c int);
CREATE UNIQUE INDEX ridindex_b ON ridindex (b);
ALTER TABLE ridindex REPLICA IDENTITY USING INDEX ridindex_b;
CREATE TABLE toasty (id int PRIMARY KEY, ext text, comp text, k text, n int);
ALTER TABLE toasty ALTER ext SET STORAGE EXTERNAL, ALTER comp SET STORAGE EXTENDED;
CREATE TABLE toastkey (k text PRIMARY KEY, n int);
CREATE TABLE toastfull (id int, ext text, n int);
ALTER TABLE toastfull ALTER ext SET STORAGE EXTERNAL;
ALTER TABLE toastfull REPLICA IDENTITY FULL;
CREATE TABLE "Other Schema"."Ta ble" ("Id" int PRIMARY KEY, "select" text, "q""q" mood);
CREATE TABLE part (id int, region text, v text, PRIMARY KEY (id, region)) PARTITION BY LIST (region);
CREATE TABLE part_eu PARTITION OF part FOR VALUES IN ('eu');
CREATE TABLE part_us (v text, extra int, region text NOT NULL, id int NOT NULL);
ALTER TABLE part_us DROP COLUMN extra;
ALTER TABLE part ATTACH PARTITION part_us FOR VALUES IN ('us');
CREATE TABLE part_rest PARTITION OF part DEFAULT PARTITION BY RANGE (id);
CREATE TABLE part_rest_1 PARTITION OF part_rest FOR VALUES FROM (0) TO (1000);
CREATE TABLE part_rest_2 PARTITION OF part_rest DEFAULT;
CREATE TABLE generated (id int PRIMARY KEY, a int, g int GENERATED ALWAYS AS (a * 2) STORED, s serial);
CREATE UNLOGGED TABLE unlogged (a int);
CREATE TABLE types (
    id int PRIMARY KEY, b bool, c "char", nm name, i8 int8, i2 int2, i4 int4, t text, o oid, x xid, ci cid, td tid,
    js json, jb jsonb, xm xml, pt point, ls lseg, pa path, bx box, po polygon, li line, cr circle, f4 float4, f8 float8,
    ma macaddr, m8 macaddr8, ine inet, cd cidr, bp bpchar(7), vc varchar(9), d date, tm time, ts timestamp, tz timestamptz,
    iv interval, tt timetz, bi bit(5), vb varbit, nu numeric, nu2 numeric(12, 3), u uuid, lsn pg_lsn, tv tsvector, tq tsquery,
    x8 xid8, by bytea, ov oidvector, i2v int2vector, m mood, p pair, dm posint, dm2 postext, ir int4range, nr numrange,
    tr tstzrange, fr frange, im int4multirange, nm2 nummultirange, ia int[], ta text[], ma2 mood[], pa2 pair[], na numeric[],
    tza timestamptz[], ba bool[], dr daterange, bxa box[], mo money, moa money[]
);
CREATE PUBLICATION p FOR ALL TABLES;
"""

# Each string is sent as one simple query: several statements in one are one transaction.
STATEMENTS = (
    "INSERT INTO plain SELECT g, 'text ' || g, g / 7.0 FROM generate_series(1, 20) g",
    "UPDATE plain SET t = t || '!' WHERE id % 2 = 0",
    "UPDATE plain SET id = id + 100 WHERE id % 5 = 0",
    "DELETE FROM plain WHERE id % 3 = 0",
    "INSERT INTO nokey VALUES (1, 'a'), (NULL, NULL)",
    "INSERT INTO ridfull SELECT g, md5(g::text), g * 1.1 FROM generate_series(1, 9) g",
    "UPDATE ridfull SET b = NULL WHERE a < 4",
    "DELETE FROM ridfull WHERE a % 2 = 0",
    "INSERT INTO ridnothing VALUES (1, 'x')",
    "INSERT INTO ridindex VALUES (1, 'one', 1), (2, 'two', 2)",
    "UPDATE ridindex SET c = 3",
    "UPDATE ridindex SET b = 'uno' WHERE a = 1",
    "UPDATE ridindex SET a = 5 WHERE a = 1",
    "DELETE FROM ridindex WHERE a = 2",
    "INSERT INTO toasty SELECT g, repeat(md5(g::text), 300), repeat(md5(g::text), 1000), 'k' || g, g FROM generate_series(1, 5) g",
    "UPDATE toasty SET n = n + 1",
    "UPDATE toasty SET ext = ext || 'more' WHERE id = 1",
    "UPDATE toasty SET comp = repeat('abc', 100000) WHERE id = 2",
    "UPDATE toasty SET id = id + 10 WHERE id > 3",
    "DELETE FROM toasty WHERE id = 3",
    "INSERT INTO toasty VALUES (50, repeat('x', 1500), repeat('y', 1900), NULL, NULL)",
    # The keys are compressed to below the size limit of an index entry.
    "INSERT INTO toastkey VALUES (repeat('k', 20000), 1)",
    "UPDATE toastkey SET n = 2",
    "UPDATE toastkey SET k = repeat('j', 20000)",
    "DELETE FROM toastkey",
    "INSERT INTO toastfull SELECT g, repeat(md5(g::text), 200), g FROM generate_series(1, 3) g",
    "UPDATE toastfull SET n = n + 1 WHERE id = 1",
    "UPDATE toastfull SET ext = 'short' WHERE id = 2",
    "DELETE FROM toastfull WHERE id = 3",
    """INSERT INTO "Other Schema"."Ta ble" VALUES (1, 'it''s \\ "q"', 'happy'), (2, NULL, NULL)""",
    """UPDATE "Other Schema"."Ta ble" SET "select" = 'x' WHERE "Id" = 1""",
    "INSERT INTO part VALUES (1, 'eu', 'a'), (2, 'us', 'b'), (3, 'asia', 'c'), (2000, 'asia', 'd')",
    "UPDATE part SET v = v || 'x'",
    "UPDATE part SET region = 'us' WHERE id = 1",
    "UPDATE part SET id = 1500 WHERE id = 3",
    "DELETE FROM part WHERE id = 2",
    "TRUNCATE part_eu",
    "INSERT INTO generated (id, a) VALUES (1, 10), (2, NULL)",
    "UPDATE generated SET a = 11 WHERE id = 1",
    "INSERT INTO unlogged VALUES (1)",
    # Subtransactions
    (
        "BEGIN; INSERT INTO plain VALUES (500, 'a', 1); SAVEPOINT s1; INSERT INTO plain VALUES (501, 'b', 2); "
        "SAVEPOINT s2; INSERT INTO plain VALUES (502, 'c', 3); ROLLBACK TO s2; INSERT INTO plain VALUES (503, 'd', 4); "
        "RELEASE s1; INSERT INTO plain VALUES (504, 'e', 5); COMMIT"
    ),
    "BEGIN; SAVEPOINT s1; INSERT INTO plain VALUES (505, 'f', 5); ROLLBACK TO s1; COMMIT",
    (
        "BEGIN; SAVEPOINT s1; SAVEPOINT s2; INSERT INTO plain VALUES (506, 'f', 5); RELEASE s2; ROLLBACK TO s1; "
        "INSERT INTO nokey VALUES (2, 'after'); COMMIT"
    ),
    "BEGIN; INSERT INTO plain VALUES (507, 'f', 5); ROLLBACK",
    (
        "DO $$ BEGIN FOR i IN 1..30 LOOP BEGIN INSERT INTO plain VALUES (600 + i, 'x', i); "
        "IF i % 3 = 0 THEN RAISE EXCEPTION 'no'; END IF; EXCEPTION WHEN raise_exception THEN NULL; END; END LOOP; END $$"
    ),
    # Speculative insertions
    "INSERT INTO plain VALUES (600, 'new', 1) ON CONFLICT (id) DO UPDATE SET t = 'conflict'",
    "INSERT INTO plain VALUES (600, 'new', 1) ON CONFLICT (id) DO UPDATE SET t = 'conflict'",
    "INSERT INTO plain VALUES (600, 'new', 1), (699, 'x', 2) ON CONFLICT DO NOTHING",
    "INSERT INTO toasty VALUES (60, repeat(md5('x'), 500), repeat('z', 200), 'k', 1) ON CONFLICT (id) DO UPDATE SET n = 9",
    # COPY and other multi-inserts
    "CREATE TABLE made AS SELECT g AS a, repeat(g::text, 5) AS b FROM generate_series(1, 200) g",
    # DDL
    "ALTER TABLE plain ADD COLUMN extra int",
    "INSERT INTO plain VALUES (700, 'extra', 1, 2)",
    "ALTER TABLE plain ADD COLUMN def text DEFAULT 'missing' NOT NULL, ADD COLUMN def2 numeric DEFAULT 12.50",
    "INSERT INTO plain (id) VALUES (701)",
    "UPDATE plain SET n = 0 WHERE id = 1",
    "ALTER TABLE ridfull ADD COLUMN d mood DEFAULT 'ok', ADD COLUMN e int[] DEFAULT '{1,2}'",
    "UPDATE ridfull SET c = 0",
    "DELETE FROM ridfull WHERE a = 1",
    "ALTER TABLE plain DROP COLUMN n",
    "INSERT INTO plain (id, t) VALUES (702, 'dropped')",
    "UPDATE plain SET t = 'u' WHERE id = 1",
    "ALTER TABLE plain RENAME COLUMN t TO txt; INSERT INTO plain (id, txt) VALUES (703, 'renamed')",
    "ALTER TABLE plain ALTER COLUMN extra TYPE bigint",
    "UPDATE plain SET extra = 12345678901 WHERE id = 700",
    "ALTER TABLE plain RENAME TO plain2; INSERT INTO plain2 (id) VALUES (704)",
    "ALTER TABLE plain2 RENAME TO plain",
    (
        "CREATE TABLE fresh (a int PRIMARY KEY); INSERT INTO fresh VALUES (1); ALTER TABLE fresh ADD b text; "
        "INSERT INTO fresh VALUES (2, 'b'); DROP TABLE fresh"
    ),
    (
        "BEGIN; CREATE TABLE sub (a int); SAVEPOINT s; ALTER TABLE sub ADD b int; INSERT INTO sub VALUES (1, 2); ROLLBACK TO s; "
        "INSERT INTO sub VALUES (3); ALTER TABLE sub ADD c text; INSERT INTO sub VALUES (4, 'c'); COMMIT"
    ),
    "ALTER TYPE mood ADD VALUE 'elated' AFTER 'happy'",
    """INSERT INTO "Other Schema"."Ta ble" VALUES (3, 'e', 'elated')""",
    "ALTER TYPE mood RENAME VALUE 'ok' TO 'fine'",
    """INSERT INTO "Other Schema"."Ta ble" VALUES (4, 'e', 'fine')""",
    "ALTER TYPE mood RENAME TO mood2",
    """INSERT INTO "Other Schema"."Ta ble" VALUES (5, 'e', 'sad')""",
    'ALTER SCHEMA "Other Schema" RENAME TO other',
    """INSERT INTO other."Ta ble" VALUES (6, 'e', 'sad')""",
    "ALTER TABLE ridindex REPLICA IDENTITY DEFAULT",
    "UPDATE ridindex SET b = 'due' WHERE a = 5",
    "ALTER TABLE ridindex REPLICA IDENTITY FULL; UPDATE ridindex SET c = 77; ALTER TABLE ridindex REPLICA IDENTITY NOTHING",
    # Rewrites
    "VACUUM FULL plain",
    "UPDATE plain SET txt = 'after' WHERE id = 702",
    "CLUSTER plain USING plain_pkey",
    "UPDATE plain SET txt = 'again' WHERE id = 702",
    "BEGIN; ALTER TABLE nokey ALTER a TYPE numeric; INSERT INTO nokey VALUES (1.5, 'rewritten'); COMMIT",
    "VACUUM",
    "VACUUM FULL pg_class",
    "INSERT INTO plain (id) VALUES (800)",
    "VACUUM FULL pg_attribute",
    "CREATE TABLE after_full (a int); INSERT INTO after_full VALUES (1)",
    "VACUUM FULL pg_publication",
    "VACUUM FULL pg_type",
    "INSERT INTO after_full VALUES (2)",
    "CREATE MATERIALIZED VIEW mv AS SELECT * FROM after_full",
    "REFRESH MATERIALIZED VIEW mv",
    "CREATE TEMP TABLE tt (a int); INSERT INTO tt VALUES (1)",
    # TRUNCATE
    "TRUNCATE nokey, ridfull",
    "BEGIN; INSERT INTO nokey VALUES (9, 'x'); TRUNCATE nokey; INSERT INTO nokey VALUES (10, 'y'); COMMIT",
    "TRUNCATE generated RESTART IDENTITY CASCADE",
    "TRUNCATE part",
    # Messages
    "SELECT pg_logical_emit_message(true, 'prefix', 'in a transaction')",
    "SELECT pg_logical_emit_message(false, 'prefix', 'outside')",
    (
        "BEGIN; INSERT INTO nokey VALUES (11, 'm'); SELECT pg_logical_emit_message(true, 'p', 'x'); "
        "SELECT pg_logical_emit_message(false, 'p', '\\x00ff'::bytea); COMMIT"
    ),
    # Attaching and detaching partitions
    "ALTER TABLE part DETACH PARTITION part_us",
    "INSERT INTO part_us VALUES ('v', 'us', 77)",
    "CREATE TABLE part_af PARTITION OF part FOR VALUES IN ('af'); INSERT INTO part VALUES (1, 'af', 'z')",
    "DROP TABLE part_af",
    # Sequences
    "SELECT nextval('generated_s_seq')",
)

TYPE_ROWS = (
    """INSERT INTO types VALUES (1, true, 'c', 'name', 9223372036854775807, -32768, -2147483648, 'te''xt', 4294967295, '123', '7',
    '(12,3)', '{"a": [1, 2]}', '{"b": {"c": [1, "x\\n\\"", null, true, 1.50], "d": {}}, "a": -1e10}', '<a>b</a>', '(1.5,-2)',
    '[(0,0),(1,1)]', '((0,0),(1,2),(3,4))', '(3,4),(1,2)', '((0,0),(0,1),(1,1))', '{1,-1,0.1}', '<(1,2),3.3>', 1.1, 0.1,
    '08:00:2b:01:02:03', '08:00:2b:01:02:03:04:05', '192.168.0.1/24', '10.0.0.0/8', 'bp', 'var', '2024-02-29', '12:34:56.789',
    '2024-02-29 12:34:56.000001', '1999-12-31 23:59:59.999999+02', '1 year 2 mons -3 days 04:05:06.7', '01:02:03+05:30', B'10101',
    B'1100110011', 12345.678900, -99.125, 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11', '16/B374D848',
    'a:1A fat:2B,4C cat:5', '(fat & (rat | !cat)) <-> super:*A', '12345678901', '\\xdeadbeef00', '1 2 3', '4 5', 'happy',
    ROW(1, 'x,"y" \\', 2.50), 5, 6, '[1,10)', '[1.5,2.5]', '[2024-01-01 00:00+00,)', '(0.5,1.5]', '{[1,3),[5,9)}',
    '{[1.1,2.2),(3,4]}', '{1,NULL,3}', '{"a b",NULL,"null","q\\"q","",x}', '{happy,sad}', ARRAY[ROW(1,'a',1)::pair, NULL],
    '{1.5,NaN,Infinity}', '{2020-01-01 00:00+00}', '{t,f,NULL}', 'empty', '{(1,1),(0,0);(3,3),(2,2)}')""",
    "INSERT INTO types (id) VALUES (2)",
    """INSERT INTO types (id, f4, f8, nu, d, ts, tz, iv, tm, ia, jb, ine, c, b, nu2, fr, ir, im, tv, tq, vb, bp) VALUES
    (3, 'NaN', '-Infinity', 'NaN', 'infinity', '-infinity', 'infinity', '-1 mon +1 day -00:00:01', '24:00:00',
     '[2:3][-1:0]={{1,2},{3,4}}', '"scalar"', '::1', '', false, 0, 'empty', '(,)', '{}', '', '', '', ''),
    (4, 1e15, 1e23, 1e40, '0044-03-15 BC', '4713-01-01 00:00:00 BC', '294276-12-31 23:59:59.999999+00', '178956970 years',
     '00:00:00.000001', '{}', '[]', 'fe80::1:2/64', '\\377', true, 0.001, '[1e-7,1e300)', '(1,5]', '{(,1),[7,)}', 'a',
     '!a & b', '1', 'x'),
    (5, 1e-5, 123456789012345680, 0.00001, '5874897-12-31', '2000-01-01', '1901-12-31 BC', '-1 year', '00:00', '{{1},{2}}',
     '{"k": "v"}', '::ffff:1.2.3.4', 'z', NULL, 123456789.123, '[1,2]', 'empty', '{[1,2)}', 'x:3 y', 'a <2> b', '0', ' '),
    (6, 16777216, 9007199254740992, 10000, '1-1-1', '1-1-1 00:00:00', '2024-01-01', '1 day', '23:59:59.5', NULL, '12.340',
     '1.2.3.4/32', 'a', true, -1, NULL, NULL, NULL, NULL, 'a | b & c | !(d <-> e)', NULL, NULL)""",
    (
        "INSERT INTO types (id, f8, f4) SELECT 100 + g, (random() - 0.5) * 10 ^ (g - 20), ((random() - 0.5) * 10 ^ (g - 20))::float4 "
        "FROM generate_series(1, 45) g"
    ),
    (
        "INSERT INTO types (id, nu, na) SELECT 200 + g, (random() * 10 ^ g)::numeric(60, 10), ARRAY[10 ^ g, -10::numeric ^ (-g)] "
        "FROM generate_series(1, 30) g"
    ),
    (
        "INSERT INTO types (id, d, ts, iv) SELECT 300 + g, date '2000-01-01' + g * 12345, timestamp '2000-01-01' + g * "
        "interval '1234567.891011 hours', g * interval '1 mon 3 days 17:11:00.12' FROM generate_series(-30, 30) g"
    ),
    (
        "UPDATE types SET t = repeat('long ', 1000), jb = (SELECT jsonb_object_agg('key' || g, g) FROM generate_series(1, 500) g) "
        "WHERE id = 1"
    ),
    "UPDATE types SET i4 = 0 WHERE id IN (1, 2)",
    (
        "INSERT INTO types (id, mo, moa) VALUES (400, '0', '{}'), (401, '-0.05', '{1234567.89,NULL,-1000}'), "
        "(402, '92233720368547758.07', NULL), (403, '-92233720368547758.08', '{999.99}')"
    ),
)

TWO_PHASE = (
    "BEGIN; INSERT INTO plain (id) VALUES (2001); PREPARE TRANSACTION 'one'",
    "INSERT INTO plain (id) VALUES (2002)",
    "COMMIT PREPARED 'one'",
    (
        "BEGIN; INSERT INTO plain (id) VALUES (2003); SAVEPOINT s; INSERT INTO plain (id) VALUES (2004); ROLLBACK TO s; "
        "SAVEPOINT s2; INSERT INTO toasty VALUES (90, repeat(md5('a'), 500), 'c'); PREPARE TRANSACTION 'it''s two'"
    ),
    "ROLLBACK PREPARED 'it''s two'",
    "BEGIN; SELECT 1; PREPARE TRANSACTION 'empty'",
    "COMMIT PREPARED 'empty'",
    "BEGIN; CREATE TABLE prep (a int); INSERT INTO prep VALUES (1); PREPARE TRANSACTION 'ddl'",
    "COMMIT PREPARED 'ddl'",
    "INSERT INTO prep VALUES (2)",
    "BEGIN; CREATE TABLE prep2 (a int); INSERT INTO prep2 VALUES (1); PREPARE TRANSACTION 'ddl2'",
    "ROLLBACK PREPARED 'ddl2'",
    "BEGIN; INSERT INTO unlogged VALUES (2); PREPARE TRANSACTION 'unlogged'",
    "COMMIT PREPARED 'unlogged'",
    "BEGIN; UPDATE toasty SET n = 5; DELETE FROM toasty WHERE id = 2; PREPARE TRANSACTION 'one'",
    "ALTER TABLE plain ADD COLUMN z int",
    "INSERT INTO plain (id, z) VALUES (2005, 1)",
    "COMMIT PREPARED 'one'",
    "BEGIN; INSERT INTO plain (id) VALUES (2006); PREPARE TRANSACTION 'as_nodecode'",
    "INSERT INTO plain (id) VALUES (2007)",
    "COMMIT PREPARED 'as_nodecode'",
    "BEGIN; INSERT INTO plain (id) VALUES (2008); PREPARE TRANSACTION 'back_nodecode'",
    "ROLLBACK PREPARED 'back_nodecode'",
    "BEGIN; SELECT FROM plain WHERE id = 2008 FOR UPDATE; PREPARE TRANSACTION 'locks'",
    "COMMIT PREPARED 'locks'",
)
"""Needs max_prepared_transactions."""

ORIGINS = (
    "SELECT pg_replication_origin_create('from elsewhere')",
    "INSERT INTO plain (id) VALUES (3000)",
    "SELECT pg_replication_origin_session_setup('from elsewhere')",
    # Until its first commit under an origin, a session's rollbacks have no time.
    "BEGIN; INSERT INTO plain (id) VALUES (3001); PREPARE TRANSACTION 'rolled back'",
    "ROLLBACK PREPARED 'rolled back'",
    "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(10000, 12000) g; ROLLBACK",
    "BEGIN; INSERT INTO plain (id) VALUES (3002); PREPARE TRANSACTION 'first'",
    "COMMIT PREPARED 'first'",
    "INSERT INTO plain (id) VALUES (3003)",
    (
        "BEGIN; SELECT pg_replication_origin_xact_setup('0/ABCDEF', '2020-01-01'); INSERT INTO plain (id) VALUES (3004); "
        "SELECT pg_logical_emit_message(true, 'p', 'm'); TRUNCATE nokey; PREPARE TRANSACTION 'second'"
    ),
    "SELECT pg_replication_origin_xact_setup('0/ABCDF0', '2020-01-02')",
    "COMMIT PREPARED 'second'",
    (
        "BEGIN; SELECT pg_replication_origin_xact_setup('0/ABCDF1', '2020-01-03'); "
        "INSERT INTO plain (id) SELECT g FROM generate_series(12001, 14000) g; COMMIT"
    ),
    # Transactions with changes of both origins: a stream has the origin of its first change.
    "SELECT pg_replication_origin_session_reset()",
    (
        "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(14001, 14050) g; "
        "SELECT pg_replication_origin_session_setup('from elsewhere'); "
        "INSERT INTO plain (id) SELECT g FROM generate_series(14051, 16000) g; COMMIT"
    ),
    (
        "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(16001, 16050) g; "
        "SELECT pg_replication_origin_session_reset(); "
        "INSERT INTO plain (id) SELECT g FROM generate_series(16051, 18000) g; COMMIT"
    ),
    # Prepared transactions that end under another origin than they were prepared under.
    "BEGIN; INSERT INTO plain (id) VALUES (3005); PREPARE TRANSACTION 'third'",
    "SELECT pg_replication_origin_session_setup('from elsewhere')",
    "COMMIT PREPARED 'third'",
    "BEGIN; INSERT INTO plain (id) VALUES (3006); PREPARE TRANSACTION 'fourth'",
    "SELECT pg_replication_origin_session_reset()",
    "COMMIT PREPARED 'fourth'",
    "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(18001, 20000) g; PREPARE TRANSACTION 'fifth'",
    "SELECT pg_replication_origin_session_setup('from elsewhere')",
    "ROLLBACK PREPARED 'fifth'",
    "INSERT INTO plain (id) VALUES (3007)",
    "SELECT pg_replication_origin_session_reset()",
    "SELECT pg_replication_origin_drop('from elsewhere')",
)
"""Needs max_prepared_transactions."""

STREAMING = (
    "INSERT INTO plain (id, t) SELECT g, repeat('x', 100) FROM generate_series(10000, 12000) g",
    (
        "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(20000, 20600) g; SAVEPOINT a; "
        "INSERT INTO plain (id) SELECT g FROM generate_series(21000, 21900) g; ROLLBACK TO a; SAVEPOINT b; "
        "INSERT INTO plain (id) SELECT g FROM generate_series(22000, 22900) g; SAVEPOINT c; "
        "INSERT INTO plain (id) SELECT g FROM generate_series(23000, 23100) g; RELEASE b; "
        "UPDATE plain SET t = t || 'y' WHERE id BETWEEN 10000 AND 10500; DELETE FROM plain WHERE id < 10300; COMMIT"
    ),
    "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(30000, 31900) g; ROLLBACK",
    # The rolled-back subtransaction wrote nothing itself; those inside it did, and were sent.
    (
        "BEGIN; INSERT INTO plain (id) VALUES (32000); SAVEPOINT a; SAVEPOINT b; "
        "INSERT INTO plain (id) SELECT g FROM generate_series(32001, 33900) g; RELEASE b; ROLLBACK TO a; "
        "INSERT INTO plain (id) VALUES (34000); COMMIT"
    ),
    (
        "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(35001, 35900) g; SAVEPOINT a; "
        "SELECT pg_logical_emit_message(true, 'p', 'of a subtransaction'); "
        "INSERT INTO plain (id) SELECT g FROM generate_series(36001, 36900) g; COMMIT"
    ),
    "INSERT INTO toasty (id, ext) SELECT g, repeat(md5(g::text), 400) FROM generate_series(1000, 1030) g",
    (
        "INSERT INTO toasty (id, ext) SELECT g, repeat(md5(g::text), 400) FROM generate_series(1000, 1060) g "
        "ON CONFLICT (id) DO UPDATE SET n = 1"
    ),
    (
        "BEGIN; CREATE TABLE st (a int PRIMARY KEY, b text); INSERT INTO st SELECT g, 'b' FROM generate_series(1, 1500) g; "
        "ALTER TABLE st ADD c int DEFAULT 7; INSERT INTO st SELECT g, 'b', g FROM generate_series(2001, 3500) g; "
        "TRUNCATE nokey; ALTER TABLE st DROP b; INSERT INTO st SELECT g, g FROM generate_series(4001, 5500) g; COMMIT"
    ),
    "INSERT INTO st SELECT g, g FROM generate_series(6001, 6010) g",
    "BEGIN; SELECT count(pg_logical_emit_message(true, 'many', repeat('m', 1000))) FROM generate_series(1, 200); COMMIT",
    "INSERT INTO unlogged SELECT g FROM generate_series(1, 3000) g",
    "UPDATE plain SET t = 'all'",
    "INSERT INTO plain (id) VALUES (1)",
)
"""Transactions larger than 64 kB."""

STREAMING_PREPARED = (
    # After it was sent it no longer counts towards the memory used.
    "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(40001, 40350) g; PREPARE TRANSACTION 'small'",
    "INSERT INTO plain (id) SELECT g FROM generate_series(41001, 41300) g",
    "COMMIT PREPARED 'small'",
    "BEGIN; INSERT INTO plain (id) SELECT g FROM generate_series(42001, 43000) g; PREPARE TRANSACTION 'large'",
    "INSERT INTO plain (id) SELECT g FROM generate_series(44001, 45000) g",
    "COMMIT PREPARED 'large'",
)
"""Prepared transactions larger than 64 kB; needs max_prepared_transactions."""

ROLLED_BACK_DEFINITION = (
    "CREATE TABLE st (a int PRIMARY KEY, c int)",
    (
        "BEGIN; INSERT INTO st SELECT g, g FROM generate_series(7001, 8000) g; SAVEPOINT a; ALTER TABLE st ADD d text; "
        "INSERT INTO st SELECT g, g FROM generate_series(8001, 9500) g; ROLLBACK TO a; "
        "INSERT INTO st SELECT g, g FROM generate_series(9501, 11000) g; COMMIT"
    ),
)
"""A transaction larger than 64 kB; a server that reads late sends nothing of its rolled-back part."""


FILES_SETUP = """
CREATE TYPE e AS ENUM ('x');
CREATE TABLE a (id int PRIMARY KEY, x int, b text);
CREATE TABLE o (id int, m e);
CREATE PUBLICATION p FOR ALL TABLES;
"""
FILES = (
    # Rows of mapped catalogs, whose files are not in pg_class.
    (
        "one",
        (
            "CREATE FUNCTION f() RETURNS int LANGUAGE sql AS 'select 1'; CREATE ROLE files; GRANT ALL ON a TO files; "
            "DROP OWNED BY files; DROP ROLE files; INSERT INTO a VALUES (1, 1, 'x')"
        ),
    ),
    (
        "one",
        (
            "BEGIN; CREATE TABLE n (id int PRIMARY KEY, x int, b text); "
            "INSERT INTO n SELECT g, 1, repeat('x', 50) FROM generate_series(1, 500) g"
        ),
    ),
    ("other", "VACUUM FULL pg_class"),
    ("one", "INSERT INTO n SELECT g, 2, repeat('y', 3000) FROM generate_series(501, 600) g"),
    (
        "one",
        "SAVEPOINT s; TRUNCATE n, a; INSERT INTO n SELECT g, 3, repeat('z', 5000) FROM generate_series(1, 300) g",
    ),
    ("other", "VACUUM FULL pg_class"),
    ("other", "VACUUM FULL pg_attribute"),
    ("one", "INSERT INTO n SELECT g, 4, repeat('z', 50) FROM generate_series(1001, 1900) g"),
    ("other", "VACUUM FULL pg_type"),
    ("one", "SAVEPOINT s2; ALTER TABLE a ALTER x TYPE numeric; INSERT INTO a VALUES (2, 2, repeat('q', 9000))"),
    ("other", "VACUUM FULL pg_class"),
    ("one", "INSERT INTO a SELECT g, 7, 'h' FROM generate_series(2000, 3500) g"),
    ("one", "ROLLBACK TO s2"),
    ("one", "INSERT INTO a SELECT g, 8, 'i' FROM generate_series(2000, 3500) g"),
    ("other", "VACUUM FULL pg_class"),
    ("other", "VACUUM FULL pg_index"),
    ("one", "ROLLBACK TO s"),
    ("other", "VACUUM FULL pg_class"),
    (
        "one",
        (
            "INSERT INTO n SELECT g, 9, repeat('w', 50) FROM generate_series(3001, 4900) g; "
            "INSERT INTO a VALUES (5, 5, repeat('e', 9000))"
        ),
    ),
    ("one", "ALTER TABLE n ALTER x TYPE bigint; INSERT INTO n VALUES (9000, 9, repeat('f', 9000))"),
    ("other", "VACUUM FULL pg_class"),
    (
        "one",
        "CREATE TABLE n2 (id int PRIMARY KEY); INSERT INTO n2 SELECT g FROM generate_series(1, 1500) g; DROP TABLE n2",
    ),
    ("other", "VACUUM FULL pg_class"),
    ("one", "INSERT INTO n SELECT g, 9, repeat('w', 50) FROM generate_series(5001, 6900) g"),
    ("one", "PREPARE TRANSACTION 'files'"),
    ("other", "VACUUM FULL pg_class"),
    ("other", "VACUUM FULL pg_attribute"),
    ("one", "COMMIT PREPARED 'files'"),
    ("other", "VACUUM FULL n"),
    ("other", "CLUSTER a USING a_pkey"),
    ("one", "INSERT INTO n VALUES (10000, 1, repeat('f', 9000)); INSERT INTO a VALUES (10000, 1, repeat('g', 9000))"),
    # Catalogs rewritten by a transaction that goes on using them.
    (
        "one",
        (
            "BEGIN; CLUSTER pg_class USING pg_class_oid_index; CREATE TABLE m (id int); INSERT INTO m VALUES (1); "
            "CLUSTER pg_attribute USING pg_attribute_relid_attnum_index; ALTER TABLE m ADD x int; "
            "INSERT INTO m VALUES (7, 7); COMMIT"
        ),
    ),
    (
        "one",
        (
            "BEGIN; SAVEPOINT a; CLUSTER pg_enum USING pg_enum_oid_index; RELEASE a; ALTER TYPE e RENAME VALUE 'x' TO 'y'; "
            "INSERT INTO o VALUES (1, 'y'); CREATE TYPE e2 AS ENUM ('u', 'v'); CREATE TABLE o2 (id int, m e2); "
            "INSERT INTO o2 VALUES (1, 'v'); COMMIT"
        ),
    ),
    (
        "one",
        "BEGIN; CLUSTER pg_class USING pg_class_oid_index; CREATE TABLE m3 (id int); INSERT INTO m3 VALUES (1); ROLLBACK",
    ),
    ("one", "INSERT INTO m VALUES (8, 8); INSERT INTO o VALUES (2, 'y'); INSERT INTO o2 VALUES (2, 'u')"),
)
"""Pairs of session and statement, in which files of relations and catalogs change during a transaction."""
