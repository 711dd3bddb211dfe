"""Device memory: readers, thresholds, callbacks for any Trainer, snapshots, and the diagnosis of growth."""
