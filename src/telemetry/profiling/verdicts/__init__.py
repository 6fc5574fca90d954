"""From what nodes did to what limits, how much faster all would get without it, and what a change would bring."""
