"""Batches: calls of many requests as one run of a vectorised program."""
