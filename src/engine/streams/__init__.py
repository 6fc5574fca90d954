"""Streams as values: nodes and graphs that give one value after the other."""
