"""Search for settings that fit."""
