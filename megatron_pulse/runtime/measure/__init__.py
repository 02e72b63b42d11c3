"""Clocks, traces and probes of a run on devices."""
