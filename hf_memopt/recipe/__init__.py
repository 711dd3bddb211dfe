"""What the recipes share: arguments, job, preflight, summary."""
