"""Replacements of other libraries' private functions while a job is traced; each is put back afterwards."""
