"""Encoders that embed the same texts with the same weights: the graph of the examples, and other libraries.

`make bench-embedding` runs this in `.venv-embedding`. Every encoder has one file and one process, which stays alive:
the processes take turns. A file has `ENCODERS`: for each name in the table, a function that opens an encoder.
"""
