"""The real Trainer's steps on fake tensors, followed storage by storage."""
