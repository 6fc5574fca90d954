"""Progress of streams on a terminal."""
