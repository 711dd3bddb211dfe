"""The versions of other libraries: those that were tried, and what was renamed between them."""
