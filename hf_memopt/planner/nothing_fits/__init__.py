"""A job for which no combination of settings fits: what else would."""
