"""Checkpoints: written whole or not at all, found intact, loaded without running code in them."""
