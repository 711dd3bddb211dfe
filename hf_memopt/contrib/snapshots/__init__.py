"""Reading snapshots: files of recorded allocations, which `monitor/snapshot_callback.py` and torch write."""
