"""Durable runs: a journal of every step (`journal`), values in parts (`parts`), and stores below them (`store`)."""
