"""When nodes and devices worked, in bounded memory, and as a trace for Perfetto."""
