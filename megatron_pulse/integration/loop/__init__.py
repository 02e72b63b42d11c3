"""Hooks around and inside a training step: schedule, stop requests, log, end of a run."""
