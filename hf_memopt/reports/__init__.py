"""What people look at when a run is over: one self-contained page, and pages that compare runs."""
