"""Commands for backbones, their weights, samples and data."""
