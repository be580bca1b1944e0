"""A node as an object, and what it tells of itself: status, snapshots, queries, verification."""
