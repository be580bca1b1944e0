"""PostgreSQL's output and send functions: from a value's bytes as stored in a tuple to its text or its binary form."""
