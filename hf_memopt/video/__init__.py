"""What only video needs."""
