"""Modules without memory, and initial values of their parameters and buffers."""
