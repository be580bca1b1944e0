"""Find the rows of a batch's keys in large tables: an index of hashed keys, a cache on the node's disk."""
