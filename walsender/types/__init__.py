"""Values: from a tuple's bytes to the text and the binary form that the server would give."""
