"""The server that clients connect to: sessions, forwarding to the upstream server, replication commands."""
