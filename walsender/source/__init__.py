"""Where WAL comes from: a server's physical replication, or a directory of segments."""
