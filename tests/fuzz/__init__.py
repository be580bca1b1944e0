"""Readers of bytes from outside, given mutations of real samples: only errors that the program knows may come of them.

python -m tests.fuzz --seconds 3600 [--reader NAME] [--seed N]
"""
