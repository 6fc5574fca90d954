"""Tracing: what a graph function does, found out by running it once on symbolic values."""
