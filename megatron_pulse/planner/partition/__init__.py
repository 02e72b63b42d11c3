"""Partitions: cuts of the chain into stages, and their costs."""
