"""Schedules as data: generators, validation, simulation."""
