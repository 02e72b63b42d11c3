"""Schedules found: list scheduling, templates, annealing."""
