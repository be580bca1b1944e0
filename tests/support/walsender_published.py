"""Publications with row filters, column lists and partitions under a root, and statements whose changes they publish."""

from __future__ import annotations

FILTER_SETUP = """
CREATE TABLE f_int (id int PRIMARY KEY, a int, b bigint, c smallint);
CREATE TABLE f_text (id int PRIMARY KEY, t text, v varchar(20), b bpchar(10), n name);
ALTER TABLE f_text REPLICA IDENTITY FULL;
CREATE TABLE f_num (id int PRIMARY KEY, n numeric, f float8, g float4, d date, ts timestamptz, bo bool, u uuid);
ALTER TABLE f_num REPLICA IDENTITY FULL;
CREATE TABLE f_key (id int, k text, v text, PRIMARY KEY (id, k));
CREATE TABLE f_toast (id int PRIMARY KEY, t text, n int);
ALTER TABLE f_toast REPLICA IDENTITY FULL;
ALTER TABLE f_toast ALTER t SET STORAGE EXTERNAL;
CREATE TABLE f_list (secret text, id int PRIMARY KEY, v text, w text);
CREATE TABLE f_root (id int, r text, v text, PRIMARY KEY (id, r)) PARTITION BY LIST (r);
CREATE TABLE f_root_a PARTITION OF f_root FOR VALUES IN ('a');
CREATE TABLE f_root_b (v text, junk int, r text NOT NULL, id int NOT NULL);
ALTER TABLE f_root_b DROP COLUMN junk;
ALTER TABLE f_root ATTACH PARTITION f_root_b FOR VALUES IN ('b');
CREATE TABLE f_root_c PARTITION OF f_root DEFAULT PARTITION BY RANGE (id);
CREATE TABLE f_root_c1 PARTITION OF f_root_c FOR VALUES FROM (0) TO (100);
CREATE SCHEMA in_schema;
CREATE TABLE in_schema.t (id int PRIMARY KEY, v text);
CREATE TABLE not_published (id int PRIMARY KEY);
CREATE TABLE f_insert (id int, v text);
CREATE TABLE f_late (id int PRIMARY KEY, t text);
ALTER TABLE f_late ALTER t SET STORAGE EXTERNAL;
CREATE PUBLICATION p FOR TABLE f_int WHERE (a > 10 AND b IS NOT NULL OR c IN (1, 2, 3)),
    f_text WHERE (t LIKE 'a%' AND lower(v) <> 'no' AND b >= 'b' AND n = 'name' OR length(t) > 5),
    f_num WHERE (n BETWEEN 1.5 AND 10 OR f > 1e10 OR g = 0.5 OR d < '2000-01-01' AND bo IS NOT TRUE
        OR u = 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11' OR CASE WHEN bo THEN n > 100 ELSE false END),
    f_key WHERE (k <> 'hidden' AND id % 2 = 0),
    f_toast WHERE (t LIKE '%x%'), f_list (id, v), f_root WHERE (id > 10)
    WITH (publish_via_partition_root);
ALTER TABLE f_int REPLICA IDENTITY FULL;
CREATE PUBLICATION q FOR TABLES IN SCHEMA in_schema;
CREATE PUBLICATION r FOR TABLE f_insert WHERE (v IS DISTINCT FROM 'x' AND COALESCE(id, 0) + 1 <> 3),
    f_root_a, f_root_b (id, v, r) WITH (publish = 'insert');
CREATE PUBLICATION s FOR TABLE f_root_c WITH (publish_via_partition_root);
CREATE PUBLICATION u FOR TABLE f_int, f_key WHERE (id = 1 OR v = 'both') WITH (publish = 'insert');
"""

