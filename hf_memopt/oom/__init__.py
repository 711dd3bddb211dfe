"""Out-of-memory failures: classified, explained, described."""
