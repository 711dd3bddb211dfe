"""A child process that the operating system keeps from changing files and sending."""
