"""Output plugins: which changes are sent, and in what form."""
