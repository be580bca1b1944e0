"""The ground of the server's own regression tests, covered anew: every way of inserting, changing and deleting rows.

Each string is one simple query, and so one transaction where it has no BEGIN of its own.
"""

from __future__ import annotations

SETUP = """
CREATE TABLE tenk (id int PRIMARY KEY, two int, ten int, txt text);
CREATE TABLE target (tid int PRIMARY KEY, balance int, note text);
CREATE TABLE source (sid int, delta int);
CREATE TABLE parent (id int PRIMARY KEY, name text);
CREATE TABLE child (id int PRIMARY KEY, parent_id int REFERENCES parent ON DELETE CASCADE ON UPDATE CASCADE, v text);
CREATE TABLE nulled (id int PRIMARY KEY, parent_id int REFERENCES parent ON DELETE SET NULL ON UPDATE CASCADE);
CREATE TABLE base (id int PRIMARY KEY, a text);
CREATE TABLE derived (b text) INHERITS (base);
ALTER TABLE derived REPLICA IDENTITY FULL;
CREATE TABLE ident (
    id int GENERATED ALWAYS AS IDENTITY PRIMARY KEY, v text DEFAULT 'given', w int GENERATED ALWAYS AS (length(v)) STORED
);
CREATE TABLE audited (id int PRIMARY KEY, v int);
CREATE TABLE audit (op text, old_v int, new_v int);
CREATE TABLE wide (id int PRIMARY KEY, big text, other text, n int);
CREATE TABLE keyed (k text COLLATE "C" PRIMARY KEY, v text);
CREATE TABLE excluded (id int PRIMARY KEY, r int4range, EXCLUDE USING gist (r WITH &&) DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE deferred (id int PRIMARY KEY, n int UNIQUE DEFERRABLE INITIALLY DEFERRED);
CREATE TABLE including (a int, b int, c int, d text, PRIMARY KEY (b, a) INCLUDE (c));
CREATE TABLE indexed (a int NOT NULL, b text NOT NULL, c int, d text);
CREATE UNIQUE INDEX indexed_key ON indexed (b) INCLUDE (c, a);
ALTER TABLE indexed REPLICA IDENTITY USING INDEX indexed_key;
CREATE TABLE ranged (id int, day date, v text, PRIMARY KEY (id, day)) PARTITION BY RANGE (day);
CREATE TABLE ranged_1 PARTITION OF ranged FOR VALUES FROM ('2024-01-01') TO ('2024-02-01');
CREATE TABLE ranged_2 PARTITION OF ranged FOR VALUES FROM ('2024-02-01') TO ('2024-03-01');
CREATE TABLE hashed (id int PRIMARY KEY, v text) PARTITION BY HASH (id);
CREATE TABLE hashed_0 PARTITION OF hashed FOR VALUES WITH (MODULUS 2, REMAINDER 0);
CREATE TABLE hashed_1 PARTITION OF hashed FOR VALUES WITH (MODULUS 2, REMAINDER 1);
CREATE VIEW visible AS SELECT id, txt FROM tenk WHERE two = 0 WITH CHECK OPTION;
CREATE MATERIALIZED VIEW summed AS SELECT ten, count(*) AS n FROM tenk GROUP BY ten;
CREATE UNIQUE INDEX ON summed (ten);
CREATE FUNCTION note_it() RETURNS trigger LANGUAGE plpgsql AS '
BEGIN INSERT INTO audit VALUES (TG_OP, OLD.v, NEW.v); IF TG_OP = ''UPDATE'' THEN NEW.v := NEW.v * 2; END IF; RETURN NEW; END';
CREATE TRIGGER before_it BEFORE INSERT OR UPDATE ON audited FOR EACH ROW EXECUTE FUNCTION note_it();
CREATE RULE also AS ON DELETE TO audited DO ALSO INSERT INTO audit VALUES ('RULE', OLD.v, NULL);
CREATE PUBLICATION p FOR ALL TABLES
"""

