"""Looking at a process from another one: a Unix socket that tells what nodes do, and who asks there."""
