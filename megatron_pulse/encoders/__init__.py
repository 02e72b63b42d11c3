"""Frozen encoders of text and images, from a diffusers pipeline folder, cut into layers."""
