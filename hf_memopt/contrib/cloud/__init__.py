"""Presets as jobs of clouds and clusters."""
