"""Partitions of a config: without a memory limit, with balanced gradients, and within device
memory."""
