"""Processes that start at once: forked from one that has imported what they need."""
