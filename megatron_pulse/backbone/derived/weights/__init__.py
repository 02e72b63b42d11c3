"""Modules without memory, and the first values of their parameters and buffers."""
