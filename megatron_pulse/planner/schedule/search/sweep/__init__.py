"""Sweeps over how far microbatches have come: bounded dynamic programming."""
