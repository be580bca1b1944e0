"""The test harness, for users' tests and our own: real embedded PostgreSQL servers, tables compared row by row."""
