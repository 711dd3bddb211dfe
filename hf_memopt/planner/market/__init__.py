"""The cards of the catalog on which a job fits, their boxes and prices."""
