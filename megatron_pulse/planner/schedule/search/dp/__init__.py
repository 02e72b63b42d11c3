"""Bounded dynamic programming over the positions of microbatches."""
