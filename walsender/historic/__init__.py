"""The historic catalog: what the system catalogs said at a position of the WAL."""
