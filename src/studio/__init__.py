"""Studio: what shows people a graph, a process that runs, and a profile; the core imports it only to show something."""
