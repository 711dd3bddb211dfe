"""What few users need; the core imports none of it, and finds commands and targets by entry points (setup.cfg)."""
