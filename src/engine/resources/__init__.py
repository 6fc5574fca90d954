"""Resources: what is opened once for an Engine, shared, reloaded, and closed in the end."""
