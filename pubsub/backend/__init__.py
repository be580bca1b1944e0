"""A PostgreSQL server's side of a connection, whoever answers then: the publisher's server and a node's own.

Messages, the start of a connection, TLS, authentication and cancel keys (src/backend/libpq, tcop/backend_startup.c).
"""
