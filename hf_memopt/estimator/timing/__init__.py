"""Seconds of a step, tokens per second, hours of a job: from kernels, links, generation and runs of one's own."""
