"""Backbones, their weights, samples and data."""
