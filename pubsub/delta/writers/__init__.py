"""A batch becomes a commit: by our files or by a statement of Spark's."""
