"""Device memory: readers, thresholds, a callback for any Trainer, and the diagnosis of growth."""
