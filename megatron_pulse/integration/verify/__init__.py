"""A plan's step beside the same step in one process, gradient by gradient."""
