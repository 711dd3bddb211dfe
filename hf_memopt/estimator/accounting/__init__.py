"""Account for a traced job: what is alive on a device at each moment, of which kind, and what is computed."""
