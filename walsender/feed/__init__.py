"""The upstream server's WAL, received once for all: kept in segments, and searched for commits and checkpoints."""
