"""The harness that users' tests and our own share: real embedded PostgreSQL servers, and tables compared row by row."""
