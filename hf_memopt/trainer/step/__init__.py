"""A step that survives running out of memory: micro-batches in chunks, what may run again, the optimizer."""
