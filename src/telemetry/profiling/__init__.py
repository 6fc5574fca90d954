"""Profiles: what nodes did inside a `with` block, which of them limits, and what a change would bring."""
