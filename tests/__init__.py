"""A package, so that a spawned process can import the names that a test module defines."""
