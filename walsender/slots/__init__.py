"""Logical replication slots of our own, in files."""
