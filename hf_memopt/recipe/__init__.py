"""The code that recipes share: arguments, job, preflight, summary."""
