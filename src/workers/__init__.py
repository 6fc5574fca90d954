"""Worker processes: how nodes with `runs_on="process"` run."""
