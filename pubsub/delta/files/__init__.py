"""The data files of a table: written, read, and the rows of keys found in them."""
