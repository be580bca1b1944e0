-- SELECTs that are answered as PostgreSQL answers them, one a line (test_059_select.py).
SELECT Full_Name FROM Customers ORDER BY ID
SELECT c."Mixed Case", C.FULL_NAME AS Name, c.code FROM public.customers AS C ORDER BY c.Id
SELECT "customers".* FROM customers WHERE id = 1
SELECT * FROM orders ORDER BY Amount DESC, 1
SELECT FULL_NAME AS "Full Name", Balance AS Total FROM customers ORDER BY TOTAL DESC, "Full Name"
SELECT Total FROM (SELECT balance AS TOTAL, id FROM customers) AS Sub WHERE sub.ID < 3 ORDER BY total
WITH Big AS (SELECT Id, Balance B FROM customers WHERE balance > 0) SELECT BIG.b, id FROM big ORDER BY 2
WITH a(X, y) AS (SELECT id, full_name FROM customers), b AS (SELECT X FROM A WHERE x > 1) SELECT * FROM b ORDER BY x
SELECT c.id, O.amount FROM customers c JOIN orders o ON o.Customer_ID = C.id ORDER BY 1, 2
SELECT * FROM customers JOIN orders USING (ID) WHERE amount > 5 ORDER BY id
SELECT id, c.id, o.id FROM customers c RIGHT JOIN orders o USING (id) ORDER BY id
SELECT ID, full_name, amount FROM customers FULL JOIN orders USING (id) ORDER BY id
SELECT count(*) FROM customers NATURAL JOIN orders
SELECT a.id, b.id FROM orders a, orders b WHERE a.id < b.id AND b.amount > a.amount ORDER BY 1, 2
SELECT id FROM customers LEFT JOIN (SELECT customer_id cid, count(*) n FROM orders GROUP BY 1) x ON cid = id WHERE n IS NULL ORDER BY id
SELECT customer_id, count(*), sum(amount), min(amount), max(amount), avg(amount) FROM orders GROUP BY customer_id ORDER BY 1
SELECT customer_id AS who, sum(amount) FROM orders GROUP BY who HAVING sum(amount) > 2 ORDER BY sum(amount) DESC
SELECT upper(left("Note", 1)) u, count(*) FROM orders GROUP BY upper(left("Note", 1)) ORDER BY 1
SELECT avg(id), avg(small), avg(big), avg(ratio), sum(id), sum(big), sum(balance), sum(ratio) FROM customers WHERE id < 4
SELECT round(avg(amount), 2), avg(amount) * 2, sum(amount) / count(*), avg(amount)::numeric(10,1), 1.0 / 3, 10 / 4.0, 2.0 / 3 * 3 FROM orders
SELECT count(DISTINCT customer_id), count(customer_id), count(*) FILTER (WHERE amount > 5), bool_and(amount > 0), bool_or(amount > 99), every(id > 0) FROM orders
SELECT string_agg("Note", ',' ORDER BY "Note" DESC), array_agg(id ORDER BY id DESC) FROM orders
SELECT DISTINCT ON (customer_id) customer_id, amount FROM orders ORDER BY customer_id, amount DESC
SELECT DISTINCT active FROM customers ORDER BY active
SELECT DISTINCT ON (c.active) Full_name, active FROM customers c ORDER BY active, Full_Name DESC
SELECT DISTINCT ON (coalesce(customer_id, 0)) customer_id, amount FROM orders ORDER BY coalesce(customer_id, 0), amount DESC
SELECT id, row_number() OVER (PARTITION BY customer_id ORDER BY amount DESC), sum(amount) OVER w, lag(id) OVER (ORDER BY id) FROM orders WINDOW w AS (ORDER BY id ROWS BETWEEN 1 PRECEDING AND CURRENT ROW) ORDER BY id
SELECT rank() OVER (ORDER BY customer_id), first_value(amount) OVER (PARTITION BY customer_id ORDER BY id), count(*) OVER () FROM orders ORDER BY id
SELECT id FROM customers UNION SELECT customer_id FROM orders ORDER BY id
SELECT id, 'x' FROM customers UNION ALL SELECT id, "Note" FROM orders ORDER BY 1, 2 LIMIT 5
SELECT id FROM customers EXCEPT SELECT id FROM orders WHERE id < 3 ORDER BY 1
(SELECT id FROM customers ORDER BY id DESC LIMIT 2) UNION ALL (SELECT 9) ORDER BY 1
SELECT id, NULL FROM orders UNION SELECT id, amount FROM orders ORDER BY 1, 2 OFFSET 1 ROWS FETCH NEXT 2 ROWS ONLY
VALUES (1, 'a'), (2, NULL) ORDER BY 1 DESC
TABLE natural_ones ORDER BY id
SELECT v.n, v.t FROM (VALUES (1, 'x'), (2, 'y')) AS v(N, T) ORDER BY n
SELECT id FROM orders WHERE customer_id IN (SELECT id FROM customers WHERE active) ORDER BY id
SELECT id FROM orders o WHERE EXISTS (SELECT 1 FROM customers c WHERE c.id = O.customer_id AND NOT c.active)
SELECT id, (SELECT max(amount) FROM orders o WHERE o.customer_id = c.id) FROM customers c ORDER BY id
SELECT id FROM orders WHERE amount = (SELECT max(amount) FROM orders)
SELECT id FROM orders WHERE id = ANY (ARRAY[1, 3]) OR id = ANY ('{4}') ORDER BY id
SELECT id FROM orders WHERE id <> ALL (ARRAY[1, 3]) AND customer_id NOT IN (7, 8) ORDER BY id
SELECT id, full_name LIKE 'A%', full_name ILIKE 'a%', full_name LIKE '%\_\%%', full_name NOT LIKE '%b%', full_name LIKE '%!_%' ESCAPE '!' FROM customers ORDER BY id
SELECT id, full_name ~ '^A', full_name ~* '^a.n', full_name !~ 'o?b$', full_name !~* '^B|x$' FROM customers ORDER BY id
SELECT id::text || '-' || full_name, 'n' || balance, id || 'x', full_name || NULL FROM customers ORDER BY id
SELECT length(full_name), reverse(full_name), octet_length(full_name), md5(full_name) FROM customers ORDER BY id
SELECT upper(full_name), lower(full_name) FROM customers WHERE id < 3 ORDER BY id
SELECT substring(full_name FROM 2 FOR 3), substr(full_name, 0, 3), substr(full_name, -1), left(full_name, -2), right(full_name, 3), position('n' in full_name), strpos(full_name, 'b') FROM customers ORDER BY id
SELECT trim(both 'Ah' from full_name), ltrim(full_name, 'A'), rtrim(full_name), btrim(full_name, 'bA'), lpad(full_name, 5, 'xy'), rpad(full_name, 12), repeat(full_name, 2), repeat('a', -1) FROM customers ORDER BY id
SELECT replace(full_name, 'n', 'NN'), replace(full_name, '', 'z'), split_part(full_name, ' ', 1), split_part(full_name, ' ', -1), starts_with(full_name, 'A'), translate(full_name, 'ab', 'x'), ascii(full_name) FROM customers WHERE id < 3 ORDER BY id
SELECT concat(full_name, NULL, id, active), concat_ws('-', full_name, NULL, balance), to_hex(255), coalesce("Mixed Case", 'none'), nullif(full_name, 'bob'), greatest(id, 2), least(1.50, balance), coalesce(NULL, id) FROM customers WHERE id < 3 ORDER BY id
SELECT code, length(code), code || '|', code = 'ab', code::text || '|', code IN ('ab   ', 'abc') FROM customers ORDER BY id
SELECT id + 1, id - 5, id * 3, id / 2, -id / 2, -7 % 3, id % 2, -small, big * 2, big / 3, small + small FROM customers ORDER BY id
SELECT balance + 1, balance - 0.005, balance * 1.10, -balance, balance / 3, balance / id, abs(balance), balance % 3, round(balance), round(balance, 1), trunc(balance, 1), ceil(balance), floor(balance), sign(balance) FROM customers ORDER BY id
SELECT ratio + 1, ratio * 2, ratio / 2, round(ratio), trunc(ratio), ceil(ratio), floor(ratio), abs(ratio), ratio = 'NaN', ratio > 1, part FROM customers ORDER BY id
SELECT id::bigint, '7'::int, 2.5::int, 3.5::int, (-2.5)::int, ratio::int, balance::int, id::numeric(6,2), id::float8, 1.005::numeric(10,2), true::int, 0::bool, 'yes'::bool, active::text, balance::text, born::text FROM customers WHERE id < 3 ORDER BY id
SELECT cast(id as varchar(1)), 'abc'::varchar(2), 'a'::char(3) || '|', "Mixed Case"::text FROM customers ORDER BY id
SELECT ratio::text, created::text, seen::text FROM customers WHERE id < 3 ORDER BY id
SELECT born, born + 1, born - 1, born - date '1990-01-01', born + interval '1 month', seen - interval '1 day 2 hours', created + interval '1 year -1 day', seen::date, created::timestamp, born::timestamptz FROM customers ORDER BY id
SELECT seen - timestamp '2024-01-01', created - '2024-01-01', extract(epoch from created - '2024-01-01 00:00:01+00') FROM customers WHERE id < 4 ORDER BY id
SELECT extract(year from created), extract(month from born), extract(dow from created), extract(doy from seen), extract(second from seen), extract(epoch from created), extract(quarter from created), extract(week from created), date_part('hour', seen), extract(epoch from born) FROM customers ORDER BY id
SELECT date_trunc('month', created), date_trunc('hour', seen), date_trunc('year', created), date_trunc('week', seen), created AT TIME ZONE 'UTC', date(created) FROM customers ORDER BY id
SELECT id FROM customers WHERE created > '2024-01-15' AND created < now() AND born BETWEEN '1990-01-01' AND '1999-12-31'
SELECT id FROM customers WHERE now() - created > interval '1 day' AND seen >= date '2024-01-01'
SELECT interval '1 day 02:03:04', interval '1 month', '90 minutes'::interval, interval '-1 day 3 hours', interval '14 months', interval '1.5 seconds'
SELECT id, tags[1], tags[2], tags[3], tags[0], numbers[1], numbers[2] FROM customers ORDER BY id
SELECT id, Tags[1], tags[3], tags[0], tags[-1], numbers[1] + 1, array_length(tags, 1), cardinality(tags), 'z' = ANY (tags), 'q' = ANY (tags) FROM natural_ones ORDER BY id
SELECT id FROM natural_ones WHERE tags[1] = 'a' AND numbers[2] = 4
SELECT id, props->>'n', props->'b', props->'b'->'c'->>1, props->'b'->'c'->-1, props->>'s', doc->>'n', doc->>'t', props->'s' FROM customers ORDER BY id
SELECT props->>'n' AS N, (props->>'n') || 'x' FROM customers WHERE false
SELECT props::text, doc::text, tags::text, m::text, loose::text, u::text FROM customers ORDER BY id
SELECT u, m, loose, lap, daytime, props, tags, raw FROM customers ORDER BY id
SELECT id FROM customers WHERE m = 'ok' ORDER BY id
SELECT m, count(*) FROM customers WHERE m IS NOT NULL GROUP BY m ORDER BY count(*)
SELECT id FROM customers WHERE u = '2F1A0C3E-0000-4000-8000-000000000001' OR u = '{2f1a0c3e000040008000000000000002}' ORDER BY id
SELECT id FROM customers WHERE u > '2f1a0c3e-0000-4000-8000-000000000001' ORDER BY u
SELECT loose::numeric(10,3) + 1 FROM customers ORDER BY id
SELECT CASE WHEN id = 1 THEN 'one' WHEN id = 2 THEN 'two' END, CASE id WHEN 1 THEN 1.50 ELSE 2.25 END, CASE WHEN active THEN full_name ELSE 'n' END FROM customers ORDER BY id
SELECT active IS TRUE, active IS NOT TRUE, active IS FALSE, NOT active, active AND id > 1, active OR NULL, full_name IS DISTINCT FROM 'bob', balance IS NULL FROM customers ORDER BY id
SELECT 1, 'a', NULL, true, 1.50, 1e3, -5, 'it''s', 9999999999, E'a\nb', 'x' AS Y
SELECT id FROM customers ORDER BY ratio DESC NULLS LAST, id
SELECT id FROM customers ORDER BY balance NULLS FIRST, lower(full_name) LIMIT 3 OFFSET 1
SELECT sum(n), max(n) FROM (SELECT count(*) AS n FROM orders GROUP BY customer_id) AS s
SELECT o.*, full_name FROM orders o LEFT JOIN customers ON customers.id = customer_id WHERE (o.id, customer_id) = (1, 1)
SELECT max(full_name), min(born), max(created), min("Mixed Case"), max(balance) FROM customers
SELECT pg_catalog.lower('A'), count(*) count FROM customers
SELECT id FROM customers WHERE id NOT IN (SELECT customer_id FROM orders)
SELECT id FROM customers WHERE id NOT IN (SELECT customer_id FROM orders WHERE customer_id IS NOT NULL) ORDER BY id
SELECT id FROM orders WHERE customer_id NOT IN (1, NULL)
SELECT count(*), sum(amount), avg(amount), max(id), string_agg("Note", ',') FROM orders WHERE id > 100
SELECT count(*) FROM orders HAVING count(*) > 100
SELECT id + 1 AS id FROM orders ORDER BY id DESC LIMIT 2
SELECT id AS x, -id AS y FROM orders ORDER BY -id
SELECT id % 2 AS odd, count(*) FROM orders GROUP BY odd ORDER BY odd
SELECT active = true, active = 't', 'a' = 'a', 'a' < 'b', id = 1.0, id < 2.5, balance = 10.5, big > 1e9, small = id FROM customers ORDER BY id
SELECT full_name IN ('bob', 'x'), full_name BETWEEN 'A' AND 'z', id IN (1, 2.0), 'Two' = "Mixed Case" FROM customers ORDER BY id
SELECT date '2024-01-31' + interval '1 month', timestamp '2024-03-31 10:00' - interval '1 month', date '2024-03-01' - 1, timestamptz '2024-01-01 00:00+02', date '2024-01-31' > '2024-01-30'
SELECT a.*, b.* FROM natural_ones a JOIN natural_ones b USING (id) ORDER BY 1
SELECT n.numbers, n.tags FROM natural_ones n ORDER BY n.id DESC
SELECT DISTINCT customer_id, amount > 5 FROM orders ORDER BY customer_id, 2
SELECT customer_id, amount FROM orders WHERE (customer_id, id) = (1, 2)
SELECT sum(id) FILTER (WHERE id > 1), max(amount) FILTER (WHERE "Note" = 'a') FROM orders
SELECT sum(amount) OVER (PARTITION BY customer_id ORDER BY id), ntile(2) OVER (ORDER BY id), lead(amount, 1, 0.00) OVER (ORDER BY id) FROM orders ORDER BY id
SELECT sum(count(*)) OVER (ORDER BY customer_id), customer_id FROM orders GROUP BY customer_id ORDER BY 2
SELECT c.id, count(o.id), coalesce(sum(o.amount), 0.00) FROM customers c LEFT JOIN orders o ON o.customer_id = c.id GROUP BY c.id ORDER BY c.id
SELECT x.n FROM (SELECT id + 1 AS n FROM orders UNION SELECT id FROM customers) x WHERE n > 3 ORDER BY n
SELECT id FROM orders WHERE placed >= '2024-03-02' AND placed < timestamp '2024-05-01' ORDER BY id
SELECT 5 / 2, -5 / 2, 5 % -3, 5.0 / 2, 1 / 3.0, 7.50 % 2, 2 * 1.5, 100000 * 100000::bigint, 1.10 + 2, 10 - 0.5
SELECT round(2.5), round(-2.5), round(2.345, 2), round(1234.5, -2), round(2.5::float8), round(3.5::float8), trunc(-2.7), ceil(-2.5), floor(-2.5), abs(-5), sign(-3)
SELECT 0.1::float8 + 0.2::float8, 1e20::float8, 1.5::float4, 'Infinity'::float8, 1::float8 / 3
SELECT '  7 '::int, ' t '::bool, '1e2'::float8, '12.5'::numeric(5,1), '2024-02-03'::date, '2024-02-03 04:05'::timestamp
SELECT 'x' || 1 || true || NULL, 'x' || 1 || 2.50, concat('x', true, 2)
SELECT nullif(1, 1), nullif('a', 'b'), nullif(id, 2), coalesce(NULL, NULL, 'z'), greatest('b', 'a', NULL), least(3, 2.5) FROM orders WHERE id = 2
SELECT (SELECT count(*) FROM orders), EXISTS (SELECT 1 FROM orders WHERE id = 99) FROM customers WHERE id = 1
SELECT "customers"."full_name" AS "FULL", CUSTOMERS.ID FROM public.customers WHERE customers.id = 1
SELECT id, count(*) OVER (PARTITION BY active) FROM customers ORDER BY id
SELECT id FROM customers ORDER BY full_name COLLATE "C" LIMIT ALL
SELECT tags[1], count(*) FROM natural_ones GROUP BY tags[1] ORDER BY 1
SELECT string_agg(DISTINCT "Note", ',' ORDER BY "Note") FROM orders
SELECT c.full_name, o.total FROM customers c JOIN (SELECT customer_id, sum(amount) AS total FROM orders GROUP BY customer_id) o ON c.id = o.customer_id ORDER BY o.total DESC
SELECT id FROM customers WHERE NOT active OR active IS NULL ORDER BY id
SELECT avg(amount) FROM orders GROUP BY customer_id HAVING avg(amount) > 2 ORDER BY avg(amount)
SELECT length('é'), upper('a'), position('b' in 'abc'), substring('hello' from 2), substring('hello', 2, 2), lpad('7', 3, '0'), left('abc', 10)
SELECT 'a\b', 'a\b' LIKE 'a\\b', E'a\tb', 'it''s' LIKE '%''%'
SELECT extract(day from placed), date_trunc('day', placed), placed::date, placed + interval '90 minutes' FROM orders ORDER BY id
SELECT count(*) FILTER (WHERE active), count(*) FILTER (WHERE NOT active) FROM customers
SELECT id FROM orders WHERE customer_id IN (2, NULL) OR id IN (customer_id, 4) ORDER BY id
SELECT id FROM orders WHERE customer_id <> ALL ('{1,NULL}') OR customer_id = ANY (ARRAY[2, NULL])
SELECT id FROM customers WHERE full_name NOT IN ('bob', 'x') AND id NOT IN (-1, 1) ORDER BY id
SELECT id FROM orders WHERE customer_id > 0 AND id = NULL
SELECT id FROM (SELECT id, NULL::int AS n FROM orders) AS s WHERE id > 0 AND n <> 1
SELECT o.id FROM orders o JOIN customers c ON o.id = c.id AND o.customer_id = NULL
-- numeric's scale and precision, literals of types that are kept as text, character beside other texts, real beside other numbers
SELECT 10.99::numeric
SELECT avg(balance)::numeric FROM customers
SELECT round(avg(balance)::numeric, 2) FROM customers
SELECT 123.456::numeric(5,2)
SELECT balance::numeric(3,1) FROM customers WHERE id < 3
SELECT 5::numeric
SELECT balance::numeric + 1 FROM customers ORDER BY id
SELECT '10.990'::numeric
SELECT sum(x::numeric(5,3)) FROM (VALUES ('1.0005'), ('2.5')) v(x)
SELECT id FROM kept WHERE t = '10:00'
SELECT id FROM kept WHERE t < '9:45' ORDER BY 1
SELECT id FROM kept WHERE t IN ('9:45', '10:00:00') ORDER BY 1
SELECT id FROM kept WHERE t = time '10:00'
SELECT id FROM kept WHERE i = '10.0.0.1/32'
SELECT id FROM kept WHERE i = '::ffff:1.2.3.4'
SELECT id FROM kept WHERE c = '10.0.0.0/8'
SELECT id FROM kept WHERE c = '0:0::1'
SELECT id FROM kept WHERE m = '08-00-2B-01-02-03'
SELECT id FROM kept WHERE m = '08002b010203'
SELECT id FROM kept WHERE m < '0800.2b01.0204'
SELECT id FROM kept WHERE r = '[1,2]'
SELECT id FROM kept WHERE r = '(0,3)'
SELECT id FROM kept WHERE r = '[3,3)'
SELECT id FROM kept WHERE r = '(,4]'
SELECT id FROM kept WHERE d = '[2024-01-01,2024-02-01)'
SELECT id FROM kept WHERE d = '[2024-1-1,]'
SELECT id FROM kept WHERE l = '0/16b3748'
SELECT id FROM kept WHERE b = '101'
SELECT id FROM kept WHERE b = 'b101'
SELECT id FROM kept WHERE v = ''
SELECT id FROM kept WHERE x8 = '5'
SELECT id FROM kept WHERE ch IN (SELECT vc FROM kept) ORDER BY 1
SELECT id FROM kept WHERE ch = ANY (SELECT vc FROM kept) ORDER BY 1
SELECT id FROM kept WHERE ch <> ALL (SELECT vc FROM kept WHERE vc IS NOT NULL) ORDER BY 1
SELECT id FROM kept WHERE vc IN (SELECT ch FROM kept) ORDER BY 1
SELECT id FROM kept WHERE 'ab' IN (SELECT ch FROM kept) ORDER BY 1
SELECT id FROM kept WHERE ch IN (SELECT ch FROM kept) ORDER BY 1
SELECT id FROM kept WHERE ch IN ('ab  ', 'x') ORDER BY 1
SELECT id FROM kept WHERE ch = ANY (ARRAY['ab', 'x']) ORDER BY 1
SELECT id FROM kept WHERE ch = vc
SELECT id FROM kept WHERE f IN (SELECT n FROM kept) ORDER BY 1
SELECT id FROM kept WHERE f IN (SELECT 0.1) ORDER BY 1
SELECT id FROM kept WHERE n IN (SELECT g FROM kept) ORDER BY 1
SELECT id FROM kept WHERE g = ANY (SELECT f FROM kept) ORDER BY 1
SELECT x::timestamp FROM kept WHERE id < 3 ORDER BY id
SELECT x::date FROM kept WHERE id < 3 ORDER BY id
SELECT x::timestamptz FROM kept WHERE id < 3 ORDER BY id
SELECT id FROM kept WHERE f = 0.1
SELECT id FROM kept WHERE f = 1.5
SELECT id FROM kept WHERE f > 0.1 ORDER BY 1
SELECT f + 1 FROM kept ORDER BY id
SELECT f * 0.1 FROM kept ORDER BY id
SELECT f + g FROM kept ORDER BY id
SELECT f / 3 FROM kept ORDER BY id
SELECT id FROM kept WHERE f IN (0.1, 1.5)
SELECT coalesce(f, 1) FROM kept ORDER BY id
SELECT extract(epoch from interval '1 year')
SELECT extract(epoch from interval '1 year 2 months 3 days 04:05:06.7')
SELECT extract(epoch from interval '-13 months')
SELECT to_hex(-1)
SELECT to_hex(-1::bigint)
SELECT to_hex(255)
SELECT to_hex(id - 2) FROM kept ORDER BY id
SELECT concat(ch, '|') FROM kept ORDER BY id
SELECT concat_ws('-', ch, vc) FROM kept ORDER BY id
SELECT octet_length(ch), length(ch), char_length(ch) FROM kept ORDER BY id
SELECT ch || '|' FROM kept ORDER BY id
SELECT now() = now()
SELECT now() = current_timestamp
SELECT current_date = now()::date
SELECT date_trunc('day', now()) = current_date
SELECT now() - now()
SELECT id FROM kept WHERE ch = vc ORDER BY 1
SELECT id FROM kept WHERE vc = 'ab' ORDER BY 1
SELECT a.id, b.id FROM kept a JOIN kept b ON a.ch = b.vc ORDER BY 1, 2
SELECT a.id, b.id FROM kept a JOIN kept b ON a.vc = b.ch ORDER BY 1, 2
SELECT id FROM kept WHERE ch::text = vc ORDER BY 1
SELECT id FROM kept WHERE ch = vc::text ORDER BY 1
SELECT id FROM kept WHERE ch < vc ORDER BY 1
SELECT id FROM kept WHERE ch IN (SELECT x FROM kept) ORDER BY 1
SELECT '{"b":1,"a":[1,2.50,null]}'::jsonb
SELECT '{"b":1,"a":1,"b":2}'::jsonb ->> 'b'
SELECT id FROM customers WHERE balance = '10.5'
SELECT id FROM customers WHERE balance = '10.505'
SELECT '1.005'::numeric(10,2)
SELECT '1.005'::numeric(10,2) + 0
SELECT NULL::numeric(5,2), NULL::numeric
SELECT x::numeric(10,1) FROM kept WHERE id = 3
SELECT x::numeric(4,2) FROM kept WHERE id = 3
SELECT x::numeric(10,0) FROM kept WHERE id = 3
SELECT n::numeric(6,1), n::numeric(6,2) FROM kept ORDER BY id
SELECT n::int FROM kept ORDER BY id
SELECT avg(n)::numeric(10,4) FROM kept
SELECT avg(n)::numeric(2,1) FROM kept
SELECT sum(n)::numeric(10,1), round(sum(n)::numeric, 1) FROM kept
SELECT loose::numeric(10,2) FROM customers WHERE id < 3 ORDER BY id
SELECT loose::numeric FROM customers WHERE id < 3 ORDER BY id
SELECT id::numeric / 3 FROM kept ORDER BY id
SELECT (id::numeric(10,2)) / 3 FROM kept ORDER BY id
SELECT CASE WHEN id = 1 THEN n::numeric ELSE 1 END FROM kept WHERE id = 1
SELECT time '9:05:03.10', '24:00'::time
SELECT inet '10.0.0.1/32', inet '::1', inet '::ffff:1.2.3.4', inet '::1.2.3.4', inet '1:0:0:2:0:0:0:3'
SELECT inet '010.1.2.3'
SELECT id FROM kept WHERE c = '10.0.0.1/8'
SELECT id FROM kept WHERE l <> '0/0' ORDER BY 1
SELECT id FROM kept WHERE l <> '1/0' ORDER BY 1
SELECT id FROM kept WHERE l IN ('0/016B3748', '00000001/00') ORDER BY 1
SELECT a.id FROM kept a JOIN kept b ON a.l = b.l ORDER BY 1
SELECT id FROM kept WHERE l IS DISTINCT FROM '1/0' ORDER BY 1
SELECT l, l::text FROM kept ORDER BY id
SELECT id FROM kept WHERE i <> '10.0.0.1' ORDER BY 1
SELECT id FROM kept WHERE t BETWEEN '9:30' AND '10:00' ORDER BY 1
SELECT CASE t WHEN '10:00' THEN 1 ELSE 2 END FROM kept ORDER BY id
SELECT nullif(t, '10:00') FROM kept ORDER BY id
SELECT coalesce(t, '1:00') FROM kept ORDER BY id
SELECT id FROM kept WHERE v = 'x1F'
SELECT id FROM kept WHERE f = 0.1::real
SELECT id FROM kept WHERE f = '0.1'
SELECT id FROM kept WHERE f = g ORDER BY 1
SELECT id FROM kept WHERE f = 1
SELECT id FROM kept WHERE f IN (0.1)
SELECT id FROM kept WHERE f IN ('0.1')
SELECT id FROM kept WHERE f NOT IN (0.1, 7) ORDER BY 1
SELECT id FROM kept WHERE f BETWEEN 0.1 AND 1.5 ORDER BY 1
SELECT f - 0.1 FROM kept ORDER BY id
SELECT f + '0.5' FROM kept ORDER BY id
SELECT f * f FROM kept ORDER BY id
SELECT f / id FROM kept ORDER BY id
SELECT n * f FROM kept ORDER BY id
SELECT sum(f), avg(f) FROM kept
SELECT id FROM kept WHERE id IN (SELECT n FROM kept)
SELECT id FROM kept WHERE n NOT IN (SELECT n FROM kept WHERE n > 0)
SELECT id FROM kept WHERE '1' IN (SELECT id FROM kept) ORDER BY 1
SELECT id FROM kept WHERE t IN (SELECT t FROM kept WHERE id = 1)
SELECT id FROM kept k WHERE id IN (SELECT n FROM kept o WHERE o.id = k.id)
SELECT to_hex(-9223372036854775808)
SELECT to_hex(2147483647), to_hex(-2147483648)
SELECT extract(epoch from now() - now())
SELECT extract(epoch from interval '3 days 1 hour')
SELECT concat('a'::char(3), 'b')
SELECT octet_length('a'::char(3)), octet_length('äb'), octet_length(vc) FROM kept WHERE id = 2
SELECT lower(ch) || '|', upper(ch) || '|', md5(ch) = md5(vc) FROM kept WHERE id = 1
SELECT max(ch), min(vc) FROM kept
SELECT string_agg(ch, ',') FROM kept
SELECT ch, count(*) FROM kept GROUP BY ch ORDER BY 1
SELECT id FROM kept WHERE n NOT IN (SELECT n FROM kept) ORDER BY 1
SELECT id FROM kept WHERE n NOT IN (SELECT n FROM kept WHERE n IS NOT NULL AND n > 0) ORDER BY 1
SELECT id FROM kept WHERE n NOT IN (SELECT n FROM kept WHERE false) ORDER BY 1
SELECT id FROM kept WHERE NOT (n IN (SELECT n FROM kept WHERE n > 0)) ORDER BY 1
SELECT id FROM kept WHERE n IN (SELECT n FROM kept WHERE n > 0) OR id = 2 ORDER BY 1
SELECT id FROM kept WHERE n NOT IN (SELECT n FROM kept WHERE n > 0) OR id = 3 ORDER BY 1
SELECT id FROM kept WHERE vc <> ALL (SELECT ch FROM kept WHERE ch IS NOT NULL) ORDER BY 1
SELECT id FROM orders WHERE customer_id NOT IN (SELECT id FROM customers WHERE id = 1) ORDER BY 1
SELECT customer_id, count(*) FROM orders GROUP BY customer_id HAVING customer_id NOT IN (SELECT id FROM customers WHERE id = 1)
SELECT i::text, i FROM kept ORDER BY id
SELECT concat(i, '') FROM kept ORDER BY id
SELECT i || '' FROM kept ORDER BY id
SELECT c::text FROM kept ORDER BY id
SELECT id, ch LIKE 'ab', ch LIKE 'ab%', ch ~ 'b$' FROM kept ORDER BY id
SELECT 'a' LIKE p, p LIKE ('a' || '%'), full_name LIKE "Mixed Case", code LIKE code FROM customers, (VALUES ('a\\'), ('b')) v(p) ORDER BY id, p
SELECT NULL::text LIKE p, p LIKE NULL FROM (VALUES ('a\'), ('b')) v(p)
SELECT repeat(full_name, NULL::int), lpad(full_name, NULL::int), replace(full_name, '', NULL), replace(full_name, 'n', NULL) FROM customers ORDER BY id
SELECT rpad(full_name, id - 3, 'xy'), lpad(full_name, id - 3), repeat(full_name, id - 3), lpad(full_name, 9, '') FROM customers ORDER BY id
SELECT part / (id - 4), ratio / (id - 4) FROM customers WHERE id = 4
SELECT id FROM customers ORDER BY -ratio, id
SELECT -ratio AS x FROM customers UNION SELECT ratio FROM customers ORDER BY 1
SELECT id, -ratio = ratio, -ratio > 5, 'Infinity'::float8 * (id - 1) = 'NaN', greatest(-ratio, 1), least(-ratio, 1) FROM customers ORDER BY id
SELECT active, max(ratio), min(ratio), max(-ratio), min(-ratio) FROM customers GROUP BY active ORDER BY 1
SELECT id, min('NaN'::float8), max('-Infinity'::float8), min('Infinity'::real), max('-Infinity'::real) FROM customers GROUP BY id ORDER BY id
SELECT min(ratio) FILTER (WHERE id = 4), max(ratio) FILTER (WHERE id < 4), min(ratio) FILTER (WHERE id > 4), min(DISTINCT ratio) FROM customers
SELECT active FROM customers GROUP BY active ORDER BY max(ratio), min(ratio) DESC
SELECT min(-ratio) OVER (ORDER BY id DESC), max(ratio) OVER (ORDER BY id) FROM customers ORDER BY id
SELECT (balance / -2.25)::float8, -(balance / 7)::float8, (balance / 7)::float8 * ratio, ratio + (balance / 7), 'NaN'::float8 / (balance / 7) FROM customers WHERE id < 3 ORDER BY id
SELECT avg(balance) * ratio, avg(balance)::float8 FROM customers WHERE id < 3 GROUP BY ratio ORDER BY ratio
SELECT DISTINCT born - seen, seen - born FROM customers ORDER BY 1
SELECT seen - timestamp '2024-01-01' AS x FROM customers UNION SELECT created - timestamptz '2024-01-01 00:00+00' FROM customers ORDER BY x
SELECT x, x = y FROM (SELECT born - seen AS x, seen - born AS y FROM customers) s ORDER BY 1
SELECT id, balance AS b FROM customers ORDER BY (1) DESC, ((b))
SELECT DISTINCT ON ((active)) active, id FROM customers ORDER BY (1), (2) DESC
SELECT active, count(*) FROM customers GROUP BY ((1)) ORDER BY ((active))
SELECT id, sum(amount) OVER (w ORDER BY id), sum(amount) OVER w FROM orders WINDOW w AS (PARTITION BY customer_id) ORDER BY id
SELECT id, sum(amount) OVER v, count(*) OVER (v ROWS 1 PRECEDING) FROM orders WINDOW w AS (PARTITION BY customer_id), v AS (w ORDER BY id) ORDER BY id
SELECT id, sum(amount) OVER (w ROWS BETWEEN 1 PRECEDING AND 1 FOLLOWING), last_value(id) OVER (w), first_value(id) OVER (w RANGE UNBOUNDED PRECEDING) FROM orders WINDOW w AS (PARTITION BY customer_id ORDER BY id DESC) ORDER BY id
SELECT id, rank() OVER (W), dense_rank() OVER ("w"), percent_rank() OVER (w), cume_dist() OVER (w), ntile(2) OVER (w), nth_value(id, 2) OVER (w) FROM orders WINDOW w AS (ORDER BY customer_id) ORDER BY id
-- In a list of several constants they have one type in common with the value; one alone, and an array, are compared as they are.
SELECT id, part IN (0.1, -2.50), part IN (0.1), part NOT IN (0.1, 3), part IN (0.1, 3, ratio), part IN (0.1, ratio) FROM customers ORDER BY id
SELECT id, part = ANY (ARRAY[0.1, 3]), part <> ALL (ARRAY[0.1, 1.1]), part = ANY ('{0.1,3}'), part = ANY (ARRAY[0.1, part]) FROM customers ORDER BY id
SELECT id, part IN (16777217, 1.1), big IN (10000000000, CAST(0.5 AS real)), balance IN (10.5, CAST(0.1 AS real), 1) FROM customers ORDER BY id
SELECT id, part IN ('0.1', 3), part IN (0.1, NULL), part IN (0.1, 3, NULL), ratio IN (0.1, 2.5), id IN (1, 2.0) FROM customers ORDER BY id
-- -0 is 0 where values are told from each other, and where they are ordered; characters have no blanks at their end there
SELECT count(DISTINCT balance * '0'::real), sum(DISTINCT ratio * 0), avg(DISTINCT ratio * 0 + id / 3), count(DISTINCT ratio) FROM customers WHERE id < 4
SELECT count(DISTINCT code), count(DISTINCT part * 0) FROM customers WHERE id < 4
SELECT id FROM customers WHERE id < 4 ORDER BY ratio * 0, id DESC
SELECT id, part * 0 AS zero FROM customers WHERE id < 4 ORDER BY zero DESC, id DESC
SELECT id, rank() OVER (ORDER BY ratio * 0), count(*) OVER (PARTITION BY ratio * 0) FROM customers WHERE id < 4 ORDER BY id
SELECT DISTINCT ON (ratio * 0) id FROM customers WHERE id < 4 ORDER BY ratio * 0, id DESC
SELECT DISTINCT ON (code) code, id FROM customers ORDER BY code, id DESC
SELECT DISTINCT ratio FROM customers ORDER BY ratio DESC
SELECT DISTINCT ratio * 0 FROM customers WHERE id IN (1, 2)
SELECT ratio * 0 AS z, id FROM customers WHERE id < 4 UNION ALL SELECT 0, 9 ORDER BY 1, 2
SELECT part, count(*), sum(ratio) FROM customers GROUP BY part ORDER BY part, sum(ratio)
SELECT code, 1 AS n FROM customers UNION ALL SELECT code, 2 FROM customers ORDER BY code, n DESC
-- an expression that is the same for all rows
SELECT id FROM customers ORDER BY substring('abc', 2, 1) DESC, id
SELECT id, rank() OVER (ORDER BY upper('a')), row_number() OVER (ORDER BY 1 + 1, id) FROM customers ORDER BY 3, upper('b')
SELECT count(*) FROM customers ORDER BY abs(-1)
SELECT id FROM customers ORDER BY now() IS NULL, id
SELECT active, count(*) FROM customers GROUP BY active ORDER BY count(*) + 1, active, sum(1)
