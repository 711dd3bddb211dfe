"""Measurements; each writes its rows to results/."""
