"""Values in PostgreSQL's text (the output functions' results) as Arrow columns, all rows at once."""
