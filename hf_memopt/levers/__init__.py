"""One memory lever a file."""
