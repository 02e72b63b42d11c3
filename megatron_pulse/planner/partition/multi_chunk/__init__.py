"""Partitions with several stages per device: beam search by blocks, then local search."""
