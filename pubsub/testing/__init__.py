"""The test harness, for users' tests and the project's own: real embedded PostgreSQL servers, and row-by-row comparison."""
