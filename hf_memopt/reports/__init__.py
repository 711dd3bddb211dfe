"""Report pages of a run, comparisons of runs, advice, and memory snapshots."""
