"""Studio: drawings of graphs, views of running processes, and pages of profiles; the core loads it only when needed."""
