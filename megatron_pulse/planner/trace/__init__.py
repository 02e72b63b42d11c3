"""Traces of runs, and their comparison with plans."""
