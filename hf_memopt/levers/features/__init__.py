"""Memory features, a file each: arguments, what they go without, how they are put on, the change they propose."""
