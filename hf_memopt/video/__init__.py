"""Video models: decoding, processors, samples, batches, estimates of clips."""