STATEMENTS = (
    # select, insert, update, delete
    "INSERT INTO tenk SELECT g, g % 2, g % 10, 'r' || g FROM generate_series(1, 300) g",
    "UPDATE tenk SET txt = txt || ten WHERE id IN (SELECT id FROM tenk ORDER BY id DESC LIMIT 20)",
    "UPDATE tenk t SET two = s.ten FROM tenk s WHERE s.id = t.id + 1 AND t.id < 15",
    "DELETE FROM tenk USING source WHERE source.sid = tenk.id",
    "DELETE FROM tenk WHERE ctid = (SELECT max(ctid) FROM tenk)",
    "INSERT INTO tenk (id) VALUES (1000), (1001) RETURNING *",
    "INSERT INTO tenk TABLE tenk ON CONFLICT DO NOTHING",
    # with
    (
        "WITH gone AS (DELETE FROM tenk WHERE id BETWEEN 40 AND 45 RETURNING *), changed AS (UPDATE tenk SET ten = 11 "
        "WHERE id = 50 RETURNING id) INSERT INTO target SELECT id, ten, txt FROM gone UNION ALL SELECT id, 0, NULL FROM changed"
    ),
    # merge
    "INSERT INTO source VALUES (40, 5), (41, -7), (900, 1), (901, NULL)",
    (
        "MERGE INTO target t USING source s ON t.tid = s.sid WHEN MATCHED AND s.delta < 0 THEN DELETE WHEN MATCHED THEN "
        "UPDATE SET balance = t.balance + s.delta WHEN NOT MATCHED AND s.delta IS NOT NULL THEN INSERT VALUES (s.sid, s.delta, 'm') "
        "WHEN NOT MATCHED THEN DO NOTHING"
    ),
    # combo command ids: the same rows again and again in one transaction
    (
        "BEGIN; INSERT INTO target VALUES (1, 1, 'a'); UPDATE target SET balance = 2 WHERE tid = 1; UPDATE target SET balance = 3, "
        "tid = 2 WHERE tid = 1; DELETE FROM target WHERE tid = 2; INSERT INTO target VALUES (1, 4, 'b'); SAVEPOINT s; "
        "DELETE FROM target WHERE tid = 1; ROLLBACK TO s; UPDATE target SET note = 'c' WHERE tid = 1; COMMIT"
    ),
    # cursors
    (
        "BEGIN; DECLARE c CURSOR FOR SELECT * FROM tenk WHERE id < 30 ORDER BY id FOR UPDATE; MOVE 3 IN c; FETCH 1 FROM c; "
        "UPDATE tenk SET txt = 'current' WHERE CURRENT OF c; FETCH 1 FROM c; DELETE FROM tenk WHERE CURRENT OF c; COMMIT"
    ),
    # foreign keys
    (
        "INSERT INTO parent SELECT g, 'p' || g FROM generate_series(1, 5) g; INSERT INTO child SELECT g, g % 5 + 1, 'c' FROM "
        "generate_series(1, 20) g; INSERT INTO nulled SELECT g, g FROM generate_series(1, 5) g"
    ),
    "UPDATE parent SET id = 60 WHERE id = 1; SELECT * FROM parent FOR KEY SHARE",
    "DELETE FROM nulled WHERE parent_id = 60; DELETE FROM parent WHERE id = 2",
    "TRUNCATE parent CASCADE",
    # inheritance
    "INSERT INTO base VALUES (1, 'base'); INSERT INTO derived VALUES (2, 'derived', 'more')",
    "UPDATE base SET a = upper(a)",
    "ALTER TABLE base ADD COLUMN c int DEFAULT 3; UPDATE base SET c = 4; DELETE FROM ONLY base",
    "ALTER TABLE derived NO INHERIT base; INSERT INTO derived VALUES (5, 'alone', 'x', 1)",
    # identity, generated columns
    "INSERT INTO ident (v) VALUES ('one'), (DEFAULT)",
    "INSERT INTO ident (id, v) OVERRIDING SYSTEM VALUE VALUES (100, 'forced'); UPDATE ident SET v = repeat('w', 50) WHERE id = 1",
    "TRUNCATE ident RESTART IDENTITY; INSERT INTO ident DEFAULT VALUES",
    # triggers and rules
    "INSERT INTO audited SELECT g, g FROM generate_series(1, 5) g; UPDATE audited SET v = v + 1 WHERE id > 2",
    "DELETE FROM audited WHERE id = 1",
    "ALTER TABLE audited DISABLE TRIGGER ALL; UPDATE audited SET v = 0; DROP RULE also ON audited; DELETE FROM audited",
    # views
    "UPDATE visible SET txt = 'through the view' WHERE id < 10; DELETE FROM visible WHERE id = 12",
    "REFRESH MATERIALIZED VIEW summed",
    "INSERT INTO tenk VALUES (2000, 0, 77, NULL)",
    "REFRESH MATERIALIZED VIEW CONCURRENTLY summed",
    # values larger than a page, and their changes
    "INSERT INTO wide SELECT g, repeat(chr(64 + g) || g, 3000), repeat('o', 10 * g), g FROM generate_series(1, 12) g",
    "ALTER TABLE wide ALTER big SET STORAGE EXTERNAL; UPDATE wide SET big = big || 'x' WHERE id < 4",
    "UPDATE wide SET n = -n; UPDATE wide SET other = big WHERE id = 5; UPDATE wide SET big = NULL WHERE id = 6",
    "ALTER TABLE wide REPLICA IDENTITY FULL; UPDATE wide SET n = 0 WHERE id < 8; DELETE FROM wide WHERE id = 2",
    "INSERT INTO wide SELECT id + 100, other, big, n FROM wide ON CONFLICT DO NOTHING",
    (
        "BEGIN; UPDATE wide SET big = big || big WHERE id = 7; SAVEPOINT s; UPDATE wide SET big = big || 'y' WHERE id = 7; "
        "ROLLBACK TO s; UPDATE wide SET n = 8 WHERE id = 7; COMMIT"
    ),
    "INSERT INTO keyed VALUES (repeat('key', 200), 'v'), ('', NULL), (E'tab\\tnew\\nline', E'\\\\')",
    "UPDATE keyed SET k = k || '!'; UPDATE keyed SET v = v; DELETE FROM keyed WHERE v IS NULL",
    # deferred and exclusion constraints
    "BEGIN; INSERT INTO deferred VALUES (1, 1), (2, 2); UPDATE deferred SET n = 3 - n; COMMIT",
    "INSERT INTO excluded VALUES (1, '[1,5)'), (2, '[5,9)'); UPDATE excluded SET r = '[20,30)' WHERE id = 1",
    "BEGIN; INSERT INTO deferred VALUES (3, 1); ROLLBACK",
    # partitions
    "INSERT INTO ranged SELECT g, date '2024-01-01' + g, 'v' FROM generate_series(0, 50) g",
    "UPDATE ranged SET day = day + 20 WHERE id % 3 = 0 AND day < '2024-02-01'; DELETE FROM ranged WHERE id % 5 = 0",
    "ALTER TABLE ranged DETACH PARTITION ranged_2; INSERT INTO ranged_2 VALUES (900, '2024-02-10', 'alone')",
    "ALTER TABLE ranged ATTACH PARTITION ranged_2 FOR VALUES FROM ('2024-02-01') TO ('2024-04-01'); UPDATE ranged SET v = 'all'",
    "INSERT INTO hashed SELECT g, 'h' FROM generate_series(1, 40) g; UPDATE hashed SET id = id + 1000 WHERE id % 4 = 0",
    "MERGE INTO hashed h USING source s ON h.id = s.sid WHEN MATCHED THEN DELETE WHEN NOT MATCHED THEN INSERT VALUES (s.sid, 'm')",
    "TRUNCATE ranged_1, hashed",
    # tables created from queries, rewritten, truncated
    "CREATE TABLE made AS SELECT id, txt, ten::numeric / 7 AS n FROM tenk WHERE id < 60; ALTER TABLE made ADD PRIMARY KEY (id)",
    "ALTER TABLE made ALTER n TYPE text USING 'n' || n, ADD COLUMN o timestamptz DEFAULT '2024-01-01 00:00+00'",
    "UPDATE made SET o = NULL WHERE id < 10; ALTER TABLE made DROP COLUMN n, ADD COLUMN n int; UPDATE made SET n = id WHERE id > 50",
    "CLUSTER made USING made_pkey",
    "VACUUM FULL made",
    "ALTER TABLE made SET UNLOGGED; INSERT INTO made (id) VALUES (5000)",
    "ALTER TABLE made SET LOGGED; INSERT INTO made (id) VALUES (5001)",
    (
        "BEGIN; TRUNCATE made; INSERT INTO made (id) SELECT generate_series(1, 20); SAVEPOINT s; TRUNCATE made; ROLLBACK TO s; "
        "DELETE FROM made WHERE id = 1; COMMIT"
    ),
    "CREATE TEMP TABLE pass (a int); INSERT INTO pass VALUES (1); INSERT INTO target SELECT a + 500 FROM pass; DROP TABLE pass",
    "SELECT id, txt INTO copied FROM tenk WHERE id < 5; DROP TABLE copied",
    "SELECT lo_from_bytea(0, '\\xdeadbeef')",
    # pruning, freezing
    "UPDATE tenk SET ten = ten + 1",
    "VACUUM (FREEZE) tenk",
    "UPDATE tenk SET ten = ten + 1 WHERE id < 100",
    "DELETE FROM tenk WHERE two = 1; UPDATE tenk SET txt = repeat('t', 200)",
    "VACUUM tenk",
    "INSERT INTO tenk SELECT g, 1, 1, repeat('u', 300) FROM generate_series(3000, 3100) g",
    # subtransactions of PL/pgSQL
    (
        "DO $$ BEGIN FOR i IN 1..70 LOOP BEGIN INSERT INTO target VALUES (i, i, 'plpgsql'); IF i % 4 = 0 THEN "
        "UPDATE target SET balance = 1 / (i % 2) WHERE tid = i; END IF; EXCEPTION WHEN unique_violation OR division_by_zero THEN "
        "UPDATE target SET note = 'caught' WHERE tid = i; END; END LOOP; END $$"
    ),
    # indexes that include columns
    "INSERT INTO including SELECT g, g, g, 'i' FROM generate_series(1, 5) g",
    "INSERT INTO indexed SELECT g, g, g, 'i' FROM generate_series(1, 5) g",
    "UPDATE including SET c = 0, d = 'u' WHERE a < 4; UPDATE including SET a = a + 10 WHERE a > 3; DELETE FROM including WHERE a < 3",
    "UPDATE indexed SET a = 0, c = 0 WHERE a < 4; UPDATE indexed SET b = b || 'b' WHERE a > 3; DELETE FROM indexed WHERE a = 0",
    # commands that only invalidate caches
    "REINDEX INDEX pg_class_oid_index",
    (
        "CREATE TEMP TABLE emptied (id int PRIMARY KEY) ON COMMIT DELETE ROWS; "
        "CREATE TEMP TABLE referring (id int REFERENCES emptied) ON COMMIT DELETE ROWS"
    ),
    "TRUNCATE emptied, referring",
    "REINDEX TABLE CONCURRENTLY tenk",
    # rewritten tables
    "REFRESH MATERIALIZED VIEW summed",
    "ALTER TABLE wide ALTER n TYPE bigint",
    (
        "BEGIN; ALTER TABLE wide RENAME TO wider; SAVEPOINT s; ALTER TABLE wider ADD at timestamptz DEFAULT clock_timestamp(); "
        "ROLLBACK TO s; ALTER TABLE wider ADD r text DEFAULT random()::text; INSERT INTO wider (id) VALUES (70000); COMMIT"
    ),
)
