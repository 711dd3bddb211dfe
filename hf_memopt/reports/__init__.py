"""Report pages of a run, comparisons of runs, and advice."""
