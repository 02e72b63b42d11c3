"""Validation and event simulation of schedules."""
