"""Cases that were found by hand, where a server's behaviour is surprising."""

from __future__ import annotations

import hashlib

_TEXTS = [hashlib.sha256(bytes([number])).hexdigest() for number in range(120)]
_LONG = ", ".join(f"'{text}'" for text in _TEXTS)
"""Longer than fits into a row of pg_publication_rel, even compressed."""

SETUP = f"""
CREATE TABLE plain (id int PRIMARY KEY, t text);
CREATE TABLE documents (id int PRIMARY KEY, x xml, xs xml[]);
CREATE TABLE addresses (id int PRIMARY KEY, a inet, c cidr);
CREATE TABLE filtered (id int PRIMARY KEY, t text);
ALTER TABLE filtered REPLICA IDENTITY FULL;
CREATE PUBLICATION p FOR ALL TABLES;
CREATE PUBLICATION long FOR TABLE filtered WHERE (t IN ({_LONG}) OR id > 90)
"""

_STEPS = {
    "i": "INSERT INTO plain VALUES ({number}, 'i')",
    "u": "UPDATE plain SET t = t || 'u' WHERE id < 4",
    "m": "SELECT pg_logical_emit_message(true, 'm', '{number}')",
    "(": "SAVEPOINT s",
    ")": "RELEASE s",
    "!": "ROLLBACK TO s",
}
_ORDERS = (
    "i(m)i",
    "(m)i",
    "m(i)",
    "i(i)m(i)i",
    "i(i)(m)(i)i",
    "(i)(i)(m)i",
    "(i)(i)(i)(m)(u)m(i)u",
    "(m)(m)(i)m(i(m)i)(u)i",
    "i(m)u(m)((i)!m(m)i",
    "i(i(i(m)i)m)i(m(i)m)u",
    "(i)m(i)m(u)m(i)(m)u(m)i",
)

_DECLARED = (
    '<?xml version="1.0"?><a/>',
    "<?xml  version = '1.0'\n?>\n\n<a/>",
    '<?xml version="1.0" encoding="UTF-8"?><a>é</a>',
    """<?xml version="1.1" encoding='utf-8' standalone='no' ?><a/>""",
    '<?xml version="1.0" standalone="yes"?>\n<a/>',
    "<?xml-stylesheet href='x'?><a/>",
    "\n\n<a/>",
    "\n",
    " <a/>",
    "text",
    "",
)

# Each string is one simple query: several statements in one are one transaction.
STATEMENTS = (
    "INSERT INTO plain SELECT g, 'text' FROM generate_series(1, 10) g",
    # A message outside of the transaction has the id of the subtransaction in which it is written.
    (
        "BEGIN; INSERT INTO plain VALUES (20, 'x'); SAVEPOINT s; INSERT INTO plain VALUES (21, 'x'); "
        "SELECT pg_logical_emit_message(false, 'of a subtransaction', 'outside'); ROLLBACK TO s; SAVEPOINT s; "
        "SELECT pg_logical_emit_message(true, 'of a subtransaction', 'inside'); "
        "SELECT pg_logical_emit_message(false, 'of a subtransaction', 'outside'); COMMIT"
    ),
    # A message, and right after it a change of another subtransaction with the same LSN: the server's heap decides
    # their order.
    *(
        "BEGIN; "
        + "; ".join(_STEPS[step].format(number=1000 + 100 * number + place) for place, step in enumerate(steps))
        + "; COMMIT"
        for number, steps in enumerate(_ORDERS)
    ),
    # An XML declaration is written anew if it declares anything; otherwise it is left out with the line end after it.
    *(
        f"INSERT INTO documents VALUES ({number}, $${one}$$, ARRAY[$${one}$$::xml, NULL])"
        for number, one in enumerate(_DECLARED)
    ),
    "UPDATE documents SET id = id + 100",
    # A filter stored in a TOAST table that is rewritten, and that changes in a part of a transaction.
    f"INSERT INTO filtered SELECT g, (ARRAY[{_LONG}])[g] FROM generate_series(80, 100) g; INSERT INTO filtered VALUES (7, '')",
    "UPDATE filtered SET t = 'other' WHERE id < 84",
    "VACUUM FULL pg_publication_rel",
    f"UPDATE filtered SET t = 'another' WHERE id < 86; INSERT INTO filtered VALUES (1, '{_TEXTS[7]}'), (2, '')",
    (
        f"BEGIN; ALTER PUBLICATION long SET TABLE filtered WHERE (t NOT IN ({_LONG})); DELETE FROM filtered WHERE id = 1; "
        f"SAVEPOINT s; ALTER PUBLICATION long SET TABLE filtered WHERE (id = 1 OR t IN ({_LONG})); "
        f"INSERT INTO filtered VALUES (1, ''); ROLLBACK TO s; INSERT INTO filtered VALUES (1, '{_TEXTS[7]}'), (3, ''); COMMIT"
    ),
    "DELETE FROM filtered",
    # Which IPv6 addresses are written with an IPv4 address in them.
    (
        "INSERT INTO addresses SELECT n, a::inet, network(a::inet) FROM unnest('{::,::1,::2,::ff:1,::1:0,::1.2.3.4,::ffff:1.2.3.4,"
        "::ffff:0:1.2.3.4,1::,1::2,1:0:0:2::3,1:0:2:0:3:0:4:0,64:ff9b::1.2.3.4,::2/127,::ffff:0:0/96,::/0,0:0:1::/48}'::text[]) "
        "WITH ORDINALITY AS given (a, n)"
    ),
)

STATEMENTS_18 = (
    # Virtual columns are NULL, as they are stored; pgoutput does not send them.
    "CREATE TABLE virtual (id int PRIMARY KEY, v int GENERATED ALWAYS AS (id * 2) VIRTUAL, t text)",
    "INSERT INTO virtual (id, t) VALUES (1, 'one'), (2, NULL)",
    "ALTER TABLE virtual ADD w text GENERATED ALWAYS AS (t || '!') VIRTUAL, ADD x int",
    "UPDATE virtual SET id = id + 10; UPDATE virtual SET x = 1; DELETE FROM virtual",
)


def statements(version: str) -> tuple[str, ...]:
    return STATEMENTS + (STATEMENTS_18 if int(version) >= 18 else ())
