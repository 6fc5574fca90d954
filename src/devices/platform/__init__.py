"""Platform: which devices there are, and which one is meant."""
