"""Programs: JAX functions compiled ahead of time, kept, counted and explained."""
