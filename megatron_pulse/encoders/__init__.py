"""Frozen text and image encoders from a diffusers pipeline folder, split into layers."""
