"""A package, so that a spawned process can import what a test module defines."""
