"""A training job as its user describes it."""
