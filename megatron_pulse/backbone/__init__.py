"""Backbones: layers, named skips, conditioning, and the checks of a chain."""
