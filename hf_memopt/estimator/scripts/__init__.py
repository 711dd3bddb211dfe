"""A training script that runs up to train() without its weights, files and processes."""
