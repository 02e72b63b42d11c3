"""Comparison of a plan's step with the same step in one process, gradient by gradient."""
