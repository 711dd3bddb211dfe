"""Out-of-memory failures: recognised, explained, reported."""
