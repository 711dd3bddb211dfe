"""What only a card can show, by one command: python -m benchmarks.gpu (see __main__.py)."""
