"""MemoryTrainer: a transformers Trainer that recovers from running out of memory."""
