"""What is alive on a device at each moment of a traced job, of which kind, and what is computed."""
