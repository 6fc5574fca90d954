"""Live looks at a running process: the Unix socket that it opens, and the client that asks there."""
