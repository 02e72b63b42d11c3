"""Compiled program of a step: messages and events, checked for deadlock, simulated with
contention."""