FILTER_STATEMENTS = (
    "INSERT INTO f_int SELECT g, g, CASE WHEN g % 3 > 0 THEN g END, g % 5 FROM generate_series(1, 30) g",
    "UPDATE f_int SET a = a + 5",
    "UPDATE f_int SET c = 1 WHERE id < 5",
    "UPDATE f_int SET c = NULL, b = NULL",
    "DELETE FROM f_int",
    (
        "INSERT INTO f_text VALUES (1, 'abc', 'yes', 'b', 'name'), (2, 'abc', 'NO', 'b', 'name'), (3, 'longer text', NULL, NULL, ''), "
        "(4, NULL, NULL, NULL, NULL), (5, 'äöü', 'Ä', 'zz', 'name'), (6, 'a_%', 'x', 'a', 'name')"
    ),
    "UPDATE f_text SET t = 'axx' || t",
    "UPDATE f_text SET v = 'No', t = left(t, 3)",
    "DELETE FROM f_text",
    """INSERT INTO f_num VALUES (1, 1.5, 0, 0, '2024-01-01', now(), true, NULL), (2, 'NaN', 'NaN', 'NaN', NULL, NULL, NULL, NULL),
    (3, 0, 'Infinity', 0, NULL, NULL, false, NULL), (4, NULL, -1, 0.5, NULL, NULL, NULL, NULL),
    (5, 200, 0, 0, '1999-12-31', NULL, NULL, NULL), (6, 200, 0, 0, NULL, NULL, true, NULL),
    (7, 0, 0, 0, NULL, NULL, NULL, 'a0eebc99-9c0b-4ef8-bb6d-6bb9bd380a11')""",
    "UPDATE f_num SET n = n + 1",
    "UPDATE f_num SET n = 5, d = '1980-01-01'",
    "DELETE FROM f_num",
    "INSERT INTO f_key SELECT g, CASE g % 3 WHEN 0 THEN 'hidden' ELSE 'k' END, 'v' || g FROM generate_series(1, 12) g",
    "UPDATE f_key SET v = 'both' WHERE id < 7",
    "UPDATE f_key SET id = id + 101",
    "UPDATE f_key SET k = 'hidden' WHERE id = 5",
    "UPDATE f_key SET k = 'seen' WHERE k = 'hidden'",
    "DELETE FROM f_key",
    "INSERT INTO f_toast VALUES (1, repeat('x', 5000), 1), (2, repeat('y', 5000), 1), (3, 'x', 1)",
    "UPDATE f_toast SET n = 2",
    "UPDATE f_toast SET t = repeat('y', 4000) WHERE id = 1",
    "UPDATE f_toast SET t = repeat('xy', 4000) WHERE id = 2",
    "DELETE FROM f_toast",
    "INSERT INTO f_list VALUES ('s', 1, 'v', 'w'), ('s', 2, NULL, NULL)",
    "UPDATE f_list SET secret = 'x', w = 'w2'",
    "UPDATE f_list SET id = id + 10",
    "DELETE FROM f_list",
    "INSERT INTO f_root VALUES (5, 'a', 'x'), (15, 'a', 'x'), (6, 'b', 'y'), (16, 'b', 'y'), (7, 'c', 'z'), (17, 'c', 'z')",
    "UPDATE f_root SET v = v || '!'",
    "UPDATE f_root SET r = 'b' WHERE id = 15",
    "UPDATE f_root SET id = 12 WHERE id = 6",
    "DELETE FROM f_root WHERE id > 15",
    "TRUNCATE f_root_a",
    "TRUNCATE f_root",
    "INSERT INTO in_schema.t VALUES (1, 'a')",
    "UPDATE in_schema.t SET v = 'b'",
    "CREATE TABLE in_schema.later (a int PRIMARY KEY)",
    "INSERT INTO in_schema.later VALUES (1)",
    "ALTER TABLE in_schema.later SET SCHEMA public",
    "INSERT INTO later VALUES (2)",
    "INSERT INTO not_published VALUES (1)",
    "INSERT INTO f_insert VALUES (1, 'x'), (2, 'y'), (NULL, NULL), (4, 'z')",
    "TRUNCATE f_insert, f_list, in_schema.t",
    # Changes of publications
    "ALTER PUBLICATION p SET TABLE f_int, f_list (id, v, w)",
    "INSERT INTO f_int VALUES (100, 1, 1, 1)",
    "INSERT INTO f_list VALUES ('s', 3, 'v', 'w')",
    "ALTER PUBLICATION p ADD TABLE not_published",
    "INSERT INTO not_published VALUES (2)",
    # Its TOAST table was not followed before.
    "INSERT INTO f_late VALUES (1, repeat('x', 5000))",
    "ALTER PUBLICATION p ADD TABLE f_late",
    "INSERT INTO f_late VALUES (2, repeat('y', 5000))",
    "BEGIN; ALTER PUBLICATION p DROP TABLE not_published; INSERT INTO not_published VALUES (3); COMMIT",
    "ALTER PUBLICATION p SET (publish = 'insert, delete')",
    "UPDATE f_int SET a = 2; DELETE FROM f_int",
    "ALTER PUBLICATION q ADD TABLE not_published WHERE (id > 100)",
    "INSERT INTO not_published VALUES (99), (101)",
    "ALTER TABLE f_list RENAME v TO vv; INSERT INTO f_list VALUES ('s', 4, 'v', 'w')",
    # Only the root's publication changes, after rows of a partition were sent.
    "INSERT INTO f_root VALUES (51, 'c', 'whole')",
    "ALTER PUBLICATION s SET TABLE f_root_c (id, r)",
    "INSERT INTO f_root VALUES (52, 'c', 'listed')",
    "ALTER PUBLICATION s SET TABLE f_root_c",
    "INSERT INTO f_root VALUES (53, 'c', 'whole')",
)

TREE_SETUP = """
CREATE PUBLICATION p FOR ALL TABLES WITH (publish_via_partition_root);
CREATE PUBLICATION q FOR TABLES IN SCHEMA public;
CREATE TABLE t_mid (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE t_leaf PARTITION OF t_mid FOR VALUES FROM (0) TO (100);
CREATE TABLE t_root (id int PRIMARY KEY, v text) PARTITION BY RANGE (id);
CREATE TABLE t_other (v text, id int PRIMARY KEY) PARTITION BY RANGE (id)
"""
TREE_STATEMENTS = (
    "INSERT INTO t_mid VALUES (1, 'a')",
    "ALTER TABLE t_root ATTACH PARTITION t_mid FOR VALUES FROM (0) TO (1000)",
    "INSERT INTO t_root VALUES (2, 'b')",
    "ALTER TABLE t_root DETACH PARTITION t_mid",
    "INSERT INTO t_mid VALUES (3, 'a')",
    (
        "BEGIN; ALTER TABLE t_other ATTACH PARTITION t_mid FOR VALUES FROM (0) TO (1000); "
        "INSERT INTO t_other VALUES ('b', 4); ROLLBACK"
    ),
    "INSERT INTO t_mid VALUES (5, 'a')",
    (
        "BEGIN; ALTER TABLE t_other ATTACH PARTITION t_mid FOR VALUES FROM (0) TO (1000); "
        "INSERT INTO t_other VALUES ('b', 6); COMMIT"
    ),
    "UPDATE t_mid SET v = 'c' WHERE id = 6",
    "ALTER TABLE t_other DETACH PARTITION t_mid CONCURRENTLY",
    "DELETE FROM t_mid WHERE id > 2",
)
