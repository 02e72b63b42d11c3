"""Heuristic search for schedules: dynamic programming, list scheduling, templates, annealing."""
