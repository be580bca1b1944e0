"""A table's log: its state, its commits, and which files a version has."""
