"""`hf-memopt calibrate`: what predictions assume of a device, measured on the user's own. benchmarks/gpu measures with
the same functions."""
