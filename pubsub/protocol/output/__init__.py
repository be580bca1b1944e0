"""The output functions of PostgreSQL's types: a value's bytes, as a tuple holds them, to its text and to its binary form."""
