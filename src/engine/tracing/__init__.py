"""Tracing: find the steps of a graph function, by running the function once on symbolic values."""
