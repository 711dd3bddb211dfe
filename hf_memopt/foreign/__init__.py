"""Configurations of other training tools, read as the job that they describe; no tool is imported."""
