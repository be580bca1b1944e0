"""Output plugins: what is sent, and how it looks."""
