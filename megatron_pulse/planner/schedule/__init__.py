"""Schedules as data: classic generators, search, lower bounds, validation, simulation."""
