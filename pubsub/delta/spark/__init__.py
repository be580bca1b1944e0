"""Spark's JVM: its session, its threads, and Delta's own transactions in it."""
