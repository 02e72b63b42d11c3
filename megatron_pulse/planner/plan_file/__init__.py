"""A plan as JSON: written, read, checked."""
