-- SELECTs that PostgreSQL refuses, in the same words here, one a line (test_059_select.py).
SELECT nope FROM customers
SELECT fullname FROM customers
SELECT c.nope FROM customers c
SELECT customers.id FROM customers c
SELECT x.id FROM customers
SELECT FULL_NAME, "Full_Name" FROM customers
SELECT * FROM nope
SELECT * FROM nope.customers
SELECT id FROM customers a, customers b
SELECT id FROM customers, orders
SELECT 1 FROM customers, customers
SELECT nope(id) FROM customers
SELECT lower(id) FROM customers
SELECT upper(props) FROM customers
SELECT full_name + 1 FROM customers
SELECT full_name = 1 FROM customers
SELECT id LIKE 'a' FROM customers
SELECT id || id FROM customers
SELECT active + 1 FROM customers
SELECT 'abc'::int
SELECT id FROM customers WHERE id = 'abc'
SELECT full_name::int FROM customers WHERE id = 2
SELECT id FROM customers WHERE created > 'yesterdayish'
SELECT id FROM customers WHERE u = 'abc'
SELECT 1 / 0
SELECT id / (id - 1) FROM customers
SELECT balance / 0 FROM customers
SELECT ratio / 0 FROM customers
SELECT 2147483647 + id FROM customers
SELECT 9223372036854775807 + id FROM customers
SELECT 40000::smallint
SELECT id FROM customers WHERE full_name
SELECT id FROM customers WHERE sum(id) > 1
SELECT id, count(*) FROM customers
SELECT c.full_name, count(*) FROM customers c GROUP BY balance
SELECT sum(sum(id)) FROM customers
SELECT sum(full_name) FROM customers
SELECT max(active) FROM customers
SELECT id FROM customers ORDER BY 2
SELECT id FROM customers ORDER BY nope
SELECT id AS x, big AS x FROM customers ORDER BY x
SELECT id FROM customers UNION SELECT full_name FROM customers
SELECT id FROM customers UNION SELECT id, id FROM customers
SELECT DISTINCT id FROM customers ORDER BY full_name
SELECT DISTINCT ON (id) id, full_name FROM customers ORDER BY full_name
SELECT id FROM customers WHERE id IN (SELECT id, id FROM orders)
SELECT CASE WHEN true THEN 1 ELSE id = 1 END FROM customers
SELECT * FROM customers JOIN orders USING (nope)
SELECT row_number() FROM customers
SELECT id FROM customers LIMIT -1
SELECT id FROM (SELECT id FROM customers) s WHERE s.nope = 1
SELECT 1 FROM orders WHERE id = (SELECT id FROM customers)
SELECT cast(born as int) FROM customers
SELECT id::nope FROM customers
SELECT full_name[1] FROM customers
SELECT id FROM customers WHERE
SELECT id FROM customers GROUP BY
SELECT 1 + 'a'
SELECT 'a' + 'b'
SELECT id = 'x' FROM customers
SELECT date '2024-13-01'
SELECT born + born FROM customers
SELECT full_name - 1 FROM customers
SELECT tags[1] FROM nope
SELECT nope.* FROM customers
SELECT id FROM customers HAVING id > 1
SELECT full_name FROM customers GROUP BY balance HAVING count(*) > 1
SELECT id FROM customers WHERE row_number() OVER (ORDER BY id) = 1
SELECT count() FROM customers
SELECT coalesce(id, 'x') FROM customers
SELECT ARRAY[1, 'x']
SELECT 1 UNION SELECT 'x'
SELECT id FROM customers GROUP BY 5
SELECT -full_name FROM customers
SELECT NOT id FROM customers
SELECT id AND true FROM customers
SELECT 1 WHERE 1
SELECT 'x'::uuid
SELECT 'maybe'::bool
SELECT length(1)
SELECT substr('a')
SELECT abs('x')
SELECT id FROM customers c WHERE customers.id = 1
WITH x AS (SELECT 1), x AS (SELECT 2) SELECT 1
SELECT * FROM (VALUES (1, 2), (3)) v
SELECT id FROM customers WHERE avg(1)::numeric > 2
SELECT 1234.5::numeric(5,2)
SELECT 99999::numeric(4,0)
SELECT id FROM kept WHERE t = '25:00'
SELECT id FROM kept WHERE i = 'x'
SELECT id FROM kept WHERE r = '[5,1]'
SELECT 'x'::jsonb
SELECT ('1234.5'::numeric(5,2))
SELECT x::numeric(3,2) FROM kept WHERE id = 3
SELECT avg(n * 100)::numeric(2,1) FROM kept
SELECT '24:01'::time
SELECT inet '10.1.2.300'
SELECT inet '10.1.2.3/33'
SELECT id FROM kept WHERE b = '1x1'
SELECT f % 2 FROM kept
SELECT count(*) FROM customers GROUP BY 'x'
SELECT count(*) FROM customers GROUP BY id, NULL
SELECT id FROM customers ORDER BY true
SELECT to_hex(small) FROM customers
SELECT array_agg('a') FROM customers
SELECT count(*) FROM customers GROUP BY - 1.5
SELECT id FROM customers ORDER BY -1
SELECT id FROM customers ORDER BY - 100000000000
SELECT sum(amount) OVER (w PARTITION BY id) FROM orders WINDOW w AS (PARTITION BY customer_id)
SELECT sum(amount) OVER (w ORDER BY id) FROM orders WINDOW w AS (ORDER BY customer_id)
SELECT sum(amount) OVER (w ORDER BY id) FROM orders WINDOW w AS (ROWS 1 PRECEDING)
SELECT sum(amount) OVER v FROM orders WINDOW w AS (ROWS 1 PRECEDING), v AS (w ORDER BY id)
SELECT sum(amount) OVER w FROM orders WINDOW w AS (ORDER BY id), w AS (ORDER BY customer_id)
SELECT sum(amount) OVER v FROM orders WINDOW v AS (w ORDER BY id), w AS (PARTITION BY customer_id)
SELECT sum(amount) OVER (nope ORDER BY id) FROM orders WINDOW w AS (PARTITION BY customer_id)
SELECT id FROM customers WHERE id <> 3 ORDER BY substring(CAST('' AS text), 0, -1) DESC, id
SELECT id, rank() OVER (ORDER BY substring('', 0, -1)) FROM customers
