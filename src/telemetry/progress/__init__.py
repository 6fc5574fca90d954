"""Progress of streams on a terminal: what a bar says, and the display that draws all bars of the process."""
