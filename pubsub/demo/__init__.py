"""`make demo`: the main job on an embedded PostgreSQL, or on a database of the user's own, checked row by row, with figures.

Everything goes the way a user would go: `pubsub daemon` is a process of its own, statements go through `pubsub sql`, what the
live view shows comes from `pubsub status --json`.
"""
