"""Features that few users need; the core imports none, and finds commands and targets by entry points (setup.cfg)."""
