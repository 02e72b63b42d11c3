"""Frozen components that encode the samples of steps."""
