"""A node's own server: what clients find behind its socket and its port."""
