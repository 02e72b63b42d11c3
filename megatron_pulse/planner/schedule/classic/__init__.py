"""Schedules of fixed order, by their published names."""
