"""Encoders that embed the same texts with the same weights: the graph of the examples, and what others use.

`make bench-embedding` runs this in `.venv-embedding`. Every encoder has one file and one process of its own, which
stays: they take turns. A file has `ENCODERS`: by the name in the table, a function that opens an encoder.
"""
