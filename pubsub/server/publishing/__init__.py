"""A node's Delta tables for subscribers: publications, positions of commits, and streams of their changes as pgoutput.

commits of Delta tables ─► positions (an LSN for each version that changes rows) ─► changes (rows of one version)
                                                                                 ─► stream ─► subscriber
"""
