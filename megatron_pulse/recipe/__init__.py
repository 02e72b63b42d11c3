"""Recipes: a training as one TOML file, in place of flags.

``keys`` declares tables and keys; ``read`` reads a file with all its faults; ``flags`` makes the
flags of a training of it. ``examples`` are the recipes that ``pulse recipe NAME`` writes.
"""
