"""`make demo`: copy and follow an embedded PostgreSQL or the user's own database, compare it row by row, print figures.

The demo works as a user would: `pubsub daemon` runs as its own process, statements go through `pubsub sql`, and the
live view's data comes from `pubsub status --json`.
"""
